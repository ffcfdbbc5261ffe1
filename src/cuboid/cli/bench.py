"""`cuboid bench`: 1-D, 2-D, 2.5-D, FSDP × TP and 3-D side by side, on one model, one batch, one machine."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cuboid.bench.accuracy import accuracy
from cuboid.bench.contestant import begin_with, every, possible, scaling
from cuboid.bench.cpu import cpu
from cuboid.bench.emulation import emulation
from cuboid.bench.overlap import overlap
from cuboid.bench.pipeline import pipeline
from cuboid.bench.plot import draw
from cuboid.bench.problem import Problem
from cuboid.bench.result import Result
from cuboid.bench.run import Pace, Trial
from cuboid.bench.run import bench as run_bench
from cuboid.bench.table import show
from cuboid.emulate.slow_motion import parse
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import Policy
from cuboid.run.cluster import bits_per_second, can_make_hosts, try_hosts
from cuboid.run.started import is_first, under_torchrun


@dataclass(frozen=True)
class Setting:
    """What a benchmark does unless told otherwise; `quick` in its place with --quick."""

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


SETTINGS = {
    "strong": Setting("8,16,64", hidden=256, heads=64, batch=64, seq=64, rate="8mbit", rounds=3),
    "weak": Setting("8,64", hidden=128, heads=64, batch=32, seq=64, rate="8mbit", rounds=3),
    "layouts": Setting("8", hidden=512, heads=8, batch=16, seq=128, rate="", rounds=7, steps=3, layers=2),
}
QUICK = {
    "strong": Setting("8,64", hidden=256, heads=64, batch=64, seq=16, rate="32mbit", rounds=1),
    "weak": Setting("8,64", hidden=64, heads=64, batch=32, seq=16, rate="8mbit", rounds=1),
    "layouts": Setting("8", hidden=256, heads=8, batch=16, seq=64, rate="", rounds=3),
}

#: The paper's strong scaling in slow motion; its weak scaling begins with a cube root of 8 less.
PAPER = {
    "strong": Setting("8,16,32,64", hidden=256, heads=64, batch=16, seq=64, rate="", rounds=3),
    "weak": Setting("8,64", hidden=128, heads=64, batch=8, seq=64, rate="", rounds=3),
}

TIMED = {"ranks", "hosts", "ranks_per_host", "rate", "rounds", "steps", "only", "layers", "hidden", "heads", "vocab"}
TIMED |= {"batch", "seq", "activations", "weights", "emulate"}
COMMON = {"quick", "out"}
#: The options that each benchmark takes, with those common to all.
TAKES = {
    **dict.fromkeys(SETTINGS, TIMED),
    "overlap": {"rounds", "only", "layers", "hidden", "batch", "micro_batches", "activations", "weights", "emulate"},
    "emulation": {"rounds", "only", "layers", "hidden", "batch", "emulate"},
    "cpu": {"ranks", "rounds", "only", "hidden"},
    "accuracy": {"steps", "only"},
    "pipeline": {"ranks", "rounds", "only", "hidden", "emulate"},
}


def _option(words: str, least: int | None = None) -> Any:
    """Whose default each benchmark has by itself."""
    return typer.Option(help=words, min=least, show_default=False)


def bench(
    ctx: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            help="strong: one problem on more and more ranks. weak: a problem that grows with the ranks. layouts: "
            "every layout and cuboid of one number of ranks. overlap: the schedule on and off, on two hosts and on "
            "eight. emulation: the same steps computed on two cores and timed on emulated devices. cpu: CPU seconds of "
            "every cuboid against one device's. accuracy: loss curves of 1-D, 2-D and 3-D on one text. pipeline: how "
            "long the ranks of a pipeline are idle, under each schedule, on emulated devices."
        ),
    ],
    ranks: Annotated[str, _option("Numbers of ranks, such as 8,64.")] = "",
    hosts: Annotated[int, _option("Emulated hosts, instead of --ranks.", 0)] = 0,
    ranks_per_host: Annotated[int, typer.Option(help="Ranks on each host.", min=1)] = 4,
    rate: Annotated[
        str | None, typer.Option(help="Each host's link, such as 25mbit; several are a sweep; '' is unshaped.")
    ] = None,
    rounds: Annotated[int, _option("How often each layout has its turn.", 0)] = 0,
    steps: Annotated[int, _option("Steps timed per turn; of accuracy: steps trained.", 0)] = 0,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only layouts whose name begins so, such as 'cuboid 2,' or 2-D; may be given several times."),
    ] = None,
    layers: Annotated[int, _option("Blocks of the model.", 0)] = 0,
    hidden: Annotated[int, _option("Features of the residual stream; of weak: on the fewest ranks.", 0)] = 0,
    heads: Annotated[int, _option("Heads of attention; they must divide --hidden.", 0)] = 0,
    vocab: Annotated[int, _option("Tokens in the vocabulary.", 0)] = 0,
    batch: Annotated[int, _option("Sequences per step, over all ranks; of weak: on the fewest ranks.", 0)] = 0,
    micro_batches: Annotated[
        int,
        typer.Option(
            help="Micro-batches of a step, of --batch sequences each. With several, overlap also runs the forward of "
            "each beside the backward of the one before it.",
            min=1,
        ),
    ] = 1,
    seq: Annotated[int, _option("Tokens per sequence.", 0)] = 0,
    activations: Annotated[
        str, typer.Option(help="Cuboids retain gathered activations for backward, or regather them.")
    ] = "retain",
    weights: Annotated[
        str, typer.Option(help="Cuboids and PyTorch's FSDP retain gathered weights for backward, or regather them.")
    ] = "regather",
    emulate: Annotated[
        str,
        typer.Option(
            help="Time local work instead of doing it, and send real messages over slowed links: paper, a preset of "
            "cuboid plan and a factor (v100-edr/2000), figures (fp32=2e9,stream=1e9,between=50mbit) or a file of "
            "cuboid calibrate. Of emulation: such a file for two ranks; without, the cores are calibrated first. All "
            "figures: docs/emulation.md."
        ),
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Smaller and fewer: minutes, and rough.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the JSON and the pictures.")] = Path("bench"),
) -> None:
    """Time ways of spreading one model over the same ranks: step, bytes, memory, against one another.

    Layouts take turns, round after round; medians and quartiles are shown; everything goes to JSON, PNG and SVG. With
    --rate the ranks live on emulated hosts with shaped links (needs root); without, on this machine's loopback. With
    --emulate their devices are emulated too, so that many ranks can share a core: see docs/emulation.md. On a cluster:
    torchrun … -m cuboid bench layouts --ranks 64 --rate ''. Sizes and rounds left out are the benchmark's own.
    """
    console = Console() if sys.stdout.isatty() else Console(width=132)
    given = {name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    _check_options(what, given - {"what"})
    only = only or [""]
    if what == "accuracy":
        accuracy(steps or (50 if quick else 200), out, console, only)
        return
    if what == "pipeline":
        sizes = _whole_numbers(ranks or ("2,4" if quick else "2,4,8"))
        if not pipeline(sizes, rounds or (1 if quick else 3), out, console, only, hidden or 256, emulate):
            raise typer.Exit(1)
        return
    policy = Policy(activations, weights)  # type: ignore[arg-type]  # it checks them itself
    slow = parse(emulate) if emulate else None
    if what == "overlap":
        turns = rounds or (2 if quick else 5)
        overlap(turns, out, console, only, policy, layers or 8, hidden or 1024, batch or 16, slow, micro_batches)
        return
    if what == "emulation":
        turns = rounds or (3 if quick else 7)
        if not emulation(turns, out, console, only, layers or 2, hidden or 1024, batch or 32, emulate):
            raise typer.Exit(1)
        return
    if what == "cpu":
        size, *more = _whole_numbers(ranks or "8")
        if more:
            raise ValueError(f"--ranks {ranks}: cpu takes one number; run it once for each, with an --out of its own")
        cpu(size, rounds or (2 if quick else 5), out, console, only, hidden or 1024)
        return
    own = (QUICK if quick else SETTINGS)[what]
    if emulate.startswith("paper") and what in PAPER:
        own = replace(PAPER[what], ranks="8,64", rounds=1) if quick else PAPER[what]
    if slow is not None:
        if given & {"rate", "ranks_per_host"} or under_torchrun():
            raise ValueError(
                "--emulate says what links and hosts there are; leave out --rate, --ranks-per-host, torchrun"
            )
        ranks_per_host, rate = slow.hardware.node, slow.links.between if can_make_hosts() else ""
    rates = [each.strip() for each in (own.rate if rate is None else rate).split(",")]
    if under_torchrun():
        if rate:
            raise ValueError(f"--rate {rate}: torchrun's ranks have the network they have; leave --rate out")
        rates = [""]
    for each in rates:
        if each:
            bits_per_second(each)
    unused = given & {"hosts", "ranks_per_host"} if what == "layouts" else given & {"hosts"}
    if unused and not any(rates):
        raise ValueError(f"{_flags(unused)}: hosts are made where links have a rate; add --rate 25mbit or give --ranks")
    sizes = [hosts * ranks_per_host] if hosts else _whole_numbers(ranks or own.ranks)
    for size in sizes:
        if slow is not None:
            slow.check(size)
        if any(rates) and size % ranks_per_host:
            raise ValueError(
                f"{size} ranks do not fill hosts of {ranks_per_host}; use a multiple, --ranks-per-host 1 or --rate ''"
            )
    if any(rates):
        try_hosts("or run on this machine's loopback with --rate ''")
    seq, hidden, heads = seq or own.seq, hidden or own.hidden, heads or own.heads
    model = ModelConfig("gpt2", layers or own.layers, hidden, heads, vocab or own.vocab, context=seq, tied=False)
    base = Problem(model, batch or own.batch, seq, policy)
    if slow is not None and slow.shrink > 1 and is_first():
        console.print(f"{slow}; {slow.meant(hidden, base.tokens)}", soft_wrap=True, highlight=False)
    trials = []
    for size in sizes:
        problem = base.grown(size, sizes[0]) if what == "weak" else base
        found = every(problem, size) if what == "layouts" else scaling(problem, size, ranks_per_host)
        contestants, left_out = possible(found, problem)
        able = {contestant.name: contestant for contestant in contestants}
        chosen = [able[name] for name in begin_with(only, list(able), left_out)]
        for name in left_out if is_first() else ():
            if name.startswith(tuple(only)):
                line = f"{size} ranks: {name} left out: {left_out[name]}"
                console.print(line, soft_wrap=True, markup=False, highlight=False)
        for each in rates:
            apart = bool(each) or under_torchrun()
            trials.append(Trial(replace(problem, apart=apart or slow is not None), size, chosen, each, slow, quick))
    pace = Pace(rounds or own.rounds, steps or own.steps, ranks_per_host)
    settings = {
        "emulate": emulate,
        "quick": quick,
        "ranks": sizes,
        "ranks_per_host": ranks_per_host,
        "rates": rates,
        **vars(pace),
    }
    result = run_bench(Result(what, settings), trials, pace, out, console)
    if is_first():
        show(result, console)
        for path in (result.save(out), *draw(result, out)):
            console.print(str(path.absolute()), soft_wrap=True, highlight=False)


def _check_options(what: str, given: set[str]) -> None:
    """What a benchmark would not look at is refused, lest one believe that it was."""
    if what not in TAKES:
        raise ValueError(f"there is no benchmark {what!r}; choose one of {', '.join(TAKES)}")
    if what not in SETTINGS and under_torchrun():
        raise ValueError(f"bench {what} starts ranks of its own; run it without torchrun")
    if unused := given - TAKES[what] - COMMON:
        raise ValueError(f"bench {what} has no use for {_flags(unused)}; it takes {_flags(TAKES[what] | COMMON)}")
    if {"ranks", "hosts"} <= given:
        raise ValueError("--ranks and --hosts both say how many ranks; give one of them")


def _flags(names: set[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in sorted(names))


def _whole_numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--ranks {text!r} is not a list of whole numbers; write 8 or 8,16,64")
    return [int(part) for part in parts]
