"""Sizes of what the first rank of each candidate holds (ARCHITECTURE.md's table), as arrays over candidates.

The first rank has the largest shards: after uneven splits the last ones are short.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cuboid.layers.head import chunk_rows
from cuboid.mesh.cuboid import AXES, Cuboid
from cuboid.model.config import ModelConfig
from cuboid.model.freeze import Trained
from cuboid.plan.time import Array, Group


def ceil_div(n: Array | int, divisor: Array | int) -> Array:
    return np.asarray(-(-n // divisor))


def added(arrays: Iterable[Array]) -> Array:
    """The sum of the arrays, per candidate."""
    return np.asarray(sum(arrays))


@dataclass(frozen=True)
class Weight:
    """A parameter [n, k] on a rank after it is gathered over x, and the size of its shard."""

    n: Array
    k: Array
    shard: Array  # elements
    vector: bool


@dataclass(frozen=True)
class Segment:
    """What a stage of a pipeline has besides blocks."""

    embeds: bool = True
    ends: bool = True  # with the last norm and the head

    @property
    def whole(self) -> bool:
        """Whether there is no pipeline."""
        return self.embeds and self.ends


WHOLE = Segment()


class Sizes:
    def __init__(
        self, config: ModelConfig, cuboids: Sequence[Cuboid], node: int, batch: Array | int, seq: int, group: int = 0
    ) -> None:
        """The batch may be each candidate's own."""
        c = self.c = config
        self.cuboids, self._of = cuboids, (node, batch, seq, group)
        self.axes = {axis: np.array([getattr(each, axis) for each in cuboids], dtype=np.int64) for axis in AXES}
        self.pipe, self.replicas, self.x, self.y, self.z = self.axes.values()
        samples = batch // self.replicas
        self.context = self.x // np.gcd(samples, self.x)
        self.b = samples // np.gcd(samples, self.x)
        unit = np.lcm(np.lcm(self.y, self.z), np.where(self.context > 1, 2, 1)) * self.context
        self.s = ceil_div(seq, unit) * unit // self.context
        self.d = c.hidden // self.z
        self.q = c.q_dim // self.y
        self.kv = ceil_div(c.kv_dim, self.y)
        self.f = ceil_div(c.ffn, self.y)
        self.vocab = ceil_div(c.vocab, self.y)
        self.few = c.kv_heads % (self.y * self.z) != 0
        self.heads = c.heads // (self.y * self.z)
        self.picked = np.array([_picked(c, each) for each in cuboids], dtype=np.int64)
        self.groups = groups(cuboids, self.context, node, group)
        self._chunks: dict[tuple[int, int], Array] = {}

    def at(self, which: Array) -> "Sizes":
        """The sizes of some candidates."""
        node, batch, *rest = self._of
        cuboids = [self.cuboids[i] for i in which.tolist()]
        return Sizes(self.c, cuboids, node, batch[which] if isinstance(batch, np.ndarray) else batch, *rest)

    @cached_property
    def m(self) -> Array:
        return self.s * self.b

    def weight(self, n: int, k: int, n_axis: str, k_axis: str | None) -> Weight:
        rows = ceil_div(n, self.axes[n_axis])
        columns = np.ones_like(rows) if k_axis is None else ceil_div(k, self.axes[k_axis])
        return Weight(rows, columns, ceil_div(rows, self.x) * columns, k_axis is None)

    @cached_property
    def norm_weight(self) -> Weight:
        """A norm's weight, or its bias."""
        return self.weight(self.c.hidden, 1, "z", None)

    @cached_property
    def linears(self) -> dict[str, Weight]:
        """The matrices of a block."""
        c = self.c
        into = {"attention.q": c.q_dim, "attention.k": c.kv_dim, "attention.v": c.kv_dim}
        into |= dict.fromkeys(("mlp.gate", "mlp.up") if c.gated else ("mlp.up",), c.ffn)
        found = {name: self.weight(n, c.hidden, "y", "z") for name, n in into.items()}
        found["attention.out"] = self.weight(c.hidden, c.q_dim, "z", "y")
        return found | {"mlp.down": self.weight(c.hidden, c.ffn, "z", "y")}

    @cached_property
    def block_weights(self) -> dict[str, Weight]:
        """A block's parameters that are sent over x, by name."""
        c, found = self.c, {f"{name}.weight": w for name, w in self.linears.items()}
        for name, w in self.linears.items():
            if c.qkv_biased if name in ("attention.q", "attention.k", "attention.v") else c.bias:
                n = ceil_div(w.n, self.x)
                found[f"{name}.bias"] = Weight(w.n, np.ones_like(w.n), n, True)
        kinds = ["weight", "bias"][: 1 + c.norm_bias]
        return found | {f"{norm}.{kind}": self.norm_weight for norm in ("norm1", "norm2") for kind in kinds}

    def trained(self, block: Collection[str]) -> list[Weight]:
        """The parameters of a block with these names that are sent over x."""
        return [w for name, w in self.block_weights.items() if name in block]

    def head_norms(self, block: Collection[str]) -> int:
        """Elements of a layer's QK-norms with these names. Every rank has them; they are not sent over x."""
        return self.c.head_dim * sum(f"attention.norm_{each}.weight" in block for each in "qk")

    @cached_property
    def tables(self) -> list[Weight]:
        """The embedding, and learned positions."""
        rows = [self.c.vocab] + ([] if self.c.rotary else [self.c.context])
        return [self.weight(n, self.c.hidden, "y", "z") for n in rows]

    @cached_property
    def head_weight(self) -> Weight:
        return self.weight(self.c.vocab, self.c.hidden, "y", "z")

    def chunk(self, limit: int, sub_batches: int) -> Array:
        """Rows of the sequence that the head takes at a time, of each sub-batch."""
        if (limit, sub_batches) in self._chunks:
            return self._chunks[limit, sub_batches]
        rows = np.maximum(self.b // sub_batches, 1) * ceil_div(self.c.vocab, self.y)
        known: dict[tuple[int, int, int], int] = {}
        found = np.empty_like(self.s)
        for i, key in enumerate(zip(self.s.tolist(), self.z.tolist(), rows.tolist(), strict=True)):
            if key not in known:
                known[key] = chunk_rows(*key, limit)
            found[i] = known[key]
        self._chunks[limit, sub_batches] = found
        return found

    @cached_property
    def parameters(self) -> Array:
        """Elements of this rank's shards."""
        return self.elements(Trained(self.c))

    def elements(self, of: Trained, segment: Segment = WHOLE) -> Array:
        """Elements of this rank's shards of a stage's trained parameters. First and last stage hold a tied
        embedding."""
        ends = [w.shard for w, each in zip(self.tables, of.tables(), strict=True) if each and segment.embeds]
        ends += [self.norm_weight.shard] * sum(of.norm()) * segment.ends
        ends += [self.head_weight.shard] * (of.head and segment.ends and not (of.config.tied and segment.embeds))
        kinds = Counter(of.block(i) for i in range(of.config.layers))
        blocks = [n * (added(w.shard for w in self.trained(kind)) + self.head_norms(kind)) for kind, n in kinds.items()]
        return added([*ends, *blocks, np.zeros_like(self.x)])


def groups(cuboids: Sequence[Cuboid], context: Array, node: int, group_of_nodes: int = 0) -> dict[str, Group]:
    """The groups of each axis, of neighbours on x that share a sequence, and of all ranks. Members of a group are a
    stride apart: the product of the axes that vary faster over ranks. A group that nodes split unevenly is as slow as
    its smallest share: with 8 ranks per node, one of the groups of 3 neighbours has only one rank on a node. The same
    holds for groups of nodes behind one link."""
    sizes = {axis: np.array([getattr(each, axis) for each in cuboids], dtype=np.int64) for axis in AXES}
    strides = {axis: np.empty(len(cuboids), dtype=np.int64) for axis in AXES}
    for i, each in enumerate(cuboids):
        stride = 1
        for axis in reversed(each.order):
            strides[axis][i] = stride
            stride *= getattr(each, axis)
    world = np.array([each.ranks for each in cuboids], dtype=np.int64)

    def together(size: Array, stride: Array | int, share: int) -> Array:
        """The number of a group's members among `share` neighbouring ranks."""
        least = np.maximum(np.gcd(stride * size, share) // stride, 1)
        return np.where(world > share, least, size)

    def group(size: Array, stride: Array | int) -> Group:
        behind = together(size, stride, node * group_of_nodes) if group_of_nodes else np.inf
        return Group(size, together(size, stride, node), behind)

    found = {axis: group(size, strides[axis]) for axis, size in sizes.items()}
    return found | {"x/context": group(context, strides["x"]), "world": group(world, 1)}


def _picked(config: ModelConfig, cuboid: Cuboid) -> int:
    """The number of key heads that the first rank's queries need; one each if the need is uneven."""
    parts = cuboid.y * cuboid.z
    if config.kv_heads % parts == 0:
        return config.kv_heads // parts
    heads = config.heads // parts
    need = [h * config.kv_heads // config.heads for h in range(heads)]
    each = sorted(set(need))
    even = [head for head in each for _ in range(heads // len(each))] == need
    return len(each) if even else heads
