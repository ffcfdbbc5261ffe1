"""How much communication hides under compute: the same steps with the schedule on and off, on links of a chosen rate.

Off, every collective is awaited where it is launched. So its step is compute alone and communication alone, one after
the other, and tells both: the time waited, and the rest. A link's rate is chosen from them so that communication takes
as long as compute, half as long, or twice as long. At best a step with the schedule on takes the longer of the two.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cuboid.bench.contestant import Contestant
from cuboid.bench.problem import Problem
from cuboid.bench.result import Spread, machine
from cuboid.bench.turn import Times, take_step, timed_step
from cuboid.cluster import Cluster
from cuboid.config import ModelConfig
from cuboid.launch import Pool, World
from cuboid.mesh import Cuboid
from cuboid.parallel.cuboid import Policy
from cuboid.trace import Phase, Trace, draw

SHAPES = (Cuboid(2, 1, 1), Cuboid(1, 2, 1), Cuboid(1, 1, 2), Cuboid(2, 2, 2))
RATIOS = (1.0, 0.5, 2.0)  # of communication to compute
UNSHAPED = "10gbit"


@dataclass(frozen=True)
class Found:
    """One shape at one rate; seconds of the slowest rank, medians with quartiles."""

    shape: str
    ratio: float  # of communication to compute, as asked
    rate: str
    on: Spread
    off: Spread
    compute: float  # alone
    communication: float  # alone
    exposed: float  # with the schedule on
    cpu: float  # seconds of all ranks together, with the schedule on

    @property
    def gain(self) -> float:
        return self.off.median / self.on.median

    @property
    def above_best(self) -> float:
        """Of the longer of compute and communication."""
        return self.on.median / max(self.compute, self.communication)

    @property
    def exposed_share(self) -> float:
        return self.exposed / self.communication

    def export(self) -> dict[str, Any]:
        return asdict(self) | {
            "gain": self.gain,
            "above_best": self.above_best,
            "exposed_share": self.exposed_share,
        }


def steps(world: World, contestant: Contestant, problem: Problem, count: int) -> list[Times]:
    """On a core of its own, where there are as many."""
    cores = sorted(os.sched_getaffinity(0))
    if world.size <= len(cores):
        os.sched_setaffinity(0, {cores[world.rank]})
    runner = contestant.runner(problem, world)
    try:
        take_step(runner, problem, problem.seq)
        return [timed_step(runner, problem) for _ in range(count)]
    finally:
        runner.close()
        os.sched_setaffinity(0, cores)


def traced(world: World, contestant: Contestant, problem: Problem) -> Trace:
    """Of one step."""
    runner = contestant.runner(problem, world)
    try:
        take_step(runner, problem, problem.seq)
        runner.ledger.spans = []
        times = timed_step(runner, problem)
        spans = runner.ledger.spans
    finally:
        runner.close()
    begin = min(span.launched for span in spans)
    forward = Phase("forward", begin, begin + times.forward)
    return Trace(world.rank, spans, [forward, Phase("backward", forward.stop, forward.stop + times.backward)])


def measure(shape: Cuboid, problem: Problem, rounds: int, console: Console) -> tuple[list[Found], dict[str, Trace]]:
    on, off = (Contestant("cuboid", shape, overlap) for overlap in (True, False))
    with Cluster(shape.ranks, UNSHAPED) as cluster, Pool(shape.ranks, cluster) as pool:
        probe = _slowest(pool.run(steps, off, problem, 2))[-1]
    compute, found, traces = probe.step - probe.exposed, [], {}
    for ratio in RATIOS if shape.ranks == 2 else RATIOS[:1]:
        rate = f"{8e-6 * probe.crossed / (ratio * compute):.1f}mbit"
        console.print(f"{shape}: communication : compute = {ratio:g}, {rate} a host", highlight=False)
        with Cluster(shape.ranks, rate) as cluster, Pool(shape.ranks, cluster) as pool:
            ons: list[Times] = []
            offs: list[Times] = []
            for _ in range(rounds):
                offs += _slowest(pool.run(steps, off, problem, 1))
                ons += _slowest(pool.run(steps, on, problem, 1))
            if ratio == 1:
                traces["schedule off"] = pool.run(traced, off, problem)[0]
                traces["schedule on"] = pool.run(traced, on, problem)[0]
        waits = [times.exposed for times in offs]
        alone = Spread.of([times.step - times.exposed for times in offs]).median
        cpu = Spread.of([times.cpu for times in ons]).median * shape.ranks
        exposed = Spread.of([times.exposed for times in ons]).median
        steps_on, steps_off = (Spread.of([times.step for times in each]) for each in (ons, offs))
        found.append(Found(str(shape), ratio, rate, steps_on, steps_off, alone, Spread.of(waits).median, exposed, cpu))
    return found, traces


def _slowest(ranks: Sequence[Sequence[Times]]) -> list[Times]:
    return [max(step, key=lambda times: times.step) for step in zip(*ranks, strict=True)]


def overlap(rounds: int, out: Path, console: Console, hidden: int = 1024) -> list[Found]:
    """Two hosts of one rank each on each axis, and eight on (2,2,2)."""
    model = ModelConfig("gpt2", layers=2, hidden=hidden, heads=16, vocab=512, context=256, tied=False)
    problem = Problem(model, 4, 256, Policy(activations="retain"))
    found: list[Found] = []
    out.mkdir(parents=True, exist_ok=True)
    for shape in SHAPES:
        more, traces = measure(shape, problem, rounds, console)
        found += more
        draw(traces, out / f"overlap-{shape.x}{shape.y}{shape.z}.png")
    report = {"machine": machine(), "problem": problem.export(), "rows": [each.export() for each in found]}
    (out / "overlap.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    show(found, console)
    console.print(str((out / "overlap.json").absolute()), soft_wrap=True, highlight=False)
    return found


def show(found: Sequence[Found], console: Console) -> None:
    columns = (
        "cuboid",
        "comm : compute",
        "rate",
        "off",
        "on",
        "gain",
        "compute",
        "comm",
        "on / longer",
        "exposed",
        "CPU s",
    )
    table = Table(*columns, title="Seconds a step, schedule off and on", title_justify="left")
    for each in found:
        table.add_row(
            each.shape,
            f"{each.ratio:g}",
            each.rate,
            f"{each.off.median:.2f}",
            f"{each.on.median:.2f}",
            f"{each.gain:.2f} ×",
            f"{each.compute:.2f}",
            f"{each.communication:.2f}",
            f"{each.above_best:.2f}",
            f"{each.exposed_share:.0%}",
            f"{each.cpu:.2f}",
        )
    console.print(table)
