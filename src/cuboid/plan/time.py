"""Seconds of a product, of memory traffic and of a collective. Sizes are arrays over candidates.

    product   2 m n (k + depth) ÷ rate, m and n rounded up to whole tiles and their count to whole rounds of all units;
              at least its traffic ÷ stream
    traffic   bytes ÷ stream
    ring      base + hop · rounds + sent ÷ min(bandwidth inside, the node's cards · members on the node ÷ devices on it)
    direct    base + hop · rounds + the longer of what leaves the node ÷ a device's part of its cards, and what stays
              ÷ bandwidth inside

All groups of an axis talk at once, so a node's cards are shared by all groups with members on it. A ring enters and
leaves a node once for all its members there; an all-to-all sends for each. Where ranks share cores, the links' figures
are of a network that never holds them back, and what leaves a host takes its time on the wire besides.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuboid.plan.hardware import Hardware

#: A figure of each candidate: bytes, calls and FLOPs are whole numbers, seconds are not.
Array = NDArray[Any]


class Group(NamedTuple):
    """The ranks of an axis: how many, and how many of them share a node."""

    size: Array
    inside: Array


def product_seconds(hw: Hardware, precision: str, m: Array, n: Array, k: Array, itemsize: int) -> Array:
    rows, columns = (np.ceil(size / side) * side for size, side in zip((m, n), hw.tile, strict=True))
    if hw.units:  # the last round of tiles leaves some units idle
        tiles = rows * columns / (hw.tile[0] * hw.tile[1])
        rows = rows * np.ceil(tiles / hw.units) * hw.units / np.maximum(tiles, 1)
    computing = 2.0 * rows * columns * (k + hw.depth) / hw.rate[precision]
    traffic = (m * n + n * k + m * k) * itemsize / hw.stream
    return (np.maximum(computing, traffic) + hw.launch) * (n > 0)


def collective_seconds(hw: Hardware, kind: str, group: Group, whole: Array, direct: bool) -> Array:
    """Of `whole` bytes after gathering or before scattering. Nothing is launched over one rank, nor for no bytes."""
    p, inside = group
    near, far = hw.link("inside", kind), hw.link("across", kind)
    crosses = inside < p
    nodes = np.ceil(p / inside)
    times = 2 if kind == "all_reduce" else 1
    sent = times * whole * (p - 1) / p
    if kind == "all_reduce":  # small ones go along a tree
        rounds_near, rounds_far = 2 * np.log2(inside), 2 * np.log2(nodes)
    elif direct:
        rounds_near, rounds_far = inside - 1, p - inside
    else:
        rounds_near, rounds_far = p - nodes, nodes - 1
    latency = np.where(crosses, far.base, near.base) + near.hop * rounds_near + far.hop * rounds_far * crosses
    if direct:
        leaving, staying = whole * (p - inside) / p, whole * (inside - 1) / p
        moving = np.maximum(leaving * hw.node / far.bandwidth, staying / near.bandwidth)
    else:
        shared = np.minimum(near.bandwidth, far.bandwidth * inside / hw.node) if hw.node > 1 else far.bandwidth
        moving = sent / np.where(crosses, shared, near.bandwidth)
    return np.where((p > 1) & (whole > 0), latency + moving, 0.0)


def wire_seconds(hw: Hardware, kind: str, group: Group, whole: Array, direct: bool) -> Array:
    """Of what leaves a host, all its ranks' together."""
    p, inside = group
    if not hw.wire:
        return np.zeros(len(p))
    times = 2 if kind == "all_reduce" else 1
    leaving = whole * (p - inside) / p if direct else times * whole * (p - 1) / p / inside
    return np.where(inside < p, leaving * hw.node / hw.wire, 0.0)


class Fare(NamedTuple):
    """Of a collective: seconds, bytes a rank sends, whether any are sent at all, the seconds that a direct
    reduce-scatter still adds up once everything has arrived, and those on the wire where cores are shared."""

    seconds: Array
    sent: Array
    used: Array
    summing: Array | None
    wire: Array | None = None


class Prices:
    """Seconds on one machine for one list of candidates. A step asks for the same few again and again, in every layer
    and under every choice, so each is worked out once."""

    def __init__(self, hw: Hardware, precision: str, itemsize: int, groups: dict[str, Group]) -> None:
        self.hw, self.precision, self.itemsize, self.groups = hw, precision, itemsize, groups
        self._known: dict[Hashable, Any] = {}

    def product(self, m: Array, n: Array, k: Array) -> Array:
        def price() -> Array:
            return product_seconds(self.hw, self.precision, m, n, k, self.itemsize)

        return self._once(price, m.tobytes(), n.tobytes(), k.tobytes())

    def collective(self, axis: str, kind: str, whole: Array, itemsize: int) -> Fare:
        """Of `whole` elements. Reduce-scatters are direct wherever a transport makes them of an all-to-all."""

        def price() -> Fare:
            group, size = self.groups[axis], whole * itemsize
            direct = kind == "reduce_scatter" and (self.hw.direct or itemsize < 4)
            used = (group.size > 1) & (whole > 0)
            sent = (2 if kind == "all_reduce" else 1) * size * (group.size - 1) // group.size * used
            summing = 3 * (group.size - 1) / group.size * whole * max(itemsize, 4) / self.hw.stream if direct else None
            if not self.hw.cores:
                return Fare(collective_seconds(self.hw, kind, group, size, direct), sent, used, summing)
            processor = collective_seconds(self.hw, kind, group, size, direct)
            return Fare(processor, sent, used, summing, wire_seconds(self.hw, kind, group, size, direct))

        return self._once(price, axis, kind, itemsize, whole.tobytes())

    def _once(self, price: Callable[[], Any], *key: Hashable) -> Any:
        if key not in self._known:
            self._known[key] = price()
        return self._known[key]
