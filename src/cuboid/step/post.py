"""Messages between the stages of a pipeline: the residual stream forward, its gradient backward, a sub-batch at a time.

What a stage makes is sent as soon as it is made, and nobody waits for that before the step ends. A receive is posted
one element of the order ahead, so that the message is on its way while the rank still computes. A stage waits inside of
its first layer or, backward, its last (`border`): each is the other's transpose, and the weights of the layer behind it
are gathered meanwhile.

INVARIANT: a lane carries messages in the order in which the sender's order has them, sub-batches by number, whenever
they are made; receives are posted in that order, because every place knows the orders of all.
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
from cuboid.step.pipeline import needed
from cuboid.step.runner import At
from cuboid.step.schedule import Move, Order, Task


def border(itemsize: int) -> tuple[Layer, Layer]:
    """The first layer of a stage (`arrive`) and the last (`depart`): where X is a `Flight`, and where dY is."""

    def land(at: Any, flight: Any) -> Steps:
        s, b, d = (len(each) for each in at.place.residual)
        yield Pause(sent=s * b * d * itemsize, axis="pipe")
        return flight.wait()

    def pass_on(at: Any, X: Tensor) -> Steps:
        return X
        yield

    return Transposable(land, pass_on), Transposable(pass_on, land)


class Post:
    """Of one step, at one place of a pipe, in which backward ends with stage `lowest`. Micro-batches are split into
    `count` sub-batches; messages have the dtype and the device of `like`."""

    def __init__(
        self,
        lanes: Lanes,
        place: int,
        orders: Sequence[Order],
        ats: Sequence[At],
        count: int,
        like: Tensor,
        lowest: int = 0,
    ) -> None:
        self._ats, self._count, self._like, self._lowest = ats, count, like, lowest
        self.last = max(move.stage for order in orders for moves in order for move in moves)
        self._out = {"F": lanes.to_next, "B": lanes.to_previous}
        self._in = {"F": lanes.from_previous, "B": lanes.from_next}
        neighbours = {"F": orders[place - 1], "B": orders[(place + 1) % len(orders)]}
        self._coming = {kind: deque(self._sent_on(kind, order)) for kind, order in neighbours.items()}
        self._flights: dict[Move, list[Flight]] = {}
        self._made: dict[Move, dict[int, Tensor]] = {}  # sub-batches that wait for those before them
        self._next: Counter[Move] = Counter()  # to be sent
        self._sent = deque[Flight]()

    def _sent_on(self, kind: str, order: Order) -> list[Move]:
        """The moves here for which a neighbour sends something, in its order."""
        further = [self.receiver(move) for moves in order for move in moves if move.kind == kind]
        return [move for move in further if (0 if kind == "F" else self._lowest) <= move.stage <= self.last]

    @staticmethod
    def receiver(move: Move) -> Move:
        """The move of another stage that needs what this one makes."""
        return move._replace(stage=move.stage + (1 if move.kind == "F" else -1))

    def expect(self, moves: Sequence[Move]) -> None:
        """Post the receives that these moves need, and those that come before them."""
        for move in moves:
            while needed(move, self.last) is not None and move not in self._flights:
                coming = self._coming[move.kind].popleft()
                lane, what = self._in[move.kind], _named(coming)
                assert lane is not None
                shapes = [
                    [len(each) for each in at.place.residual] for at in self._ats[coming.batch].split(self._count)
                ]
                self._flights[coming] = [receive(self._like.new_empty(shape), lane, what) for shape in shapes]

    def take(self, move: Move) -> list[Flight]:
        """By sub-batch."""
        return self._flights.pop(move)

    def sending(self, task: Task, move: Move) -> Task:
        """The task of a move, and the messages that it makes."""
        return Task([self._sending(steps, move, i) for i, steps in enumerate(task.steps)], task.finish)

    def _sending(self, steps: Steps, move: Move, sub_batch: int) -> Steps:
        made = yield from steps
        waiting = self._made.setdefault(move, {})
        waiting[sub_batch] = made
        del made
        lane, what = self._out[move.kind], _named(self.receiver(move))
        assert lane is not None
        while self._next[move] in waiting:
            self._sent.append(send(waiting.pop(self._next[move]), lane, what))
            self._next[move] += 1

    def reap(self) -> None:
        """Let go of messages that have been sent."""
        while self._sent and self._sent[0].over:
            self._sent.popleft().wait()

    def finish(self) -> None:
        """Wait for what was sent."""
        while self._sent:
            self._sent.popleft().wait()


def _named(move: Move) -> str:
    return f"{'forward' if move.kind == 'F' else 'backward'} of micro-batch {move.batch} for stage {move.stage}"


def exchange(x: Tensor, lanes: Lanes, first: bool) -> Tensor:
    """The sum of x of the first place of a pipe and of the last, on both; added in the same order."""
    if not x.numel():
        return x
    out, back = (lanes.to_previous, lanes.from_previous) if first else (lanes.to_next, lanes.from_next)
    assert out is not None
    assert back is not None
    other, sent = receive(torch.empty_like(x), back, "shared gradients"), send(x, out, "shared gradients")
    theirs = other.wait()
    sent.wait()
    return x + theirs if first else theirs + x
