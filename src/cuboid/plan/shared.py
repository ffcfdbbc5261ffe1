"""The clock of ranks that share cores: the same processors compute and send.

Figures are measured with all ranks at once, so an operation's seconds are its share of the cores' time. So is a share
of a collective's seconds, the slowdown: what compute beside it was measured to lose. None of that overlaps. The rest,
in which ranks wait for each other or for the wire, overlaps with any other work:

    step = compute + slowdown · seconds of collectives + time that all ranks wait

A launched collective owes its processor time, which precedes compute, as the kernel's and the sender's threads do,
while its bytes are in flight. A wait pays what is owed so far, for each axis separately.
"""

from dataclasses import dataclass

import numpy as np

from cuboid.plan.tape import Message, Tape
from cuboid.plan.time import Array, Prices


@dataclass
class Owing(Message):
    due: Array  # [axes, candidates] processor seconds of all collectives up to this one; 0 over one rank


class SharedTape(Tape):
    def __init__(self, prices: Prices, overlap: bool = True) -> None:
        super().__init__(prices, overlap)
        self._rows = {axis: row for row, axis in enumerate(self._exposed)}
        self._owed = self._paid = np.zeros((len(self._rows), len(self.now)))

    def compute(self, kind: str, seconds: Array) -> None:
        took = (self._owed - self._paid).sum(0) + seconds
        self._paid = self._owed
        self.now += took
        self._compute[kind] += took

    def launch(self, axis: str, kind: str, whole: Array, times: Array | int = 1, itemsize: int = 0) -> Message:
        fare = self.prices.collective(axis, kind, whole, itemsize or self.prices.itemsize)
        assert fare.wire is not None
        seconds = times * np.maximum(fare.seconds, fare.wire)
        self.count(axis, kind, fare, times, seconds)
        free, _ = self._free
        lands = np.maximum(self.now, free) + seconds
        np.copyto(free, lands, where=fare.used)
        self._owed = self._owed.copy()
        self._owed[self._rows[axis]] += self.hw.slowdown * times * fare.seconds
        summing = None if fare.summing is None else times * fare.summing
        flight = Owing(axis, np.where(fare.used, lands + fare.lag, self.now), summing, self._owed * fare.used)
        if not self.overlap:
            self._land(flight)
        return flight

    def _land(self, flight: Message) -> None:
        assert isinstance(flight, Owing)
        owed = np.maximum(flight.due - self._paid, 0.0)
        self._paid = self._paid + owed
        late = np.maximum(flight.lands - self.now, owed.sum(0))
        for axis, row in self._rows.items():
            self._exposed[axis] += owed[row]
        self._exposed[flight.axis] += late - owed.sum(0)
        self.now += late


def tape_of(prices: Prices, overlap: bool) -> Tape:
    """The tape for the machine of these prices."""
    return (SharedTape if prices.hw.cores else Tape)(prices, overlap)
