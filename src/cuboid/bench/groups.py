"""Two groups of hosts joined by a slow link: the best pipeline of cuboids against the best cuboid.

The planner searches both alike, within one device's memory and for one batch: every shape and order of axes, what is
kept and what is recomputed, sub-batches, the schedules of a pipeline, how its blocks are split, and every number of
micro-batches. The first few shapes of each take turns on emulated devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cuboid.bench.layouts import Layout, Way
from cuboid.bench.plot import draw_planned, rate_of
from cuboid.bench.problem import Problem
from cuboid.bench.result import MOST_CPU, Result, Row, Spread
from cuboid.bench.run import Pace, Trial, bench
from cuboid.emulate.slow_motion import SlowMotion, parse
from cuboid.plan.layer import Work
from cuboid.plan.search import rank
from cuboid.run.cluster import try_hosts
from cuboid.train.progress import quantity

#: Two groups of two hosts of two V100 each; their link is ten times slower than a host's.
CLUSTER = "v100-edr/1500,shrink=12,node=2,group=2,uplink=5.867mbit"
LEAST_GAIN, MOST_APART = 1.2, 0.15


def planned(
    slow: SlowMotion, problem: Problem, ranks: int, top: int, told: Callable[[str], None] = lambda _: None
) -> list[Layout]:
    """The fastest planned cuboids and pipelines, up to a number of each, with the best options for each."""
    found: dict[tuple[Any, ...], tuple[float, Layout]] = {}
    for count in (n for n in range(1, problem.batch + 1) if problem.batch % n == 0):
        told(f"Planning with {count} micro-batches")
        work = Work(problem.config, problem.batch // count, problem.seq, "fp32", count)
        for plan in rank(slow.hardware, work, ranks).plans:
            way: Way = "pipe" if plan.cuboid.pipe > 1 else "cuboid"
            shape = tuple(plan.cuboid.sizes.values())
            layout = Layout(way, plan.cuboid, choice=plan.choice, micro_batches=count)
            if shape not in found or plan.seconds < found[shape][0]:
                found[shape] = plan.seconds, layout
    fastest = [each for _, each in sorted(found.values(), key=lambda one: one[0])]
    return [each for way in ("cuboid", "pipe") for each in [it for it in fastest if it.way == way][:top]]


@dataclass(frozen=True)
class Gain:
    """How many times faster the best pipeline is than the best cuboid."""

    cuboid: Row  # the fastest as measured
    pipe: Row
    planned: float  # of the fastest as planned

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Gain":
        ways = [[row for row in rows if row.layout.way == way] for way in ("cuboid", "pipe")]
        cuboid, pipe = (min(each, key=lambda row: row.spread("step").median) for each in ways)
        first, other = (min(row.planned or 0.0 for row in each) for each in ways)
        return cls(cuboid, pipe, first / other)

    @property
    def measured(self) -> float:
        return self.cuboid.spread("step").median / self.pipe.spread("step").median

    @property
    def spread(self) -> Spread:
        """The spread of the gain over rounds."""
        pairs = zip(self.cuboid.samples, self.pipe.samples, strict=True)
        return Spread.of([one["step"] / other["step"] for one, other in pairs])

    @property
    def good(self) -> bool:
        return self.measured >= LEAST_GAIN and abs(self.measured / self.planned - 1) <= MOST_APART

    def __str__(self) -> str:
        names = f"{self.pipe.layout.name} is {self.measured:.2f} × as fast as {self.cuboid.layout.name}"
        rounds = f"quartiles of rounds {self.spread.low:.2f}–{self.spread.high:.2f}"
        return f"{names} ({rounds}); planned: {self.planned:.2f} ×, {self.measured / self.planned - 1:+.0%} apart"


def groups(
    problem: Problem, emulate: str, ranks: int, top: int, rounds: int, out: Path, console: Console
) -> tuple[Gain, bool]:
    """The gain; and whether it is large enough, as planned, and every rank's bytes are the formula's."""
    slow = parse(emulate)
    slow.check(ranks)
    if not slow.hardware.group or ranks <= slow.hardware.node * slow.hardware.group:
        raise ValueError(
            f"--emulate {emulate!r} has no two groups of hosts for {ranks} ranks; give "
            "node=2,group=2,uplink=5.867mbit, devices of a host, hosts of a group and the rate of a group's "
            "link, and enough --ranks for two groups"
        )
    try_hosts("bench groups cannot do without hosts")
    pace = Pace(rounds, 1, slow.hardware.node)
    result = Result("groups", {"emulate": emulate, "ranks": ranks, "top": top, **vars(pace)})
    console.print(f"{slow}, {rate_of(slow.links.uplink)} between groups of {slow.links.group} hosts", soft_wrap=True)
    console.print(slow.meant(problem.config.hidden, problem.tokens), soft_wrap=True, highlight=False)
    layouts = planned(slow, problem, ranks, top, partial(console.print, highlight=False))
    trial = Trial(problem, ranks, layouts, slow.links.between, slow)
    rows = bench(result, [trial], pace, out, console).rows
    gain = Gain.of(rows)
    _show(rows, gain, f"{ranks} ranks, {slow.hardware.node} per host, {slow.links.group} hosts per group", console)
    names, steps = [row.layout.name for row in rows], [row.spread("step") for row in rows]
    links = f"{rate_of(slow.links.uplink)} between them, {rate_of(slow.links.between)} per host"
    title = f"Two groups of hosts, {links}: the pipe is {gain.measured:.2f} × as fast"
    pictures = draw_planned(title, names, steps, [row.planned or 0.0 for row in rows], out / "groups")
    for path in (result.save(out), *pictures):
        console.print(str(path.absolute()), soft_wrap=True, highlight=False)
    return gain, gain.good and all(row.as_predicted for row in rows)


def _show(rows: Sequence[Row], gain: Gain, title: str, console: Console) -> None:
    columns = ["layout", "step", "quartiles", "planned", "apart", "busy", "sent", "crossed", "bytes", "CPU"]
    table = Table(*columns, title=f"Seconds per step; {title}", title_justify="left")
    for row in rows:
        step, share, plan = row.spread("step"), row.cpu_share, row.planned or 0.0
        figures = [
            f"{step.median:.3g}",
            f"{step.low:.3g}–{step.high:.3g}",
            f"{plan:.3g}",
            f"{step.median / plan - 1:+.0%}",
        ]
        figures += [f"{row.spread('busy').median / step.median:.0%}", quantity(row.sent)]
        figures += [quantity(row.spread("crossed").median), "formula's" if row.as_predicted else "DIFFER"]
        table.add_row(row.layout.name, *figures, f"{share:.0%}{'!' * (share > MOST_CPU)}")
    console.print(table)
    console.print(
        "busy: of the step, the busiest device; sent: bytes of a rank; crossed: bytes that left the busiest host; CPU: "
        f"of the cores' time, the ranks' own, at most {MOST_CPU:.0%} or marked.",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"{gain}.", highlight=False, soft_wrap=True)
