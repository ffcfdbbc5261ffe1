"""What a transport does, and its default: the backend's own collective of the same name.

`comm/collectives.py` says what a collective means and counts it; a transport launches its messages over one group. Each
method returns what must be awaited and, if the result is not a tensor it was given, a function that makes the result
afterwards. p is the size of the group.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from cuboid.comm.ledger import Span
from cuboid.device import Stamps

Works = Sequence[Work]
Result = Callable[[], Tensor]
Wait = Callable[[Work], object]  # for a message in the midst of a collective, in the collective's books
NewGroup = Callable[[], ProcessGroup]


class Transport:
    """Sends over one group, as one rank sees it; for the arguments see `transport_over`. `wire` launches messages:
    torch.distributed, or something with the same functions that sends nothing."""

    least_alone = 1 << 19  # bytes: smaller tensors are packed, since a message costs more than a copy (on gloo)

    def __init__(
        self, group: ProcessGroup, hosts: int, per_host: int, new_group: NewGroup | None, small: bool, wire: Any = dist
    ) -> None:
        self.group, self.size, self.index, self.wire = group, group.size(), group.rank(), wire
        self._own_stays = self.size == 2  # a rank does not send its own summand to itself

    def all_gather(self, x: Tensor, whole: Tensor) -> Works:
        """Gathers x [r, ...] of every rank into `whole` [p·r, ...]."""
        return [self.wire.all_gather_single(whole, x, group=self.group, async_op=True)]

    def all_gather_each(self, xs: Sequence[Tensor], wholes: Sequence[Tensor]) -> Works:
        """Gathers several tensors, each into its own output."""
        return [work for x, whole in zip(xs, wholes, strict=True) for work in self.all_gather(x, whole)]

    def all_reduce(self, total: Tensor) -> Works:
        """Sums in place."""
        return [self.wire.all_reduce(total, group=self.group, async_op=True)]

    def broadcast(self, block: Tensor, source: int, wait: Wait) -> tuple[Works, Result]:
        """The block of rank `source`; other ranks' blocks may be overwritten."""
        work = self.wire.broadcast(block, group=self.group, group_src=source, async_op=True)
        return [work], lambda: block

    def reduce(self, x: Tensor, target: int, wait: Wait) -> tuple[Works, Result]:
        """The sum on rank `target`, something undefined on the others. The memory of x is reused."""
        return [self.wire.reduce(x, group=self.group, group_dst=target, async_op=True)], lambda: x

    def shift(self, x: Tensor, other: Tensor, by: int) -> Work:
        """Sends x [n] to the rank `by` places further, cyclically, and receives other [n]."""
        there, here = [0] * self.size, [0] * self.size
        there[(self.index + by) % self.size] = here[(self.index - by) % self.size] = x.numel()
        return cast(Work, self.wire.all_to_all_single(other, x, here, there, group=self.group, async_op=True))

    def reduce_scatter(self, xs: Sequence[Tensor], dtype: torch.dtype) -> tuple[Works, Result]:
        """For each x [p·r, ...] this rank's shard of the sum, in `dtype`, flat and concatenated.

        An all-to-all followed by a local sum sends the least and lets us sum in fp32 or better.
        """
        like, p, i, lengths = xs[0], self.size, self.index, [x.numel() // self.size for x in xs]
        wide, rows = torch.promote_types(like.dtype, torch.float32), p - self._own_stays
        received = like.new_empty(rows * sum(lengths))
        works, each = list[Work](), list[Sequence[Tensor]]()
        places = [received] if len(xs) == 1 else received.split([rows * n for n in lengths])
        for x, place in zip(xs, places, strict=True):
            launched, parts = self._exchange(x.view(p, -1), place.view(rows, -1))
            works += launched
            each.append(parts)

        def land() -> Tensor:
            total = received.to(wide) if p == 2 else received.new_empty(sum(lengths), dtype=wide)
            for place, parts in zip([total] if len(each) == 1 else total.split(lengths), each, strict=True):
                place.add_(parts[i]) if p == 2 else add(parts, place)
            return total.to(dtype)

        return works, land

    def _exchange(self, x: Tensor, received: Tensor) -> tuple[Works, Sequence[Tensor]]:
        """Sends a row of x [p, n] to each rank; returns the rows that they send here, by rank."""
        if self._own_stays:
            (first, second), row = x.unbind(), received.view(-1)
            if self.index:
                return [self.shift(first, row, 1)], (row, second)
            return [self.shift(second, row, 1)], (first, row)
        return [self.wire.all_to_all_single(received, x, group=self.group, async_op=True)], received.unbind()

    def stamp(self, works: Works, span: Span, listed: bool) -> Stamps | None:
        """Record when the works land. `listed`: the span itself will be read."""
        return None

    # Outside of steps: these block

    def from_first(self, value: Any) -> Any:
        """The first rank's value."""
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def from_all(self, value: Any) -> list[Any]:
        """All ranks' values."""
        box = [None] * self.size
        dist.all_gather_object(box, value, group=self.group)
        return box


def add(parts: Sequence[Tensor], total: Tensor | None = None) -> Tensor:
    """The sum in fp32 or better, first to last. `torch.sum` adds in another order at a tensor's end, so that ranks
    which hold the same value at different offsets would disagree in its last bit."""
    first, second, *rest = parts
    total = torch.add(first.to(torch.promote_types(first.dtype, torch.float32)), second, out=total)
    for part in rest:
        total += part
    return total
