"""Weights: buckets of shards (`Bucket`), the unsharded weights of a running stage (`Gathered`), and the gradients of a
step (`Sums`).

A bucket has one collective per direction: an all-gather of its shards over x, a reduce-scatter of its gradients. Its
shards share one flat buffer in communication order, matrices first, so that they are sent without a copy. Small
parameters are packed. A large one is a message of its own, which costs less than a copy: it is gathered into its final
place, and its gradient is sent from where it was computed.

A bucket has no state of a step: `Gathered` and `Sums` have it.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache, cached_property
from itertools import pairwise
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from cuboid.comm.axis import Axis
from cuboid.comm.collectives import all_gather, all_reduce, reduce_scatter_each
from cuboid.comm.flight import landed
from cuboid.mesh.layout import Spec, ceil_div, data_of, set_shard, shard_of
from cuboid.mesh.mesh import Mesh

Tensors = dict[nn.Parameter, Tensor]  # weights or gradients of some parameters
Landing = Callable[[], Tensors]  # waits for them
Group = tuple[int, tuple[nn.Parameter, ...]]  # parameters whose gradients share a buffer, and rows after each
#: When the matmuls of weight gradients run: in backward, in a pause in which nothing else can run, or in `settle`.
When = Literal["now", "spare", "late"]
MOST_IN_FLIGHT = 2  # buckets whose gradients are being reduced at a time


class Slot(NamedTuple):
    """A parameter's place in messages, which are padded to the longest shard."""

    length: int  # elements of a rank
    rows: int  # of the unsharded weight
    padded: Sequence[int]  # its shape as it arrives
    shard: Sequence[int]

    @classmethod
    def of(cls, shape: Sequence[int], shard: Tensor, ranks: int) -> "Slot":
        rows = ceil_div(shape[0], ranks)
        return cls(rows * prod(shape[1:]), shape[0], (rows * ranks, *shape[1:]), shard.shape)


