"""What a step's collectives cost by themselves: the same messages over the same axes, and nothing else."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cuboid.bench.contestant import Contestant, ModelRunner
from cuboid.bench.problem import Problem
from cuboid.bench.turn import take_step
from cuboid.comm import COLLECTIVES
from cuboid.launch import World
from cuboid.ledger import Span
from cuboid.mesh import Axis


@dataclass(frozen=True)
class Bare:
    """Of one step, on one rank."""

    seconds: float
    cpu: float  # seconds of all this rank's threads
    bytes: int  # sent


def bare(world: World, contestant: Contestant, problem: Problem, times: int = 3) -> Bare:
    """The collectives of a step of a cuboid, played one after another, so many times; the mean."""
    runner = ModelRunner(contestant, problem, world)
    try:
        take_step(runner, problem, problem.seq)
        runner.ledger.spans = []
        take_step(runner, problem, problem.seq)
        spans, runner.ledger.spans = runner.ledger.spans, None
        mesh = runner.mesh
        axes = {axis.name: axis for axis in (mesh.data, mesh.x, mesh.y, mesh.z, mesh.world)}
        _play(spans, axes)
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(times):
            _play(spans, axes)
        cpu, seconds = time.process_time() - cpu, time.perf_counter() - start
    finally:
        runner.close()
    return Bare(seconds / times, cpu / times, sum(span.bytes for span in spans))


def _play(spans: list[Span], axes: dict[str, Axis]) -> None:
    for span in spans:
        axis = axes[span.axis]
        whole = span.bytes * axis.size // (axis.size - 1) // (8 if span.kind == "all_reduce" else 4)
        given = whole // axis.size if span.kind == "all_gather" else whole // axis.size * axis.size
        COLLECTIVES[span.kind](torch.zeros(max(given, 1)), axis).wait()  # type: ignore[index]
