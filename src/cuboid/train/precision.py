"""What a run computes in where its configuration leaves that open: `precision.dtype = "auto"`."""

import tomllib
from contextlib import suppress
from pathlib import Path

from cuboid.device import is_gpu
from cuboid.run.launch import World
from cuboid.train.begin import is_same_run
from cuboid.train.config import TrainConfig
from cuboid.train.listing import inspect, newest

EARLIER = "fp32"  # the default of versions whose checkpoints do not say


def settled(
    config: TrainConfig, world: World, folder: Path | None = None, resume: Path | None = None
) -> tuple[TrainConfig, str]:
    """The configuration with a definite precision, and the reason; "" if it was given. A resumed run keeps its
    precision: the interrupted run in `folder`, or `resume`. Every rank may call this: all see the same files."""
    if config.precision.dtype != "auto":
        return config, ""
    before = _before(config, folder, resume)
    usual, why = (before, "as it began") if before else usual_on(world)
    return config.computed_in(usual), why


def usual_on(world: World) -> tuple[str, str]:
    """A precision, and why it is the default there. INVARIANT: identical on all ranks."""
    if world.bf16:
        return "bf16", "the default on GPUs"
    return "fp32", "a GPU has no bf16; fp16 is faster" if is_gpu(world.device) else "the default on CPUs"


def _before(config: TrainConfig, folder: Path | None, resume: Path | None) -> str:
    """The precision of the run to resume; "" if there is none."""
    found = ""
    if resume is not None:
        with suppress(ValueError):  # none can be read: resuming reports that
            found = inspect(newest(resume))[1].get("precision", EARLIER)
    elif folder is not None and is_same_run(config, folder):
        written = tomllib.loads((folder / "config.toml").read_text("utf-8"))
        found = written.get("precision", {}).get("dtype", EARLIER)
    return "" if found == "auto" else found
