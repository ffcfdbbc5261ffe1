"""What overlaps with what: the options of a step, the order of its micro-batches, and how sub-batches take turns.

    prefetch     the next stage's weights are gathered while this one computes, in forward and in backward; the last
                 block's stay from one to the other
    sub_batches  how many sub-batches a rank's micro-batch is split into: one computes while the collectives of the
                 others are in flight
    chunks       a linear takes its tokens in `chunks` chunks: one is multiplied while the next is gathered and the
                 previous one is scattered. For a micro-batch that cannot be split
    compile      elementwise work is fused by torch.compile: values then differ in rounding. On a GPU it always is
    beside       the forward of a micro-batch runs beside the backward of the one before it
    pipeline     on a pipe: the name of an order of `step/pipeline.py`, with `stages` stages per rank; `split` is the
                 number of blocks of each stage, empty: evenly

The order of a step is data: forwards F, backwards B and weight gradients W of numbered micro-batches, those joined by
`+` beside each other. `"F0 F1+B0 B1"` runs two micro-batches, the second's forward beside the first's backward.

What a linear can overlap by itself it always does: X's second gather under dX's matmul, dX's scatter under dW's. On a
`Mesh` made with `overlap=False` every collective is awaited where it is launched, whatever the schedule.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from cuboid.comm.flight import Steps
    from cuboid.fuse import Fuse


@dataclass(frozen=True)
class Schedule:
    """What overlaps with what in a step. The module's docstring says how.

    Args:
        prefetch: Gather the next stage's weights while this one computes.
        sub_batches: Sub-batches that take turns: one computes while others communicate.
        chunks: Chunks of a linear's tokens, for micro-batches that cannot be split.
        compile: Fuse elementwise operations with torch.compile; changes rounding.
        beside: Run the forward of a micro-batch beside the backward of the one before it.
        pipeline: On a pipe: "gpipe", "1f1b", "interleaved", "zero-bubble" or "beside".
        stages: On a pipe: stages per rank.
        split: On a pipe: blocks of each stage; empty: evenly.

    Raises:
        ValueError: If a number is below 1, or the pipeline is another or does not go with `stages`.
    """

    prefetch: bool = True
    sub_batches: int = 1
    chunks: int = 1
    compile: bool = False
    beside: bool = False
    pipeline: str = "1f1b"
    stages: int = 1
    split: tuple[int, ...] = ()

    @classmethod
    def stored(cls, values: Mapping[str, Any]) -> "Schedule":
        """Reads a schedule from JSON, of earlier versions too."""
        return cls(**{"sub_batches" if name == "parts" else name: value for name, value in values.items()})

    def fuse(self, device: "torch.device") -> "Fuse":
        """How elementwise functions are fused on this device."""
        from cuboid.fuse import compiled, fuse_on  # here, so that reading a configuration needs no torch

        return compiled if self.compile else fuse_on(device)

    def __post_init__(self) -> None:
        for name in ("sub_batches", "chunks", "stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"a schedule of {name}={getattr(self, name)} is none; use 1 or more")
        if self.pipeline not in PIPELINES:
            raise ValueError(f"pipeline={self.pipeline!r} is not one of {', '.join(PIPELINES)}")
        if (self.pipeline, self.stages > 1) in (("1f1b", True), ("interleaved", False)):
            raise ValueError(
                f"pipeline={self.pipeline!r} with {self.stages} stages per rank: 1f1b has one, interleaved two or "
                "more; use the other name, or another number"
            )


#: Orders of a pipeline (step/pipeline.py)
PIPELINES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "beside")

OFF, PREFETCH = Schedule(prefetch=False), Schedule()


# The order of micro-batches


class Move(NamedTuple):
    """F: a forward, B: a backward, W: the weight gradients that it left; of one stage of a pipeline."""

    kind: str
    batch: int
    stage: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.batch}"


KINDS = "FBW"
Order = Sequence[Sequence[Move]]  # moves of one element run beside each other


def parse(text: str) -> Order:
    """An order as a person writes it, of micro-batches 0, 1, …"""
    words = [moves.split("+") for moves in text.split()]
    for each in (each for moves in words for each in moves):
        if each[:1] not in KINDS or not each[1:].isdecimal():
            raise _misplaced(text, each)
    order = [[Move(each[0], int(each[1:])) for each in moves] for moves in words]
    check_order(order)
    return order


def check_order(order: Order) -> None:
    """Raise ValueError where a micro-batch is run backward before it is run forward, twice, or not at all."""
    text, done = " ".join("+".join(map(str, moves)) for moves in order), set[Move]()
    for moves in order:
        for i, move in enumerate(moves):
            needed = {"F": move, "B": Move("F", move.batch), "W": Move("B", move.batch)}.get(move.kind)
            if needed not in done | {move} or move in done.union(moves[:i]):
                raise _misplaced(text, str(move))
        done.update(moves)
    count, kinds = len({move.batch for move in done}), KINDS if any(move.kind == "W" for move in done) else "FB"
    missing = [f"{kind}{i}" for i in range(max(count, 1)) for kind in kinds if Move(kind, i) not in done]
    if missing:
        raise ValueError(f"order {text!r} lacks {', '.join(missing)}; every micro-batch needs one of each of {kinds}")


def _misplaced(text: str, each: str) -> ValueError:
    return ValueError(
        f"order {text!r}: {each} cannot run there; each micro-batch has one F, then one B and, in an order with weight "
        "gradients, one W, such as 'F0 F1+B0 W0 B1 W1'"
    )


# Turns

#: How many pauses a sub-batch may be ahead of another: less than a block has, so that two blocks' weights are enough.
MOST_AHEAD = 8


class Task(NamedTuple):
    """Steps of sub-batches, which take turns, and what becomes of what they return."""

    steps: "Sequence[Steps]"
    finish: Callable[[list[Any]], Any]


class Clock:
    """Counts FLOPs, and the bytes that have left over one link, in the order of their launch. On it the link takes as
    long over all that a step sends as the work takes. It begins anew with every step: the order of turns must not
    depend on where a run was resumed.

    If one generator runs `alone` throughout the step, there are no turns, and nothing is counted."""

    def __init__(self, alone: bool = False) -> None:
        self.alone = alone
        self.now = self._work = self._sent = 0.0
        self.forward = True  # the first of the step, from which the pace follows
        self._launched = self._landed = 0.0  # bytes

    def launch(self, sent: float) -> float:
        """A message of so many bytes, which leaves after all before it: the bytes up to its end."""
        if self.alone or not sent:
            return 0.0
        self._sent += sent if self.forward else 0.0
        self._launched += sent
        return self._launched

    def lands(self, message: float) -> float:
        """When it will have landed."""
        left = message - self._landed
        return self.now + self._pace() * left if left > 1e-9 * message else self.now  # rounding leaves a rest

    def compute(self, work: float) -> None:
        if work and not self.alone:
            self._work += work if self.forward else 0.0
            self.advance(self.now + work)

    def _pace(self) -> float:
        """Of a byte on the link: a backward does twice its forward's work and sends as much. 1 where a forward sends or
        computes nothing."""
        return 1.5 * self._work / self._sent if self._work and self._sent else 1.0

    def advance(self, moment: float) -> None:
        """Move on to `moment`, unless it has passed, while messages progress."""
        moment = max(moment, self.now)
        self._landed = min(self._launched, self._landed + (moment - self.now) / self._pace())
        self.now = moment


@dataclass
class _Turns:
    steps: "Steps"
    message: float = 0.0  # that it waits for, on the clock
    work: float = 0.0  # of its next turn
    done: int = 0


def interleave(tasks: Sequence[Task], clock: Clock) -> list[Any]:
    """Run the steps of all tasks from pause to pause, one computing while the others' collectives are in flight.

    Whose turn it is follows from a clock. Of the steps whose collective has landed by then, those with the least to
    compute before their next goes first, so that the link is kept busy, and of them the ones behind. Where all wait,
    work that was put off is done.
    INVARIANT: sizes of pauses are the same on all ranks, hence the order is, whatever the time.

    >>> from cuboid.comm.flight import Pause
    >>> def counts(name):
    ...     for i in range(2):
    ...         print(name, i)
    ...         yield Pause(sent=1, work=1)
    ...     return name
    >>> interleave([Task([counts("a"), counts("b")], list)], Clock())
    a 0
    b 0
    a 1
    b 1
    [['a', 'b']]
    """
    spare = deque[Callable[[], float]]()
    if clock.alone:
        from cuboid.comm.flight import run  # here, so that reading a configuration needs no torch

        return [task.finish([run(steps) for steps in task.steps]) for task in tasks]
    results = [[None] * len(task.steps) for task in tasks]
    going = {(t, i): _Turns(steps) for t, task in enumerate(tasks) for i, steps in enumerate(task.steps)}
    while going:
        last = [min((turns.done for at, turns in going.items() if at[0] == t), default=0) for t in range(len(tasks))]
        free = [at for at, turns in going.items() if turns.done < last[at[0]] + MOST_AHEAD]
        landing, *_, at = min((clock.lands(going[at].message), going[at].work, going[at].done, at) for at in free)
        turns = going[at]
        while spare and (len(spare) > len(going) or landing > clock.now):
            clock.compute(spare.popleft()())
        clock.advance(landing)
        clock.compute(turns.work)
        try:
            pause = next(turns.steps)
        except StopIteration as end:
            results[at[0]][at[1]] = end.value
            del going[at]
            continue
        turns.message = pause.message or clock.launch(pause.sent)
        turns.work, turns.done = pause.work, turns.done + 1
        clock.launch(pause.aside)
        if pause.later is not None:
            spare.append(pause.later)
    return [task.finish(found) for task, found in zip(tasks, results, strict=True)]
