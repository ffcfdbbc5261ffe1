"""Costs of a training step on a rank, by formula: bytes sent per axis and collective, FLOPs, and memory at rest.

One file a way of parallelising. Arithmetic on sizes alone, so a cluster need not exist to be costed; the
tests hold them against the ledger, the FLOP counter and autograd's saved tensors.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import shard_range


@dataclass
class Cost:
    """The cost of one step, forward and backward, on one rank."""

    traffic: defaultdict[tuple[str, str], list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    flops: int = 0
    matrices: int = 0  # bytes of weights at rest; gradients of those trained are as many, AdamW's state twice as many
    vectors: int = 0  # bytes of norms and biases, which are replicated over the axis they lack
    saved: int = 0  # bytes of activations kept from forward to backward

    @property
    def parameters(self) -> int:
        return self.matrices + self.vectors

    def add(self, other: "Cost") -> None:
        """Add what another micro-batch sends and computes."""
        for key, (calls, sent) in other.traffic.items():
            self.traffic[key][0] += calls
            self.traffic[key][1] += sent
        self.flops += other.flops

    def bytes(self) -> dict[str, int]:
        total: defaultdict[str, int] = defaultdict(int)
        for (axis, _), (_, sent) in self.traffic.items():
            total[axis] += sent
        return dict(total)

    def counts(self) -> dict[str, dict[str, tuple[int, int]]]:
        """(calls, bytes) per axis and kind, in the form of `Ledger.counts`."""
        table: defaultdict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
        for (axis, kind), (calls, sent) in sorted(self.traffic.items()):
            table[axis][kind] = (calls, sent)
        return dict(table)


class Counter:
    """Adds to the `cost` of one rank, a collective or a tensor at a time."""

    def __init__(self, cuboid: Cuboid, coordinates: Mapping[str, int]) -> None:
        self.axes, self.at, self.cost = cuboid.sizes, coordinates, Cost()
        self._counted = 0  # bytes of parameters in buckets before

    def part(self, n: int, axis: str | None) -> int:
        """This rank's share of n, split over the axis."""
        if axis is None:
            return n
        start, stop = shard_range(n, self.axes[axis], self.at[axis])
        return stop - start

    def send(self, kind: str, axis: str, whole: int, size: int, times: int = 1, p: int = 0) -> None:
        """A collective over an axis of p, of `whole` elements after gathering or before scattering."""
        p = p or self.axes[axis]
        if p > 1 and whole:
            entry = self.cost.traffic[axis, kind]
            entry[0] += 1
            entry[1] += times * whole * size * (p - 1) // p

    def reduce(self, axis: str, whole: int, size: int) -> None:
        self.send("all_reduce", axis, whole, size, times=2)

    def bucket(self, size: int) -> None:
        """End a bucket of the parameters added since the last one: their gradients are summed over replicas
        together."""
        self.reduce("replicas", (self.cost.parameters - self._counted) // size, size)
        self._counted = self.cost.parameters
