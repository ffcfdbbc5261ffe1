"""`cuboid bench`: compares 1-D, 2-D, 2.5-D, PyTorch's own and 3-D on one model, batch and machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cuboid.cli.command import Command, CommandGroup, one_of
from cuboid.cli.option import option
from cuboid.run.started import is_first, local_ranks, under_torchrun

app = typer.Typer(name="bench", cls=CommandGroup, add_completion=False)


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

MODEL, MACHINE, RUN, PIPES = "Model and batch", "Ranks and network", "Measurement", "Pipes"


RANKS = Annotated[str, option("Numbers of ranks, such as 8,64.", MACHINE)]
HOSTS = Annotated[int | None, option("Emulated hosts, instead of --ranks.", MACHINE, 1)]
PER_HOST = Annotated[int, option("Ranks on each host.", MACHINE, 1)]
RATE = Annotated[
    str, option("Rate of each host's link, such as 25mbit; several make a sweep; '' is unshaped.", MACHINE)
]
EMULATE = Annotated[
    str,
    option(
        "Time local work instead of doing it, and send real messages over slowed links: paper, a preset of cuboid plan "
        "and a factor (v100-edr/2000), figures (fp32=2e9,stream=1e9,between=50mbit) or a file of cuboid calibrate. All "
        "figures: docs/emulation.md.",
        MACHINE,
    ),
]
LAYERS = Annotated[int, option("Transformer blocks.", MODEL, 1)]
HIDDEN = Annotated[int, option("Width of the residual stream.", MODEL, 1)]
FIRST_HIDDEN = Annotated[int, option("Width of the residual stream, on the fewest ranks.", MODEL, 1)]
HEADS = Annotated[int, option("Attention heads; they must divide --hidden.", MODEL, 1)]
VOCAB = Annotated[int, option("Tokens in the vocabulary.", MODEL, 1)]
BATCH = Annotated[int, option("Sequences per step, over all ranks.", MODEL, 1)]
FIRST_BATCH = Annotated[int, option("Sequences per step, over all ranks, on the fewest ranks.", MODEL, 1)]
SEQ = Annotated[int, option("Tokens per sequence.", MODEL, 1)]
ACTIVATIONS = Annotated[str, option("Cuboids retain gathered activations for backward, or regather them.", MODEL)]
WEIGHTS = Annotated[str, option("Cuboids retain gathered weights for backward, or regather them.", MODEL)]
ROUNDS = Annotated[int, option("Turns of each layout.", RUN, 1)]
STEPS = Annotated[int, option("Steps timed per turn.", RUN, 1)]
ONLY = Annotated[
    list[str] | None,
    option("Only layouts whose name begins with this, such as 'cuboid 2,' or 2-D; may be repeated.", RUN),
]
SMALLER = Annotated[bool, option("Fewer and smaller measurements: rough, in minutes.", RUN, flag="--quick")]
OUT = Annotated[Path, option("Folder for the JSON and the pictures.", RUN)]


@app.callback()
def bench() -> None:
    """Time cuboids against other parallelisms on the same ranks.

    Layouts take turns, round after round; medians and quartiles of step, bytes and memory are shown; everything goes to
    JSON, PNG and SVG. With --rate the ranks run on emulated hosts with shaped links (needs root); without, on this
    machine's loopback. With --emulate their devices are emulated too, so that many ranks can share a core; see
    docs/emulation.md.

    Examples:
      cuboid bench layouts --quick
      cuboid bench strong --rate 25mbit --only 'cuboid 2,'
      torchrun … -m cuboid bench layouts --ranks 64
    """


@app.command(cls=Command)
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


@app.command(cls=Command)
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


@app.command(cls=Command)
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
            "Cuboids on a pipe of so many places run too. Without --layers the model has at least a block per stage.",
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


@app.command(cls=Command)
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
    _reject_torchrun("overlap")
    _check_policy(activations, weights)
    from cuboid.bench.overlap import overlap as run
    from cuboid.emulate.slow_motion import parse
    from cuboid.model.cuboid import Policy

    slow, turns = parse(emulate) if emulate else None, _unless_quick(ctx, "rounds", quick, 2)
    policy = Policy(activations, weights)  # type: ignore[arg-type]
    run(turns, out, _console(), only or [""], policy, layers, hidden, batch, slow, micro_batches)


@app.command(cls=Command)
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
    _reject_torchrun("emulation")
    from cuboid.bench.emulation import emulation as run

    turns = _unless_quick(ctx, "rounds", quick, 3)
    if not run(turns, out, _console(), only or [""], layers, hidden, batch, emulate):
        raise typer.Exit(1)


@app.command(cls=Command)
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
    _reject_torchrun("cpu")
    from cuboid.bench.cpu import cpu as run

    run(ranks, _unless_quick(ctx, "rounds", quick, 2), out, _console(), only or [""], hidden)


@app.command(cls=Command)
def accuracy(
    ctx: typer.Context,
    steps: Annotated[int, option("Steps trained.", RUN, 1)] = 200,
    only: ONLY = None,
    quick: SMALLER = False,
    out: OUT = Path("bench"),
) -> None:
    """Loss curves of 1-D, 2-D and 3-D on one text. With --quick: 50 steps."""
    _reject_torchrun("accuracy")
    from cuboid.bench.accuracy import accuracy as run

    run(_unless_quick(ctx, "steps", quick, 50), out, _console(), only or [""])


@app.command(cls=Command)
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
    _reject_torchrun("pipeline")
    if cores and (emulate or _is_given(ctx, "ranks")):
        raise ValueError("--cores has two ranks that compute; leave out --ranks and --emulate")
    sizes = [2] if cores else _whole_numbers(_unless_quick(ctx, "ranks", quick, "2,4"))
    from cuboid.bench.pipeline import pipeline as run

    turns = _unless_quick(ctx, "rounds", quick, 1)
    if not run(sizes, turns, out, _console(), only or [""], hidden or (1024 if cores else 256), emulate, cores):
        raise typer.Exit(1)


@app.command(cls=Command)
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
    _reject_torchrun("groups")
    from cuboid.bench.groups import CLUSTER
    from cuboid.bench.groups import groups as run
    from cuboid.bench.problem import Problem
    from cuboid.model.config import ModelConfig

    best, turns = (_unless_quick(ctx, name, quick, 1) for name in ("top", "rounds"))
    model = ModelConfig("gpt2", layers, hidden, heads, vocab, context=seq, tied=False)
    if not run(Problem(model, batch, seq), emulate or CLUSTER, ranks, best, turns, out, _console())[1]:
        raise typer.Exit(1)


def timed(what: str, ctx: typer.Context) -> None:
    """Run strong, weak or layouts with the options of its command."""
    given = {name for name in ctx.params if _is_given(ctx, name)}
    if {"ranks", "hosts"} <= given:
        raise ValueError("--ranks and --hosts both set the number of ranks; give one of them")
    o = dict(ctx.params)
    quick, emulate, only = o["quick"], o["emulate"], o["only"] or [""]
    own = QUICK[what] if quick else None
    if emulate.startswith("paper") and what in PAPER:
        own = replace(PAPER[what], ranks="8,64", rounds=1) if quick else PAPER[what]
    if own is not None:
        o |= {name: value for name, value in asdict(own).items() if name not in given}
    _check_policy(o["activations"], o["weights"])
    sizes = _whole_numbers(o["ranks"])
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

    console, policy, rate, per_host = _console(), Policy(o["activations"], o["weights"]), o["rate"], o["ranks_per_host"]
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


def _is_given(ctx: typer.Context, name: str) -> bool:
    return getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"


def _unless_quick(ctx: typer.Context, name: str, quick: bool, smaller: Any) -> Any:
    """An option's value; with --quick the smaller one, unless the option is given."""
    return smaller if quick and not _is_given(ctx, name) else ctx.params[name]


def _reject_torchrun(what: str) -> None:
    if under_torchrun():
        raise ValueError(f"bench {what} starts its own ranks; run it without torchrun")


def _check_policy(activations: str, weights: str) -> None:
    one_of("--activations", activations, ("regather", "retain"))
    one_of("--weights", weights, ("regather", "retain"))


def _check_pipes(pipe: int, pipeline: str, given: set[str], only: Sequence[str]) -> None:
    from cuboid.step.schedule import PIPELINES

    one_of("--pipeline", pipeline, PIPELINES)
    named = [f"--only {each!r}" for each in only if "pipe=" in each]
    named += [f"--{name.replace('_', '-')}" for name in ("pipeline", "micro_batches") if name in given]
    if pipe == 1 and named:
        raise ValueError(f"{', '.join(named)}: there are no pipes without --pipe; add --pipe 2, or another number")


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=132)


def _whole_numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--ranks {text!r} is not a list of whole numbers; write 8 or 8,16,64")
    return [int(part) for part in parts]
