"""How long are the ranks of a pipeline idle? Each schedule on 2, 4 and 8 emulated devices, against its formula; or
on two hosts of one rank and one core each.

One rank a stage (two stages with interleaved), as many blocks for each, and next to no time for messages. Idle is what
a step leaves of the ranks' time. The formula (step/pipeline.py) has the times of a stage's forward, backward and weight
gradients, which the ranks were busy with in the same step; the textbook has a backward that takes twice as long as a
forward, half of it for weight gradients. The planner simulates the moves with the ends' embedding and head.
"""

import os
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from cuboid.bench.layouts import Layout, ModelRunner, begin_with
from cuboid.bench.overlap import UNSHAPED, on_a_core
from cuboid.bench.planned import predicted
from cuboid.bench.plot import Bubble, draw_bubbles
from cuboid.bench.problem import Problem
from cuboid.bench.result import MOST_CPU, BenchReport, Spread
from cuboid.bench.turn import data_of, device_of, now
from cuboid.emulate.slow_motion import SlowMotion, parse
from cuboid.mesh.cuboid import Cuboid
from cuboid.model.config import ModelConfig
from cuboid.plan.layer import Choice
from cuboid.run.cluster import Cluster, try_hosts
from cuboid.run.launch import Pool, World
from cuboid.step.schedule import PIPELINES, Move, Schedule

DEVICE = "fp32=2e9,stream=1e12"  # so slow that launching takes the cores no time to speak of
MOST_APART = 0.05
SEQ, BATCH, BLOCKS = 64, 2, 2  # a micro-batch's sequences and their tokens; blocks of a rank


@dataclass(frozen=True)
class PlayedStep:
    """A step on one rank, in seconds."""

    seconds: float
    busy: float
    moves: dict[str, float]  # busy, by kind of move
    cpu: float  # of all the rank's threads


@dataclass(frozen=True)
class Idle:
    """One schedule on a pipe, and its number of ranks."""

    pipeline: str
    pipe: int
    micro_batches: int
    stages: int
    steps: list[list[PlayedStep]]  # by step, by rank
    as_predicted: bool  # calls and bytes, messages between stages among them, are the formula's on every rank
    planned: float | None = None  # by the planner's simulation; None where it knows no figures of the machine
    emulated: bool = True

    @property
    def spread(self) -> Spread:
        """The share of a step in which ranks are idle."""
        return Spread.of(
            [1 - sum(each.busy for each in ranks) / len(ranks) / max(r.seconds for r in ranks) for ranks in self.steps]
        )

    @property
    def measured(self) -> float:
        return self.spread.median

    def _share(self, forward: float, backward: float, weights: float) -> float:
        """The idle share, from a stage's times. If weight gradients are postponed, `backward` is without them."""
        idle = (self.pipe - 1) * (forward + backward - weights)
        return idle / (idle + self.stages * self.micro_batches * (forward + backward + weights))

    @property
    def formula(self) -> float:
        """The idle share by the formula, with the median times of a stage."""
        of_stage = self.stages * self.micro_batches * self.pipe
        times = (
            median(sum(each.moves.get(kind, 0.0) for each in ranks) / of_stage for ranks in self.steps)
            for kind in "FBW"
        )
        return self._share(*times)

    @property
    def textbook(self) -> float:
        """(p-1) / (v·m + p-1), and a third of the idle time with zero-bubble."""
        return self._share(1.0, 1.0, 1.0) if self.pipeline == "zero-bubble" else self._share(1.0, 2.0, 0.0)

    @property
    def apart(self) -> float:
        return self.measured - self.formula

    @property
    def cpu_share(self) -> float:
        """The ranks' share of the cores' time. On emulated devices it should be 0."""
        shares = [sum(each.cpu for each in ranks) / max(r.seconds for r in ranks) for ranks in self.steps]
        return median(shares) / (os.cpu_count() or 1)

    def cells(self) -> list[str]:
        """Under `COLUMNS`."""
        where = f"{self.pipe * self.stages} on {self.pipe} ranks"
        quartiles = f"{self.spread.low:.1%}–{self.spread.high:.1%}"
        figures = [f"{self.measured:.1%}", quartiles, f"{self.formula:.1%}", f"{100 * self.apart:+.1f}"]
        planned = "–" if self.planned is None else f"{self.planned:.1%}"
        cpu = f"{self.cpu_share:.0%}{'!' * (self.emulated and self.cpu_share > MOST_CPU)}"
        told = [f"{self.textbook:.1%}", planned, "formula's" if self.as_predicted else "DIFFER", cpu]
        return [self.pipeline, where, str(self.micro_batches), *figures, *told]

    def export(self) -> dict[str, Any]:
        names = ("measured", "formula", "apart", "textbook", "cpu_share")
        return asdict(self) | {"spread": asdict(self.spread)} | {name: getattr(self, name) for name in names}


COLUMNS = ["schedule", "stages", "micro-batches", "idle", "quartiles", "formula", "points", "textbook", "planned"]
COLUMNS += ["bytes", "CPU"]


