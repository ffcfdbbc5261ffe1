"""What is under way: a collective, and a block of the model that waits for some.

A collective is a `Flight`: launched, it moves by itself, and `wait()` gives the result. A block is `Steps`: a generator
that yields where it would wait, so that `schedule.py` can let something else run there.
"""

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from cuboid.comm.axis import Axis
from cuboid.comm.ledger import Span

Message = tuple[str, int]  # on the clock by which turns are taken: its axis and number


class Pause(NamedTuple):
    """Where a block of the model can be suspended. Sizes are as large on every rank: turns are taken by them."""

    sent: float = 0  # bytes on their way that it will wait for
    work: float = 0  # FLOPs that it will then do
    axis: str = ""  # over which they are sent
    aside: tuple[float, str] = (0.0, "")  # bytes that it will need only later, and their axis
    later: Callable[[], float] | None = None  # work it has put off: does it and gives its FLOPs, 0 if it was done
    message: Message | None = None  # in place of `sent`: what it will wait for, launched on the clock before


#: What a block of the model is: a generator that yields wherever a collective has been launched but is not yet
#: needed, so that something else can run there, and returns its value at the end.
Steps = Generator[Pause, None, Any]


def run(steps: Steps) -> Any:
    """Play the steps straight through."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


class Flight:
    """A collective that is over, but for what makes its `result`."""

    def __init__(self, result: Callable[[], Tensor]) -> None:
        self._result = result

    def wait(self) -> Tensor:
        return self._result()

    @property
    def over(self) -> bool:
        """Whether it has landed, as far as one can see without waiting."""
        return True


def landed(x: Tensor) -> Flight:
    return Flight(lambda: x)


class Launched(Flight):
    """A collective whose messages are under way, in the books as `span`."""

    def __init__(self, works: Sequence[dist.Work], result: Callable[[], Tensor], span: Span, axis: Axis) -> None:
        super().__init__(result)
        self._works, self._span, self._axis = works, span, axis
        self._number = 0 if axis.journal is None else axis.journal.count
        self._stamps = axis.transport.stamp(works, span, axis.ledger.spans is not None)
        if not axis.overlap:
            self._land()

    def wait(self) -> Tensor:
        if self._works:
            self._land()
        return self._result()

    @property
    def over(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def _land(self) -> None:
        works, self._works = self._works, ()
        span, ledger, journal, stamps = self._span, self._axis.ledger, self._axis.journal, self._stamps
        if stamps is None:
            start = time.perf_counter()
            for work in works:
                work.wait() if journal is None else journal.wait(work, self._number)
            ledger.waited(span, start, time.perf_counter())
            return
        stamps.awaited()
        for work in works:
            work.wait()
        stamps.there()

        def settle() -> None:
            if ledger.clock is not None:
                span.launched = ledger.clock.read(stamps.launched)
            start, stop = (span.launched + seconds for seconds in stamps.seconds())
            ledger.waited(span, start, stop, stamps.weight)
            span.landed = stop

        if stamps.weight:
            ledger.later(settle)
