"""What a rank does in a benchmark: count a step once, time steps turn by turn."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch.distributed as dist
from torch import Tensor

from cuboid.bench.layouts import Layout, LayoutRunner
from cuboid.bench.problem import Problem
from cuboid.device import synchronize
from cuboid.emulate.device import Emulated
from cuboid.emulate.slow_motion import SlowMotion
from cuboid.mesh.layout import shard_of
from cuboid.plan.measure import Memory, count_flops
from cuboid.run.launch import World

Counts = dict[str, dict[str, tuple[int, int]]]


@dataclass(frozen=True)
class Count:
    """What does not depend on the clock, of one step on one rank. The peak is 0 except on the first rank, of a pipe
    on the first of each place."""

    loss: float | None  # None on emulated devices, which compute no values
    traffic: Counts  # (calls, bytes) per axis and collective
    predicted: Counts
    flops: int
    peak: int  # bytes, parameters and AdamW's moments included
    parameters: int  # bytes at rest


@dataclass(frozen=True)
class Times:
    """The times of one step on one rank, in seconds."""

    forward: float
    backward: float
    optimizer: float
    exposed: float  # waiting for communication; for native known only on emulated devices
    crossed: int  # bytes that all ranks of this host sent to others
    cpu: float  # seconds of all this rank's threads
    began: float  # by `time.perf_counter`
    busy: float = 0.0  # of an emulated device
    late: float = 0.0  # by which messages left later than an emulated device would have sent them
    left: int = 0  # bytes that this rank sent to any other; 0 if ranks share their host's loopback

    @property
    def step(self) -> float:
        return self.forward + self.backward + self.optimizer


def slowest(ranks: Sequence[Sequence[Times]]) -> list[Times]:
    """The slowest rank's times of each step."""
    return [max(step, key=lambda times: times.step) for step in zip(*ranks, strict=True)]


def count(world: World, layout: Layout, problem: Problem, slow: SlowMotion | None = None) -> Count:
    """One step, under the first rank's memory meter, which slows a rank down, so the others go without; on a pipe each
    place has one. The FLOP counter holds on to tensors, so native, whose FLOPs have no formula, takes a second step,
    whose traffic counts too. On emulated devices nothing is computed, nor does it take any time here."""
    at = layout.shape.coordinates(world.rank)
    runner, metered = layout.runner(problem, world), not any(at[axis] for axis in at if axis != "pipe")
    memory, predicted = Memory(runner.module), layout.cost(problem, world.rank)
    try:
        with device_of(slow and slow.instant(), world):
            with memory if metered else nullcontext(), runner.counted():
                loss = runner.forward(*data_of(problem, runner))
                loss.backward()
            flops = predicted.flops
            if layout.native:
                runner.optimizer.zero_grad()
                runner.ledger.reset()  # DDP's first step sums everything at once
                with count_flops() as counter, runner.counted():
                    runner.forward(*data_of(problem, runner)).backward()
                flops = counter.get_total_flops()
        parameters = sum(shard_of(p).nbytes for p in runner.module.parameters())
        peak = memory.peak + 2 * parameters if metered else 0
        value = None if slow else float(loss.detach())
        return Count(value, runner.ledger.counts(), predicted.counts(), flops, peak, parameters)
    finally:
        runner.close()


def device_of(slow: SlowMotion | None, world: World) -> AbstractContextManager[Emulated | None]:
    return nullcontext() if slow is None else Emulated(slow.of_rank(world.rank), seed=world.rank)


def turn(
    world: World, layout: Layout, problem: Problem, steps: int, cold: bool, slow: SlowMotion | None = None
) -> list[Times]:
    """Creates the model, warms it up, times `steps` steps, releases everything. If links are slow (`cold`) the warm-up
    is a step of a few tokens, which opens every connection."""
    runner = layout.runner(problem, world)
    short = layout.shape.y if layout.native else 1  # torch's own splits the sequence without padding
    try:
        with device_of(slow, world) as device:
            take_step(runner, problem, short if cold else problem.seq)
            if device is not None and cold:
                with device.rehearsal():
                    take_step(runner, problem, problem.seq)
            return [timed_step(runner, problem, world, device) for _ in range(steps)]
    finally:
        runner.close()


def data_of(problem: Problem, runner: LayoutRunner, seq: int = 0) -> list[Tensor]:
    """Tokens and targets, on the runner's device."""
    device = next(runner.module.parameters()).device
    return [each.to(device) for each in problem.data(seq)]


def take_step(runner: LayoutRunner, problem: Problem, seq: int) -> None:
    runner.forward(*data_of(problem, runner, seq)).backward()
    update(runner)


def update(runner: LayoutRunner) -> None:
    runner.clip()
    runner.optimizer.step()
    runner.optimizer.zero_grad()


def timed_step(runner: LayoutRunner, problem: Problem, world: World, device: Emulated | None = None) -> Times:
    data = data_of(problem, runner)
    runner.ledger.reset()
    now(device)
    dist.barrier()
    before, own = sent_to_others(world), sent_by(world)
    dist.barrier()
    if device is not None:
        device.reset()
    cpu, marks = time.process_time(), [now(device)]
    loss = runner.forward(*data)
    marks.append(now(device))
    loss.backward()
    marks.append(now(device))
    update(runner)
    marks.append(now(device))
    cpu = time.process_time() - cpu
    found = (runner.ledger.exposed(), 0.0, 0.0) if device is None else (device.exposed, device.busy, device.late)
    dist.barrier()
    crossed, left = sent_to_others(world) - before, sent_by(world) - own
    forward, backward, optimizer = (stop - start for start, stop in pairwise(marks))
    exposed, busy, late = found
    return Times(forward, backward, optimizer, exposed, crossed, cpu, marks[0], busy, late, left)


def now(device: Emulated | None = None) -> float:
    """The time when the device has finished its work."""
    if device is not None:
        device.synchronize()
    else:
        synchronize()
    return time.perf_counter()


def sent_by(world: World) -> int:
    """Bytes sent by this rank so far, if its link inside the host is shaped, so that it has its own network device."""
    return world.host.sent_by_rank() if world.host is not None and world.host.uplink[0] else 0


def sent_to_others(world: World) -> int:
    """Bytes sent by all ranks of this host so far, by the kernel's count; 0 without emulated hosts."""
    return 0 if world.host is None else world.host.sent()
