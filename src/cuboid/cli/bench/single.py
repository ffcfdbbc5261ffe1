"""`cuboid bench overlap`, `emulation`, `cpu` and `accuracy`: each measures one property of a cuboid's step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cuboid.cli.bench.options import (
    ACTIVATIONS,
    BATCH,
    EMULATE,
    HIDDEN,
    LAYERS,
    MACHINE,
    MODEL,
    ONLY,
    OUT,
    ROUNDS,
    RUN,
    SMALLER,
    WEIGHTS,
    check_policy,
    make_console,
    reject_torchrun,
    unless_quick,
)
from cuboid.cli.option import option


def overlap(
    ctx: typer.Context,
    layers: LAYERS = 8,
    hidden: HIDDEN = 1024,
    batch: BATCH = 16,
    micro_batches: Annotated[
        int,
        option(
            "Micro-batches of a step, of --batch sequences each. With several, the forward of each also runs beside "
            "the backward of the one before it.",
            MODEL,
            1,
        ),
    ] = 1,
    activations: ACTIVATIONS = "retain",
    weights: WEIGHTS = "regather",
    emulate: EMULATE = "",
    rounds: ROUNDS = 5,
    only: ONLY = None,
    quick: SMALLER = False,
    out: OUT = Path("bench"),
) -> None:
    """The schedule on and off, on two hosts and on eight. With --quick: 2 rounds."""
    reject_torchrun("overlap")
    check_policy(activations, weights)
    from cuboid.bench.overlap import overlap as run
    from cuboid.emulate.slow_motion import parse
    from cuboid.model.cuboid import Policy

    slow, turns = parse(emulate) if emulate else None, unless_quick(ctx, "rounds", quick, 2)
    policy = Policy(activations, weights)  # type: ignore[arg-type]
    run(turns, out, make_console(), only or [""], policy, layers, hidden, batch, slow, micro_batches)


def emulation(
    ctx: typer.Context,
    layers: LAYERS = 2,
    hidden: HIDDEN = 1024,
    batch: BATCH = 32,
    emulate: Annotated[
        str, option("A file of cuboid calibrate for two ranks; without, the cores are calibrated first.", MACHINE)
    ] = "",
    rounds: ROUNDS = 7,
    only: ONLY = None,
    quick: SMALLER = False,
    out: OUT = Path("bench"),
) -> None:
    """The same steps computed on two cores and timed on emulated devices. With --quick: 3 rounds."""
    reject_torchrun("emulation")
    from cuboid.bench.emulation import emulation as run

    turns = unless_quick(ctx, "rounds", quick, 3)
    if not run(turns, out, make_console(), only or [""], layers, hidden, batch, emulate):
        raise typer.Exit(1)


def cpu(
    ctx: typer.Context,
    ranks: Annotated[int, option("Number of ranks.", MACHINE, 1)] = 8,
    hidden: HIDDEN = 1024,
    rounds: ROUNDS = 5,
    only: ONLY = None,
    quick: SMALLER = False,
    out: OUT = Path("bench"),
) -> None:
    """CPU seconds of every cuboid against one device's. With --quick: 2 rounds."""
    reject_torchrun("cpu")
    from cuboid.bench.cpu import cpu as run

    run(ranks, unless_quick(ctx, "rounds", quick, 2), out, make_console(), only or [""], hidden)


def accuracy(
    ctx: typer.Context,
    steps: Annotated[int, option("Steps trained.", RUN, 1)] = 200,
    only: ONLY = None,
    quick: SMALLER = False,
    out: OUT = Path("bench"),
) -> None:
    """Loss curves of 1-D, 2-D and 3-D on one text. With --quick: 50 steps."""
    reject_torchrun("accuracy")
    from cuboid.bench.accuracy import accuracy as run

    run(unless_quick(ctx, "steps", quick, 50), out, make_console(), only or [""])
