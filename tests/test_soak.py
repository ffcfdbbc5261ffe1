"""A long run does not grow."""

import subprocess
import sys
from pathlib import Path

import pytest
from counts import count

SOAK = Path(__file__).parents[1] / "examples" / "soak.py"


@pytest.mark.slow
def test_trainer_does_not_grow_in_long_run() -> None:
    done = subprocess.run(
        [sys.executable, SOAK, "--steps", str(count("steps of a soaked run"))], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
