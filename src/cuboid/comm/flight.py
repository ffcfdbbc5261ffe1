"""Collectives in flight, and blocks of a model that can pause while they wait.

A collective is a `Flight`: once launched it proceeds by itself, and `wait()` gives the result. A block is `Steps`: a
generator that yields where it would wait, so that `schedule.py` can run something else there.
"""

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from cuboid.comm.axis import Axis
from cuboid.comm.ledger import Span


class Pause(NamedTuple):
    """Where a block of the model can be suspended. INVARIANT: sizes are the same on all ranks; turns depend on them."""

    sent: float = 0  # bytes in flight for which it will wait
    work: float = 0  # FLOPs that follow
    aside: float = 0  # bytes in flight that it needs only later
    later: Callable[[], float] | None = None  # does postponed work and returns its FLOPs, 0 if it was already done
    message: float = 0  # instead of `sent`: launched on the schedule's `Clock` before


#: A block of the model: a generator that yields where a collective has been launched and its result is needed next, so
#: that something else can run, and that returns its value in the end.
Steps = Generator[Pause, None, Any]


def run(steps: Steps) -> Any:
    """Run the steps to the end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


class Flight:
    """A collective that is over; `result` makes its result."""

    def __init__(self, result: Callable[[], Tensor]) -> None:
        self._result = result

    def wait(self) -> Tensor:
        return self._result()

    @property
    def over(self) -> bool:
        """Whether it has landed, as far as is known without waiting."""
        return True


def landed(x: Tensor) -> Flight:
    return Flight(lambda: x)


class Launched(Flight):
    """A collective in flight, in the ledger as `span`."""

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
