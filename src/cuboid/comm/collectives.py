"""What each collective means, what it counts in the ledger, and its transpose. How it is sent: `comm/transport/`.

| collective     | what a rank gets                         | its transpose  |
|----------------|------------------------------------------|----------------|
| all_gather     | everyone's tensor, stacked along dim 0   | reduce_scatter |
| reduce_scatter | its shard along dim 0 of the sum         | all_gather     |
| all_reduce     | the sum (of partial values)              | copy           |
| copy           | the same value, used by every rank       | all_reduce     |
| broadcast      | the tensor of one rank                   | reduce         |
| reduce         | one rank: the sum; the others: nothing   | broadcast      |
| send           | of two ranks, one: nothing               | receive        |
| receive        | the other: its tensor                    | send           |

Each returns a `Flight`, whose `wait()` gives the result, and does not wait itself, except that gloo's `reduce` by hosts
waits for the sum of its own host. Over an axis of size 1 nothing is launched, counted or copied. In shapes, p is the
size of the axis.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from cuboid.comm.axis import Axis
from cuboid.comm.flight import Flight, Launched, landed
from cuboid.comm.ledger import Span
from cuboid.comm.transport.base import Wait


def _launched(kind: str, shape: tuple[int, ...], dtype: torch.dtype, axis: Axis, times: int = 1) -> Span:
    """Enters a collective in journal and ledger. `shape`: the unsharded tensor, of which (p-1)/p is sent."""
    sent = times * prod(shape) * dtype.itemsize * (axis.size - 1) // axis.size
    return _entered(kind, kind, shape, dtype, axis, sent)


def _entered(what: str, kind: str, shape: tuple[int, ...], dtype: torch.dtype, axis: Axis, sent: int) -> Span:
    """`what` is its name in the journal, `kind` the one in the ledger."""
    if axis.journal is not None:
        axis.journal.note(what, shape, dtype)
    return axis.ledger.launched(axis.name, kind, sent)


def all_gather(x: Tensor, axis: Axis, pieces: Sequence[int] = ()) -> Flight:
    """[r, ...] of each rank -> [p·r, ...]. With `pieces`, numbers of rows of x, all ranks' first pieces come first,
    then all ranks' second, and so on."""
    if axis.size == 1:
        return landed(x)
    x = x.contiguous()
    gathered = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    span = _launched("all_gather", gathered.shape, gathered.dtype, axis)
    if len(pieces) <= 1:
        return Launched(axis.transport.all_gather(x, gathered), lambda: gathered, span, axis)
    places = gathered.split([axis.size * rows for rows in pieces])
    return Launched(axis.transport.all_gather_each(x.split(pieces), places), lambda: gathered, span, axis)


