"""NCCL. Its own collectives are fast, but it adds bf16 in bf16, and each call launches a kernel. So the messages of one
collective are launched together.

On a GPU `wait` only makes the stream wait. So events are recorded on the stream and read with the ledger, for a sample
of the collectives that stands for all.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.comm.ledger import Span
from cuboid.comm.transport.base import Result, Transport, Works
from cuboid.device import Stamps, any_gpu
from cuboid.fuse import fuse_on

TIMED = 7  # one of every 7 collectives of a kind is timed; prime, so that it is not the same one in every layer


class TimedShare:
    """Which collectives of a kind are timed: one of every `TIMED` over all steps, or all if a step has fewer."""

    def __init__(self) -> None:
        self._calls = self._number = 0
        self._few = False

    def weight(self, number: int) -> int:
        """The number of collectives that this one stands for, 0 if it is not timed. `number`: in its step, from 1."""
        if number == 1:
            self._few = 0 < self._number < TIMED
        self._number = number
        self._calls += 1
        if self._few and number < TIMED:
            return 1
        return TIMED if self._calls % TIMED == 0 else 0


class Nccl(Transport):
    def all_gather_each(self, xs: Sequence[Tensor], wholes: Sequence[Tensor]) -> Works:
        return self._together(partial(self.wire.all_gather_single, group=self.group, async_op=True), wholes, xs, None)

    def reduce_scatter(self, xs: Sequence[Tensor], dtype: torch.dtype) -> tuple[Works, Result]:
        """NCCL's own in fp32 or better; in low precision an all-to-all and a local sum."""
        like, p, lengths = xs[0], self.size, [x.numel() // self.size for x in xs]
        if torch.promote_types(like.dtype, torch.float32) == like.dtype:
            mine = like.new_empty(sum(lengths))
            scatter = partial(self.wire.reduce_scatter_single, group=self.group, async_op=True)
            return self._together(scatter, mine.split(lengths), [x.view(-1) for x in xs], None), lambda: mine.to(dtype)
        if p == 2:  # a rank's own half stays
            received = like.new_empty(sum(lengths))
            rows, halves = received.split(lengths), [x.view(2, -1) for x in xs]
            works = self._together(
                lambda row, half: self.shift(half, row, 1), rows, [half[1 - self.index] for half in halves], like.device
            )
            own = [half[self.index] for half in halves]
            each: list[tuple[Tensor, ...]] = [
                (a, b) if self.index == 0 else (b, a) for a, b in zip(own, rows, strict=True)
            ]
        else:  # a row of everything from each rank
            received = like.new_empty(p, sum(lengths))
            rows = received.split(lengths, 1)
            exchange = partial(self.wire.all_to_all, group=self.group, async_op=True)
            parts = [list(x.view(p, -1).unbind()) for x in xs]
            works = self._together(exchange, [list(row.unbind()) for row in rows], parts, like.device)
            each, lengths = [received.unbind()], [sum(lengths)]

        def land() -> Tensor:
            total = received.new_empty(sum(lengths), dtype=dtype)  # `like` would keep what was sent alive
            for place, summands in zip(total.split(lengths), each, strict=True):
                fuse_on(total.device)(add_up)(place, *summands)
            return total

        return works, land

    def _together(
        self, launch: Callable[[Any, Any], Any], outs: Sequence[Any], xs: Sequence[Any], device: torch.device | None
    ) -> Works:
        """One launch of NCCL for several messages. Without `device` PyTorch has one call for all of them."""
        if len(xs) == 1:
            return [launch(outs[0], xs[0])]
        return self._launch_all(launch, outs, xs, device).works

    def _launch_all(self, launch: Any, outs: Any, xs: Any, device: torch.device | None) -> Any:
        with dist._coalescing_manager(self.group, device, async_ops=True) as together:
            for out, x in zip(outs, xs, strict=True):
                launch(out, x)
        return together

    @cached_property
    def _samples(self) -> defaultdict[str, TimedShare]:
        return defaultdict(TimedShare)

    @cached_property
    def _has_events(self) -> bool:
        return any_gpu()  # a dry run may have none

    def stamp(self, works: Works, span: Span, listed: bool) -> Stamps | None:
        weight = self._samples[span.kind].weight(span.entry.calls)
        return Stamps(1 if listed else weight) if self._has_events else None


def add_up(total: Tensor, *summands: Tensor) -> None:
    """Their sum, first to last in fp32 or better, into `total`."""
    wide = torch.promote_types(summands[0].dtype, torch.float32)
    sum_of_first = summands[0].to(wide)
    for each in summands[1:]:
        sum_of_first += each
    total.copy_(sum_of_first)
