"""`cuboid bench pipeline` and `groups`: pipelines of cuboids."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cuboid.cli.bench.options import (
    BATCH,
    HEADS,
    HIDDEN,
    LAYERS,
    MACHINE,
    MODEL,
    OUT,
    ROUNDS,
    RUN,
    SEQ,
    SMALLER,
    VOCAB,
    is_given,
    make_console,
    reject_torchrun,
    unless_quick,
    whole_numbers,
)
from cuboid.cli.option import option


def pipeline(
    ctx: typer.Context,
    ranks: Annotated[str, option("Numbers of ranks, one per stage, such as 2,4,8.", MACHINE)] = "2,4,8",
    hidden: Annotated[
        int | None, option("Width of the residual stream.", MODEL, 1, otherwise="256, or with --cores 1024")
    ] = None,
    emulate: Annotated[
        str, option("The device, as for cuboid bench layouts; '': the benchmark's default.", MACHINE)
    ] = "",
    cores: Annotated[
        bool,
        option(
            "Compute on two hosts, each with one rank and one core. It needs root and an otherwise idle machine.",
            MACHINE,
            flag="--cores",
        ),
    ] = False,
    rounds: ROUNDS = 3,
    only: Annotated[
        list[str] | None, option("Only schedules whose name begins with this; may be repeated.", RUN)
    ] = None,
    quick: SMALLER = False,
    out: OUT = Path("bench"),
) -> None:
    """How long the ranks of a pipeline are idle, under each schedule, on emulated devices. With --quick: 2,4 ranks, 1
    round."""
    reject_torchrun("pipeline")
    if cores and (emulate or is_given(ctx, "ranks")):
        raise ValueError("--cores has two ranks that compute; leave out --ranks and --emulate")
    sizes = [2] if cores else whole_numbers(unless_quick(ctx, "ranks", quick, "2,4"))
    from cuboid.bench.pipeline import pipeline as run

    turns = unless_quick(ctx, "rounds", quick, 1)
    if not run(sizes, turns, out, make_console(), only or [""], hidden or (1024 if cores else 256), emulate, cores):
        raise typer.Exit(1)


def groups(
    ctx: typer.Context,
    ranks: Annotated[int, option("Number of ranks; they fill two groups of hosts.", MACHINE, 2)] = 8,
    emulate: Annotated[
        str,
        option(
            "Devices, hosts and groups of hosts, as for cuboid bench layouts, with node=, group= and uplink=; '': two "
            "groups of two hosts of two devices, whose link is ten times slower than a host's.",
            MACHINE,
        ),
    ] = "",
    layers: LAYERS = 4,
    hidden: HIDDEN = 256,
    heads: HEADS = 16,
    vocab: VOCAB = 512,
    batch: BATCH = 8,
    seq: SEQ = 256,
    top: Annotated[int, option("Number of shapes of each kind: the fastest ones of cuboid plan.", RUN, 1)] = 2,
    rounds: ROUNDS = 3,
    quick: SMALLER = False,
    out: OUT = Path("bench"),
) -> None:
    """Two groups of hosts joined by a slow link: the best pipe × cuboid against the best cuboid. With --quick: --top 1,
    1 round."""
    reject_torchrun("groups")
    from cuboid.bench.groups import CLUSTER
    from cuboid.bench.groups import groups as run
    from cuboid.bench.problem import Problem
    from cuboid.model.config import ModelConfig

    best, turns = (unless_quick(ctx, name, quick, 1) for name in ("top", "rounds"))
    model = ModelConfig("gpt2", layers, hidden, heads, vocab, context=seq, tied=False)
    if not run(Problem(model, batch, seq), emulate or CLUSTER, ranks, best, turns, out, make_console())[1]:
        raise typer.Exit(1)
