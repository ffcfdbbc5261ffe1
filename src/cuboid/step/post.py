"""Messages between the stages of a pipeline: the residual stream forward, its gradient backward, per sub-batch.

A stage sends its output as soon as it is computed, and waits for the send only at the end of the step. It posts a
receive one element of the order ahead, so that the message is in flight while the rank still computes. A stage waits in
its first layer or, backward, in its last (`border`). These two are transposes, and the weights of the layer next to
them are gathered meanwhile.

INVARIANT: a lane carries messages in the sender's order, sub-batches by number, whenever they are computed. Receives
are posted in that order, because every place knows the orders of all.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuboid.comm.collectives import receive, send
from cuboid.comm.flight import Flight, Pause, Steps
from cuboid.mesh.mesh import Lanes
from cuboid.step.op import Layer, Transposable
from cuboid.step.pipeline import needed, receiver
from cuboid.step.runner import At
from cuboid.step.schedule import Move, Order, Task


def border(itemsize: int) -> tuple[Layer, Layer]:
    """The first layer of a stage, whose X is a `Flight`, and the last, whose dY is one."""

    def land(at: Any, flight: Any) -> Steps:
        s, b, d = (len(each) for each in at.place.residual)
        yield Pause(sent=s * b * d * itemsize)
        return flight.wait()

    def pass_on(at: Any, X: Tensor) -> Steps:
        return X
        yield

    return Transposable(land, pass_on), Transposable(pass_on, land)


class Post:
    """The messages of one step at one place of a pipe. Forward ends with stage `last`, backward with stage `lowest`.
    Micro-batches are split into `count` sub-batches. Messages have the dtype and device of `like`."""

    def __init__(
        self,
        lanes: Lanes,
        place: int,
        orders: Sequence[Order],
        ats: Sequence[At],
        count: int,
        like: Tensor,
        last: int,
        lowest: int = 0,
    ) -> None:
        self._ats, self._count, self._like, self._last, self._lowest = ats, count, like, last, lowest
        self._out = {"F": lanes.to_next, "B": lanes.to_previous}
        self._in = {"F": lanes.from_previous, "B": lanes.from_next}
        neighbours = {"F": orders[place - 1], "B": orders[(place + 1) % len(orders)]}
        self._coming = {kind: deque(self._sent_on(kind, order)) for kind, order in neighbours.items()}
        self._flights: dict[Move, list[Flight]] = {}
        self._made: dict[Move, dict[int, Tensor]] = {}  # sub-batches to be sent after earlier ones
        self._next: Counter[Move] = Counter()  # number of the next sub-batch to send
        self._sent = deque[Flight]()

    def _sent_on(self, kind: str, order: Order) -> list[Move]:
        """The moves of this place that receive a message from a neighbour, in its order."""
        receivers = [receiver(move) for moves in order for move in moves if move.kind == kind]
        return [move for move in receivers if (0 if kind == "F" else self._lowest) <= move.stage <= self._last]

    def expect(self, moves: Sequence[Move]) -> None:
        """Post the receives of these moves, and all before them in the lane."""
        for move in moves:
            while needed(move, self._last) is not None and move not in self._flights:
                coming = self._coming[move.kind].popleft()
                lane, what = self._in[move.kind], _named(coming)
                assert lane is not None
                shapes = [
                    [len(each) for each in at.place.residual] for at in self._ats[coming.batch].split(self._count)
                ]
                self._flights[coming] = [receive(self._like.new_empty(shape), lane, what) for shape in shapes]

    def take(self, move: Move) -> list[Flight]:
        """The messages that a move waits for, by sub-batch."""
        return self._flights.pop(move)

    def sending(self, task: Task, move: Move) -> Task:
        """The task of a move, which also sends its outputs."""
        return Task([self._sending(steps, move, i) for i, steps in enumerate(task.steps)], task.finish)

    def _sending(self, steps: Steps, move: Move, sub_batch: int) -> Steps:
        made = yield from steps
        waiting = self._made.setdefault(move, {})
        waiting[sub_batch] = made
        del made
        lane, what = self._out[move.kind], _named(receiver(move))
        assert lane is not None
        while self._next[move] in waiting:
            self._sent.append(send(waiting.pop(self._next[move]), lane, what))
            self._next[move] += 1

    def reap(self) -> None:
        """Release messages that have been sent."""
        while self._sent and self._sent[0].over:
            self._sent.popleft().wait()

    def finish(self) -> None:
        """Wait until all messages have been sent."""
        while self._sent:
            self._sent.popleft().wait()


def _named(move: Move) -> str:
    return f"{'forward' if move.kind == 'F' else 'backward'} of micro-batch {move.batch} for stage {move.stage}"


def exchange(x: Tensor, lanes: Lanes, first: bool) -> Tensor:
    """The sum of x over the first and the last place of a pipe, on both, added in the same order."""
    if not x.numel():
        return x
    out, back = (lanes.to_previous, lanes.from_previous) if first else (lanes.to_next, lanes.from_next)
    assert out is not None
    assert back is not None
    other, sent = receive(torch.empty_like(x), back, "shared gradients"), send(x, out, "shared gradients")
    theirs = other.wait()
    sent.wait()
    return x + theirs if first else theirs + x
