"""A schedule played on a clock: compute, launches and waits of one rank, for all candidates at once.

Compute goes on while collectives are in flight, at 1 − slowdown of its speed. A wire carries one collective after the
other: one wire joins the devices of a node, one its nodes. With c the seconds of an operation and u those until the last
collective under way has landed, the operation takes

    min( c / (1 − slowdown),  c + slowdown · u )
"""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from cuboid.plan.hardware import Hardware
from cuboid.plan.time import Array, Group, collective_seconds


@dataclass
class Flight:
    axis: str
    lands: Array
    sum_seconds: Array  # what a direct reduce-scatter still adds up once it has landed


@dataclass
class Totals:
    """What a tape has added up. All grow by as much with each further layer, so two depths give any depth."""

    seconds: Array
    flops: Array
    saved: Array  # bytes
    compute: dict[str, Array] = field(default_factory=dict)  # seconds by kind of work
    exposed: dict[str, Array] = field(default_factory=dict)  # seconds waited by axis
    in_flight: dict[str, Array] = field(default_factory=dict)  # seconds by axis, were it alone
    calls: dict[tuple[str, str], Array] = field(default_factory=dict)
    sent: dict[tuple[str, str], Array] = field(default_factory=dict)  # bytes

    def deeper(self, shallower: "Totals", layers: int) -> "Totals":
        """With so many layers more, each adding what the last one of this tape added to the shallower one's."""

        def line(here: Array, before: Array) -> Array:
            return here + layers * (here - before)

        def lines(here: dict, before: dict) -> dict:
            return {name: line(value, before[name]) for name, value in here.items()}

        names = ("compute", "exposed", "in_flight", "calls", "sent")
        return Totals(
            line(self.seconds, shallower.seconds),
            line(self.flops, shallower.flops),
            line(self.saved, shallower.saved),
            *(lines(getattr(self, name), getattr(shallower, name)) for name in names),
        )


class Tape:
    def __init__(self, hw: Hardware, groups: dict[str, Group], itemsize: int, overlap: bool = True) -> None:
        self.hw, self.groups, self.itemsize, self.overlap = hw, groups, itemsize, overlap
        count = len(groups["x"].size)
        self.now = np.zeros(count)
        self._free = [np.zeros(count), np.zeros(count)]  # when the wire inside nodes and the one across are
        self._wide = {axis: group.inside < group.size for axis, group in groups.items()}
        self.flops = np.zeros(count, dtype=np.int64)
        self.saved = np.zeros(count, dtype=np.int64)
        self._compute: dict[str, Array] = {}
        self._exposed = {axis: np.zeros(count) for axis in groups}
        self._in_flight = {axis: np.zeros(count) for axis in groups}
        self._calls: dict[tuple[str, str], Array] = defaultdict(lambda: np.zeros(count, dtype=np.int64))
        self._sent: dict[tuple[str, str], Array] = defaultdict(lambda: np.zeros(count, dtype=np.int64))

    def compute(self, kind: str, seconds: Array) -> None:
        until = np.maximum(np.maximum(*self._free) - self.now, 0.0)
        slow = self.hw.slowdown
        took = seconds + slow * until
        if slow < 1:
            took = np.minimum(took, seconds / (1 - slow))
        self.now = self.now + took
        self._compute[kind] = self._compute.get(kind, 0.0) + took

    def stream(self, kind: str, size: Array, operations: int = 1) -> None:
        """An elementwise operation that reads and writes so many bytes."""
        self.compute(kind, size / self.hw.stream + operations * self.hw.launch * (size > 0))

    def launch(self, axis: str, kind: str, whole: Array, times: Array | int = 1, itemsize: int = 0) -> Flight:
        """Of `whole` elements, `times` after one another. A group of its own is named axis/what."""
        itemsize = itemsize or self.itemsize
        group, name = self.groups[axis], axis.split("/")[0]
        direct = kind == "reduce_scatter" and (self.hw.direct or itemsize < 4)
        size = whole * itemsize
        used = (group.size > 1) & (whole > 0)
        seconds = times * collective_seconds(self.hw, kind, group, size, direct)
        sent = (2 if kind == "all_reduce" else 1) * size * (group.size - 1) // group.size
        self._calls[name, kind] = self._calls[name, kind] + times * used
        self._sent[name, kind] = self._sent[name, kind] + times * sent * used
        self._in_flight[axis] = self._in_flight[axis] + seconds
        wide = self._wide[axis]
        if self.hw.one_wire:
            lands = np.maximum(self.now, self._free[0]) + seconds
            self._free[0] = np.where(used, lands, self._free[0])
        else:
            lands = np.maximum(self.now, np.where(wide, self._free[1], self._free[0])) + seconds
            self._free[0] = np.where(used & ~wide, lands, self._free[0])
            self._free[1] = np.where(used & wide, lands, self._free[1])
        added = 3 * (group.size - 1) / group.size * whole * max(itemsize, 4) / self.hw.stream if direct else 0.0
        flight = Flight(axis, np.where(used, lands, self.now), used * times * added)
        if not self.overlap:
            self._land(flight)
        return flight

    def wait(self, flight: Flight) -> None:
        self._land(flight)
        self.compute("sums of reduce-scatters", flight.sum_seconds)

    def _land(self, flight: Flight) -> None:
        late = np.maximum(flight.lands - self.now, 0.0)
        self._exposed[flight.axis] = self._exposed[flight.axis] + late
        self.now = self.now + late

    def totals(self) -> Totals:
        return Totals(
            self.now,
            self.flops,
            self.saved,
            dict(self._compute),
            _by_axis(self._exposed),
            _by_axis(self._in_flight),
            dict(self._calls),
            dict(self._sent),
        )


def _by_axis(values: dict[str, Array]) -> dict[str, Array]:
    """Of an axis and its parts together."""
    found: dict[str, Array] = {}
    for name, value in values.items():
        axis = name.split("/")[0]
        found[axis] = found.get(axis, 0.0) + value
    return found
