"""gloo. Its own collectives are not always the best of what it can do.

* Its connection of two ranks carries one message at a time, either way. So between hosts, where time is the link's,
  what goes to lower ranks has a group of its own, and small messages have one where there are many.
* Its all_gather is a ring of p-1 turns that copies everything once more at its end. Between hosts that keeps every link
  busy, and what it sends leaves a host once. Inside one, sent from each rank to each, the same bytes take half the CPU
  time: small ones as copies in one all-to-all, large ones as they are, a place further at a time.
* Its reduce_scatter is an all-reduce inside and moves twice the bytes: `Transport.reduce_scatter` moves the least.
* Its reduce moves 1 + 1/p times the least, but no rank has to take in everyone's tensor alone.
* Its broadcast and reduce do not know of hosts: of a row of eight ranks on two hosts a broadcast crosses between them
  up to five times. Where hosts have several ranks each, one of them, the head, takes what comes from another host and
  hands it on, or sums what its host has and sends that: to each host everything crosses once.
* It calls back when a message has landed, and the thread that does can stamp the clock.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from cuboid.comm.ledger import Span
from cuboid.comm.transport.base import NewGroup, Result, Transport, Wait, Works, add

SMALL = 1 << 16  # bytes: up to them a message takes longer to wait for others than to be sent


class Gloo(Transport):
    def __init__(
        self, group: ProcessGroup, hosts: int, per_host: int, new_group: NewGroup | None, small: bool, wire: Any = dist
    ) -> None:
        super().__init__(group, hosts, per_host, new_group, small, wire)
        self.back = new_group() if new_group else None  # for what goes from higher ranks to lower
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
        """A row of `up` to each rank after this one, of `down` to each before it; `below` and `above` are what these
        send. Each way has a group of its own."""
        i, n, p = self.index, up.shape[1], self.size
        lower, upper = [n] * i + [0] * (p - i), [0] * (i + 1) + [n] * (p - 1 - i)
        send = self.wire.all_to_all_single
        return [
            send(below.view(-1), up.view(-1), lower, upper, group=self.group, async_op=True),
            send(above.view(-1), down.view(-1), upper, lower, group=self.back, async_op=True),
        ]

    def broadcast(self, block: Tensor, source: int, wait: Wait) -> tuple[Works, Result]:
        """By hosts, the second of two messages is sent where the first is awaited: ranks must wait in one order."""
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
        """By hosts, it waits for the sum of its own host before it returns. Sums of one host go the way back."""
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
            return [], lambda: x  # who only sends does not wait for it
        return [work], lambda: add([total, *sums.view(-1, *x.shape)])

    def _heads(self, one: int) -> tuple[int, list[int], list[int]]:
        """For what comes from or goes to rank `one`: the head of this rank's host, those of the hosts that `one` is not
        on, and the other ranks of this host. A head has the place on its host that `one` has on its own, so that all
        take turns."""
        start, place = self.index // self.mates * self.mates, one % self.mates
        heads = [i for i in range(place, self.size, self.mates) if i != one]
        return start + place, heads, [i for i in range(start, start + self.mates) if i != start + place]

    def _messages(self, x: Tensor, to: Sequence[int], by: Sequence[int]) -> tuple[Work, Tensor]:
        """x to each of the ranks `to`, and a row from each of the ranks `by`."""
        rows = x.new_empty((len(by), x.numel()))
        there, here = ([x.numel() * (i in ranks) for i in range(self.size)] for ranks in (to, by))
        sent = x.view(-1).repeat(len(to))
        return self.wire.all_to_all_single(rows.view(-1), sent, here, there, group=self.group, async_op=True), rows
