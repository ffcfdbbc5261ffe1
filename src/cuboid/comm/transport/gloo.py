"""gloo. Its own collectives are not always the fastest way to use it.

* A connection of two ranks carries one message at a time, in either direction. So between hosts, where the link takes
  the time, messages to lower ranks have their own group, and so do small messages if there are many.
* Its all_gather is a ring of p-1 rounds with one more copy at the end. Between hosts that keeps every link busy, and
  each byte leaves a host once. Inside a host, direct messages take half the CPU time for the same bytes: small ones as
  copies in one all-to-all, large ones rank by rank.
* Its reduce_scatter is an all-reduce inside and sends twice the bytes: `Transport.reduce_scatter` sends the least.
* Its reduce sends 1 + 1/p times the least, but no rank must receive all tensors alone.
* Its broadcast and reduce ignore hosts: over eight ranks on two hosts a broadcast crosses between them up to five
  times. Where hosts have several ranks each, one of them, the head, receives from other hosts and passes on inside its
  own, or sums inside its own and sends the sum. So everything crosses to each host once.
* It calls back when a message has landed, in a thread that can read the clock.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from cuboid.comm.ledger import Span
from cuboid.comm.transport.base import NewGroup, Result, Transport, Wait, Works, add

SMALL = 1 << 16  # bytes: smaller messages wait longer for others than sending takes


class Gloo(Transport):
    def __init__(
        self, group: ProcessGroup, hosts: int, per_host: int, new_group: NewGroup | None, small: bool, wire: Any = dist
    ) -> None:
        super().__init__(group, hosts, per_host, new_group, small, wire)
        self.back = new_group() if new_group else None  # for messages from higher ranks to lower
        self.aside = new_group() if new_group and small else None  # for small messages
        self.mates = per_host if self.back and 1 < per_host < self.size else 1  # ranks of a host that share messages
        self._ring = hosts > 1 and self.size > 2
        self._own_stays = self.size == 2 or self.back is not None

    def stamp(self, works: Works, span: Span, listed: bool) -> None:
        for work in works if listed else ():  # a call into Python takes time from the rank
            work.get_future().add_done_callback(lambda _: setattr(span, "landed", time.perf_counter()))

    def _is_aside(self, x: Tensor) -> bool:
        return self.aside is not None and x.nbytes <= SMALL

    def all_gather(self, x: Tensor, whole: Tensor) -> Works:
        if self._is_aside(whole):
            return [self.wire.all_gather_single(whole, x, group=self.aside, async_op=True)]
        if self._ring:
            return super().all_gather(x, whole)
        i, row, rows = self.index, x.view(-1), whole.view(self.size, x.numel())
        if self.size > 2 and x.nbytes < self.least_alone:
            return [self.wire.all_to_all_single(rows, row.repeat(self.size, 1), group=self.group, async_op=True)]
        places = rows.unbind()
        if self.back is None or self.size > 2:
            works: Works = [self.shift(row, places[i - by], by) for by in range(1, self.size)]
        else:
            x = x.view(1, -1)
            works = self._swap(x[i:], rows[:i], x[:i], rows[i + 1 :])
        places[i].copy_(row)
        return works

    def all_reduce(self, total: Tensor) -> Works:
        group = self.aside if self._is_aside(total) else self.group
        return [self.wire.all_reduce(total, group=group, async_op=True)]

    def _exchange(self, x: Tensor, received: Tensor) -> tuple[Works, Sequence[Tensor]]:
        if self.back is None:
            return super()._exchange(x, received)
        i = self.index
        below, above = received[:i], received[i:]
        return self._swap(x[i + 1 :], below, x[:i], above), [*below, x[i], *above]

    def _swap(self, up: Tensor, below: Tensor, down: Tensor, above: Tensor) -> Works:
        """Sends a row of `up` to each rank after this one and of `down` to each before it; receives `below` from ranks
        before it and `above` from ranks after it. Each direction has its own group."""
        i, n, p = self.index, up.shape[1], self.size
        lower, upper = [n] * i + [0] * (p - i), [0] * (i + 1) + [n] * (p - 1 - i)
        send = self.wire.all_to_all_single
        return [
            send(below.view(-1), up.view(-1), lower, upper, group=self.group, async_op=True),
            send(above.view(-1), down.view(-1), upper, lower, group=self.back, async_op=True),
        ]

    def broadcast(self, block: Tensor, source: int, wait: Wait) -> tuple[Works, Result]:
        """By hosts, `wait` for the first message sends the second. INVARIANT: ranks wait in the same order."""
        if self.mates == 1:
            return super().broadcast(block, source, wait)
        head, heads, others = self._heads(source)
        is_head, first = self.index == head, self.index == source
        work, rows = self._messages(block, heads if first else [], [source] if self.index in heads else [])

        def hand_on() -> Tensor:
            mine = rows[0] if len(rows) else block
            work, handed = self._messages(mine, others if is_head else [], [] if is_head else [head])
            wait(work)
            return (mine if is_head else handed[0]).view(block.shape)

        return [work], hand_on

    def reduce(self, x: Tensor, target: int, wait: Wait) -> tuple[Works, Result]:
        """By hosts, it waits for its own host's sum before it returns. Without hosts it uses the group `back`."""
        if self.mates == 1:
            group = self.back or self.group
            return [self.wire.reduce(x, group=group, group_dst=target, async_op=True)], lambda: x
        head, heads, others = self._heads(target)
        is_head, last = self.index == head, self.index == target
        work, rows = self._messages(x, [] if is_head else [head], others if is_head else [])
        wait(work)
        total = add([x, *rows.view(-1, *x.shape)]) if is_head else x
        work, sums = self._messages(total, [target] if self.index in heads else [], heads if last else [])
        if not last:
            return [], lambda: x  # a rank that only sends does not wait
        return [work], lambda: add([total, *sums.view(-1, *x.shape)])

    def _heads(self, one: int) -> tuple[int, list[int], list[int]]:
        """For messages from or to rank `one`: the head of this rank's host, the heads of hosts other than `one`'s, and
        the other ranks of this host. A head has the same place on its host as `one`, so that ranks share the work."""
        start, place = self.index // self.mates * self.mates, one % self.mates
        heads = [i for i in range(place, self.size, self.mates) if i != one]
        return start + place, heads, [i for i in range(start, start + self.mates) if i != start + place]

    def _messages(self, x: Tensor, to: Sequence[int], by: Sequence[int]) -> tuple[Work, Tensor]:
        """Sends x to each of the ranks `to`, and receives a row from each of the ranks `by`."""
        rows = x.new_empty((len(by), x.numel()))
        there, here = ([x.numel() * (i in ranks) for i in range(self.size)] for ranks in (to, by))
        sent = x.view(-1).repeat(len(to))
        return self.wire.all_to_all_single(rows.view(-1), sent, here, there, group=self.group, async_op=True), rows
