"""No schedule touches what a collective reads or writes while it is under way, as on a GPU it may be."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

Emulate = Callable[..., Any]


def test_gpu_schedules_have_no_race(emulate: Emulate) -> None:
    found = emulate("races.py", "steps")
    assert len(found) == 12
    for name, launched in found.items():
        assert isinstance(launched, list), f"{name}: {launched}"
        assert min(launched) > 20, name


def test_gpu_step_waits_for_a_checkpoints_copies(emulate: Emulate, tmp_path: Path) -> None:
    found = emulate("races.py", "checkpoint", str(tmp_path))
    assert min(found[""]) > 20
    assert "before its wait" in str(found["a step not held"])


def test_gpu_races_are_noticed(emulate: Emulate) -> None:
    found = emulate("races.py", "planted")
    assert len(found) == 3
    for fault, said in found.items():
        assert "before its wait" in str(said), fault