def play(
    world: World, layout: Layout, problem: Problem, rounds: int, slow: SlowMotion | None
) -> tuple[list[PlayedStep], bool]:
    """Steps of one rank; whether calls and bytes are the formula's. Before them connections are opened and memory is
    made or, on an emulated device, what operations cost is found out."""
    found, as_predicted = list[PlayedStep](), True
    marks, begun = list[tuple[str, float]](), 0.0
    core = on_a_core(world) if slow is None else nullcontext()
    with core, closing(ModelRunner(layout, problem, world)) as runner, device_of(slow, world) as device:

        def busy() -> float:
            return device.busy if device is not None else time.perf_counter() - begun - runner.ledger.exposed()

        def told(moves: Sequence[Move]) -> None:
            marks.append(("+".join(move.kind for move in moves), busy()))

        tokens = data_of(problem, runner)
        runner.forward(*data_of(problem, runner, 1 if device is not None else SEQ))
        if device is not None:
            with device.rehearsal():
                runner.forward(*tokens)
        runner.module.player.on_moves = told
        for _ in range(rounds):
            runner.module.zero_grad()
            runner.ledger.reset()
            marks.clear()
            now(device)
            dist.barrier()
            if device is not None:
                device.reset()
            begun, cpu = time.perf_counter(), time.process_time()
            runner.forward(*tokens)
            seconds = now(device) - begun
            found.append(PlayedStep(seconds, busy(), by_kind([*marks, ("", busy())]), time.process_time() - cpu))
            as_predicted &= runner.ledger.counts() == layout.cost(problem, world.rank).counts()
    return found, as_predicted


def by_kind(marks: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Busy seconds by kind of move, of moves and the busy seconds before each. Of a forward and a backward beside each
    other the backward has two thirds."""
    found: dict[str, float] = {}
    for (kinds, start), (_, end) in pairwise(marks):
        for kind, share in (("F", 1 / 3), ("B", 2 / 3)) if kinds == "F+B" else ((kinds, 1.0),):
            found[kind] = found.get(kind, 0.0) + share * (end - start)
    return found


def measure(pool: Pool, name: str, pipe: int, hidden: int, rounds: int, slow: SlowMotion | None) -> Idle:
    stages, micro_batches = 2 if name == "interleaved" else 1, max(8, 2 * pipe)
    config = ModelConfig("gpt2", BLOCKS * pipe, hidden, 8, vocab=16, context=SEQ, tied=False)
    choice = Choice(schedule=Schedule(pipeline=name, stages=stages))
    layout = Layout("pipe", Cuboid(pipe=pipe), choice=choice, micro_batches=micro_batches)
    problem = Problem(config, BATCH * micro_batches, SEQ)
    played, right = zip(*pool.run(play, layout, problem, rounds, slow), strict=True)
    planned = predicted(slow.hardware, layout, problem).bubble if slow is not None else None
    steps = [list(step) for step in zip(*played, strict=True)]
    return Idle(name, pipe, micro_batches, stages, steps, all(right), planned, slow is not None)


def pipeline(
    pipes: Sequence[int],
    rounds: int,
    out: Path,
    console: Console,
    only: Sequence[str],
    hidden: int,
    device: str,
    cores: bool = False,
) -> bool:
    """Whether every schedule is idle as long as its formula says, to five points, and sends the formula's bytes. On
    emulated devices, or on two hosts of a rank and a core each."""
    slow, names, name = parse(device or DEVICE), begin_with(only, list(PIPELINES)), "cores" if cores else "pipeline"
    if cores:
        try_hosts("or leave out --cores for emulated devices")
    settings = {"rounds": rounds, "hidden": hidden, "device": "a core each" if cores else device or DEVICE}
    report, rows = BenchReport("pipeline", settings), list[Idle]()
    for pipe in pipes:
        hosts = Cluster(pipe, UNSHAPED) if cores else nullcontext()
        with hosts as cluster, Pool(pipe, cluster) as pool:
            for i, each in enumerate(names):
                console.print(f"[{i + 1}/{len(names)}] {pipe} ranks: {each}", markup=False, highlight=False)
                rows.append(measure(pool, each, pipe, hidden, rounds, None if cores else slow))
    where = "two hosts of a rank and a core each" if cores else slow.without_links()
    title = f"Share of a step in which ranks are idle; {where}"
    table = Table(*COLUMNS, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row.cells())
    console.print(table)
    worst = max(rows, key=lambda row: abs(row.apart))
    console.print(
        f"At most {abs(100 * worst.apart):.1f} points from the formula ({worst.pipeline}, {worst.pipe} ranks); "
        f"{MOST_APART:.0%} are allowed. CPU: of the cores' time, the ranks' own.",
        highlight=False,
    )
    out.mkdir(parents=True, exist_ok=True)
    bubbles = [
        Bubble(f"{row.pipe} ranks", row.pipeline, row.spread, row.formula, row.textbook, row.planned) for row in rows
    ]
    pictures = draw_bubbles(f"cuboid bench pipeline: {where}", bubbles, out / name)
    for path in (report.write(out / f"{name}.json", {"rows": [row.export() for row in rows]}), *pictures):
        console.print(str(path.absolute()), soft_wrap=True, highlight=False)
    return all(abs(row.apart) <= MOST_APART and row.as_predicted for row in rows)
