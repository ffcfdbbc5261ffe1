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
from cuboid.device import Stamps


class Pause(NamedTuple):
    """Where a block of the model can be suspended. Sizes are as large on every rank: turns are taken by them."""

    sent: float = 0  # bytes on their way that it will wait for
    work: float = 0  # FLOPs that it will then do


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
    """A collective under way."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        result: Callable[[], Tensor],
        span: Span | None = None,
        axis: Axis | None = None,
    ) -> None:
        self._works, self._result, self._span, self._axis = works, result, span, axis
        self._stamps: Stamps | None = None
        self._number = 0 if axis is None or axis.journal is None else axis.journal.count
        if works and span is not None and axis is not None:
            self._stamps = axis.transport.stamp(works, span, axis.ledger.spans is not None)
            if not axis.overlap:
                self._land()

    def wait(self) -> Tensor:
        self._land()
        return self._result()

    def _land(self) -> None:
        works, self._works = self._works, ()
        span, axis, stamps = self._span, self._axis, self._stamps
        if not works or span is None or axis is None:
            return
        ledger = axis.ledger
        if stamps is None:
            start = time.perf_counter()
            for work in works:
                work.wait() if axis.journal is None else axis.journal.wait(work, self._number)
            ledger.waited(span, start, time.perf_counter())
            return
        stamps.awaited()
        for work in works:
            work.wait()
        stamps.there()

        def settle() -> None:
            start, stop = (span.launched + seconds for seconds in stamps.seconds())
            ledger.waited(span, start, stop)
            span.landed = stop

        ledger.later(settle)


def landed(x: Tensor) -> Flight:
    """A flight that is already over."""
    return Flight((), lambda: x)
