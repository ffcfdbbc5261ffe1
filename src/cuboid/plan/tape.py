"""Simulates a schedule: compute, launches and waits of one rank on a clock, for all candidates at once.

Compute continues while collectives are in flight, at 1 − slowdown of its speed. A wire carries one collective after
another: one wire joins the devices of a node, one the nodes. With c the seconds of an operation and u those until the
last collective in flight has landed, the operation takes

    min( c / (1 − slowdown),  c + slowdown · u )
"""

from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from cuboid.plan.time import Array, Fare, Prices


@dataclass
class Message:
    """A collective on the clock of a `Tape`."""

    axis: str
    lands: Array
    summing: Array | None  # seconds, once it has landed


@dataclass
class Totals:
    """The sums of a tape."""

    seconds: Array
    flops: Array
    saved: Array  # bytes
    compute: dict[str, Array] = field(default_factory=dict)  # seconds by kind of work
    exposed: dict[str, Array] = field(default_factory=dict)  # seconds waited by axis
    in_flight: dict[str, Array] = field(default_factory=dict)  # seconds by axis, each alone
    calls: dict[tuple[str, str], Array] = field(default_factory=dict)
    sent: dict[tuple[str, str], Array] = field(default_factory=dict)  # bytes
    dW: Array | float = 0.0  # seconds of the products that make weight gradients in backward

    def copy(self) -> "Totals":
        """A deep copy, because a tape adds to arrays in place."""
        return deepcopy(self)

    def at(self, which: Array) -> "Totals":
        """The totals of some candidates."""

        def of(value: Array | dict | float) -> Any:
            if isinstance(value, dict):
                return {key: of(each) for key, each in value.items()}
            return value[which] if isinstance(value, np.ndarray) else value

        return Totals(*(of(getattr(self, each.name)) for each in fields(self)))

    def plus(self, other: "Totals", times: Array | int, without: "Totals | None" = None) -> "Totals":
        """These totals plus `times` times those of `other`, less those of `without`."""

        def line(here: Array, more: Array, less: Array | float) -> Array:
            return here + times * (more - less)

        def lines(name: str) -> dict:
            here, more = getattr(self, name), getattr(other, name)
            less = {} if without is None else getattr(without, name)
            return {key: line(value, more.get(key, 0), less.get(key, 0)) for key, value in here.items()}

        zero = Totals(0.0, 0, 0) if without is None else without  # type: ignore[arg-type]
        return Totals(
            line(self.seconds, other.seconds, zero.seconds),
            line(self.flops, other.flops, zero.flops),
            self.saved if without is None else line(self.saved, other.saved, zero.saved),
            **{name: lines(name) for name in ("compute", "exposed", "in_flight", "calls", "sent")},
            dW=line(np.asarray(self.dW), np.asarray(other.dW), zero.dW),
        )


class Tape:
    def __init__(self, prices: Prices, overlap: bool = True) -> None:
        self.prices, self.hw, self.overlap = prices, prices.hw, overlap
        groups = prices.groups
        count = len(groups["x"].size)
        self.now = np.zeros(count)
        self._free = [np.zeros(count), np.zeros(count)]  # when the wires inside and across nodes are free
        self._wide = {axis: group.inside < group.size for axis, group in groups.items()}
        self.flops = np.zeros(count, dtype=np.int64)
        self.saved = np.zeros(count, dtype=np.int64)
        self.dW = np.zeros(count)
        self._compute: dict[str, Array] = defaultdict(lambda: np.zeros(count))
        self._exposed = {axis: np.zeros(count) for axis in groups}
        self._in_flight = {axis: np.zeros(count) for axis in groups}
        self._calls: dict[tuple[str, str], Array] = defaultdict(lambda: np.zeros(count, dtype=np.int64))
        self._sent: dict[tuple[str, str], Array] = defaultdict(lambda: np.zeros(count, dtype=np.int64))

    def compute(self, kind: str, seconds: Array) -> None:
        slow = self.hw.slowdown
        took = np.maximum(*self._free)  # u, in place from here on: this runs a thousand times per candidate
        took -= self.now
        np.maximum(took, 0.0, out=took)
        took *= slow
        took += seconds
        if slow < 1:
            np.minimum(took, seconds / (1 - slow), out=took)
        self.now += took
        self._compute[kind] += took

    def stream(self, kind: str, size: Array, operations: int = 1) -> None:
        """An elementwise operation that reads and writes `size` bytes."""
        self.compute(kind, size / self.hw.stream + operations * self.hw.launch * (size > 0))

    def launch(self, axis: str, kind: str, whole: Array, times: Array | int = 1, itemsize: int = 0) -> Message:
        """Launches `times` collectives of `whole` elements each. `axis` may be axis/name, for another group of its
        ranks."""
        fare = self.prices.collective(axis, kind, whole, itemsize or self.prices.itemsize)
        seconds = times * fare.seconds
        self.count(axis, kind, fare, times, seconds)
        near, far = self._free
        if self.hw.one_wire:
            lands = np.maximum(self.now, near)
            lands += seconds
            np.copyto(near, lands, where=fare.used)
        else:
            wide = self._wide[axis]
            lands = np.maximum(self.now, np.where(wide, far, near))
            lands += seconds
            np.copyto(near, lands, where=fare.used & ~wide)
            np.copyto(far, lands, where=fare.used & wide)
        summing = None if fare.summing is None else times * fare.summing
        flight = Message(axis, np.where(fare.used, lands + fare.lag, self.now), summing)
        if not self.overlap:
            self._land(flight)
        return flight

    def count(self, axis: str, kind: str, fare: Fare, times: Array | int, seconds: Array) -> None:
        name = axis.split("/")[0]
        self._calls[name, kind] += times * fare.used
        self._sent[name, kind] += times * fare.sent
        self._in_flight[axis] += seconds

    def wait(self, flight: Message) -> None:
        self._land(flight)
        if flight.summing is not None:
            self.compute("sums of reduce-scatters", flight.summing)

    def _land(self, flight: Message) -> None:
        late = np.maximum(flight.lands - self.now, 0.0)
        self._exposed[flight.axis] += late
        self.now += late

    def held(self) -> Array:
        """[wires, candidates] seconds for which collectives have held the wire inside nodes, and the one across."""
        wires = np.zeros((2, len(self.now)))
        for axis, seconds in self._in_flight.items():
            wires += np.where(self._wide[axis] & (not self.hw.one_wire), [[0], [1]], [[1], [0]]) * seconds
        return wires

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
            self.dW,
        )


def _by_axis(values: dict[str, Array]) -> dict[str, Array]:
    """Values of an axis and of its other groups (axis/name) together."""
    found: dict[str, Array] = {}
    for name, value in values.items():
        axis = name.split("/")[0]
        found[axis] = found.get(axis, 0.0) + value
    return found
