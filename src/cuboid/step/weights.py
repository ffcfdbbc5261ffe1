"""The weights of a layer: shards at rest, one flat gather over x when the layer runs, one reduce-scatter of their
gradients when it has run backward.

Three autograd nodes make a step's traffic of weights:

    open    shards -> tokens           backward: wait for every gradient, sum what is replicated, hand the shards out
    gather  token  -> whole weights    backward: launch the reduce-scatter of the layer's gradients
    (use)   the products of the layer, which gather again in backward unless the whole weights were retained

`open` comes first in the step, so autograd plays its backward last: reduce-scatters are launched as soon as a layer's
gradients exist and awaited at the end, or when two further layers' are on their way, so that the buffers in flight do
not grow with depth. A layer's sum over `data` is launched when that over x has landed, and awaited at the end.

A bucket travels in one collective. Its small parameters are packed for it; each large one is gathered straight into
place, and its gradient goes from where it was made: a message of its own costs less than a copy.

Of several micro-batches only the last sums over replicas: the others leave their gradients with the shards, and the
last takes them along.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cuboid.comm.axis import Axis
from cuboid.comm.collectives import all_gather, all_reduce, reduce_scatter_each
from cuboid.comm.flight import Flight, landed, token
from cuboid.comm.transport.gloo import LEAST_ALONE
from cuboid.mesh.layout import Spec, ceil_div
from cuboid.mesh.mesh import Mesh

Holder = Literal["forward", "backward"]
Gradients = list[Tensor | None]  # of a bucket's shards
MOST_IN_FLIGHT = 2  # layers whose gradients are being reduced at a time


class Bucket:
    """The parameters gathered together. Whole weights exist only while a pass holds them (or from forward to backward
    under `retain`)."""

    def __init__(
        self,
        parameters: Sequence[tuple[nn.Parameter, Spec]],
        mesh: Mesh,
        dtype: torch.dtype | None = None,
        retain: bool = False,
        in_flight: "deque[Bucket] | None" = None,
        before: "Bucket | None" = None,
    ) -> None:
        self.parameters = [parameter for parameter, _ in parameters]
        self.specs = [spec for _, spec in parameters]
        self.mesh, self.dtype, self.retain, self.before = mesh, dtype, retain, before
        self.after: Bucket | None = None
        if before is not None:
            before.after = self
        self._in_flight = deque() if in_flight is None else in_flight
        self._index = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        self._whole: list[Tensor] | None = None
        self._flight: Flight | None = None
        self._holders: set[Holder] = set()
        self._sums: dict[int, Tensor] = {}
        self._reducing: list[Callable[[], Gradients]] = []  # sums over x, of every use of the weights
        self._landed: list[Callable[[], Gradients]] = []  # those, on their way over `data`
        self.uses = 0  # of the weights, that backward has yet to come by
        self._last = True
        self._left = False  # the shards have gradients of earlier micro-batches
        shapes = [spec.local_shape(mesh.cuboid, mesh.coordinates, gathered=("x",)) for spec in self.specs]
        self._shapes = shapes
        # in flight every rank's part is as long as the longest: ceil(rows/x) rows of each parameter cut by x
        self._rows = [ceil_div(shape[0], mesh.x.size) for shape in shapes]
        # they travel matrices first, so that those of one product are neighbours, and their biases are
        cut = [i for i, spec in enumerate(self.specs) if "x" in spec.cut_by]
        self._cut = sorted(cut, key=lambda i: -len(shapes[i]))
        self._lengths = [self._rows[i] * torch.Size(shapes[i][1:]).numel() for i in self._cut]
        self._gathers = mesh.x.size > 1 and sum(self._lengths) > 0
        self._pieces = pieces(self._lengths, LEAST_ALONE // (dtype or self.parameters[0].dtype).itemsize)
        self._lay_out()

    def _lay_out(self) -> None:
        """Have the shards lie one behind another as they travel."""
        shards = [self.parameters[i] for i in self._cut]
        if shards:
            flat = torch.cat([shard.detach().view(-1) for shard in shards])
            for shard, place in zip(shards, flat.split([shard.numel() for shard in shards]), strict=True):
                shard.data = place.view(shard.shape)

    def index(self, parameter: nn.Parameter) -> int:
        return self._index[id(parameter)]

    # Weights: shards -> whole

    def launch(self, holder: Holder) -> None:
        """Have the whole weights on their way, for `holder` until it releases them."""
        self._holders.add(holder)
        if self._whole is None and self._flight is None and self._gathers:
            self._flight = all_gather(self._pack(), self.mesh.x, [sum(self._lengths[each]) for each in self._pieces])

    def launch_backward(self) -> None:
        """The same in backward, and the weights that backward will need after these as well, once those it needed
        before are gone: two layers' are whole at a time."""
        self.launch("backward")
        if self.before is not None and not (self.after is not None and "backward" in self.after._holders):
            self.before.launch("backward")

    def whole(self) -> list[Tensor]:
        if self._whole is None:
            self._whole = [parameter.detach() for parameter in self.parameters]
            for i, weight in zip(self._cut, self._unpack(), strict=True):
                rows, *rest = self._shapes[i]
                self._whole[i] = weight.view(self._rows[i] * self.mesh.x.size, *rest)[:rows]
            if self.dtype is not None:
                self._whole = [weight.to(self.dtype) for weight in self._whole]
        return self._whole

    def again(self, parameter: nn.Parameter) -> Tensor:
        """In backward: the whole weight's value once more."""
        self.launch_backward()
        return self.whole()[self.index(parameter)]

    def release(self, holder: Holder) -> None:
        self._holders.discard(holder)
        if not self._holders and not (self.retain and holder == "forward" and torch.is_grad_enabled()):
            self._whole = None

    def reset(self, last: bool) -> None:
        """Forget what an earlier step left: weights retained for a backward that never came are stale."""
        self._whole, self._flight, self.uses, self._last = None, None, 0, last
        self._holders.clear()
        self._sums.clear()
        self._reducing.clear()
        self._landed.clear()
        self._in_flight.clear()

    def _pack(self) -> Tensor:
        """The shards as they travel: where they lie, unless some are short or products are of another dtype."""
        shards = [self.parameters[i].detach().view(-1) for i in self._cut]
        parts = [
            F.pad(shard, (0, n - len(shard))) if len(shard) < n else shard
            for shard, n in zip(shards, self._lengths, strict=True)
        ]
        return joined(parts).to(self.dtype or parts[0].dtype)

    def _unpack(self) -> Sequence[Tensor]:
        """Every rank's parts of each, one weight behind another."""
        if not self._cut:
            return ()
        if self._flight is None:
            return self._pack().split_with_sizes(self._lengths)
        flat, self._flight = self._flight.wait(), None
        x, found, end = self.mesh.x.size, list[Tensor](), 0
        for piece in self._pieces:
            lengths, start = self._lengths[piece], end
            end = start + x * sum(lengths)
            found += in_turn(flat[start:end].view(x, -1), lengths)
        return found

    # Gradients: whole -> shards

    def gradient(self, parameters: Sequence[nn.Parameter]) -> tuple[Tensor, bool]:
        """Where the gradients of whole weights are added up, the rows of one below those of another, and whether there
        is anything yet to add to. So the parts of a batch need no tensor each."""
        at = [self.index(parameter) for parameter in parameters]
        found = at[0] in self._sums
        if not found:
            like, (_, *rest) = parameters[0], self._shapes[at[0]]
            rows = [self._shapes[i][0] for i in at]
            joint = like.new_empty((sum(rows), *rest), dtype=self.dtype or like.dtype)
            self._sums.update(zip(at, joint.split_with_sizes(rows), strict=True))
        return joined([self._sums[i] for i in at]), found

    def reduce(self, gradients: Sequence[Tensor | None]) -> None:
        """Launch the sum over x of the whole weights' gradients, given or added up."""
        x = self.mesh.x
        self.uses -= 1
        mine: Gradients = [self._sums.pop(i, gradient) for i, gradient in enumerate(gradients)]
        if all(gradient is None for gradient in mine):
            return
        if not self._gathers:
            self._reducing.append(lambda: mine)
            self.land()
            return
        parts = [self._parts(i, mine[i]) for i in self._cut]
        for i in self._cut:
            mine[i] = None
        sent = [parts[each][0] if len(parts[each]) == 1 else torch.cat(parts[each], 1) for each in self._pieces]
        del parts
        flight = reduce_scatter_each(sent, x, dtype=self.parameters[0].dtype)
        del sent
        self._reducing += [lambda: mine, lambda: self._split(flight.wait())]
        self._in_flight.append(self)
        if len(self._in_flight) > MOST_IN_FLIGHT:
            self._in_flight.popleft().land()

    def _parts(self, i: int, gradient: Tensor | None) -> Tensor:
        """The whole weight's gradient as a row for each rank of x, the short parts of an uneven cut filled up."""
        like, rows, (n, *rest) = self.parameters[i], self._rows[i] * self.mesh.x.size, self._shapes[i]
        if gradient is None:
            gradient = like.new_zeros(rows, *rest)
        elif rows != n:
            gradient = torch.cat((gradient, gradient.new_zeros(rows - n, *rest)))
        return gradient.reshape(self.mesh.x.size, -1).to(self.dtype or like.dtype)

    def reduce_one(self, parameter: nn.Parameter, gradient: Tensor) -> Flight:
        """Launch the sum over x of one weight's gradient; the flight brings the shard's, to be handed to `add`."""
        if not self._gathers:
            return landed(gradient.to(parameter.dtype))
        flight = reduce_scatter_each([self._parts(self.index(parameter), gradient)], self.mesh.x, parameter.dtype)
        return Flight((), lambda: flight.wait()[: parameter.numel()].view(parameter.shape))

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add to the gradient of one shard."""
        mine: Gradients = [None] * len(self.parameters)
        mine[self.index(parameter)] = gradient
        self._reducing.append(lambda: mine)

    def land(self) -> None:
        """Wait for what was launched, a shard being a small part of the buffers it travels in, and launch the sum over
        `data` unless the weights were used elsewhere too."""
        if self.uses:
            total = self._add_up(self._reducing)
            self._reducing = [lambda: total]
            return
        earlier = [self._earlier] if self._last and self._left else []
        total = self._add_up([*earlier, *self._reducing])
        self._reducing = []
        self._landed.append(_sum_over(self.mesh.data, total) if self._last else lambda: total)

    def land_all(self) -> None:
        """At the end of backward: what has not come by will not."""
        self.uses = 0
        self.land()

    def collect(self) -> Gradients:
        """The shards' gradients, all uses of the weights summed."""
        self._left = not self._last
        landed, self._landed = self._landed, []
        return self._add_up(landed)

    def _earlier(self) -> Gradients:
        """Take over what earlier micro-batches left."""
        self._left = False
        found: Gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return found

    def _add_up(self, items: Sequence[Callable[[], Gradients]]) -> Gradients:
        total: Gradients = [None] * len(self.parameters)
        for item in items:
            for i, gradient in enumerate(item()):
                if gradient is not None:
                    gradient = gradient.to(self.parameters[i].dtype)
                    before = total[i]
                    total[i] = gradient if before is None else before + gradient
        return total

    def _split(self, flat: Tensor) -> Gradients:
        found: Gradients = [None] * len(self.parameters)
        for i, part in zip(self._cut, flat.split_with_sizes(self._lengths), strict=True):
            p = self.parameters[i]
            found[i] = part[: p.numel()].view(p.shape)
        return found


