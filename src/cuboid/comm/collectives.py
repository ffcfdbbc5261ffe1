"""The one file that calls collectives. Each returns a `Flight` at once; `wait()` gives the result.

| collective     | what a rank gets                         | its transpose  |
|----------------|------------------------------------------|----------------|
| all_gather     | everyone's tensor, stacked along dim 0   | reduce_scatter |
| reduce_scatter | its part along dim 0 of the sum          | all_gather     |
| all_to_all     | its part along dim 0 of everyone's       | all_to_all     |
| all_reduce     | the sum (of partial values)              | copy           |
| copy           | the same value, used by every rank       | all_reduce     |
| broadcast      | the tensor of one rank                   | reduce         |
| reduce         | one rank: the sum; the others: nothing   | broadcast      |

Over an axis of size 1 nothing is launched, counted or copied.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.comm.flight import Flight, Pause, Steps, landed, token
from cuboid.mesh.ledger import Span
from cuboid.mesh.mesh import Axis

LEAST_ALONE = 1 << 19  # bytes: below them a message of its own costs more than a copy
SMALL = 1 << 16  # bytes: up to them a message takes longer to wait for others than to be sent


def _blocking(kind: str, axis: Axis) -> AbstractContextManager[None]:
    """Around a collective that is not launched but called, outside the steps."""
    return nullcontext() if axis.journal is None else axis.journal.blocking(kind)


def _launched(kind: str, shape: tuple[int, ...], dtype: torch.dtype, axis: Axis, times: int = 1) -> Span:
    """Into the books: a collective of a whole tensor, the same on every rank."""
    if axis.journal is not None:
        axis.journal.note(kind, shape, dtype)
    return axis.ledger.launched(axis.name, kind, _sent(times * prod(shape) * dtype.itemsize, axis))


def _sent(size: int, axis: Axis) -> int:
    """Bytes a rank sends of a whole tensor of so many when p-1 of its p parts move."""
    return size * (axis.size - 1) // axis.size


def all_gather(x: Tensor, axis: Axis, pieces: Sequence[int] = ()) -> Flight:
    """With `pieces`, so many rows of x each, everyone's first lie together, then everyone's second, and so on."""
    if axis.size == 1:
        return landed(x)
    x, pieces = x.contiguous(), pieces or [x.shape[0]]
    whole = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    span = _launched("all_gather", whole.shape, whole.dtype, axis)
    places = whole.split([axis.size * rows for rows in pieces])
    works = [work for piece, place in zip(x.split(pieces), places, strict=True) for work in _gather(piece, place, axis)]
    return Flight(works, lambda: whole, span, axis)


def _gather(x: Tensor, whole: Tensor, axis: Axis) -> list[dist.Work]:
    """gloo's own all_gather is a ring of p-1 turns that copies everything once more at its end. Between hosts it keeps
    every link busy, and what it sends leaves a host once. Inside one, sent from each rank to each, the same bytes take
    half the CPU time: small ones as copies in one all-to-all, large ones as they are, a place further at a time."""
    if axis.backend != "gloo" or (axis.size > 2 and axis.hosts > 1) or _aside(whole, axis):
        return [dist.all_gather_single(whole, x, group=_way(whole, axis), async_op=True)]
    x, parts = x.view(1, -1), whole.view(axis.size, x.numel())
    if axis.size == 2:
        works = _swap(x[axis.index :], parts[: axis.index], x[: axis.index], parts[axis.index + 1 :], axis)
    elif x.nbytes < LEAST_ALONE:
        return [dist.all_to_all_single(parts, x.repeat(axis.size, 1), group=axis.group, async_op=True)]
    else:
        works = [_shift(x[0], parts[axis.index - by], axis, by) for by in range(1, axis.size)]
    parts[axis.index] = x[0]
    return works


def _aside(x: Tensor, axis: Axis) -> bool:
    return axis.aside is not None and x.nbytes <= SMALL


def _way(x: Tensor, axis: Axis) -> dist.ProcessGroup | None:
    """gloo's connection of two ranks carries one message after another, so small ones have one of their own."""
    return axis.aside if _aside(x, axis) else axis.group


