"""No schedule touches what a collective reads or writes while it is under way, as on a GPU it may be."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

Emulate = Callable[..., Any]


FAST = ("bf16", "two sub-batches", "replicas, beside", "pipe")


@pytest.mark.parametrize("names", [FAST, pytest.param(("but", *FAST), marks=pytest.mark.slow)], ids=["fast", "others"])
def test_gpu_schedules_have_no_race(emulate: Emulate, names: Sequence[str]) -> None:
    found = emulate("races.py", "steps", *names)
    assert len(found) >= len(FAST)
    for name, launched in found.items():
        assert isinstance(launched, list), f"{name}: {launched}"
        assert min(launched) > 20, name


@pytest.mark.slow
def test_gpu_step_waits_for_a_checkpoints_copies(emulate: Emulate, tmp_path: Path) -> None:
    found = emulate("races.py", "checkpoint", str(tmp_path))
    assert min(found[""]) > 20
    assert "before its wait" in str(found["a step not held"])


def test_gpu_races_are_noticed(emulate: Emulate) -> None:
    found = emulate("races.py", "planted")
    assert len(found) == 3
    for fault, said in found.items():
        assert "before its wait" in str(said), fault
