"""Weights: how a bucket's shards travel (`Bucket`), the unsharded weights while a stage runs (`Gathered`), and what
becomes of their gradients (`Sums`).

A bucket is one collective each way: an all-gather of its shards over x, a reduce-scatter of its gradients. Its shards
share one flat buffer in communication order, matrices first, so that they are sent from where they lie. Small
parameters are packed; a large one is gathered straight into place, and its gradient is sent from where it was made: a
message of its own costs less than a copy.

No bucket holds anything of a step. What a pass through the model has gathered, and the sums it adds to, belong to it.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cuboid.comm.axis import Axis
from cuboid.comm.collectives import all_gather, all_reduce, reduce_scatter_each
from cuboid.comm.transport.gloo import LEAST_ALONE
from cuboid.mesh.layout import Spec, ceil_div
from cuboid.mesh.mesh import Mesh

Gradients = list[Tensor | None]  # of a bucket's parameters
Landing = Callable[[], Gradients]  # waits for them
MOST_IN_FLIGHT = 2  # buckets whose gradients are being reduced at a time


class Bucket:
    """Parameters that are gathered together, and how. It never changes."""

    def __init__(self, parameters: Sequence[tuple[nn.Parameter, Spec]], mesh: Mesh, dtype: torch.dtype | None) -> None:
        self.parameters = [parameter for parameter, _ in parameters]
        self.specs = [spec for _, spec in parameters]
        self.mesh, self.dtype = mesh, dtype or self.parameters[0].dtype
        self.index = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        self.shapes = [spec.local_shape(mesh.cuboid, mesh.coordinates, gathered=("x",)) for spec in self.specs]
        # in flight every rank's part is as long as the longest: ceil(rows/x) rows of each parameter split by x
        self._rows = [ceil_div(shape[0], mesh.x.size) for shape in self.shapes]
        split = [i for i, spec in enumerate(self.specs) if "x" in spec.cut_by]
        self._split = sorted(split, key=lambda i: -len(self.shapes[i]))  # weights of one linear are neighbours
        self._lengths = {i: self._rows[i] * torch.Size(self.shapes[i][1:]).numel() for i in self._split}
        self.gathers = mesh.x.size > 1 and sum(self._lengths.values()) > 0
        self._least = LEAST_ALONE // self.dtype.itemsize
        shards = [self.parameters[i] for i in self._split]
        if shards:
            flat = torch.cat([shard.detach().view(-1) for shard in shards])
            for shard, place in zip(shards, flat.split([shard.numel() for shard in shards]), strict=True):
                shard.data = place.view(shard.shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Bucket":
        parameters = [deepcopy(parameter, memo) for parameter in self.parameters]
        return Bucket(list(zip(parameters, self.specs, strict=True)), self.mesh, self.dtype)

    def messages(self, chosen: Sequence[int] | None = None) -> list[Sequence[int]]:
        """Of the parameters `chosen`, all unless told, in communication order: those of each message."""
        chosen = self._split if chosen is None else chosen
        return [chosen[each] for each in neighbours([self._lengths[i] for i in chosen], self._least)]

    # Weights: shards -> unsharded

    def gather(self) -> Callable[[], list[Tensor]]:
        """Launch; the function returned waits for the unsharded weights."""
        packed, pieces = self._packed(), self.messages()
        flight = None
        if self.gathers:
            assert packed is not None
            flight = all_gather(packed, self.mesh.x, [sum(self._lengths[i] for i in piece) for piece in pieces])
            packed = None  # else `land` would hold it, besides what the backend sends

        def land() -> list[Tensor]:
            whole = [parameter.detach() for parameter in self.parameters]
            if flight is not None:
                found = self._unpacked(flight.wait(), pieces)
            else:
                found = [] if packed is None else list(packed.split(list(self._lengths.values())))
            for i, weight in zip(self._split, found, strict=True):
                rows, *rest = self.shapes[i]
                whole[i] = weight.view(self._rows[i] * self.mesh.x.size, *rest)[:rows]
            return whole if self.parameters[0].dtype == self.dtype else [weight.to(self.dtype) for weight in whole]

        return land

    def _packed(self) -> Tensor | None:
        """The shards as they travel: where they lie, unless some are short or linears compute in another dtype."""
        shards = [(self.parameters[i].detach().view(-1), self._lengths[i]) for i in self._split]
        parts = [F.pad(shard, (0, n - len(shard))) if len(shard) < n else shard for shard, n in shards]
        return joined(parts).to(self.dtype) if parts else None

    def _unpacked(self, flat: Tensor, pieces: Sequence[Sequence[int]]) -> list[Tensor]:
        """Every rank's parts of each weight, one weight after another."""
        x, found, end = self.mesh.x.size, list[Tensor](), 0
        for piece in pieces:
            lengths, start = [self._lengths[i] for i in piece], end
            end = start + x * sum(lengths)
            found += by_weight(flat[start:end].view(x, -1), lengths)
        return found

    # Gradients: unsharded -> shards

    def reduce(self, gradients: Gradients) -> Landing:
        """Launch the sum over x of those there are; the function returned waits for the shards'. The list is used up:
        what is sent is released as soon as the backend allows."""
        sent = [i for i in self._split if gradients[i] is not None]
        if not self.gathers or not sent:
            return lambda: gradients
        pieces = self.messages(sent)
        parts = [[self._by_rank(i, gradients) for i in piece] for piece in pieces]
        packed = [each.pop() if len(each) == 1 else torch.cat(each, 1) for each in parts]
        del parts
        flight = reduce_scatter_each(packed, self.mesh.x, dtype=self.parameters[0].dtype)
        del packed

        def land() -> Gradients:
            lengths = [self._lengths[i] for i in sent]
            for i, part in zip(sent, flight.wait().split_with_sizes(lengths), strict=True):
                gradients[i] = part[: self.parameters[i].numel()].view(self.parameters[i].shape)
            return gradients

        return land

    def _by_rank(self, i: int, gradients: Gradients) -> Tensor:
        """Take a gradient, as a row for each rank of x; short parts of an uneven split are padded."""
        gradient, gradients[i] = gradients[i], None
        assert gradient is not None
        rows = self._rows[i] * self.mesh.x.size
        if rows != len(gradient):
            gradient = torch.cat((gradient, gradient.new_zeros(rows - len(gradient), *gradient.shape[1:])))
        return gradient.reshape(self.mesh.x.size, -1).to(self.dtype)


