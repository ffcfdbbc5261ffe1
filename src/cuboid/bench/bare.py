"""The cost of a step's collectives alone: the same messages over the same axes, and nothing else."""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cuboid.bench.layouts import Layout, ModelRunner
from cuboid.bench.problem import Problem
from cuboid.bench.turn import device_of, take_step
from cuboid.comm.collectives import COLLECTIVES
from cuboid.emulate.slow_motion import SlowMotion
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.mesh import Mesh
from cuboid.run.launch import World


@dataclass(frozen=True)
class Sent:
    """A collective, and what a rank sends for it."""

    axis: str
    kind: str
    bytes: int

    def given(self, p: int) -> int:
        """Elements that a rank passes to it, over p ranks."""
        part = self.bytes // (p - 1) // (8 if self.kind == "all_reduce" else 4)
        return max(part if self.kind == "all_gather" else part * p, 1)


def messages(world: World, layout: Layout, problem: Problem, slow: SlowMotion | None = None) -> list[Sent]:
    """The collectives of one step of a cuboid, on one rank."""
    with closing(ModelRunner(layout, problem, world)) as runner, device_of(slow and slow.instant(), world):
        runner.ledger.spans = []
        take_step(runner, problem, problem.seq)
        return [Sent(span.axis, span.kind, span.bytes) for span in runner.ledger.spans]


def bare(world: World, shape: Cuboid, ranks: Sequence[Sequence[Sent]], times: int = 2) -> list[float]:
    """Sends all ranks' messages one after another, `times` times; returns the CPU seconds of this rank's threads, each
    time. They are sent from one buffer, made before the clock starts, and received into new memory, as in a step."""
    with closing(Mesh(shape, world.rank, world.device, per_host=world.local_size)) as mesh:
        axes = {axis.name: axis for axis in (mesh.replicas, mesh.x, mesh.y, mesh.z, mesh.world)}
        sizes = [each.given(axes[each.axis].size) for each in ranks[world.rank]]
        buffer, seconds = torch.zeros(max(sizes)), []
        for _ in range(1 + times):  # the first time opens connections and allocates memory
            dist.barrier()
            start = time.process_time()
            for each, size in zip(ranks[world.rank], sizes, strict=True):
                COLLECTIVES[each.kind](buffer[:size], axes[each.axis]).wait()  # type: ignore[index]
            seconds.append(time.process_time() - start)
    return seconds[1:]
