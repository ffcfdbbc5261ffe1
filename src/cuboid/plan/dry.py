"""Dry runs: the model code of one rank, without other ranks and data. Counts what it calls, sends, computes and holds.

Collectives send nothing and tensors have only shapes, so a rank of thousands runs on any machine. It makes the same
calls as on gloo or NCCL, and a message's memory is held until it is awaited. So allocations are exact to the byte,
whatever else the machine is doing.
"""

from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import shard_of
from cuboid.mesh.mesh import Mesh
from cuboid.model.cuboid import COMPUTE, CuboidParallel
from cuboid.model.transformer import Transformer
from cuboid.plan.layer import Choice, Work
from cuboid.plan.measure import Memory, count_flops
from cuboid.plan.search import Plan
from cuboid.run.launch import World
from cuboid.run.silent import silently
from cuboid.step.runner import At

MOST_RANKS = 4096  # whose groups take seconds to make
NEAR = 0.05  # largest error of the planned peak, which has no exact formula


@dataclass(frozen=True)
class Counted:
    """What was counted in a forward and backward of one rank; on a pipe, of all micro-batches of a step."""

    counts: dict[str, dict[str, tuple[int, int]]]  # (calls, bytes) per axis and collective
    flops: int
    parameters: int  # bytes
    saved: int | None  # None on a pipe, where several micro-batches are alive
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


def dry_run(work: Work, cuboid: Cuboid, choice: Choice, rank: int = 0, backend: str = "gloo") -> Counted:
    """Runs one micro-batch or, on a pipe, those of a step, as if all ranks were on one host."""
    if cuboid.ranks > MOST_RANKS:
        raise ValueError(f"a dry run of {cuboid.ranks} ranks is beyond {MOST_RANKS}; choose fewer devices")
    if not 0 <= rank < cuboid.ranks:
        raise ValueError(f"rank {rank} is not one of the {cuboid.ranks} ranks of {cuboid}")
    work.config.check(cuboid, work.batch, work.seq)
    found: Counted = silently(_count, rank, cuboid.ranks, work, cuboid, choice, backend=backend)
    return found


def _count(world: World, work: Work, cuboid: Cuboid, choice: Choice) -> Counted:
    mesh = Mesh(cuboid, world.rank)
    with FakeTensorMode():
        config = work.config.replace(dropout=0.0)  # dropout would read its seed
        parallel = CuboidParallel(config, mesh, choice.policy, COMPUTE[work.precision], choice.schedule)
        model = Transformer(parallel, None, recompute=choice.recompute)  # shapes have no values
        model.freeze(work.freeze)
        place = parallel.place(work.batch, work.seq)
        ids = torch.zeros(len(place.positions), len(place.samples), dtype=torch.long)
        at = At(place, ids)
        saved, piped = None, cuboid.pipe > 1
        with Memory(model) as memory:  # separate steps, because the FLOP counter keeps tensors alive
            if not piped:
                loss = model(ids, ids, place)
                saved = memory.saved(loss)
                loss.backward()
                model.zero_grad()
            # the second finds the gradients of the first
            model.play([(ids, at)] * (work.micro_batches if piped else min(work.micro_batches, 3)))
        model.zero_grad()
        mesh.ledger.reset()
        with count_flops() as flops:
            if piped:
                model.play([(ids, at)] * work.micro_batches)
            else:
                model(ids, ids, place).backward()
        sizes = {p: shard_of(p).nbytes for p in model.parameters()}
    moments = 2 * sum(size for p, size in sizes.items() if p.requires_grad)
    total = flops.get_total_flops()
    return Counted(mesh.ledger.counts(), total, sum(sizes.values()), saved, memory.peak + moments)


def compare(counted: Counted, plan: Plan, work: Work, rank: int = 0) -> list[Comparison]:
    """Compares the counts of a rank, which has the largest shards of its place, with the plan."""
    cost, held = plan.cost(work, rank), plan.memory
    if plan.places:
        held = plan.places[plan.cuboid.coordinates(rank)["pipe"]].memory
    planned, found = cost.counts(), []
    for axis in sorted(counted.counts.keys() | planned.keys()):
        for kind in sorted(counted.counts.get(axis, {}).keys() | planned.get(axis, {}).keys()):
            ours, theirs = (table.get(axis, {}).get(kind, (0, 0)) for table in (counted.counts, planned))
            found += [
                Comparison(f"{axis} {kind}, {what}", a, b, True)
                for what, a, b in zip(("calls", "bytes"), ours, theirs, strict=True)
            ]
    found.append(Comparison("FLOPs", counted.flops, cost.flops, True))
    found.append(Comparison("bytes of parameters", counted.parameters, held["parameters"], True))
    if counted.saved is not None:
        found.append(Comparison("bytes saved for backward", counted.saved, cost.saved, True))
    found.append(Comparison("bytes at the peak", counted.peak, sum(held.values()), False))
    return found
