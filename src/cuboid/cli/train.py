"""`cuboid train`: from text to a checkpoint that loads anywhere."""

import os
import shlex
import signal
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cuboid.launch import is_first, launch, under_torchrun
from cuboid.mesh import Cuboid
from cuboid.train import checkpoint
from cuboid.train.auto import planned
from cuboid.train.config import TrainConfig, load
from cuboid.train.keys import toml
from cuboid.train.loop import Outcome
from cuboid.train.loop import train as train_on_rank
from cuboid.train.progress import duration


def train(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file; `cuboid config --show` prints every key. The demo if left out.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key; may be repeated.")
    ] = None,
    preset: Annotated[str, typer.Option(help="Begin with the sizes of a known model.")] = "",
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on from this run's newest good checkpoint, or from this one, on any cuboid."),
    ] = None,
    cuboid: Annotated[
        str, typer.Option(help="x,y,z; or auto: what cuboid plan finds fastest for as many ranks as configured.")
    ] = "",
    hardware: Annotated[str, typer.Option(help="For auto: a preset or a file of cuboid calibrate.")] = "",
    trace: Annotated[
        int, typer.Option(help="Trace so many steps, after two: trace.json for Perfetto, timeline.png.", min=0)
    ] = 0,
) -> None:
    """Train a language model.

    Without a configuration: a small GPT on the running Python's own library, on 8 ranks of this machine.
    Ranks are forked here; on a cluster start it with torchrun: torchrun --nproc-per-node 8 -m cuboid train big.toml

    Ctrl-C finishes the step and saves; a second one ends it at once.
    """
    start = run = None
    overrides = overrides or []
    if resume is not None:
        start = resume.resolve()
        run = checkpoint.candidates(start)[0].parent.parent
        if config is None:  # the run's own, wherever its folder is by now
            own = [f"logging.folder={toml(str(run))}", "model.pretrained="]  # its weights are its own by now
            config, overrides = run / "config.toml", own + overrides
    chosen = on_cuboid(load(config, overrides, preset), cuboid, hardware)
    chosen.check()
    folder = Path(chosen.logging.folder) if chosen.logging.folder else run
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the ranks get it too, finish their step and save
    try:
        outcome = launch(train_on_rank, chosen.cuboid_shape().ranks, [chosen, folder, start, trace])[0]
    finally:
        signal.signal(signal.SIGINT, before)
    if outcome is not None:
        show(outcome)


def on_cuboid(config: TrainConfig, cuboid: str, hardware: str) -> TrainConfig:
    """The configuration with another cuboid, if one was asked for."""
    if cuboid == "auto":
        ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun() else config.cuboid_shape().ranks
        config, why = planned(config, ranks, hardware)
        if is_first():
            Console(highlight=False, soft_wrap=True).print(f"plan    {why}", markup=False)
    elif cuboid:
        k = Cuboid.parse(cuboid, config.cuboid.data)
        config = replace(config, cuboid=replace(config.cuboid, x=k.x, y=k.y, z=k.z))
    if hardware and cuboid != "auto":
        raise ValueError(f"--hardware {hardware} is for --cuboid auto; leave it out or give both")
    return config


def show(outcome: Outcome) -> None:
    console, folder = Console(highlight=False, markup=False, soft_wrap=True), Path(outcome.folder)
    if not outcome.finished:
        again = shlex.join(["cuboid", "train", "--resume", outcome.folder])
        console.print(f"\nStopped after step {outcome.steps} of {outcome.of}; all is saved. Go on with:\n  {again}")
        return
    if outcome.sample:
        console.rule("a sample", align="left")
        console.print(outcome.sample)
        console.rule()
    console.print(
        f"{outcome.steps} steps in {duration(outcome.seconds)}. Validation loss {outcome.val_loss:.4f} nats a token; "
        f"knowing only how frequent each token is: {outcome.unigram:.4f}"
    )
    for what, path in [
        ("plot", folder / "plot.png"),
        *(("trace", path) for path in [folder / "trace.json"] if path.exists()),
        ("metrics", folder / "metrics.jsonl"),
        *(("checkpoint", newest) for newest in checkpoint.complete(folder / "checkpoints")[-1:]),
        ("config", folder / "config.toml"),
    ]:
        console.print(f"  {what:<11}{path}")
    console.print(f"More text: {shlex.join(['cuboid', 'sample', outcome.folder, '--prompt', 'class '])}")
