"""Pipelines: which blocks a stage has, which stages a rank has, and the order in which each rank plays them, as data.

A stage is consecutive blocks; the first has the embedding too, the last the final norm and the head. Stage s is played
by place s mod p of a pipe of p: with v stages each, a rank's are p apart. The order of each place is made by one small
function. Of m micro-batches, with F, B and W the times of a stage's forward, backward and the weight gradients in it:

    gpipe         all forwards, then all backwards                                          idle (p-1)(F+B)
    1f1b          so many forwards as places follow; then a forward and a backward in turn  idle (p-1)(F+B)
                  At most p micro-batches are alive.
    interleaved   the same with two or more stages per rank, hence shorter ones             idle (p-1)(F+B)
    zero-bubble   a backward leaves its weight gradients: they follow it by as many         idle (p-1)(F+B-2W)
                  backwards as there are places before, and fill the wait at the end
    beside        forwards beside backwards: twice as many ahead, and one more, so that     idle (p-1)(F+B)
                  both have what they need when they begin

A step takes v·m·(F+B) besides. torch.distributed.pipelining makes the same tables, but privately, inside of schedules
that want its own stages and groups; the tests compare ours with them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Any, NamedTuple

from cuboid.step.schedule import Move, Order, Schedule

Slots = Mapping[Move, tuple[Any, Any]]  # when moves begin and end


@dataclass(frozen=True)
class Split:
    """Blocks dealt to stages: so many to each, and stages to the places of a pipe."""

    blocks: tuple[int, ...]
    pipe: int = 1

    @classmethod
    def of(cls, layers: int, pipe: int, schedule: Schedule) -> "Split":
        """As the schedule says, or evenly; the first stages have one more where it does not go up. Raises if there are
        more stages than blocks."""
        stages, blocks = pipe * schedule.stages, schedule.split
        if pipe == 1 and (schedule.stages > 1 or blocks):
            raise ValueError(
                f"stages={schedule.stages} a rank, split={list(blocks)}: a pipe of one is not split; use pipe of 2 or "
                "more, or leave them out"
            )
        if stages > layers:
            raise ValueError(
                f"{layers} blocks cannot be split into {stages} stages, {schedule.stages} on each of pipe={pipe}; use "
                f"at most {layers} stages: " + " or ".join(_fitting(layers, pipe, schedule.stages))
            )
        if not blocks:
            blocks = tuple(layers // stages + (i < layers % stages) for i in range(stages))
        if len(blocks) != stages or sum(blocks) != layers or min(blocks) < 1:
            raise ValueError(
                f"split={list(blocks)} must name {stages} stages of a block or more, {layers} in all; such as "
                f"{[layers // stages + (i < layers % stages) for i in range(stages)]}"
            )
        return cls(blocks, pipe)

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return len(self.blocks) - 1

    def stages(self, place: int) -> range:
        """Those of a place of the pipe."""
        return range(place, len(self.blocks), self.pipe)

    def layers(self, stage: int) -> range:
        """The blocks of a stage."""
        starts = list(accumulate(self.blocks, initial=0))
        return range(starts[stage], starts[stage + 1])

    def stage_of(self, part: int) -> int:
        """The stage that has a part of the model, by its number among the embedding, the blocks, the last norm and the
        head; the number of stages for what is none of them."""
        of_blocks = [stage for stage in range(len(self.blocks)) for _ in self.layers(stage)]
        parts = [0, *of_blocks, self.last, self.last]
        return parts[part] if part < len(parts) else self.last + 1


def _fitting(layers: int, pipe: int, each: int) -> list[str]:
    found = [(layers // each, each)] if layers // each > 1 else []
    found.append((pipe, layers // pipe) if layers >= pipe else (layers, 1))
    return [f"pipe={places} with {stages} each" for places, stages in dict.fromkeys(found)]


# Orders


class Shape(NamedTuple):
    """Of a pipeline: places, stages of each, micro-batches of a step."""

    p: int
    v: int
    m: int

    @property
    def round(self) -> int:
        """Micro-batches that pass a stage before a rank turns to its next: about as many as there are places."""
        return self.m // max(1, self.m // self.p)

    def forwards(self, place: int) -> list[Move]:
        moves, (p, v, m), k = [], self, self.round
        for step in range(v * m):
            moves.append(Move("F", step // (k * v) * k + step % k, step // k % v * p + place))
        return moves

    def backwards(self, place: int) -> list[Move]:
        """Stages in reverse."""
        last = self.p * self.v - 1
        return [Move("B", batch, last - stage) for _, batch, stage in self.forwards(self.p - 1 - place)]

    def ahead(self, place: int, each: int) -> int:
        """Forwards before the first backward: to the last of its stages, and `each` for every place behind."""
        return (self.v - 1) * self.round + each * (self.p - 1 - place)


def gpipe(shape: Shape, place: int) -> Order:
    return [[move] for move in (*shape.forwards(place), *shape.backwards(place))]


def one_f_one_b(shape: Shape, place: int) -> Order:
    """
    >>> [str(move) for (move,) in one_f_one_b(Shape(p=2, v=1, m=3), 0)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    moves = in_turns(shape, place, shape.ahead(place, 1 if shape.v == 1 else 2))
    return [[move] for pair in moves for move in pair]


def zero_bubble(shape: Shape, place: int) -> Order:
    """
    >>> [str(move) for (move,) in zero_bubble(Shape(p=2, v=1, m=2), 1)]
    ['F0', 'B0', 'F1', 'B1', 'W0', 'W1']
    """
    order, left = list[list[Move]](), list[Move]()
    for pair in in_turns(shape, place, shape.ahead(place, 1)):
        for move in pair:
            order.append([move])
            if move.kind == "B":
                left.append(move._replace(kind="W"))
                if len(left) > place:
                    order.append([left.pop(0)])
    return [*order, *([move] for move in left)]


def beside(shape: Shape, place: int) -> Order:
    """
    >>> ["+".join(map(str, moves)) for moves in beside(Shape(p=2, v=1, m=3), 1)]
    ['F0', 'F1+B0', 'F2+B1', 'B2']
    """
    return in_turns(shape, place, shape.ahead(place, 2) + 1)


def in_turns(shape: Shape, place: int, ahead: int) -> Order:
    """So many forwards, then one forward and one backward at a time, then the backwards that are left."""
    forwards, backwards = shape.forwards(place), shape.backwards(place)
    ahead = min(ahead, len(forwards))
    pairs = [list(pair) for pair in zip(forwards[ahead:], backwards, strict=False)]
    return [*([move] for move in forwards[:ahead]), *pairs, *([move] for move in backwards[len(pairs) :])]


ORDERS: Mapping[str, Callable[[Shape, int], Order]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": one_f_one_b,
    "zero-bubble": zero_bubble,
    "beside": beside,
}


def orders(schedule: Schedule, pipe: int, count: int) -> list[Order]:
    """Of every place of a pipe, for so many micro-batches. Raises if the schedule cannot deal them out."""
    shape = Shape(pipe, schedule.stages, count)
    if pipe == 1:
        return [schedule.order(count)]
    rounds = max(1, count // pipe)
    if schedule.stages > 1 and count % rounds:
        fits = [n for n in range(1, 2 * count + pipe) if n % max(1, n // pipe) == 0]
        near = [max(n for n in fits if n < count), min(n for n in fits if n > count)]
        raise ValueError(
            f"{count} micro-batches cannot be dealt out in rounds of about pipe={pipe} to {schedule.stages} stages a "
            f"rank; use {near[0]} or {near[1]} micro-batches, or one stage per rank"
        )
    return [ORDERS[schedule.pipeline](shape, place) for place in range(pipe)]


def backward_until(lowest: int, orders: Sequence[Order]) -> list[Order]:
    """The orders without the backwards of stages below `lowest`, which have nothing to train.

    >>> [[str(move) for (move,) in order] for order in backward_until(1, orders(Schedule(), 2, 2))]
    [['F0', 'F1'], ['F0', 'B0', 'F1', 'B1']]
    """
    kept = [[[m for m in moves if m.kind == "F" or m.stage >= lowest] for moves in order] for order in orders]
    return [[moves for moves in order if moves] for order in kept]


# What a move needs, and when it can run


def needed(move: Move, last: int) -> Move | None:
    """The move of another stage whose message a move waits for."""
    if move.kind == "F" and move.stage > 0:
        return move._replace(stage=move.stage - 1)
    return move._replace(stage=move.stage + 1) if move.kind == "B" and move.stage < last else None


def no_time(_: Move) -> float:
    return 0.0


def simulate(
    orders: Sequence[Order],
    seconds: Callable[[Move], Any],
    hop: Callable[[Move], Any] = no_time,
    later: Callable[[Any, Any], Any] = max,
) -> Slots:
    """When every move begins and ends if the message that it makes takes `hop`, those of a lane one after another.
    Moves beside each other begin when all have what they need, and end together. Seconds may be arrays, of several
    pipelines in the same order, if `later` of two of them is one. Raises if places wait for one another."""
    last = max(move.stage for order in orders for moves in order for move in moves)
    slots: dict[Move, tuple[Any, Any]] = {}
    landed: dict[Move, Any] = {}
    lanes: dict[tuple[str, int], Any] = {}  # by kind and sender: when they are free
    at, free = [0] * len(orders), list[Any]([0.0] * len(orders))
    while any(i < len(order) for i, order in zip(at, orders, strict=True)):
        before = sum(at)
        for place, order in enumerate(orders):
            while at[place] < len(order):
                moves = order[at[place]]
                waits = [each for each in (needed(move, last) for move in moves) if each is not None]
                if any(each not in slots for each in waits):
                    break
                start = reduce(later, (landed[each] for each in waits), free[place])
                free[place] = end = start + sum(seconds(move) for move in moves)
                slots |= dict.fromkeys(moves, (start, end))
                for move in moves:
                    lane = move.kind, place
                    landed[move] = lanes[lane] = later(end, lanes.get(lane, 0.0)) + hop(move)
                at[place] += 1
        if sum(at) == before:
            waiting = [order[i][0] for i, order in zip(at, orders, strict=True) if i < len(order)]
            raise ValueError(f"places of the pipe wait for one another: {', '.join(map(str, waiting))} cannot begin")
    return slots


def bubble(orders: Sequence[Order], seconds: Callable[[Move], float]) -> float:
    """The share of the step in which places are idle."""
    slots = simulate(orders, seconds)
    busy = sum(seconds(move) for move in slots)
    return 1 - busy / (len(orders) * max(end for _, end in slots.values()))
