"""Train on a cuboid and on one device side by side, and compare the loss at every step."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from cuboid.run.launch import World
from cuboid.train.config import TrainConfig
from cuboid.train.layout import on_one_device
from cuboid.train.loop import Trainer
from cuboid.train.plot import plot_curves
from cuboid.train.progress import Progress


@dataclass(frozen=True)
class Curves:
    serial: list[float]
    cuboid: list[float]

    @property
    def difference(self) -> float:
        return furthest(self.serial, self.cuboid)


def furthest(serial: Sequence[float], losses: Sequence[float]) -> float:
    """The largest difference over the steps, relative to the serial loss; infinite if either is not a number."""
    apart = [abs(b - a) / abs(a) for a, b in zip(serial, losses, strict=True)]
    return max(each if each == each else float("inf") for each in apart)


def curves(world: World, config: TrainConfig, dtype: torch.dtype, quiet: bool = False) -> Curves | None:
    """Trains on every rank of the cuboid. Rank 0 also trains on one device, and returns both losses of every step."""
    ours = Trainer(config, world, dtype=dtype)
    alone = Trainer(config, world, on_one_device, dtype) if world.rank == 0 else None
    serial, cuboid = [], []
    with Progress(config.schedule.steps, console=Console(quiet=quiet or alone is None, stderr=True)) as progress:
        for _ in range(config.schedule.steps):
            report, _ = ours.step()
            progress.update(report)
            cuboid.append(report.loss)
            if alone is not None:
                serial.append(alone.step()[0].loss)
    ours.model.parallel.mesh.close()
    return Curves(serial, cuboid) if alone is not None else None


def draw(found: Curves, name: str, path: Path) -> None:
    plot_curves({"one device": found.serial, name: found.cuboid}, path, f"Loss on {name} and on one device")