class Bucket:
    """Parameters that are gathered together, and how. Immutable."""

    def __init__(self, specs: Mapping[nn.Parameter, Spec], mesh: Mesh, dtype: torch.dtype | None) -> None:
        self.specs, self.mesh, self.parameters = specs, mesh, list(specs)
        self.dtype = dtype or self.parameters[0].dtype
        self.shapes = {p: s.local_shape(mesh.cuboid, mesh.coordinates, gathered=("x",)) for p, s in specs.items()}
        self.partial = {axis: [p for p, spec in specs.items() if axis in spec.sums] for axis in ("x", "y", "z")}
        split = [p for p, spec in specs.items() if "x" in spec.split_axes]
        split.sort(key=lambda p: -p.dim())  # keeps weights with the same input adjacent
        self.slots = {p: Slot.of(self.shapes[p], shard_of(p), mesh.x.size) for p in split}
        lengths = [slot.length for slot in self.slots.values()]
        self.gathers = mesh.x.size > 1 and sum(lengths) > 0
        self._least = mesh.x.transport.least_alone // self.dtype.itemsize if self.gathers else 0
        self.messages = self._messages(split)
        self._flat = shard_of(self.parameters[0]).new_zeros(sum(lengths))  # the shards as they are sent
        for p, place in zip(split, self._flat.split_with_sizes(lengths), strict=True):
            shard = shard_of(p)
            set_shard(p, place[: shard.numel()].view(shard.shape).copy_(shard))
        self._data = {p: data_of(p) for p in self.parameters}

    @cached_property
    def sent(self) -> float:
        """Bytes that a rank receives per all-gather. INVARIANT: the same on all ranks."""
        sizes, split = self.mesh.cuboid.sizes, [spec for spec in self.specs.values() if "x" in spec.split_axes]
        shards = [prod(spec.shape) / prod(sizes[axis] for axis in spec.split_axes) for spec in split]
        return sum(shards) * (sizes["x"] - 1) * self.dtype.itemsize

    def check(self) -> None:
        """Raise if `parameter.data` was set, which does not change the shard."""
        if any(data_of(p) != data for p, data in self._data.items()):
            raise ValueError(
                "the data of a parameter was set (parameter.data = …), which a DTensor ignores; copy values into it: "
                "with torch.no_grad(): parameter.copy_(…)"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Bucket":
        return Bucket({deepcopy(p, memo): spec for p, spec in self.specs.items()}, self.mesh, self.dtype)

    def _messages(self, sent: Sequence[nn.Parameter]) -> list[Sequence[nn.Parameter]]:
        """The parameters of each message."""
        return [sent[each] for each in neighbours(tuple(self.slots[p].length for p in sent), self._least)]

    # Weights: shards -> unsharded

    def gather(self) -> Landing:
        """Launch the all-gather. The returned function waits for the unsharded weights."""
        x, lengths = self.mesh.x, [[self.slots[p].length for p in message] for message in self.messages]
        sizes, flat = [sum(each) for each in lengths], self._packed().to(self.dtype)
        flight = all_gather(flat, x, sizes) if self.gathers else landed(flat)
        del flat

        def land() -> Tensors:
            unsharded = {p: shard_of(p).to(self.dtype) for p in self.parameters if p not in self.slots}
            received = flight.wait().split_with_sizes([x.size * size for size in sizes])
            for message, each, elements in zip(self.messages, received, lengths, strict=True):
                for p, weight in zip(message, by_weight(each.view(x.size, -1), elements), strict=True):
                    slot = self.slots[p]
                    unsharded[p] = first_rows(slot.rows, weight.view(slot.padded))
            return unsharded

        return land

    def _packed(self) -> Tensor:
        """The shards as they are sent. On one device parameters are plain, and may have been given other data."""
        plain = self.slots and self.mesh.cuboid.ranks == 1
        return joined([shard_of(p).view(-1) for p in self.slots]) if plain else self._flat

    # Gradients: unsharded -> shards

    def reduce(self, gradients: Tensors) -> Landing:
        """Launch the reduce-scatter of `gradients` over x; the returned function waits for it. Empties the dict, so
        that the backend can release what it has sent."""
        sent = [p for p in self.slots if p in gradients]
        if not self.gathers or not sent:
            return lambda: gradients
        messages = [[self._by_rank(p, gradients) for p in message] for message in self._messages(sent)]
        packed = [each.pop() if len(each) == 1 else torch.cat(each, 1) for each in messages]
        del messages
        flight = reduce_scatter_each(packed, self.mesh.x, dtype=self.parameters[0].dtype)
        del packed

        def land() -> Tensors:
            totals = flight.wait().split_with_sizes([self.slots[p].length for p in sent])
            for p, total in zip(sent, totals, strict=True):
                shard = self.slots[p].shard
                gradients[p] = first_rows(prod(shard), total).view(shard)
            return gradients

        return land

    def _by_rank(self, parameter: nn.Parameter, gradients: Tensors) -> Tensor:
        """Pop a gradient as [x, elements], one row per rank of x; short shards are padded."""
        gradient, slot = gradients.pop(parameter), self.slots[parameter]
        missing = slot.padded[0] - slot.rows
        if missing:
            gradient = torch.cat((gradient, gradient.new_zeros(missing, *slot.padded[1:])))
        return gradient.reshape(self.mesh.x.size, -1).to(self.dtype)


@cache
def neighbours(lengths: tuple[int, ...], least: int) -> list[slice]:
    """Groups for messages: lengths of at least `least` alone, the others together with their neighbours.

    >>> neighbours((9, 2, 3, 8, 7, 1), 7)
    [slice(0, 1, None), slice(1, 3, None), slice(3, 4, None), slice(4, 5, None), slice(5, 6, None)]
    """
    starts = [i for i, n in enumerate(lengths) if i == 0 or n >= least or lengths[i - 1] >= least]
    return [slice(start, stop) for start, stop in pairwise([*starts, len(lengths)])]


def first_rows(rows: int, x: Tensor) -> Tensor:
    return x if x.shape[0] == rows else x[:rows]


def by_weight(shards: Tensor, lengths: Sequence[int]) -> Sequence[Tensor]:
    """[ranks, Σ lengths] -> one flat tensor per length, with the shards of all ranks."""
    ranks = shards.shape[0]
    sizes = [ranks * n for n in lengths]
    if 1 in (ranks, len(lengths)):
        return shards.view(-1).split_with_sizes(sizes)
    found = torch.empty_like(shards).view(-1).split_with_sizes(sizes)
    places = [each.view(ranks, -1) for each in found]
    torch._foreach_copy_(places, shards.split_with_sizes(list(lengths), 1))
    return found


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate along dim 0: a view if the tensors are adjacent in memory, else a copy."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    storage, end = first.untyped_storage()._cdata, first.storage_offset()
    for each in tensors:
        if each.untyped_storage()._cdata != storage or each.storage_offset() != end or not each.is_contiguous():
            return torch.cat(list(tensors))
        end += each.numel()
    return first.as_strided((sum(each.shape[0] for each in tensors), *first.shape[1:]), first.stride())


class Gathered:
    """The unsharded weights of a stage while it runs, and its gradients, added up over sub-batches.

    With several sub-batches (`uses`), gradients of low precision are added in fp32.
    """

    def __init__(self, buckets: Sequence[Bucket], weights: Tensors, uses: int, wgrads: When = "now") -> None:
        self.buckets, self._weights, self._uses, self.wgrads = buckets, weights, uses, wgrads
        self._sums: dict[Group, Tensor] = {}
        self._waiting: list[tuple[Callable[[], None], float]] = []
        self.shrunk = 1.0  # factor of gradients computed in forward, so that they fit in fp16

    def __getitem__(self, parameter: nn.Parameter) -> Tensor:
        try:
            return self._weights[parameter]
        except KeyError:
            self._bucket(parameter)  # raises if it is of another stage
        raise ValueError(
            f"a layer uses its weight {list(parameter.shape)} in backward, but its stage says in_backward=False; leave "
            "that out"
        )

    def lasting(self, parameter: nn.Parameter) -> Tensor:
        """A weight that may be kept: it does not keep what was gathered with it alive."""
        bucket = self._bucket(parameter)
        return self[parameter].clone() if bucket.gathers and parameter in bucket.slots else self[parameter]

    def release(self) -> None:
        self._weights.clear()

    def _bucket(self, parameter: nn.Parameter) -> Bucket:
        for bucket in self.buckets:
            if parameter in bucket.shapes:
                return bucket
        raise ValueError(
            f"a layer uses a parameter {list(parameter.shape)} of no module of its stage; name its module in the stage"
        )

    def gradient(self, parameters: Sequence[nn.Parameter], wide: bool = False, extra: int = 0) -> tuple[Tensor, bool]:
        """The buffer of the gradients of unsharded weights, concatenated by rows with `extra` rows after each, and
        whether it has values to add to. `wide`: in fp32 or better."""
        group = extra, tuple(parameters)
        if group in self._sums:
            return self._sums[group], True
        shapes, dtype = [self._bucket(p).shapes[p] for p in parameters], self._bucket(parameters[0]).dtype
        rows = sum(shape[0] + extra for shape in shapes)
        if wide or self._uses > 1:
            dtype = torch.promote_types(dtype, torch.float32)
        self._sums[group] = torch.empty((rows, *shapes[0][1:]), dtype=dtype, device=parameters[0].device)
        return self._sums[group], False

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add to the gradient of one small weight. Keeps `gradient`, which nothing else may have."""
        if parameter.requires_grad:
            if self._uses > 1:
                gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            group = 0, (parameter,)
            before = self._sums.get(group)
            self._sums[group] = gradient if before is None else before + gradient

    def make(self, work: Callable[[], None], flops: float) -> Callable[[], float] | None:
        """Compute gradients now, or later: in the returned function, if there is one, or in `settle`."""
        if self.wgrads == "now":
            work()
            return None
        self._waiting.append((work, flops))
        return self._make_one if self.wgrads == "spare" else None

    def _make_one(self) -> float:
        """Compute the oldest waiting gradients. Returns the FLOPs."""
        if not self._waiting:
            return 0.0
        work, flops = self._waiting.pop(0)
        work()
        return flops

    def settle(self) -> float:
        """Compute all waiting gradients. Returns the FLOPs."""
        return sum(self._make_one() for _ in range(len(self._waiting)))

    def reduce(self) -> list[tuple[Bucket, Landing]]:
        """Launch the sums over x of all gradients."""
        gradients, found = self._gradients(), []
        for bucket in self.buckets:
            made = {p: gradients.pop(p) for p in bucket.shapes if p in gradients}
            if made:
                found.append((bucket, bucket.reduce(made)))
        return found

    def _gradients(self) -> Tensors:
        """Of each parameter, summed over the groups that it is in. They are released here."""
        gradients: Tensors = {}
        for (extra, parameters), joint in self._sums.items():
            rows = [self._bucket(p).shapes[p][0] for p in parameters]
            for p, n, part in zip(parameters, rows, joint.split([n + extra for n in rows]), strict=True):
                gradient = first_rows(n, part)
                gradients[p] = gradients[p] + gradient if p in gradients else gradient
        self._sums.clear()
        return gradients


class Sums:
    """The gradients of a step's shards. They are summed over x per stage and, after all `uses` of a bucket's weights,
    over replicas."""

    def __init__(self, uses: Mapping[Bucket, int]) -> None:
        self._pending_uses = dict(uses)
        self._flying: deque[tuple[Bucket, Landing]] = deque()
        self.launched: deque[float] = deque(maxlen=MOST_IN_FLIGHT)  # the last ones, on the clock
        self._totals: Tensors = {}
        self._replicas: dict[Bucket, Landing] = {}

    def add(self, gathered: Gathered) -> None:
        """Launch and add the sums over x of a stage's gradients; its weights have been used once more. Few sums are in
        flight at a time: memory must not grow with depth."""
        self._flying.extend(gathered.reduce())
        while self._flying and (len(self._flying) > MOST_IN_FLIGHT or not self._flying[-1][0].gathers):
            self._land()
        for bucket in gathered.buckets:
            self._pending_uses[bucket] -= 1
            self._sum_replicas(bucket)

    def put(self, gradients: Tensors) -> None:
        """Add gradients that are already summed over x."""
        for p, gradient in gradients.items():
            before = self._totals.get(p)
            self._totals[p] = gradient.to(p.dtype) if before is None else before.add_(gradient)

    def _land(self) -> None:
        bucket, land = self._flying.popleft()
        self.put(land())
        del land  # releases the messages
        self._sum_replicas(bucket)

    def _sum_replicas(self, bucket: Bucket) -> None:
        """Launch the sum over replicas if the bucket's gradients are complete."""
        if self._pending_uses[bucket] == 0 and all(each is not bucket for each, _ in self._flying):
            totals = {p: self._totals.pop(p) for p in bucket.parameters if p in self._totals}
            self._replicas[bucket] = sum_over(bucket.mesh.replicas, totals)

    def finish(self) -> Tensors:
        """The gradients of all parameters that have one, summed over all ranks."""
        while self._flying:
            self._land()
        gradients = {
            p: gradient for bucket in self._pending_uses for p, gradient in self._replicas.pop(bucket, dict)().items()
        }
        mesh = next(iter(self._pending_uses)).mesh
        for axis in (mesh.x, mesh.y, mesh.z):
            partial = [p for bucket in self._pending_uses for p in bucket.partial[axis.name] if p in gradients]
            gradients |= sum_over(axis, {p: gradients[p] for p in partial})()
        return gradients


def sum_over(axis: Axis, gradients: Tensors) -> Landing:
    """Launch the all-reduce of all gradients as one flat tensor."""
    if axis.size == 1 or not gradients:
        return lambda: gradients
    flight = all_reduce(torch.cat([gradient.reshape(-1) for gradient in gradients.values()]), axis)
    shapes = {p: gradient.shape for p, gradient in gradients.items()}

    def land() -> Tensors:
        totals = flight.wait().split([shape.numel() for shape in shapes.values()])
        return {p: total.view(shape) for (p, shape), total in zip(shapes.items(), totals, strict=True)}

    return land
