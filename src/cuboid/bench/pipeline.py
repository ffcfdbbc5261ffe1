"""How long do the ranks of a pipeline stand idle? Each schedule on 2, 4 and 8 emulated devices, against its formula.

One rank a stage (two stages with interleaved), as many blocks for each, and no time for messages. Idle is what a step
leaves of the devices' time; the formula (step/pipeline.py) has the times of a stage's forward, backward and weight
gradients, which the devices were busy with in the same step.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from cuboid.bench.layouts import begin_with
from cuboid.bench.result import BenchReport
from cuboid.emulate.device import Emulated
from cuboid.emulate.slow_motion import SlowMotion, parse
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import CuboidParallel
from cuboid.model.transformer import Transformer
from cuboid.run.launch import Pool, World
from cuboid.step.runner import At
from cuboid.step.schedule import PIPELINES, Move, Schedule

DEVICE = "fp32=2e9,stream=1e12"  # so slow that launching takes the cores no time to speak of
MOST_APART = 0.05
SEQ, BATCH, BLOCKS = 64, 2, 2  # blocks of a rank


@dataclass(frozen=True)
class PlayedStep:
    """As one rank saw it, in seconds: in all, busy, and busy by kind of move."""

    seconds: float
    busy: float
    moves: dict[str, float]


@dataclass(frozen=True)
class Idle:
    pipeline: str
    pipe: int
    micro_batches: int
    stages: int
    steps: list[list[PlayedStep]]  # by step, by rank

    @property
    def measured(self) -> float:
        """The share of the step in which devices were idle, the median over steps."""
        shares = [
            1 - sum(each.busy for each in ranks) / len(ranks) / max(r.seconds for r in ranks) for ranks in self.steps
        ]
        return median(shares)

    @property
    def formula(self) -> float:
        """Of the times of a stage in the middle of all."""
        of_stage = self.stages * self.micro_batches * self.pipe
        F, B, W = (
            median(sum(each.moves.get(kind, 0.0) for each in ranks) / of_stage for ranks in self.steps)
            for kind in "FBW"
        )
        idle = (self.pipe - 1) * (F + B - W)  # B is without W where that is apart
        return idle / (idle + self.stages * self.micro_batches * (F + B + W))

    @property
    def apart(self) -> float:
        return self.measured - self.formula


def play(
    world: World, config: ModelConfig, schedule: Schedule, micro_batches: int, rounds: int, slow: SlowMotion
) -> list[PlayedStep]:
    """Steps of one rank, after one that finds out what operations cost."""
    mesh = Mesh(Cuboid(pipe=world.size), world.rank, share_device=True)
    parallel, found = CuboidParallel(config, mesh, schedule=schedule), list[PlayedStep]()
    model, place = Transformer(parallel), parallel.place(BATCH, SEQ)
    ids = torch.zeros(SEQ, BATCH, dtype=torch.long)
    with Emulated(slow.of_rank(world.rank), seed=world.rank) as device:
        for _ in range(1 + rounds):
            device.synchronize()
            dist.barrier()
            device.reset()
            marks: list[tuple[str, float]] = []

            def told(moves: Sequence[Move], marks: list[tuple[str, float]] = marks) -> None:
                marks.append(("+".join(move.kind for move in moves), device.busy))

            model.player.told = told
            start = time.perf_counter()
            model.play([(ids, At(place, ids))] * micro_batches)
            device.synchronize()
            seconds = time.perf_counter() - start
            ends = [busy for _, busy in marks[1:]] + [device.busy]
            by_kind: dict[str, float] = {}
            for (kinds, begun), ended in zip(marks, ends, strict=True):
                both = kinds == "F+B"  # a backward is twice as long as a forward
                for kind, share in (("F", 1 / 3), ("B", 2 / 3)) if both else ((kinds, 1.0),):
                    by_kind[kind] = by_kind.get(kind, 0.0) + share * (ended - begun)
            found.append(PlayedStep(seconds, device.busy, by_kind))
            model.zero_grad()
    mesh.close()
    return found[1:]


def measure(pipeline: str, pipe: int, hidden: int, rounds: int, slow: SlowMotion) -> Idle:
    stages, micro_batches = 2 if pipeline == "interleaved" else 1, max(8, 2 * pipe)
    config = ModelConfig("gpt2", BLOCKS * pipe, hidden, 8, vocab=16, context=SEQ, tied=False)
    schedule = Schedule(pipeline=pipeline, stages=stages)
    with Pool(pipe) as pool:
        ranks = pool.run(play, config, schedule, micro_batches, rounds, slow)
    return Idle(pipeline, pipe, micro_batches, stages, [list(step) for step in zip(*ranks, strict=True)])


def pipeline(
    pipes: Sequence[int], rounds: int, out: Path, console: Console, only: Sequence[str], hidden: int, device: str
) -> bool:
    """Whether every schedule stands idle as long as its formula says, to five points."""
    slow, names = parse(device or DEVICE), begin_with(only, list(PIPELINES))
    report = BenchReport("pipeline", {"rounds": rounds, "device": device or DEVICE})
    title = f"Share of a step in which devices are idle; {slow.without_links()}"
    table = Table(
        "schedule", "stages", "micro-batches", "measured", "formula", "points", title=title, title_justify="left"
    )
    rows = list[Idle]()
    for pipe in pipes:
        for name in names:
            row = measure(name, pipe, hidden, rounds, slow)
            rows.append(row)
            on = f"{pipe * row.stages} on {pipe} ranks"
            table.add_row(
                name, on, str(row.micro_batches), f"{row.measured:.1%}", f"{row.formula:.1%}", f"{100 * row.apart:+.1f}"
            )
    console.print(table)
    found = {
        "hidden": hidden,
        "rows": [asdict(row) | {"measured": row.measured, "formula": row.formula} for row in rows],
    }
    out.mkdir(parents=True, exist_ok=True)
    console.print(str(report.write(out / "pipeline.json", found).absolute()), soft_wrap=True, highlight=False)
    return all(abs(row.apart) <= MOST_APART for row in rows)