def _swap(up: Tensor, below: Tensor, down: Tensor, above: Tensor, axis: Axis) -> list[dist.Work]:
    """A row of `up` to each rank after this one, of `down` to each before it; `below` and `above` are what these send.

    gloo's connection of two ranks carries one message at a time, either way. So between hosts, where time is the
    link's, each way has a group of its own."""
    i, n, p = axis.index, up.shape[1], axis.size
    lower, upper = [n] * i + [0] * (p - i), [0] * (i + 1) + [n] * (p - 1 - i)
    if axis.back is None and p == 2:
        here, there = (lower, lower) if i else (upper, upper)
        theirs, ours = (below, down) if i else (above, up)
        return [dist.all_to_all_single(theirs.view(-1), ours.view(-1), here, there, group=axis.group, async_op=True)]
    return [
        dist.all_to_all_single(below.view(-1), up.view(-1), lower, upper, group=axis.group, async_op=True),
        dist.all_to_all_single(above.view(-1), down.view(-1), upper, lower, group=axis.back, async_op=True),
    ]


def reduce_scatter(x: Tensor, axis: Axis, dtype: torch.dtype | None = None) -> Flight:
    """The part sums, in `dtype` (that of x unless given). Values of low precision are summed in fp32."""
    if axis.size == 1:
        return landed(x.to(dtype or x.dtype))
    assert x.shape[0] % axis.size == 0, f"dim 0 of {tuple(x.shape)} cannot be scattered over {axis.size} ranks"
    part = (x.shape[0] // axis.size, *x.shape[1:])
    flight = reduce_scatter_each([x.contiguous()], axis, dtype)
    return Flight((), lambda: flight.wait().view(part))


def reduce_scatter_each(xs: Sequence[Tensor], axis: Axis, dtype: torch.dtype | None = None) -> Flight:
    """Of several tensors, each with a part along dim 0 for every rank of the axis, this rank's of the sums, flat, one
    behind another.

    gloo's own reduce_scatter is an all-reduce inside and moves twice the bytes; NCCL's adds bf16 to bf16. An
    all-to-all followed by a local sum moves the least and lets us choose the sum's precision.
    """
    like, p, lengths = xs[0], axis.size, [x.numel() // axis.size for x in xs]
    shape = like.shape if len(xs) == 1 else (p, sum(lengths))
    dtype, wide = dtype or like.dtype, torch.promote_types(like.dtype, torch.float32)
    span, works = _launched("reduce_scatter", shape, like.dtype, axis), list[dist.Work]()
    if axis.backend == "nccl" and wide == like.dtype:
        mine = like.new_empty(sum(lengths))
        for x, place in zip(xs, mine.split(lengths), strict=True):
            works.append(dist.reduce_scatter_single(place, x.view(-1), group=axis.group, async_op=True))
        return Flight(works, lambda: mine.to(dtype), span, axis)
    rows = p - _own_stays(axis)
    received = like.new_empty(rows * sum(lengths))
    places = received.split([rows * n for n in lengths])
    each: list[list[Tensor]] = []
    for x, place in zip(xs, places, strict=True):
        launched, parts = _parts(x.view(p, -1), place.view(rows, -1), axis)
        works += launched
        each.append(parts)

    def land() -> Tensor:
        total = received.to(wide) if p == 2 else received.new_empty(sum(lengths), dtype=wide)
        for place, parts in zip(total.split(lengths), each, strict=True):
            place.add_(parts[axis.index]) if p == 2 else _sum(parts, place)
        return total.to(dtype)

    return Flight(works, land, span, axis)


def _own_stays(axis: Axis) -> bool:
    """A rank's own part of a sum stays where it is, unless gloo takes it along."""
    return axis.size == 2 or axis.back is not None


def _parts(x: Tensor, received: Tensor, axis: Axis) -> tuple[list[dist.Work], list[Tensor]]:
    """Every rank's row for this one, by rank."""
    i = axis.index
    if not _own_stays(axis):
        return [dist.all_to_all_single(received, x, group=axis.group, async_op=True)], list(received)
    below, above = received[:i], received[i:]
    return _swap(x[i + 1 :], below, x[:i], above, axis), [*below, x[i], *above]


def _sum(parts: Sequence[Tensor], total: Tensor | None = None) -> Tensor:
    """In fp32 or better, first to last whatever the shape: `torch.sum` adds in another order at a tensor's end, and
    ranks that hold the same value at different places would then disagree about its last bit."""
    first, second, *rest = parts
    total = torch.add(first.to(torch.promote_types(first.dtype, torch.float32)), second, out=total)
    for part in rest:
        total += part
    return total


def all_to_all(x: Tensor, axis: Axis) -> Flight:
    if axis.size == 1:
        return landed(x)
    x = x.contiguous()
    parts = torch.empty_like(x)
    span = _launched("all_to_all", x.shape, x.dtype, axis)
    work = dist.all_to_all_single(parts, x, group=axis.group, async_op=True)
    return Flight([work], lambda: parts, span, axis)


def all_reduce(x: Tensor, axis: Axis) -> Flight:
    """The sum. Give it fp32 or better: the backend adds in the tensor's own precision."""
    if axis.size == 1:
        return landed(x)
    total = x.clone(memory_format=torch.contiguous_format)
    span = _launched("all_reduce", total.shape, total.dtype, axis, times=2)
    work = dist.all_reduce(total, group=_way(total, axis), async_op=True)
    return Flight([work], lambda: total, span, axis)


def copy(x: Tensor, axis: Axis) -> Flight:
    return landed(x)


def broadcast(x: Tensor, axis: Axis, source: int, shape: Sequence[int]) -> Flight:
    """The tensor of rank `source` of the axis, which has this shape. Of the others' x only the dtype is looked at."""
    if axis.size == 1:
        return landed(x)
    block = x.contiguous() if axis.index == source else x.new_empty(shape)
    assert block.shape == torch.Size(shape), f"{tuple(block.shape)} is not {tuple(shape)}"
    if not block.numel():
        return landed(block)
    span = _launched("broadcast", block.shape, block.dtype, axis)
    if 1 < axis.mates < axis.size:
        return _broadcast_by_host(block, axis, source, span)
    work = dist.broadcast(block, group=axis.group, group_src=source, async_op=True)
    return Flight([work], lambda: block, span, axis)


def reduce(x: Tensor, axis: Axis, target: int, dtype: torch.dtype | None = None) -> Flight:
    """The sum, in `dtype` (that of x unless given), on rank `target` of the axis; an empty tensor on the others. Values
    of low precision are summed in fp32. The memory of x is used up.

    Of two ranks one sends its tensor and the other adds it, which moves the least. Of p ranks gloo's reduce moves
    1 + 1/p times the least, but no rank has to take in everyone's tensor alone. Between hosts sums go the way back.
    """
    dtype, sum_in = dtype or x.dtype, torch.promote_types(x.dtype, torch.float32)
    if axis.size == 1 or not x.numel():
        return landed(x.to(dtype))
    mine, nothing = axis.index == target, x.new_empty(0, dtype=dtype)
    x = x.contiguous() if axis.size == 2 else x.contiguous().to(sum_in)
    span = _launched("reduce", x.shape, x.dtype, axis)
    if axis.size == 2:
        other = torch.empty_like(x) if mine else x
        work = dist.broadcast(other, group=axis.group, group_src=1 - target, async_op=True)
        return Flight([work], lambda: (x.to(sum_in) + other).to(dtype) if mine else nothing, span, axis)
    if 1 < axis.mates < axis.size:
        total = _reduce_by_host(x, axis, target, span)
        return Flight((), lambda: total.wait().to(dtype) if mine else nothing)
    work = dist.reduce(x, group=axis.back or axis.group, group_dst=target, async_op=True)
    return Flight([work], lambda: x.to(dtype) if mine else nothing, span, axis)


# gloo's broadcast and reduce do not know of hosts: of a row of eight ranks on two hosts a broadcast crosses between
# them up to five times. Where hosts have several ranks of an axis each, one of them, the head, takes what comes from
# another host and hands it on, or sums what its host has and sends that: to each host everything crosses once.


def _broadcast_by_host(block: Tensor, axis: Axis, source: int, span: Span) -> Flight:
    head, heads, others = _heads(axis, source)
    first = axis.index == source
    work, rows = _messages(block, heads if first else [], [source] if axis.index in heads else [], axis)

    def hand_on() -> Tensor:
        mine = rows[0] if len(rows) else block
        is_head = axis.index == head
        work, handed = _messages(mine, others if is_head else [], [] if is_head else [head], axis)
        return Flight([work], lambda: (mine if is_head else handed[0]).view(block.shape), span, axis).wait()

    return Flight([work], hand_on, span, axis)


def _reduce_by_host(x: Tensor, axis: Axis, target: int, span: Span) -> Flight:
    """Of the target the sum, of the others something else."""
    head, heads, others = _heads(axis, target)
    is_head, last = axis.index == head, axis.index == target
    work, rows = _messages(x, [] if is_head else [head], others if is_head else [], axis)
    Flight([work], lambda: x, span, axis).wait()
    total = _sum([x, *rows.view(-1, *x.shape)]) if is_head else x
    work, sums = _messages(total, [target] if axis.index in heads else [], heads if last else [], axis)
    return Flight([work], lambda: _sum([total, *sums.view(-1, *x.shape)]) if last else x, span, axis)


def _heads(axis: Axis, one: int) -> tuple[int, list[int], list[int]]:
    """For what comes from or goes to rank `one` of the axis: the head of this rank's host, those of the hosts that
    `one` is not on, and the other ranks of this host. A head has the place on its host that `one` has on its own, so
    that all take turns."""
    start, place = axis.index // axis.mates * axis.mates, one % axis.mates
    heads = [i for i in range(place, axis.size, axis.mates) if i != one]
    return start + place, heads, [i for i in range(start, start + axis.mates) if i != start + place]


def _messages(x: Tensor, to: Sequence[int], by: Sequence[int], axis: Axis) -> tuple[dist.Work, Tensor]:
    """x to each of the ranks `to`, and a row from each of the ranks `by`."""
    rows = x.new_empty((len(by), x.numel()))
    there, here = ([x.numel() * (i in ranks) for i in range(axis.size)] for ranks in (to, by))
    sent = x.view(-1).repeat(len(to))
    return dist.all_to_all_single(rows.view(-1), sent, here, there, group=axis.group, async_op=True), rows


def shift(x: Tensor, axis: Axis, by: int) -> Flight:
    """The tensor of the rank that is `by` places before this one on the axis, the last before the first. For checks."""
    if by % axis.size == 0:
        return landed(x)
    x = x.contiguous()
    other = torch.empty_like(x)
    if axis.journal is not None:
        axis.journal.note("shift", x.shape, x.dtype)
    span = axis.ledger.launched(axis.name, "shift", x.numel() * x.element_size())
    return Flight([_shift(x.view(-1), other.view(-1), axis, by)], lambda: other, span, axis)


def _shift(x: Tensor, other: Tensor, axis: Axis, by: int) -> dist.Work:
    there, here = [0] * axis.size, [0] * axis.size
    there[(axis.index + by) % axis.size] = here[(axis.index - by) % axis.size] = len(x)
    return dist.all_to_all_single(other, x, here, there, group=axis.group, async_op=True)


Kind = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce", "copy"]

COLLECTIVES: dict[Kind, Callable[[Tensor, Axis], Flight]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "all_reduce": all_reduce,
    "copy": copy,
}
TRANSPOSE: dict[Kind, Kind] = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "all_reduce": "copy",
    "copy": "all_reduce",
}


@dataclass
class _Call:
    """What the two nodes of one collective share."""

    kind: Kind
    axis: Axis
    flight: Flight | None = None

    def land(self) -> Tensor:
        assert self.flight is not None
        flight, self.flight = self.flight, None
        return flight.wait()


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        call.flight = COLLECTIVES[call.kind](x, call.axis)
        return token(x)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.call.land(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        y = call.land()
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        call = ctx.call
        call.flight = COLLECTIVES[TRANSPOSE[call.kind]](dy, call.axis)
        return token(dy), None


def collective(kind: Kind, x: Tensor, axis: Axis) -> Steps:
    """A collective that autograd differentiates: launched now, awaited when the steps go on. Its backward is the
    transposed collective, launched where the forward waited and awaited where the forward launched."""
    if axis.size == 1:
        return x
    call = _Call(kind, axis)
    launched = _Launch.apply(x, call)
    yield Pause(sent=_sent(x.nbytes, axis) * (axis.size if kind == "all_gather" else 1))
    return _Wait.apply(launched, call)


def from_first(value: Any, axis: Axis) -> Any:
    """What the first rank of the axis has. For set-up, never inside a step."""
    if axis.size == 1:
        return value
    box = [value]
    with _blocking("from_first", axis):
        dist.broadcast_object_list(box, group=axis.group, group_src=0)
    return box[0]


def from_all(value: Any, axis: Axis) -> list[Any]:
    """What every rank of the axis has, in their order. For reports, never inside a step."""
    if axis.size == 1:
        return [value]
    box = [None] * axis.size
    with _blocking("from_all", axis):
        dist.all_gather_object(box, value, group=axis.group)
    return box


def gather_pieces(x: Tensor, axis: Axis) -> list[Tensor]:
    """Every rank's tensor, whatever its shape, in rank order. For reports and tests, never inside a step."""
    if axis.size == 1:
        return [x]
    shapes = from_all(tuple(x.shape), axis)
    numel = [torch.Size(shape).numel() for shape in shapes]
    padded = x.new_zeros(max(numel))
    padded[: x.numel()] = x.reshape(-1)
    whole = x.new_empty(axis.size * max(numel))
    with _blocking("gather_pieces", axis):
        dist.all_gather_single(whole, padded, group=axis.group)
    rows = whole.view(axis.size, -1)
    return [row[:n].view(shape) for row, n, shape in zip(rows, numel, shapes, strict=True)]
