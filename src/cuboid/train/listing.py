"""Which checkpoints a folder has, and what their state says. Nothing here loads torch."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cuboid.model.config import ModelConfig, RopeScaling
from cuboid.train import manifest
from cuboid.train.manifest import Damaged, Sum

STATE = "state.json"
State = Mapping[str, Any]
SHOWN = 5  # most runs that a message lists
_NAME = re.compile(r"step-(\d{8,})")


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first; links are ignored."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted((path for path in found if path.is_dir() and not path.is_symlink()), key=step_of)


def last_step(folder: Path) -> int:
    """The step of the newest complete checkpoint; 0 if there is none."""
    return max(map(step_of, complete(folder)), default=0)


def step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def candidates(given: Path) -> list[Path]:
    """Absolute paths: `given` if it is a checkpoint, else those in it or in its `checkpoints`, newest first."""
    given = given.resolve()
    if given.is_dir() and (_NAME.fullmatch(given.name) or (given / manifest.FILE).is_file()):
        return [given]
    found = complete(given / "checkpoints") or complete(given)
    if not found:
        raise ValueError(
            f"{given} has no complete checkpoint; give a run folder with one, or a checkpoint itself{runs_near(given)}"
        )
    return found[::-1]


def runs_near(given: Path) -> str:
    """A sentence with the newest runs of runs/ that have a checkpoint, if `given` is there or below; else empty."""
    runs = Path("runs").resolve()
    if not given.is_relative_to(runs):
        return ""
    found = [path for path in runs.glob("*/checkpoints") if complete(path)]
    names = [f"runs/{path.parent.name}" for path in sorted(found, key=lambda path: -path.stat().st_mtime)]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f". There are {', '.join(names[:SHOWN])}{more}" if names else ""


def newest(given: Path) -> Path:
    """The first of the candidates that is undamaged, as far as `inspect` sees."""
    damage = []
    for path in candidates(given):
        try:
            inspect(path)
        except Damaged as error:
            damage.append(error)
        else:
            return path
    raise none_good(given, damage)


def none_good(given: Path, damage: list[Damaged]) -> ValueError:
    if len(damage) == 1:
        return ValueError(f"{damage[0]}; use another")
    listed = "; ".join(f"{error.path.name}: {', '.join(error.names)}" for error in damage)
    return ValueError(f"every checkpoint of {given} is damaged ({listed}); start a new run")


def inspect(path: Path) -> tuple[dict[str, Sum], State]:
    """Returns its manifest and state. Raises Damaged if these were changed or another file's size is wrong."""
    sums = manifest.read(path)
    wrong = [name for name, each in sums.items() if not manifest.same_size(path, name, each)]
    if STATE not in sums or (STATE not in wrong and not manifest.same(path, STATE, sums[STATE])):
        wrong.append(STATE)
    if wrong:
        raise Damaged(path, sorted(wrong))
    state: State = json.loads((path / STATE).read_bytes())
    if _NAME.fullmatch(path.name) and state["step"] != step_of(path):
        raise Damaged(path, [f"{STATE}, which is of step {state['step']},"])
    return sums, state


def model_config(path: Path) -> ModelConfig:
    """The configuration of a checkpoint's model."""
    values = dict(inspect(path)[1]["model"])
    scaling = values.pop("rope_scaling")
    return ModelConfig(**values, rope_scaling=RopeScaling(**scaling) if scaling else None)
