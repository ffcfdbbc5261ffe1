"""What a rank does in a benchmark: count a step once, time steps turn by turn."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch.distributed as dist

from cuboid.bench.contestant import Contender, Contestant
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
    """Of one step, on one rank: what does not depend on the clock. The peak is rank 0's, else 0."""

    loss: float | None  # None on emulated devices, which compute no values
    traffic: Counts  # (calls, bytes) per axis and collective
    predicted: Counts
    flops: int
    peak: int  # bytes, parameters and AdamW's moments included
    parameters: int  # bytes at rest


@dataclass(frozen=True)
class Times:
    """Of one step, on one rank, in seconds."""

    forward: float
    backward: float
    optimizer: float
    exposed: float  # waiting for communication; not known of native, but on emulated devices
    crossed: int  # bytes that left this rank's host, all its ranks'
    cpu: float  # seconds of all this rank's threads
    began: float  # by `time.perf_counter`
    busy: float = 0.0  # of an emulated device
    late: float = 0.0  # by which messages left later than an emulated device would have sent them
    left: int = 0  # bytes that left this rank for others, on its host or not; 0 where ranks share their host's loopback

    @property
    def step(self) -> float:
        return self.forward + self.backward + self.optimizer


def slowest(ranks: Sequence[Sequence[Times]]) -> list[Times]:
    """Of each step, as every rank timed them."""
    return [max(step, key=lambda times: times.step) for step in zip(*ranks, strict=True)]


def count(world: World, contestant: Contestant, problem: Problem, slow: SlowMotion | None = None) -> Count:
    """One step, under rank 0's memory meter, which slows a rank down, so the others go without. The FLOP counter holds
    on to tensors, so native, whose FLOPs have no formula, takes a second one. On emulated devices nothing is computed,
    nor does it take any time here."""
    runner, metered = contestant.runner(problem, world), world.rank == 0
    memory, predicted = Memory(runner.module), contestant.cost(problem, world.rank)
    try:
        with device_of(slow and slow.instant(), world):
            with memory if metered else nullcontext(), runner.counted():
                loss = runner.forward(*problem.data())
                loss.backward()
            traffic, flops = runner.ledger.counts(), predicted.flops
            if contestant.native:
                runner.optimizer.zero_grad()
                with count_flops() as counter, runner.counted():
                    runner.forward(*problem.data()).backward()
                flops = counter.get_total_flops()
        parameters = sum(shard_of(p).nbytes for p in runner.module.parameters())
        peak = memory.peak + 2 * parameters if metered else 0
        value = None if slow else float(loss.detach())
        return Count(value, traffic, predicted.counts(), flops, peak, parameters)
    finally:
        runner.close()


def device_of(slow: SlowMotion | None, world: World) -> AbstractContextManager[Emulated | None]:
    return nullcontext() if slow is None else Emulated(slow.of_rank(world.rank), seed=world.rank)


def turn(
    world: World, contestant: Contestant, problem: Problem, steps: int, cold: bool, slow: SlowMotion | None = None
) -> list[Times]:
    """Make the model, warm it up, time `steps` steps, give everything back. Where links are slow (`cold`) the warm-up
    is a step of a few tokens, which opens every connection."""
    runner = contestant.runner(problem, world)
    short = contestant.shape.y if contestant.native else 1  # torch's own cuts the sequence, and pads nothing
    try:
        with device_of(slow, world) as device:
            take_step(runner, problem, short if cold else problem.seq)
            if device is not None and cold:
                with device.rehearsal():
                    take_step(runner, problem, problem.seq)
            return [timed_step(runner, problem, world, device) for _ in range(steps)]
    finally:
        runner.close()


def take_step(runner: Contender, problem: Problem, seq: int) -> None:
    runner.forward(*problem.data(seq)).backward()
    update(runner)


def update(runner: Contender) -> None:
    runner.clip()
    runner.optimizer.step()
    runner.optimizer.zero_grad()


def timed_step(runner: Contender, problem: Problem, world: World, device: Emulated | None = None) -> Times:
    data = problem.data()
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
    """When the device has done what it was given."""
    if device is not None:
        device.synchronize()
    else:
        synchronize()
    return time.perf_counter()


def sent_by(world: World) -> int:
    """By this rank so far, if its link inside the host is shaped: it then has a network device of its own."""
    return world.host.sent_by_rank() if world.host is not None and world.host.uplink[0] else 0


def sent_to_others(world: World) -> int:
    """By all ranks of this host so far, as the kernel counts; 0 where no link joins hosts of its own."""
    return 0 if world.host is None else world.host.sent()
