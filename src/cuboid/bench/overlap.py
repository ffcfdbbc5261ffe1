"""Measures overlap: the same steps with the schedule on and off, on links of a chosen rate.

Off, every collective is awaited where it is launched. So its step is compute alone and communication alone, one after
the other, and tells both: the time waited, and the rest. A link's rate is chosen from them so that communication takes
as long as compute, half as long, or twice as long. At best a step with the schedule on takes the longer of the two.
Eight ranks share their cores with one another and with TCP: there the rate is such that a link takes as long over its
bytes as the cores over the whole step. With several micro-batches a third schedule runs the forward of each beside the
backward of the one before it.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from cuboid.bench.bare import bare, messages
from cuboid.bench.layouts import Layout, ModelRunner, begin_with
from cuboid.bench.plot import rate_of
from cuboid.bench.problem import Problem
from cuboid.bench.result import BenchReport, Spread
from cuboid.bench.turn import Times, slowest, take_step, timed_step, turn
from cuboid.emulate.device import FIRST, hurry
from cuboid.emulate.slow_motion import SlowMotion
from cuboid.mesh.cuboid import Cuboid
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import Policy
from cuboid.run.cluster import Cluster, try_hosts
from cuboid.run.launch import Pool, World
from cuboid.train.trace import Phase, Trace, draw

SHAPES = (Cuboid(2, 1, 1), Cuboid(1, 2, 1), Cuboid(1, 1, 2), Cuboid(2, 2, 2))
LARGE = (Cuboid(4, 4, 4),)  # on emulated devices alone
RATIOS = (1.0, 0.5, 2.0)  # of communication to compute
UNSHAPED = "10gbit"


@dataclass(frozen=True)
class Found:
    """One shape at one rate; seconds of the slowest rank."""

    shape: str
    ratio: float  # of communication to compute, as requested
    rate: str
    ons: list[Times]  # every step with the schedule on
    offs: list[Times]
    traced: float  # exposed seconds in one further step, by its trace
    tcps: list[float]  # CPU seconds of all ranks for the step's collectives alone, each time
    ranks: int
    bytes: int  # that the busiest rank sends in a step
    besides: list[Times] = field(default_factory=list)  # every step with forwards beside backwards, if there were any

    @property
    def on(self) -> Spread:
        return Spread.of([times.step for times in self.ons])

    @property
    def off(self) -> Spread:
        return Spread.of([times.step for times in self.offs])

    @property
    def compute(self) -> float:
        """Alone."""
        return median(times.step - times.exposed for times in self.offs)

    @property
    def communication(self) -> float:
        """Alone."""
        return median(times.exposed for times in self.offs)

    @property
    def measured_ratio(self) -> float:
        """Communication to compute, as measured."""
        return self.communication / self.compute

    @property
    def exposed(self) -> float:
        """Exposed seconds with the schedule on, by the ledger."""
        return median(times.exposed for times in self.ons)

    @property
    def cpu(self) -> float:
        """CPU seconds of all ranks, with the schedule on."""
        return self.ranks * median(times.cpu for times in self.ons)

    @property
    def tcp(self) -> float:
        return median(self.tcps)

    @property
    def gain(self) -> float:
        return self.off.median / self.on.median

    @property
    def above_best(self) -> float:
        """Step time relative to the longer of compute and communication."""
        return self.on.median / max(self.compute, self.communication)

    @property
    def exposed_share(self) -> float:
        return self.exposed / self.communication

    @property
    def traced_share(self) -> float:
        return self.traced / self.communication

    @property
    def beside(self) -> tuple[float, float] | None:
        """The step with forwards beside backwards, and its exposed fraction of communication."""
        if not self.besides:
            return None
        step, exposed = (median(getattr(times, name) for times in self.besides) for name in ("step", "exposed"))
        return step, exposed / self.communication

    def export(self) -> dict[str, Any]:
        plain = "shape ratio measured_ratio rate bytes compute communication exposed traced cpu tcp gain above_best"
        names = [*plain.split(), "exposed_share", "traced_share", "beside"]
        samples = {"on": [asdict(each) for each in self.ons], "off": [asdict(each) for each in self.offs]}
        samples["beside"] = [asdict(each) for each in self.besides]
        spreads = {"on": asdict(self.on), "off": asdict(self.off), "samples": samples | {"tcp": self.tcps}}
        return {name: getattr(self, name) for name in names} | spreads

    def beside_cells(self) -> list[str]:
        """Cells under `BESIDE`."""
        return [] if self.beside is None else [f"{self.beside[0]:.2f}", f"{self.beside[1]:.0%}"]

    def cells(self) -> list[str]:
        """A row of the table, under `COLUMNS`."""
        seconds = [f"{value:.2f}" for value in (self.off.median, self.on.median)]
        alone = [f"{value:.2f}" for value in (self.compute, self.communication, self.above_best)]
        shares = [f"{self.exposed_share:.0%}", f"{self.traced_share:.0%}", f"{self.cpu:.2f}", f"{self.tcp:.2f}"]
        which = [self.shape, f"{self.measured_ratio:.2f} ({self.ratio:g})", self.rate]
        return [*which, *seconds, f"{self.gain:.2f} ×", *alone, *shares]


COLUMNS = ["cuboid", "comm : compute (asked)", "rate", "off", "on", "gain", "compute", "comm", "on / longer"]
COLUMNS += ["exposed", "in trace", "CPU s", "of it TCP"]
BESIDE = ["beside", "exposed beside"]


@contextmanager
def on_a_core(world: World) -> Iterator[None]:
    """Run on a core of this rank alone if there are enough, and before other processes if permitted."""
    cores, niceness = sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0)
    if world.size <= len(cores):
        os.sched_setaffinity(0, {cores[world.rank]})
        hurry(FIRST)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        hurry(niceness)


def steps(world: World, layout: Layout, problem: Problem, count: int, slow: SlowMotion | None = None) -> list[Times]:
    """Times steps, after one that allocates the memory they reuse: page faults can take a third of a step."""
    with on_a_core(world):
        return turn(world, layout, problem, 1 + count, cold=True, slow=slow)[1:]


def traced(world: World, layout: Layout, problem: Problem) -> Trace:
    """Traces one step, after one to warm up."""
    with on_a_core(world), closing(ModelRunner(layout, problem, world)) as runner:
        take_step(runner, problem, problem.seq)
        runner.ledger.spans = []
        times = timed_step(runner, problem, world)
        spans = runner.ledger.spans
    phases, start = [], times.began
    for name in ("forward", "backward", "optimizer"):
        phases.append(Phase(name, start, start + getattr(times, name)))
        start = phases[-1].stop
    return Trace(world.rank, spans, phases)


def measure(
    shape: Cuboid, problem: Problem, rounds: int, console: Console, slow: SlowMotion | None
) -> tuple[list[Found], dict[str, Trace]]:
    """Measures one shape. Emulated devices do not share cores; no steps are traced on them."""
    on, off = (Layout("cuboid", shape, overlap) for overlap in (True, False))
    apart = shape.ranks == 2 or slow is not None
    with Cluster(shape.ranks, UNSHAPED) as cluster, Pool(shape.ranks, cluster) as pool:
        probe = min(slowest(pool.run(steps, off, problem, 2, slow)), key=lambda times: times.step)
        told = pool.run(messages, on, problem, slow)
        tcps = [sum(ranks) for ranks in zip(*pool.run(bare, shape, told, 3), strict=True)] if slow is None else [0.0]
    sent = max(sum(message.bytes for message in rank) for rank in told)
    found, traces = [], {}
    even = even_rate(off, problem, probe, slow) if apart else 8e-6 * probe.crossed / probe.step
    for ratio in RATIOS if apart and shape.ranks <= 8 else RATIOS[:1]:
        rate = f"{even / ratio:.1f}mbit"
        console.print(f"{shape}: communication : compute = {ratio:g}, {rate} per host", highlight=False)
        with Cluster(shape.ranks, rate) as cluster, Pool(shape.ranks, cluster) as pool:
            ons: list[Times] = []
            offs: list[Times] = []
            besides: list[Times] = []
            for _ in range(rounds if ratio == 1 else 1):
                offs += slowest(pool.run(steps, off, problem, 1, slow))
                ons += slowest(pool.run(steps, on, problem, 1, slow))
                if problem.micro_batches > 1:
                    besides += slowest(pool.run(steps, replace(on, beside=True), problem, 1, slow))
            both = (("off", off), ("on", on)) if slow is None else ()
            last = {name: pool.run(traced, each, problem)[0] for name, each in both}
        if ratio == 1:
            traces = {f"schedule {name}": trace for name, trace in last.items()}
        shown = last["on"].exposed() if last else ons[-1].exposed
        found.append(Found(str(shape), ratio, rate, ons, offs, shown, tcps, shape.ranks, sent, besides))
    return found, traces


def even_rate(off: Layout, problem: Problem, probe: Times, slow: SlowMotion | None) -> float:
    """The rate, in Mbit/s, at which communication alone takes as long as compute alone. A link is a little slower than
    its setting, so a first guess is tried."""
    compute = probe.step - probe.exposed
    guess = 8e-6 * probe.crossed / compute
    with Cluster(off.shape.ranks, f"{guess:.1f}mbit") as cluster, Pool(off.shape.ranks, cluster) as pool:
        tried = min(slowest(pool.run(steps, off, problem, 2, slow)), key=lambda times: times.step)
    return guess * tried.exposed / (tried.step - tried.exposed)


def overlap(
    rounds: int,
    out: Path,
    console: Console,
    only: Sequence[str],
    policy: Policy,
    layers: int,
    hidden: int,
    batch: int,
    slow: SlowMotion | None = None,
    micro_batches: int = 1,
) -> list[Found]:
    """Runs on two hosts of one rank for each axis, on eight for 2,2,2, and on 64 if devices are emulated; only shapes
    whose names start with one of `only`."""
    model = ModelConfig("gpt2", layers, hidden, heads=16, vocab=512, context=128, tied=False)
    problem, found = Problem(model, batch, 128, policy, micro_batches=micro_batches), []
    shapes = SHAPES if slow is None else (*SHAPES, *LARGE)
    names = begin_with(only, [str(shape) for shape in shapes])
    try_hosts("bench overlap cannot do without hosts, which need root and iproute2")
    for shape in (shape for shape in shapes if str(shape) in names):
        report = BenchReport("overlap", {"rounds": rounds, "ratios": RATIOS, "emulated": str(slow) if slow else None})
        rows, traces = measure(shape, problem, rounds, console, slow)
        found += rows
        path = out / f"overlap-{shape.x}{shape.y}{shape.z}.png"
        found_here = {"problem": problem.export(), "rows": [row.export() for row in rows]}
        report.write(path.with_suffix(".json"), found_here)
        if traces:
            at = f"{rate_of(rows[0].rate)} per host"
            what = f"hidden {hidden}, {layers} layer{'s' * (layers != 1)}, {batch} × {problem.seq} tokens"
            draw(traces, f"cuboid {shape}, rank 0: a step of GPT-2, {what}, {at}", path)
    where = f", {slow.without_links()}" if slow is not None else ""
    columns = COLUMNS if slow is None else COLUMNS[:-3]  # an emulated device has no CPU seconds, nor traces
    more = BESIDE if micro_batches > 1 else []
    table = Table(*columns, *more, title=f"Seconds per step, schedule off and on{where}", title_justify="left")
    for each in found:
        table.add_row(*each.cells()[: len(columns)], *each.beside_cells())
    console.print(table)
    return found
