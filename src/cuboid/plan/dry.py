"""The real model code of one rank, without the others and without data: what it calls, sends, computes and holds.

Collectives send nothing and tensors have shapes alone, so a rank of thousands runs on any machine. The rank calls what
it would call on gloo or on NCCL, and as there a message's memory is held until it is awaited: what a step allocates, to
the byte, whatever else the machine is doing. It runs in a process of its own, which may belong to no other world.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.mesh import Mesh
from cuboid.model.cuboid import COMPUTE, CuboidParallel
from cuboid.model.transformer import Transformer
from cuboid.plan.layer import Choice, Work
from cuboid.plan.measure import Memory, count_flops
from cuboid.plan.search import Plan
from cuboid.run.launch import RankError
from cuboid.step.runner import At

MOST_RANKS = 4096  # of whom the groups take seconds to make
NEAR = 0.1  # how far the peak, which has no exact formula, may be from the plan's
LAUNCHES = ("all_gather_single", "all_reduce", "all_to_all_single", "broadcast", "reduce", "reduce_scatter_single")


@dataclass(frozen=True)
class Counted:
    """Of a forward and backward of one rank."""

    counts: dict[str, dict[str, tuple[int, int]]]  # (calls, bytes) per axis and collective
    flops: int
    parameters: int  # bytes
    saved: int
    peak: int  # AdamW's moments included, and where there are micro-batches the gradients of those before


@dataclass(frozen=True)
class Comparison:
    what: str
    counted: int
    planned: int
    exact: bool  # must be equal; else near

    @property
    def ok(self) -> bool:
        if self.exact:
            return self.counted == self.planned
        return abs(self.planned / self.counted - 1) <= NEAR


class _HeldWork:
    """A collective that keeps its tensors until it is awaited, as those of gloo and NCCL do."""

    def __init__(self, launch: Callable[..., dist.Work], *tensors: Any, **options: Any) -> None:
        self._work, self._tensors = launch(*tensors, **options), tensors

    def wait(self) -> None:
        self._tensors = ()
        self._work.wait()


def dry_run(work: Work, cuboid: Cuboid, choice: Choice, rank: int = 0, backend: str = "gloo") -> Counted:
    """Of one micro-batch, all ranks on one host."""
    if cuboid.ranks > MOST_RANKS:
        raise ValueError(f"a dry run of {cuboid.ranks} ranks is beyond {MOST_RANKS}; choose fewer devices")
    if not 0 <= rank < cuboid.ranks:
        raise ValueError(f"rank {rank} is not one of the {cuboid.ranks} ranks of {cuboid}")
    work.config.check(cuboid, work.batch, work.seq)
    fork = get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    child = fork.Process(target=_play, args=(work, cuboid, choice, rank, backend, theirs))
    child.start()
    theirs.close()  # so that a child that dies ends the wait
    try:
        found: Counted = ours.recv()
    except EOFError:
        raise RankError(f"the dry run of rank {rank} of {cuboid} ended without an answer") from None
    finally:
        child.join()
    return found


def join_silent_world(rank: int, size: int, backend: str = "gloo") -> None:
    """For a process that does nothing else: collectives are called as on this backend, and none sends anything."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    dist.get_backend = lambda group=None: dist.Backend(backend)
    for name in LAUNCHES:
        setattr(dist, name, partial(_HeldWork, getattr(dist, name)))


def _play(work: Work, cuboid: Cuboid, choice: Choice, rank: int, backend: str, answer: Connection) -> None:
    join_silent_world(rank, cuboid.ranks, backend)
    mesh = Mesh(cuboid, rank)
    with FakeTensorMode():
        parallel = CuboidParallel(work.config, mesh, choice.policy, COMPUTE[work.precision], choice.schedule)
        model = Transformer(parallel, recompute=choice.recompute)
        place = parallel.place(work.batch, work.seq)
        ids = torch.zeros(len(place.positions), len(place.samples), dtype=torch.long)
        at = At(place, ids)
        with Memory(model) as memory:  # steps of their own: the FLOP counter holds on to tensors
            loss = model(ids, ids, place)
            saved = memory.saved(loss)
            loss.backward()
            model.zero_grad()
            model.play([(ids, at)] * min(work.micro_batches, 3))  # the second finds the gradients of the first
        model.zero_grad()
        mesh.ledger.reset()
        with count_flops() as flops:
            model(ids, ids, place).backward()
        parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    total = flops.get_total_flops()
    answer.send(Counted(mesh.ledger.counts(), total, parameters, saved, memory.peak + 2 * parameters))


def compare(counted: Counted, plan: Plan, work: Work) -> list[Comparison]:
    """What was counted on rank 0 against the plan."""
    cost = plan.cost(work)
    planned, found = cost.counts(), []
    for axis in sorted(counted.counts.keys() | planned.keys()):
        for kind in sorted(counted.counts.get(axis, {}).keys() | planned.get(axis, {}).keys()):
            ours, theirs = (table.get(axis, {}).get(kind, (0, 0)) for table in (counted.counts, planned))
            found += [
                Comparison(f"{axis} {kind}, {what}", a, b, True)
                for what, a, b in zip(("calls", "bytes"), ours, theirs, strict=True)
            ]
    found.append(Comparison("FLOPs", counted.flops, cost.flops, True))
    found.append(Comparison("bytes of parameters", counted.parameters, plan.memory["parameters"], True))
    found.append(Comparison("bytes saved for backward", counted.saved, cost.saved, True))
    found.append(Comparison("bytes at the peak", counted.peak, plan.peak, False))
    return found