def pieces(lengths: Sequence[int], least: int) -> list[slice]:
    """Neighbours that travel together: those of at least `least` alone, the others as many as there are.

    >>> pieces([9, 2, 3, 8, 7, 1], 7)
    [slice(0, 1, None), slice(1, 3, None), slice(3, 4, None), slice(4, 5, None), slice(5, 6, None)]
    """
    starts = [i for i, n in enumerate(lengths) if i == 0 or n >= least or lengths[i - 1] >= least]
    return [slice(start, stop) for start, stop in pairwise([*starts, len(lengths)])]


def in_turn(parts: Tensor, lengths: Sequence[int]) -> Sequence[Tensor]:
    """Every rank's parts, [ranks, Σ lengths] -> of each length all ranks', one behind another."""
    if len(lengths) == 1:
        return [parts.view(-1)]
    found = torch.empty_like(parts).view(-1).split_with_sizes([len(parts) * n for n in lengths])
    for each, part in zip(found, parts.split_with_sizes(list(lengths), 1), strict=True):
        each.view(part.shape).copy_(part)
    return found


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Along dim 0: a view where they lie one behind another, else a copy."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    storage, end = first.untyped_storage()._cdata, first.storage_offset()
    for each in tensors:
        if each.untyped_storage()._cdata != storage or each.storage_offset() != end or not each.is_contiguous():
            return torch.cat(list(tensors))
        end += each.numel()
    return first.as_strided((sum(each.shape[0] for each in tensors), *first.shape[1:]), first.stride())


