"""`cuboid bench strong`, `weak` and `layouts`: layouts take turns on the same ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from cuboid.cli.bench.options import (
    ACTIVATIONS,
    BATCH,
    EMULATE,
    FIRST_BATCH,
    FIRST_HIDDEN,
    HEADS,
    HIDDEN,
    HOSTS,
    LAYERS,
    ONLY,
    OUT,
    PER_HOST,
    PIPES,
    RANKS,
    RATE,
    ROUNDS,
    SEQ,
    SMALLER,
    STEPS,
    VOCAB,
    WEIGHTS,
    check_policy,
    is_given,
    make_console,
    whole_numbers,
)
from cuboid.cli.command import one_of
from cuboid.cli.option import option
from cuboid.run.started import is_first, local_ranks, under_torchrun


@dataclass(frozen=True)
class Setting:
    """Defaults of a benchmark of layouts."""

    ranks: str
    hidden: int
    heads: int
    batch: int
    seq: int
    rate: str
    rounds: int
    steps: int = 1
    layers: int = 1
    vocab: int = 512


STRONG = Setting("8,16,64", hidden=256, heads=64, batch=64, seq=64, rate="8mbit", rounds=3)
WEAK = Setting("8,64", hidden=128, heads=64, batch=32, seq=64, rate="8mbit", rounds=3)
LAYOUTS = Setting("8", hidden=512, heads=8, batch=16, seq=128, rate="", rounds=7, steps=3, layers=2)
QUICK = {
    "strong": Setting("8,64", hidden=256, heads=64, batch=64, seq=16, rate="32mbit", rounds=1),
    "weak": Setting("8,64", hidden=64, heads=64, batch=32, seq=16, rate="8mbit", rounds=1),
    "layouts": Setting("8", hidden=256, heads=8, batch=16, seq=64, rate="", rounds=3),
}
#: The paper's scaling on emulated devices. Weak scaling begins at half the hidden size.
PAPER = {
    "strong": Setting("8,16,32,64", hidden=256, heads=64, batch=16, seq=64, rate="", rounds=3),
    "weak": Setting("8,64", hidden=128, heads=64, batch=8, seq=64, rate="", rounds=3),
}


def strong(
    ctx: typer.Context,
    ranks: RANKS = STRONG.ranks,
    hosts: HOSTS = None,
    ranks_per_host: PER_HOST = 4,
    rate: RATE = STRONG.rate,
    emulate: EMULATE = "",
    layers: LAYERS = STRONG.layers,
    hidden: HIDDEN = STRONG.hidden,
    heads: HEADS = STRONG.heads,
    vocab: VOCAB = STRONG.vocab,
    batch: BATCH = STRONG.batch,
    seq: SEQ = STRONG.seq,
    activations: ACTIVATIONS = "retain",
    weights: WEIGHTS = "regather",
    rounds: ROUNDS = STRONG.rounds,
    steps: STEPS = STRONG.steps,
    only: ONLY = None,
    quick: SMALLER = False,
    out: OUT = Path("bench"),
) -> None:
    """Strong scaling: one problem on more and more ranks."""
    timed("strong", ctx)


def weak(
    ctx: typer.Context,
    ranks: RANKS = WEAK.ranks,
    hosts: HOSTS = None,
    ranks_per_host: PER_HOST = 4,
    rate: RATE = WEAK.rate,
    emulate: EMULATE = "",
    layers: LAYERS = WEAK.layers,
    hidden: FIRST_HIDDEN = WEAK.hidden,
    heads: HEADS = WEAK.heads,
    vocab: VOCAB = WEAK.vocab,
    batch: FIRST_BATCH = WEAK.batch,
    seq: SEQ = WEAK.seq,
    activations: ACTIVATIONS = "retain",
    weights: WEIGHTS = "regather",
    rounds: ROUNDS = WEAK.rounds,
    steps: STEPS = WEAK.steps,
    only: ONLY = None,
    quick: SMALLER = False,
    out: OUT = Path("bench"),
) -> None:
    """Weak scaling: a problem that grows with the ranks."""
    timed("weak", ctx)


def layouts(
    ctx: typer.Context,
    ranks: RANKS = LAYOUTS.ranks,
    hosts: HOSTS = None,
    ranks_per_host: PER_HOST = 4,
    rate: RATE = LAYOUTS.rate,
    emulate: EMULATE = "",
    layers: LAYERS = LAYOUTS.layers,
    hidden: HIDDEN = LAYOUTS.hidden,
    heads: HEADS = LAYOUTS.heads,
    vocab: VOCAB = LAYOUTS.vocab,
    batch: BATCH = LAYOUTS.batch,
    seq: SEQ = LAYOUTS.seq,
    pipe: Annotated[
        int,
        option(
            "Cuboids on a pipe of this many places run too. Without --layers the model has at least a block per stage.",
            PIPES,
            1,
        ),
    ] = 1,
    pipeline: Annotated[str, option("With --pipe: gpipe, 1f1b, interleaved, zero-bubble or beside.", PIPES)] = "1f1b",
    micro_batches: Annotated[
        int | None,
        option("With --pipe: micro-batches that it splits the batch into.", PIPES, 1, otherwise="twice --pipe"),
    ] = None,
    activations: ACTIVATIONS = "retain",
    weights: WEIGHTS = "regather",
    rounds: ROUNDS = LAYOUTS.rounds,
    steps: STEPS = LAYOUTS.steps,
    only: ONLY = None,
    quick: SMALLER = False,
    out: OUT = Path("bench"),
) -> None:
    """All layouts and cuboids of one number of ranks, PyTorch's own included.

    With --pipe also every cuboid on a pipe, such as 'cuboid 1,2,2 pipe=2'; only pipes have micro-batches.

    Examples:
      cuboid bench layouts --quick
      cuboid bench layouts --pipe 2 --micro-batches 8 --only cuboid
      cuboid bench layouts --pipe 2 --only 'cuboid 1,2,2 pipe=2' --only 1-D
    """
    timed("layouts", ctx)


def timed(what: str, ctx: typer.Context) -> None:
    """Run strong, weak or layouts with the options of its command."""
    given = {name for name in ctx.params if is_given(ctx, name)}
    if {"ranks", "hosts"} <= given:
        raise ValueError("--ranks and --hosts both set the number of ranks; give one of them")
    o = dict(ctx.params)
    quick, emulate, only = o["quick"], o["emulate"], o["only"] or [""]
    own = QUICK[what] if quick else None
    if emulate.startswith("paper") and what in PAPER:
        own = replace(PAPER[what], ranks="8,64", rounds=1) if quick else PAPER[what]
    if own is not None:
        o |= {name: value for name, value in asdict(own).items() if name not in given}
    check_policy(o["activations"], o["weights"])
    sizes = whole_numbers(o["ranks"])
    pipe, pipeline = o.get("pipe", 1), o.get("pipeline", "1f1b")
    micro_batches = o.get("micro_batches") or 2 * pipe
    _check_pipes(pipe, pipeline, given, only)
    from cuboid.bench.layouts import begin_with, every, on_pipes, possible, scaling, stages_of
    from cuboid.bench.plot import draw
    from cuboid.bench.problem import Problem
    from cuboid.bench.result import Result
    from cuboid.bench.run import Pace, Trial
    from cuboid.bench.run import bench as run_bench
    from cuboid.bench.table import show
    from cuboid.device import gpus_for
    from cuboid.emulate.slow_motion import parse
    from cuboid.model.config import ModelConfig
    from cuboid.model.cuboid import Policy
    from cuboid.run.cluster import bits_per_second, can_make_hosts, try_hosts

    console, policy = make_console(), Policy(o["activations"], o["weights"])
    rate, per_host = o["rate"], o["ranks_per_host"]
    slow = parse(emulate) if emulate else None
    if slow is not None:
        if given & {"rate", "ranks_per_host"} or under_torchrun():
            raise ValueError("--emulate sets the links and hosts; leave out --rate, --ranks-per-host, torchrun")
        per_host, rate = slow.hardware.node, slow.links.between if can_make_hosts() else ""
    if under_torchrun():
        if "rate" in given and rate:
            raise ValueError(f"--rate {rate}: ranks under torchrun use the real network; leave --rate out")
        rate = ""
    rates = [each.strip() for each in rate.split(",")]
    for each in rates:
        if each:
            bits_per_second(each)
    unused = given & {"hosts", "ranks_per_host"} if what == "layouts" else given & {"hosts"}
    if unused and not any(rates):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(unused))
        raise ValueError(f"{flags}: hosts are emulated only if links have a rate; add --rate 25mbit or give --ranks")
    if o["hosts"]:
        sizes = [o["hosts"] * per_host]
    for size in sizes:
        if slow is not None:
            slow.check(size)
        if any(rates) and size % per_host:
            raise ValueError(
                f"{size} ranks do not fill hosts of {per_host}; use a multiple, --ranks-per-host 1 or --rate ''"
            )
    if any(rates):
        try_hosts("or run on this machine's loopback with --rate ''")
    if pipe > 1 and "layers" not in given:
        o["layers"] = max(o["layers"], pipe * stages_of(pipeline))
    model = ModelConfig("gpt2", o["layers"], o["hidden"], o["heads"], o["vocab"], context=o["seq"], tied=False)
    base = Problem(model, o["batch"], o["seq"], policy)
    if slow is not None and slow.shrink > 1 and is_first():
        console.print(f"{slow}; {slow.meant(o['hidden'], base.tokens)}", soft_wrap=True, highlight=False)
    trials = []
    for size in sizes:
        problem = base.grown(size, sizes[0]) if what == "weak" else base
        found = list(every(problem, size, slow is not None) if what == "layouts" else scaling(problem, size, per_host))
        found += on_pipes(problem, size, pipe, pipeline, micro_batches) if pipe > 1 else ()
        runnable, left_out = possible(found, problem)
        able = {layout.name: layout for layout in runnable}
        chosen = [able[name] for name in begin_with(only, list(able), left_out)]
        for name in left_out if is_first() else ():
            if name.startswith(tuple(only)):
                line = f"{size} ranks: {name} left out: {left_out[name]}"
                console.print(line, soft_wrap=True, markup=False, highlight=False)
        for each in rates:
            gpu = not each and slow is None and gpus_for(local_ranks(size))
            apart = bool(each) or slow is not None or gpu or under_torchrun()
            trials.append(Trial(replace(problem, apart=apart, gpu=gpu), size, chosen, each, slow, quick))
    pace = Pace(o["rounds"], o["steps"], per_host)
    settings = {
        "emulate": emulate,
        "quick": quick,
        "ranks": sizes,
        "ranks_per_host": per_host,
        "rates": rates,
        **vars(pace),
    }
    result = run_bench(Result(what, settings), trials, pace, o["out"], console)
    if is_first():
        show(result, console)
        for path in (result.save(o["out"]), *draw(result, o["out"])):
            console.print(str(path.absolute()), soft_wrap=True, highlight=False)


def _check_pipes(pipe: int, pipeline: str, given: set[str], only: Sequence[str]) -> None:
    from cuboid.step.schedule import PIPELINES

    one_of("--pipeline", pipeline, PIPELINES)
    named = [f"--only {each!r}" for each in only if "pipe=" in each]
    named += [f"--{name.replace('_', '-')}" for name in ("pipeline", "micro_batches") if name in given]
    if pipe == 1 and named:
        raise ValueError(f"{', '.join(named)}: there are no pipes without --pipe; add --pipe 2, or another number")
