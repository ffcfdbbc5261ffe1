"""Pipelines: the blocks of each stage, the stages of each rank, and the order in which each rank runs them, as data.

A stage is consecutive blocks. The first also has the embedding, the last the final norm and the head. Stage s runs at
place s mod p of a pipe of p places; with v stages per place, a rank's stages are p apart. One small function makes the
order of each place. m is the number of micro-batches; F, B and W are the times of a stage's forward, of its backward
and of the weight gradients in it:

    gpipe         all forwards, then all backwards                                          idle (p-1)(F+B)
    1f1b          one forward per following place, then forward and backward in turn;       idle (p-1)(F+B)
                  at most p micro-batches are alive
    interleaved   the same with two or more stages per rank, hence shorter ones             idle (p-1)(F+B)
    zero-bubble   a backward postpones its weight gradients by as many backwards as         idle (p-1)(F+B-2W)
                  there are earlier places; they fill the wait at the end
    beside        forwards beside backwards, with twice as many forwards ahead, plus one,   idle (p-1)(F+B)
                  so that both have their inputs when they begin

The rest of a step takes v·m·(F+B). torch.distributed.pipelining makes the same tables, except for beside, but
privately, inside schedules that need its own stages and groups; the tests compare ours with them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Any, NamedTuple

from cuboid.step.schedule import Move, Order, Schedule

Slots = Mapping[Move, tuple[Any, Any]]  # start and end of each move


@dataclass(frozen=True)
class Split:
    """The number of blocks of each stage, and the number of places of the pipe."""

    blocks: tuple[int, ...]
    pipe: int = 1

    @classmethod
    def of(cls, layers: int, pipe: int, schedule: Schedule) -> "Split":
        """As the schedule says, or evenly, with the remainder in the first stages. Raises if there are more stages than
        blocks."""
        stages, blocks = pipe * schedule.stages, schedule.split
        if pipe == 1 and (schedule.stages > 1 or blocks):
            raise ValueError(
                f"stages={schedule.stages} per rank, split={list(blocks)}: a pipe of one is not split; use pipe of 2 "
                "or more, or leave them out"
            )
        if stages > layers:
            raise ValueError(
                f"{layers} blocks cannot be split into {stages} stages, {schedule.stages} on each of pipe={pipe}; "
                f"use at most {layers} stages: " + " or ".join(_fitting(layers, pipe, schedule))
            )
        if not blocks:
            blocks = tuple(layers // stages + (i < layers % stages) for i in range(stages))
        if len(blocks) != stages or sum(blocks) != layers or min(blocks) < 1:
            raise ValueError(
                f"split={list(blocks)} must have {stages} stages of a block or more, {layers} in all; such as "
                f"{[layers // stages + (i < layers % stages) for i in range(stages)]}"
            )
        return cls(blocks, pipe)

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return len(self.blocks) - 1

    def stages(self, place: int) -> range:
        """The stages of a place."""
        return range(place, len(self.blocks), self.pipe)

    def layers(self, stage: int) -> range:
        """The blocks of a stage."""
        starts = list(accumulate(self.blocks, initial=0))
        return range(starts[stage], starts[stage + 1])

    def stage_of(self, module: int) -> int:
        """The stage of a module, numbered among embedding, blocks, final norm and head; else the number of stages."""
        of_blocks = [stage for stage in range(len(self.blocks)) for _ in self.layers(stage)]
        stages = [0, *of_blocks, self.last, self.last]
        return stages[module] if module < len(stages) else self.last + 1


def _fitting(layers: int, pipe: int, schedule: Schedule) -> list[str]:
    """Pipes that have a block or more for each stage, and as many stages per rank as the schedule allows."""
    each, least = schedule.stages, 2 if schedule.pipeline == "interleaved" else 1
    found = [(layers // each, each), (pipe, layers // pipe) if layers // pipe >= least else (layers // least, least)]
    fits = [f"pipe={places} with {stages} each" for places, stages in dict.fromkeys(found) if places > 1]
    return fits or [f"pipe={min(pipe, layers)} with 1 each, in another schedule"]


# Orders


class Shape(NamedTuple):
    """The shape of a pipeline: p places, v stages per place, m micro-batches per step."""

    p: int
    v: int
    m: int

    @property
    def round_size(self) -> int:
        """Micro-batches that run through a stage before a rank turns to its next stage: about p."""
        return self.m // max(1, self.m // self.p)

    def forwards(self, place: int) -> list[Move]:
        """The forwards of a place: rounds of k micro-batches, each through one of its stages after another."""
        moves, (p, v, m), k = [], self, self.round_size
        for step in range(v * m):  # (r·v + c)·k + i: the i-th micro-batch of round r, in the c-th stage of the place
            moves.append(Move("F", step // (k * v) * k + step % k, step // k % v * p + place))
        return moves

    def backwards(self, place: int) -> list[Move]:
        """The backwards of a place, through its stages in reverse."""
        last = self.p * self.v - 1
        return [Move("B", batch, last - stage) for _, batch, stage in self.forwards(self.p - 1 - place)]

    def ahead(self, place: int, per_place: int) -> int:
        """Forwards before the first backward: to reach its last stage, and `per_place` for each following place."""
        return (self.v - 1) * self.round_size + per_place * (self.p - 1 - place)


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
    """`ahead` forwards, then pairs of a forward and a backward, then the remaining backwards."""
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
    """The order of every place of a pipe, for `count` micro-batches. Raises if the schedule does not allow them."""
    shape, name = Shape(pipe, schedule.stages, count), schedule.pipeline
    if pipe == 1:
        name = "beside" if schedule.beside else "1f1b"
    rounds = max(1, count // pipe)
    if schedule.stages > 1 and count % rounds:
        fits = [n for n in range(1, 2 * count + pipe) if n % max(1, n // pipe) == 0]
        near = [max(n for n in fits if n < count), min(n for n in fits if n > count)]
        raise ValueError(
            f"{count} micro-batches cannot be split into rounds of about pipe={pipe} for {schedule.stages} stages per "
            f"rank; use {near[0]} or {near[1]} micro-batches, or one stage per rank"
        )
    return [ORDERS[name](shape, place) for place in range(pipe)]


def backward_until(lowest: int, orders: Sequence[Order]) -> list[Order]:
    """The orders without the backwards of stages below `lowest`, which are not trained.

    >>> [[str(move) for (move,) in order] for order in backward_until(1, orders(Schedule(), 2, 2))]
    [['F0', 'F1'], ['F0', 'B0', 'F1', 'B1']]
    """
    kept = [[[m for m in moves if m.kind == "F" or m.stage >= lowest] for moves in order] for order in orders]
    return [[moves for moves in order if moves] for order in kept]


# What a move needs, and when it can run


def needed(move: Move, last: int) -> Move | None:
    """The move of another stage whose message `move` waits for."""
    if move.kind == "F" and move.stage > 0:
        return move._replace(stage=move.stage - 1)
    return move._replace(stage=move.stage + 1) if move.kind == "B" and move.stage < last else None


def receiver(move: Move) -> Move:
    """The inverse of `needed`: the move of another stage that waits for this one's message, if there is one."""
    return move._replace(stage=move.stage + (1 if move.kind == "F" else -1))


def no_time(_: Move) -> float:
    return 0.0


def simulate(
    orders: Sequence[Order],
    seconds: Callable[[Move], Any],
    hop: Callable[[Move], Any] = no_time,
    later: Callable[[Any, Any], Any] = max,
) -> Slots:
    """Start and end of every move, if its message takes `hop` and messages of a lane follow one another. Moves beside
    each other start when all have their inputs, and end together. Seconds may be arrays, for several pipelines with the
    same orders, if `later` is their maximum. Raises if places wait for one another."""
    last = max(move.stage for order in orders for moves in order for move in moves)
    slots: dict[Move, tuple[Any, Any]] = {}
    landed: dict[Move, Any] = {}
    lanes: dict[tuple[str, int], Any] = {}  # by kind and sender: when the lane is free
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