@dataclass
class Trail:
    """What one pass through the layers has left behind."""

    last: tuple[Any, Tensor] | None = None  # its last product, and the shard of its X


class Weights:
    """The whole weights of one bucket as passes through its layer see them, differentiable. Not to be kept."""

    def __init__(self, bucket: Bucket, tensors: Sequence[Tensor], trail: Trail | None = None) -> None:
        self.bucket, self._tensors, self.trail = bucket, tensors, trail or Trail()

    def along(self, trail: Trail) -> "Weights":
        """The same, for a pass of its own."""
        return Weights(self.bucket, self._tensors, trail)

    def __getitem__(self, parameter: nn.Parameter) -> Tensor:
        return self._tensors[self.bucket.index(parameter)]


def open_buckets(buckets: Sequence[Bucket], mesh: Mesh, last: bool) -> list[Tensor]:
    """A token for each bucket, from which `gather` makes the whole weights. Call it first in a micro-batch."""
    for bucket in buckets:
        bucket.reset(last)
    parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
    return list(_Open.apply(buckets, mesh, last, *parameters))


def gather(bucket: Bucket, opened: Tensor) -> Weights:
    bucket.uses += torch.is_grad_enabled()
    return Weights(bucket, _Gather.apply(opened, bucket))


class _Open(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buckets: Sequence[Bucket], mesh: Mesh, last: bool, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.buckets, ctx.axes = buckets, (mesh.x, mesh.y, mesh.z) if last else ()
        return tuple(token(bucket.parameters[0]) for bucket in buckets)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        for bucket in ctx.buckets:
            bucket.land_all()
        gradients = [gradient for bucket in ctx.buckets for gradient in bucket.collect()]
        specs = [spec for bucket in ctx.buckets for spec in bucket.specs]
        for axis in ctx.axes:
            partial = [g if axis.name in spec.sums else None for g, spec in zip(gradients, specs, strict=True)]
            sums = _sum_over(axis, partial)()
            gradients = [g if total is None else total for g, total in zip(gradients, sums, strict=True)]
        return None, None, None, *gradients


def _sum_over(axis: Axis, gradients: Gradients) -> Callable[[], Gradients]:
    """Launch the sum of those that are there, as one flat tensor."""
    shapes = {i: gradient.shape for i, gradient in enumerate(gradients) if gradient is not None}
    if axis.size == 1 or not shapes:
        return lambda: gradients
    flight = all_reduce(torch.cat([gradient.reshape(-1) for gradient in gradients if gradient is not None]), axis)
    count = len(gradients)

    def land() -> Gradients:
        parts = iter(flight.wait().split([shape.numel() for shape in shapes.values()]))
        return [next(parts).view(shapes[i]) if i in shapes else None for i in range(count)]

    return land


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, opened: Tensor, bucket: Bucket) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.bucket = bucket
        bucket.launch("forward")
        return tuple(weight.view_as(weight) for weight in bucket.whole())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None]:
        ctx.bucket.reduce(gradients)
        ctx.bucket.release("backward")
        return token(ctx.bucket.parameters[0]), None