def neighbours(lengths: Sequence[int], least: int) -> list[slice]:
    """Which of a sequence travel together: those of at least `least` alone, the others with their neighbours.

    >>> neighbours([9, 2, 3, 8, 7, 1], 7)
    [slice(0, 1, None), slice(1, 3, None), slice(3, 4, None), slice(4, 5, None), slice(5, 6, None)]
    """
    starts = [i for i, n in enumerate(lengths) if i == 0 or n >= least or lengths[i - 1] >= least]
    return [slice(start, stop) for start, stop in pairwise([*starts, len(lengths)])]


def by_weight(parts: Tensor, lengths: Sequence[int]) -> Sequence[Tensor]:
    """[ranks, Σ lengths] -> for each length, all ranks' parts, flat."""
    if len(lengths) == 1:
        return [parts.view(-1)]
    found = torch.empty_like(parts).view(-1).split_with_sizes([len(parts) * n for n in lengths])
    for each, part in zip(found, parts.split_with_sizes(list(lengths), 1), strict=True):
        each.view(part.shape).copy_(part)
    return found


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Along dim 0: a view where they are adjacent in memory, else a copy."""
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
    """The unsharded weights of a stage while a pass holds them, and where the gradients of its sub-batches add up.

    With several sub-batches (`uses`) gradients of low precision are added in fp32. With `late`, the matmuls that make
    gradients wait for `settle`.
    """

    def __init__(self, buckets: Sequence[Bucket], weights: Sequence[list[Tensor]], uses: int, late: bool) -> None:
        self._buckets, self.weights, self._uses, self._late = buckets, weights, uses, late
        self._by_id: dict[int, Tensor] = {}
        for bucket, each in zip(buckets, weights, strict=False):
            self._by_id.update(zip(bucket.index, each, strict=True))
        self._sums: dict[int, Tensor] = {}  # by the parameter's id
        self._waiting: list[Callable[[], None]] = []
        self.shrunk = 1.0  # what gradients made in forward were multiplied by, so that they fit in fp16

    def __getitem__(self, parameter: nn.Parameter) -> Tensor:
        try:
            return self._by_id[id(parameter)]
        except KeyError:
            self._bucket(parameter)  # which says why, unless it was released
            raise

    def lasting(self, parameter: nn.Parameter) -> Tensor:
        """A weight that may be kept: it does not hold on to what was gathered with it."""
        bucket = self._bucket(parameter)
        gathered = bucket.mesh.x.size > 1 and "x" in bucket.specs[bucket.index[id(parameter)]].cut_by
        return self[parameter].clone() if gathered else self[parameter]

    def release(self) -> None:
        self.weights = ()
        self._by_id.clear()

    def _bucket(self, parameter: nn.Parameter) -> Bucket:
        for bucket in self._buckets:
            if id(parameter) in bucket.index:
                return bucket
        raise ValueError(
            f"a layer needs a parameter of {parameter.numel()} elements, of no module that its stage names; name the "
            "module in the stage"
        )

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Of the unsharded weight, released or not."""
        bucket = self._bucket(parameter)
        return bucket.shapes[bucket.index[id(parameter)]]

    def gradient(self, parameters: Sequence[nn.Parameter], wide: bool = False, extra: int = 0) -> tuple[Tensor, bool]:
        """Where the gradients of unsharded weights are added up, the rows of one after those of another, with `extra`
        rows after each, and whether there is anything yet to add to. `wide`: in fp32 or better."""
        if id(parameters[0]) in self._sums:
            return joined([self._sums[id(p)] for p in parameters]), True
        shapes, dtype = [self.shape(p) for p in parameters], self._bucket(parameters[0]).dtype
        rows = [shape[0] + extra for shape in shapes]
        if wide or self._uses > 1:
            dtype = torch.promote_types(dtype, torch.float32)
        joint = torch.empty((sum(rows), *shapes[0][1:]), dtype=dtype, device=parameters[0].device)
        self._sums.update(zip(map(id, parameters), joint.split_with_sizes(rows), strict=True))
        return joint, False

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add to the gradient of one small weight."""
        if parameter.requires_grad:
            before = self._sums.get(id(parameter))
            self._sums[id(parameter)] = gradient if before is None else before + gradient

    def make(self, work: Callable[[], None]) -> None:
        """Have gradients made: now or when `settle` is called."""
        self._waiting.append(work) if self._late else work()

    def settle(self) -> None:
        while self._waiting:
            self._waiting.pop(0)()

    def reduce(self) -> list[tuple[Bucket, Landing]]:
        """Launch the sums over x of all gradients there are."""
        found = []
        for bucket in self._buckets:
            mine: Gradients = [self._sums.pop(i, None) for i in bucket.index]
            if any(gradient is not None for gradient in mine):
                rows = [shape[0] for shape in bucket.shapes]
                mine = [g if g is None or len(g) == n else g[:n] for g, n in zip(mine, rows, strict=True)]
                found.append((bucket, bucket.reduce(mine)))
        return found


class Sums:
    """The gradients of a step's shards: those summed over x as they land, then over `data` once every use of the
    weights, `uses` of each bucket, has come by."""

    def __init__(self, uses: Mapping[Bucket, int]) -> None:
        self._left = dict(uses)
        self._flying: deque[tuple[Bucket, Landing]] = deque()
        self._totals: dict[Bucket, Gradients] = {}
        self._replicas: dict[Bucket, Landing] = {}

    def add(self, reduced: Sequence[tuple[Bucket, Landing]]) -> None:
        """What a stage gave. Few sums over x are in flight at a time: memory must not grow with depth."""
        for bucket, land in reduced:
            self._flying.append((bucket, land))
            while len(self._flying) > (MOST_IN_FLIGHT if bucket.gathers else 0):
                self._land()

    def put(self, bucket: Bucket, gradients: Gradients) -> None:
        """Gradients that are summed over x already."""
        total = self._totals.setdefault(bucket, [None] * len(gradients))
        for i, (gradient, parameter) in enumerate(zip(gradients, bucket.parameters, strict=True)):
            if gradient is not None:
                before = total[i]
                total[i] = gradient.to(parameter.dtype) if before is None else before.add_(gradient)

    def used(self, buckets: Sequence[Bucket]) -> None:
        """One use of these weights is over."""
        for bucket in buckets:
            self._left[bucket] -= 1
            self._sum_replicas(bucket)

    def _land(self) -> None:
        bucket, land = self._flying.popleft()
        self.put(bucket, land())
        self._sum_replicas(bucket)

    def _sum_replicas(self, bucket: Bucket) -> None:
        """Launch it, if all has come that will."""
        flying = any(each is bucket for each, _ in self._flying)
        if self._left[bucket] == 0 and not flying and bucket in self._totals:
            self._replicas[bucket] = sum_over(bucket.mesh.data, self._totals.pop(bucket))

    def finish(self) -> dict[nn.Parameter, Tensor]:
        """The gradient of every parameter that has one, summed over all ranks that saw a part of it."""
        while self._flying:
            self._land()
        buckets = list(self._left)
        found = [self._replicas.pop(b)() if b in self._replicas else [None] * len(b.parameters) for b in buckets]
        gradients = [gradient for each in found for gradient in each]
        specs = [spec for bucket in buckets for spec in bucket.specs]
        mesh = buckets[0].mesh
        for axis in (mesh.x, mesh.y, mesh.z):
            partial = [g if axis.name in spec.sums else None for g, spec in zip(gradients, specs, strict=True)]
            sums = sum_over(axis, partial)()
            gradients = [g if total is None else total for g, total in zip(gradients, sums, strict=True)]
        parameters = [p for bucket in buckets for p in bucket.parameters]
        return {p: gradient for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None}


def sum_over(axis: Axis, gradients: Gradients) -> Landing:
    """Launch the sum of those there are, as one flat tensor."""
    shapes = {i: gradient.shape for i, gradient in enumerate(gradients) if gradient is not None}
    if axis.size == 1 or not shapes:
        return lambda: gradients
    flight = all_reduce(torch.cat([gradient.reshape(-1) for gradient in gradients if gradient is not None]), axis)
    count = len(gradients)

    def land() -> Gradients:
        parts = iter(flight.wait().split([shape.numel() for shape in shapes.values()]))
        return [next(parts).view(shapes[i]) if i in shapes else None for i in range(count)]

    return land