def reduce_scatter(x: Tensor, axis: Axis, dtype: torch.dtype | None = None) -> Flight:
    """[p·r, ...] of each rank -> [r, ...] of the sum, in `dtype` (that of x unless given). Values of low precision are
    summed in fp32."""
    if axis.size == 1:
        return landed(x.to(dtype or x.dtype))
    assert x.shape[0] % axis.size == 0, f"dim 0 of {tuple(x.shape)} cannot be scattered over {axis.size} ranks"
    shard = (x.shape[0] // axis.size, *x.shape[1:])
    flight = reduce_scatter_each([x.contiguous()], axis, dtype)
    return Flight(lambda: flight.wait().view(shard))


def reduce_scatter_each(xs: Sequence[Tensor], axis: Axis, dtype: torch.dtype | None = None) -> Flight:
    """Several tensors [p·r, ...], each with its own r -> this rank's shards of the sums, flat and concatenated."""
    like = xs[0]
    shape = like.shape if len(xs) == 1 else (axis.size, sum(x.numel() // axis.size for x in xs))
    span = _launched("reduce_scatter", shape, like.dtype, axis)
    return Launched(*axis.transport.reduce_scatter(xs, dtype or like.dtype), span, axis)


def all_reduce(x: Tensor, axis: Axis) -> Flight:
    """[...] -> [...], the sum. Give it fp32 or better: the backend adds in the tensor's own precision."""
    if axis.size == 1:
        return landed(x)
    total = x.clone(memory_format=torch.contiguous_format)
    span = _launched("all_reduce", total.shape, total.dtype, axis, times=2)
    return Launched(axis.transport.all_reduce(total), lambda: total, span, axis)


def copy(x: Tensor, axis: Axis) -> Flight:
    """[...] -> [...], x itself."""
    return landed(x)


def broadcast(x: Tensor, axis: Axis, source: int, shape: Sequence[int]) -> Flight:
    """The tensor of rank `source` of the axis, which has this shape. Of other ranks' x only the dtype is used."""
    if axis.size == 1:
        return landed(x)
    block = x.contiguous() if axis.index == source else x.new_empty(shape)
    assert block.shape == torch.Size(shape), f"{tuple(block.shape)} is not {tuple(shape)}"
    if not block.numel():
        return landed(block)
    span = _launched("broadcast", block.shape, block.dtype, axis)
    return Launched(*axis.transport.broadcast(block, source, _wait(span, axis)), span, axis)


def reduce(x: Tensor, axis: Axis, target: int, dtype: torch.dtype | None = None) -> Flight:
    """[...] -> [...], the sum, in `dtype` (that of x unless given), on rank `target` of the axis; [0] on the others.
    Values of low precision are summed in fp32. The memory of x is reused.

    Of two ranks one sends its tensor unchanged and the other adds it, which sends the least.
    """
    dtype, sum_in = dtype or x.dtype, torch.promote_types(x.dtype, torch.float32)
    if axis.size == 1 or not x.numel():
        return landed(x.to(dtype))
    mine, nothing = axis.index == target, x.new_empty(0, dtype=dtype)
    x = x.contiguous() if axis.size == 2 else x.contiguous().to(sum_in)
    span = _launched("reduce", x.shape, x.dtype, axis)
    if axis.size == 2:
        other = torch.empty_like(x) if mine else x
        works, result = axis.transport.broadcast(other, 1 - target, _wait(span, axis))
        return Launched(works, lambda: (x.to(sum_in) + result()).to(dtype) if mine else nothing, span, axis)
    works, result = axis.transport.reduce(x, target, _wait(span, axis))
    return Launched(works, lambda: result().to(dtype) if mine else nothing, span, axis)


def _wait(span: Span, axis: Axis) -> Wait:
    return lambda work: Launched([work], lambda: torch.empty(0), span, axis).wait()


def send(x: Tensor, lane: Axis, what: str) -> Flight:
    """Sends x to the other rank of a lane, which receives `what` in the same order. After `wait` x may be reused."""
    x = x.contiguous()
    return _message(x, lane, what, lane.index, "send", x.nbytes)


def receive(like: Tensor, lane: Axis, what: str) -> Flight:
    """Receives the tensor that the other rank of the lane sends, of the same size, into `like`."""
    return _message(like, lane, what, 1 - lane.index, "receive", 0)


def _message(x: Tensor, lane: Axis, what: str, source: int, kind: str, sent: int) -> Flight:
    """A message, sent as a broadcast of two ranks: backends send those in the order of their launch."""
    span = _entered(what, kind, x.shape, x.dtype, lane, sent)
    return Launched(*lane.transport.broadcast(x, source, _wait(span, lane)), span, lane)


def shift(x: Tensor, axis: Axis, by: int) -> Flight:
    """[...] -> [...], for checks: the tensor of the rank that is `by` places before this one, cyclically."""
    if by % axis.size == 0:
        return landed(x)
    x = x.contiguous()
    other = torch.empty_like(x)
    span = _entered("shift", "shift", x.shape, x.dtype, axis, x.nbytes)
    return Launched([axis.transport.shift(x.view(-1), other.view(-1), by)], lambda: other, span, axis)


Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "copy"]

COLLECTIVES: dict[Kind, Callable[[Tensor, Axis], Flight]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "copy": copy,
}
TRANSPOSE: dict[Kind, Kind] = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_reduce": "copy",
    "copy": "all_reduce",
}


def _blocking(kind: str, axis: Axis, call: Callable[[], Any]) -> Any:
    return call() if axis.journal is None else axis.journal.blocking(kind, call)


def from_first(value: Any, axis: Axis) -> Any:
    """Returns the first rank's value on all ranks. For set-up, never inside a step."""
    return value if axis.size == 1 else _blocking("from_first", axis, lambda: axis.transport.from_first(value))


def from_all(value: Any, axis: Axis) -> list[Any]:
    """Returns all ranks' values, in rank order. For reports, never inside a step."""
    return [value] if axis.size == 1 else _blocking("from_all", axis, lambda: axis.transport.from_all(value))


def gather_pieces(x: Tensor, axis: Axis) -> list[Tensor]:
    """Returns all ranks' tensors, of any shapes, in rank order. For reports and tests, never inside a step."""
    if axis.size == 1:
        return [x]
    shapes = from_all(tuple(x.shape), axis)
    longest = max(prod(shape) for shape in shapes)
    padded, rows = x.new_zeros(longest), x.new_empty(axis.size, longest)
    padded[: x.numel()] = x.reshape(-1)
    _blocking("gather_pieces", axis, lambda: [work.wait() for work in axis.transport.all_gather(padded, rows)])
    return [row[: prod(shape)].view(shape) for row, shape in zip(rows, shapes, strict=True)]
