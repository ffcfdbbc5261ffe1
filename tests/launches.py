"""The order in which all ranks of a cuboid launch their collectives, rank after rank in one process that sends nothing.

Every rank must launch the same collectives in the same order: with the same axis, kind and dtype throughout and, of
those that meet in one collective, the same shape. What one rank decides by its own shapes, of an uneven split say,
shows as a difference.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from sharded import Case
from torch.testing._internal.distributed.fake_pg import FakeStore

from cuboid.comm.journal import Journal
from cuboid.mesh.cuboid import AXES
from cuboid.mesh.mesh import Mesh
from cuboid.model.cuboid import CuboidParallel
from cuboid.model.transformer import Transformer
from cuboid.run.launch import World
from cuboid.step.runner import At
from cuboid.step.weights import Bucket, Landing, Tensors


class Launch(NamedTuple):
    axis: str
    kind: str
    dtype: torch.dtype | None
    ranks: tuple[int, ...]  # that meet
    shape: tuple[int, ...] | None  # None: left out, because the weights of these ranks are empty

    def like(self, other: "Launch | None") -> bool:
        """What all ranks have in common, and with those that meet also the shape."""
        if other is None or self[:3] != other[:3] or len(self.ranks) != len(other.ranks):
            return False
        return self.ranks != other.ranks or self.shape == other.shape


class Recording(Journal):
    """A journal that keeps everything, of all groups in one list."""

    def __init__(self, axis: str, ranks: Sequence[int], rank: int, launches: list[Launch]) -> None:
        super().__init__(axis, ranks, rank)
        self._launches = launches

    def note(self, kind: str, shape: tuple[int, ...] = (), dtype: torch.dtype | None = None) -> int:
        self._launches.append(Launch(self.axis, kind, dtype, self.ranks, tuple(shape)))
        return super().note(kind, shape, dtype)

    def wait(self, work: dist.Work, number: int) -> None:
        work.wait()


class Recorder:
    """In the place of the watchdog."""

    def __init__(self, rank: int) -> None:
        self.rank, self.launches = rank, list[Launch]()

    def journal(self, axis: str, group: dist.ProcessGroup) -> Journal:
        return Recording(axis, dist.get_process_group_ranks(group), self.rank, self.launches)

    def share(self) -> float:
        return 0.0

    def disagree(self) -> None:
        raise AssertionError("nobody reads these journals")


@contextmanager
def noting_empty_buckets(launches: list[Launch]) -> Iterator[None]:
    """Ranks whose shard of an embedding is empty send none of it: such collectives are noted as left out."""
    gather, reduce = Bucket.gather, Bucket.reduce

    def note(kind: str, bucket: Bucket) -> None:
        x = bucket.mesh.x
        if x.size > 1 and bucket.slots and not bucket.gathers:
            launches.append(Launch("x", kind, bucket.dtype, tuple(dist.get_process_group_ranks(x.group)), None))

    def gather_noted(bucket: Bucket) -> Landing:
        note("all_gather", bucket)
        return gather(bucket)

    def reduce_noted(bucket: Bucket, gradients: Tensors) -> Landing:
        if gradients.keys() & bucket.slots.keys():
            note("reduce_scatter", bucket)
        return reduce(bucket, gradients)

    with patch.object(Bucket, "gather", gather_noted), patch.object(Bucket, "reduce", reduce_noted):
        yield


def launches(case: Case, rank: int) -> list[Launch]:
    """Of a rank in a step of the case."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake_gloo", rank=rank, world_size=case.cuboid.ranks, store=FakeStore())
    recorder = Recorder(rank)
    parallel = CuboidParallel(case.config, Mesh(case.cuboid, rank, watch=recorder), case.policy, schedule=case.schedule)
    model, place = Transformer(parallel, None, recompute=case.recompute), parallel.place(case.batch, case.seq)
    model.freeze(case.freeze)
    ids = torch.zeros(len(place.positions), len(place.samples), dtype=torch.long)
    with noting_empty_buckets(recorder.launches):
        if case.order or case.micro_batches > 1 or case.cuboid.pipe > 1:
            model.play([(ids, At(place, ids, case.loss, case.dropout))] * case.micro_batches, case.order or None)
        else:
            model(ids, ids, place, case.loss, case.dropout).backward()
    return recorder.launches


def difference(case: Case) -> str:
    """The first place where two ranks launch something different; "" where all launch the same. On a pipe, ranks of the
    same stages do, and on a lane between two stages both of its ranks have the same messages in the same order."""
    found = [launches(case, rank) for rank in range(case.cuboid.ranks)]
    for ranks in case.cuboid.array(AXES).reshape(case.cuboid.pipe, -1).tolist():
        for i, at in enumerate(zip_longest(*(found[rank] for rank in ranks))):
            first = {each.ranks: each for each in reversed(at) if each is not None}  # of those that meet
            for rank, launch in zip(ranks, at, strict=True):
                if launch is None or not launch.like(at[0]) or not launch.like(first[launch.ranks]):
                    return f"launch {i} of {case}: {at[0]} of rank {ranks[0]}, {launch} of rank {rank}"
    lanes: dict[Any, dict[int, list[Launch]]] = {}
    for rank, order in enumerate(found):
        for launch in order:
            if launch.axis.startswith("pipe "):
                lanes.setdefault((launch.axis, launch.ranks), {}).setdefault(rank, []).append(launch)
    for way, ends in lanes.items():
        if len(ends) != 2 or len({tuple(each) for each in ends.values()}) > 1:
            return f"messages {way} of {case}: {ends}"
    return "" if found[0] or case.cuboid.ranks == 1 else f"no launches of {case}"


def differences(world: World, cases: Sequence[Case]) -> list[str]:
    """To be run by `silently` as one rank: it becomes all ranks in turn."""
    torch.set_num_threads(1)
    return [said for said in map(difference, cases) if said]
