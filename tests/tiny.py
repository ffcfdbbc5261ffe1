"""A model small enough to train in a test, on a text made for it."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from cuboid.run.launch import World
from cuboid.train.config import TrainConfig, load
from cuboid.train.layout import on_cuboid, on_one_device
from cuboid.train.loop import Trainer

Curve = list[tuple[float, float]]

SETTINGS = (
    "model.family=gpt2",
    "model.layers=1",
    "model.hidden=32",
    "model.heads=8",
    "model.ffn=48",
    "data.seq=16",
    "data.batch=8",
    "data.val_fraction=0.1",
    "optimizer.lr=0.01",
    "precision.dtype=fp32",  # on GPUs too
    "schedule.steps=12",
    "schedule.warmup=3",
    "logging.eval_every=0",
    "logging.sample_tokens=8",
    "logging.tensorboard=false",
)


def write_text(folder: Path, seed: int = 0) -> Path:
    """More than 12 steps of 8 samples of 16 tokens, so that no sample of a run is seen twice."""
    dice = random.Random(seed)
    words = ["".join(dice.choices("abcdefgh", k=dice.randint(1, 5))) for _ in range(20)]
    path = folder / f"text {seed}.txt"
    path.write_text(" ".join(dice.choices(words, k=900)))
    return path


def settings(text: Path, *more: str) -> list[str]:
    """For `--set`."""
    return [*SETTINGS, f"data.paths={text}", *more]


def sets(changes: list[str]) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


class Said(NamedTuple):
    """What a command said, and how it ended."""

    code: int
    out: str
    err: str


Cuboid = Callable[..., Said]


def tiny(text: Path, *more: str) -> TrainConfig:
    config = load(None, settings(text, *more))
    config.check()
    return config


def on(cuboid: str) -> list[str]:
    """ "2,2,1" or, with a data axis, "2,2,1,2", and with a pipe, "2,2,1,1,2", as settings."""
    sizes = dict(zip(("x", "y", "z", "replicas", "pipe"), (*cuboid.split(","), "1", "1"), strict=False))
    return [f"cuboid.{axis}={size}" for axis, size in sizes.items()]


def ranks_of(config: TrainConfig) -> int:
    return config.cuboid_shape().ranks


def curve(world: World, config: TrainConfig, steps: int, serial: bool = False) -> Curve:
    """The loss and the gradient's norm at each step. Adam hides a gradient of the wrong size; its norm does not."""
    trainer = Trainer(config, world, on_one_device if serial else on_cuboid)
    try:
        reports = [trainer.step()[0] for _ in range(steps)]
    finally:
        trainer.model.parallel.mesh.close()
    return [(report.loss, report.grad_norm) for report in reports]


def losses(found: Curve) -> list[float]:
    return [loss for loss, _ in found]


def furthest(found: Curve | list[float], wanted: Curve | list[float]) -> float:
    """The largest relative difference between two curves."""
    a, b = (torch.tensor(each, dtype=torch.float64) for each in (found, wanted))
    assert a.shape == b.shape
    return (a / b - 1).abs().max().item()


def said_to_resuming(world: World, config: TrainConfig, path: Path) -> str:
    """By a rank, to a checkpoint or a run."""
    trainer = Trainer(config, world)
    try:
        trainer.resume(path)
    except ValueError as error:
        return str(error)
    finally:
        trainer.model.parallel.mesh.close()
    return f"resumed from {trainer.done}"
