"""What a rank does in a benchmark: count a step once, time steps turn by turn."""

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from cuboid.bench.contestant import Contestant, Runner
from cuboid.bench.problem import Problem
from cuboid.cluster import sent
from cuboid.launch import World
from cuboid.measure import Memory, count_flops, local

Counts = dict[str, dict[str, tuple[int, int]]]


@dataclass(frozen=True)
class Count:
    """Of one step, on one rank: what does not depend on the clock. The peak is rank 0's, else 0."""

    loss: float
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
    exposed: float  # waiting for communication; not known of native
    crossed: int  # bytes that left this rank's host, all its ranks'
    cpu: float  # seconds of all this rank's threads
    began: float  # by `time.perf_counter`

    @property
    def step(self) -> float:
        return self.forward + self.backward + self.optimizer


def slowest(ranks: Sequence[Sequence[Times]]) -> list[Times]:
    """Of each step, as every rank timed them."""
    return [max(step, key=lambda times: times.step) for step in zip(*ranks, strict=True)]


def count(world: World, contestant: Contestant, problem: Problem) -> Count:
    """One step, under rank 0's memory meter, which slows a rank down, so the others go without. The FLOP counter holds
    on to tensors, so native, whose FLOPs have no formula, takes a second one."""
    runner, metered = contestant.runner(problem, world), world.rank == 0
    memory, predicted = Memory(runner.module), contestant.cost(problem, world.rank)
    try:
        with memory if metered else nullcontext(), runner.counted():
            loss = runner.forward(*problem.data())
            loss.backward()
        traffic, flops = runner.ledger.counts(), predicted.flops
        if contestant.native:
            runner.optimizer.zero_grad()
            with count_flops() as counter, runner.counted():
                runner.forward(*problem.data()).backward()
            flops = counter.get_total_flops()
        parameters = sum(local(p).nbytes for p in runner.module.parameters())
        peak = memory.peak + 2 * parameters if metered else 0
        return Count(float(loss.detach()), traffic, predicted.counts(), flops, peak, parameters)
    finally:
        runner.close()


def turn(world: World, contestant: Contestant, problem: Problem, steps: int, cold: bool) -> list[Times]:
    """Make the model, warm it up, time `steps` steps, give everything back. Where links are slow (`cold`) the warm-up
    is a step of a few tokens, which opens every connection."""
    runner = contestant.runner(problem, world)
    short = contestant.shape.y if contestant.native else 1  # torch's own cuts the sequence, and pads nothing
    try:
        take_step(runner, problem, short if cold else problem.seq)
        return [timed_step(runner, problem) for _ in range(steps)]
    finally:
        runner.close()


def take_step(runner: Runner, problem: Problem, seq: int) -> None:
    runner.forward(*problem.data(seq)).backward()
    update(runner)


def update(runner: Runner) -> None:
    runner.clip()
    runner.optimizer.step()
    runner.optimizer.zero_grad()


def timed_step(runner: Runner, problem: Problem) -> Times:
    data = problem.data()
    runner.ledger.reset()
    dist.barrier()
    before = sent_to_others()
    dist.barrier()
    cpu, marks = time.process_time(), [now()]
    loss = runner.forward(*data)
    marks.append(now())
    loss.backward()
    marks.append(now())
    update(runner)
    marks.append(now())
    cpu = time.process_time() - cpu
    dist.barrier()
    crossed = sent_to_others() - before
    exposed = runner.ledger.exposed()
    forward, backward, optimizer = (stop - start for start, stop in pairwise(marks))
    return Times(forward, backward, optimizer, exposed, crossed, cpu, marks[0])


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def sent_to_others() -> int:
    """By all ranks of this host so far, as the kernel counts; 0 where no link joins hosts of its own."""
    return sent("eth0") if emulated() else 0


def emulated() -> bool:
    return os.environ.get("GLOO_SOCKET_IFNAME") == "eth0"
