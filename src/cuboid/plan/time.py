"""Seconds of a matmul, of memory traffic and of a collective. Sizes are arrays over candidates.

    matmul    2 m n (k + depth) ÷ rate, m and n rounded up to whole tiles and their count to whole rounds of all units;
              at least its traffic ÷ stream
    traffic   bytes ÷ stream
    ring      base + hop · rounds + sent ÷ min(bandwidth inside, the node's cards · members on the node ÷ devices on it)
    direct    base + hop · rounds + the longer of what leaves the node ÷ a device's part of its cards, and what stays
              ÷ bandwidth inside

All groups of an axis communicate at once, so all groups with members on a node share its cards. A ring enters and
leaves a node once for all its members there; an all-to-all sends for each. The same holds for a link that joins a group
of nodes to all others. If ranks share cores, the links' figures are those of a network that never limits them, and
bytes that leave a host take their time on the wire in addition.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuboid.plan.hardware import Hardware, Link

#: A figure of each candidate: bytes, calls and FLOPs are whole numbers, seconds are not.
Array = NDArray[Any]


class Group(NamedTuple):
    """The ranks of an axis: their number, how many of them share a node, and how many a group of nodes behind one link
    (infinite without such groups)."""

    size: Array
    inside: Array
    behind: Array | float = np.inf


ROOTED = ("broadcast", "reduce")
#: The measured collective whose links another one uses.
LIKE = {"broadcast": "all_gather", "reduce": "all_reduce", "all_to_all": "reduce_scatter"}


def product_seconds(hw: Hardware, precision: str, m: Array, n: Array, k: Array, itemsize: int) -> Array:
    rows, columns = (np.ceil(size / side) * side for size, side in zip((m, n), hw.tile, strict=True))
    if hw.units:  # the last round of tiles leaves some units idle
        tiles = rows * columns / (hw.tile[0] * hw.tile[1])
        rows = rows * np.ceil(tiles / hw.units) * hw.units / np.maximum(tiles, 1)
    computing = 2.0 * rows * columns * (k + hw.depth) / hw.rate[precision]
    traffic = (m * n + n * k + m * k) * itemsize / hw.stream
    return (np.maximum(computing, traffic) + hw.launch) * (n > 0)


def _links(hw: Hardware, kind: str) -> tuple[Link, Link]:
    measured = LIKE.get(kind, kind)
    return hw.link("inside", measured), hw.link("across", measured)


def collective_seconds(hw: Hardware, kind: str, group: Group, whole: Array, direct: bool) -> Array:
    """Seconds for `whole` bytes, gathered or not yet scattered. Over one rank, or for no bytes, nothing is launched."""
    p, inside, _ = group
    near, far = _links(hw, kind)
    crosses = inside < p
    nodes = np.ceil(p / inside)
    times = 2 if kind == "all_reduce" else 1
    sent = times * whole * (p - 1) / p
    if kind == "all_reduce":  # small ones use a tree
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
    if hw.group:
        leaving = whole * (p - group.behind) / p if direct else sent / group.behind
        moving = np.where(group.behind < p, np.maximum(moving, leaving * hw.node * hw.group / hw.uplink), moving)
    return np.where((p > 1) & (whole > 0), latency + moving, 0.0)


def rooted_seconds(hw: Hardware, kind: str, group: Group, whole: Array, by_host: bool) -> tuple[Array, Array]:
    """Returns how long a broadcast or reduce of `whole` bytes occupies the wire, and after how long it lands.

    Roots take turns, so over time every link carries the mean; but a block lands only when its own root's link has
    carried everything. gloo's broadcast is a tree in which all ranks of a node send in each round, its reduce a ring of
    slices that are then gathered. With `by_host` a block enters, or leaves, each node of its group once.
    """
    p, inside, _ = group
    near, far = _links(hw, kind)
    nodes, crosses = np.ceil(p / inside), inside < p
    groups = hw.node / inside  # that share a node's cards

    def seconds(staying: Array, leaving: Array) -> Array:
        return whole * (staying / near.bandwidth + np.where(crosses, leaving / far.bandwidth, 0.0))

    leaving = (p - inside) / p  # share of a tree's sends, or of a rank's slices
    once = [seconds((inside - 1) / inside, groups * (nodes - 1) / nodes), seconds(inside - 1, groups * (nodes - 1))]
    own = [seconds((inside - 1) / p, hw.node * leaving), seconds(np.log2(inside), hw.node * np.log2(nodes))]
    if kind == "reduce":  # of two ranks one sends
        ring = collective_seconds(hw, kind, group, whole, direct=False)
        parts = [seconds((inside - 1) / p**2, hw.node * leaving / p), seconds((inside - 1) / p, groups * leaving)]
        own = [np.where(p == 2, one, ring + each) for one, each in zip(own, parts, strict=True)]
    latency = np.where(crosses, far.base, near.base) + near.hop * np.log2(inside) + far.hop * np.log2(nodes)
    used, apart = (p > 1) & (whole > 0), by_host & (inside > 1) & crosses
    held, landed = (np.where(used, np.where(apart, a, b), 0.0) for a, b in zip(once, own, strict=True))
    return held, landed + latency * used


def wire_seconds(hw: Hardware, kind: str, group: Group, whole: Array, direct: bool) -> Array:
    """Seconds on the wire for the bytes that all ranks of a host send to others."""
    p, inside, _ = group
    if not hw.wire:
        return np.zeros(len(p))
    times = 2 if kind == "all_reduce" else 1
    leaving = whole * (p - inside) / p if direct else times * whole * (p - 1) / p / inside
    return np.where(inside < p, leaving * hw.node / hw.wire, 0.0)


class Fare(NamedTuple):
    """The costs of a collective: seconds that it occupies the wire, bytes per rank, whether it is launched at all,
    seconds that a direct reduce-scatter sums after everything has arrived, seconds on the wire if cores are shared, and
    seconds from when the wire is free until it lands."""

    seconds: Array
    sent: Array
    used: Array
    summing: Array | None
    wire: Array | None = None
    lag: Array | float = 0.0


class Prices:
    """Seconds on one machine for one list of candidates. A step asks for the same few in every layer and under every
    choice, so they are cached."""

    def __init__(
        self, hw: Hardware, precision: str, itemsize: int, groups: dict[str, Group], by_host: bool = True
    ) -> None:
        self.hw, self.precision, self.itemsize, self.groups, self.by_host = hw, precision, itemsize, groups, by_host
        self._known: dict[Hashable, Any] = {}

    def product(self, m: Array, n: Array, k: Array) -> Array:
        def price() -> Array:
            return product_seconds(self.hw, self.precision, m, n, k, self.itemsize)

        return self._once(price, m.tobytes(), n.tobytes(), k.tobytes())

    def collective(self, axis: str, kind: str, whole: Array, itemsize: int) -> Fare:
        """The fare of `whole` elements. Reduce-scatters are direct where a transport does them by all-to-all."""

        def price() -> Fare:
            group, size, rooted = self.groups[axis], whole * itemsize, kind in ROOTED
            scatters = kind == "reduce_scatter" and (self.hw.direct or itemsize < 4)
            direct = scatters or rooted or kind == "all_to_all"
            used = (group.size > 1) & (whole > 0)
            sent = (2 if kind == "all_reduce" else 1) * size * (group.size - 1) // group.size * used
            summing = 3 * (group.size - 1) / group.size * whole * max(itemsize, 4) / self.hw.stream
            wire = wire_seconds(self.hw, kind, group, size, direct) if self.hw.cores else None
            if rooted:
                held, landed = rooted_seconds(self.hw, kind, group, size, self.by_host)
                return Fare(held, sent, used, None, wire, landed - held)
            seconds = collective_seconds(self.hw, kind, group, size, direct)
            return Fare(seconds, sent, used, summing if scatters else None, wire)

        return self._once(price, axis, kind, itemsize, whole.tobytes())

    def _once(self, price: Callable[[], Any], *key: Hashable) -> Any:
        if key not in self._known:
            self._known[key] = price()
        return self._known[key]
