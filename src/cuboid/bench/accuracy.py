"""Trains one model on one text with each layout, and compares the loss curves."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console

from cuboid.baselines.one_d import OneD
from cuboid.baselines.two_d import TwoD
from cuboid.bench.layouts import begin_with
from cuboid.bench.result import BenchReport
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import CuboidParallel
from cuboid.model.parallel import Parallel
from cuboid.run.launch import Pool, World
from cuboid.train.compare import furthest
from cuboid.train.config import TrainConfig, load
from cuboid.train.layout import on_one_device
from cuboid.train.loop import Trainer
from cuboid.train.plot import plot_curves
from cuboid.train.progress import Progress

MakeParallel = Callable[[TrainConfig, ModelConfig, World], Parallel]


def on_mesh(
    make: Callable[[ModelConfig, Mesh], Parallel], cuboid: Cuboid, _: TrainConfig, model: ModelConfig, world: World
) -> Parallel:
    return make(model, Mesh(cuboid, world.rank, world.device))


ALONE = "one device"
LAYOUTS: dict[str, tuple[int, MakeParallel]] = {
    ALONE: (1, on_one_device),
    "1-D on 4 ranks": (4, partial(on_mesh, OneD, Cuboid(1, 4, 1))),
    "2-D, 2×2": (4, partial(on_mesh, TwoD, Cuboid(1, 2, 2))),
    "2.5-D, 2×2×2": (8, partial(on_mesh, TwoD, Cuboid(2, 2, 2))),
    "3-D, 2,2,2": (8, partial(on_mesh, CuboidParallel, Cuboid(2, 2, 2))),
}


def curve(world: World, config: TrainConfig, layout: MakeParallel, name: str) -> list[float]:
    trainer, losses = Trainer(config, world, layout), []
    try:
        with Progress(config.schedule.steps, console=Console(quiet=world.rank != 0, stderr=True)) as progress:
            progress.note(name)
            for _ in range(config.schedule.steps):
                report, _ = trainer.step()
                progress.update(report)
                losses.append(report.loss)
    finally:
        trainer.model.parallel.mesh.close()
    return losses


def accuracy(steps: int, out: Path, console: Console, only: Sequence[str] = ("",)) -> None:
    """Trains `cuboid train`'s default model on its text, with dropout, in fp32: on one device, and on layouts whose
    names start with one of `only`."""
    only = [ALONE if name == "serial" else name for name in only]  # its earlier name
    asked = [ALONE, *begin_with(only, list(LAYOUTS))]
    chosen = {name: who for name, who in LAYOUTS.items() if name in asked}
    config = load(None, [f"schedule.steps={steps}", f"schedule.warmup={min(steps, 20)}", "model.dropout=0.1"])
    report = BenchReport("accuracy", asdict(config))
    curves: dict[str, list[float]] = {}
    for name, (ranks, layout) in chosen.items():
        with Pool(ranks) as pool:
            curves[name] = pool.run(curve, config, layout, name)[0]
    apart = {name: furthest(curves[ALONE], losses) for name, losses in curves.items()}
    found = {"steps": steps, "largest_relative_difference_to_one_device": apart, "losses": curves}
    report.write(out / "accuracy.json", found)
    plot_curves(curves, out / "accuracy.png", f"{steps} steps of cuboid train's default model, one curve per layout")
    for name, losses in curves.items():
        console.print(
            f"{name:16} loss {losses[0]:.4f} → {losses[-1]:.4f}, from one device's at most {apart[name]:.1e}",
            highlight=False,
        )
    console.print(str((out / "accuracy.png").absolute()), soft_wrap=True, highlight=False)
