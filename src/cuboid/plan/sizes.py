"""What the first rank of each candidate holds: the sizes of ARCHITECTURE.md's table, as arrays over candidates.

The first rank has the largest parts: uneven cuts leave the last ones short.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cuboid.layers.head import chunk_rows
from cuboid.mesh.cuboid import AXES, Cuboid
from cuboid.model.config import ModelConfig
from cuboid.plan.time import Array, Group


def ceil_div(n: Array | int, parts: Array | int) -> Array:
    return np.asarray(-(-n // parts))


def added(arrays: Iterable[Array]) -> Array:
    """Their sum, candidate by candidate."""
    return np.asarray(sum(arrays))


@dataclass(frozen=True)
class Weight:
    """A parameter [n, k] as a rank holds it once gathered over x, and the rows of its shard."""

    n: Array
    k: Array
    shard: Array  # elements
    vector: bool


class Sizes:
    def __init__(self, config: ModelConfig, cuboids: Sequence[Cuboid], node: int, batch: int, seq: int) -> None:
        c = self.c = config
        self.cuboids = cuboids
        self.axes = {axis: np.array([getattr(each, axis) for each in cuboids], dtype=np.int64) for axis in AXES}
        self.pipe, self.data, self.x, self.y, self.z = self.axes.values()
        samples = batch // self.data
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
        self.groups = groups(cuboids, self.context, node)
        self._chunks: dict[tuple[int, int], Array] = {}

    @cached_property
    def m(self) -> Array:
        return self.s * self.b

    def weight(self, n: int, k: int, n_axis: str, k_axis: str | None) -> Weight:
        rows = ceil_div(n, self.axes[n_axis])
        columns = np.ones_like(rows) if k_axis is None else ceil_div(k, self.axes[k_axis])
        return Weight(rows, columns, ceil_div(rows, self.x) * columns, k_axis is None)

    def norm_weights(self, count: int) -> list[Weight]:
        return [self.weight(self.c.hidden, 1, "z", None)] * (count * (1 + self.c.norm_bias))

    @cached_property
    def block_weights(self) -> list[Weight]:
        c, ups = self.c, 2 if self.c.gated else 1
        into = [(n, c.hidden, "y", "z") for n in (c.q_dim, c.kv_dim, c.kv_dim, *[c.ffn] * ups)]
        matrices = [*into, (c.hidden, c.q_dim, "z", "y"), (c.hidden, c.ffn, "z", "y")]
        found = [self.weight(*each) for each in matrices]
        biases = matrices[:3] * c.qkv_biased + matrices[3:] * bool(c.bias)
        found += [self.weight(n, 1, axis, None) for n, _, axis, _ in biases]
        return found + self.norm_weights(2)

    @property
    def head_norms(self) -> int:
        """Elements of a layer's norms of queries and keys, whole on every rank: none of them travels over x."""
        return 2 * self.c.head_dim * self.c.qk_norm

    @cached_property
    def tables(self) -> list[Weight]:
        """The embedding, and learned positions."""
        rows = [self.c.vocab] + ([] if self.c.rotary else [self.c.context])
        return [self.weight(n, self.c.hidden, "y", "z") for n in rows]

    @cached_property
    def head_weight(self) -> Weight:
        return self.weight(self.c.vocab, self.c.hidden, "y", "z")

    def chunk(self, limit: int, parts: int) -> Array:
        """Rows of the sequence that the head takes at a time, of each of the batch's parts."""
        if (limit, parts) in self._chunks:
            return self._chunks[limit, parts]
        rows = np.maximum(self.b // parts, 1) * ceil_div(self.c.vocab, self.y)
        known: dict[tuple[int, int, int], int] = {}
        found = np.empty_like(self.s)
        for i, key in enumerate(zip(self.s.tolist(), self.z.tolist(), rows.tolist(), strict=True)):
            if key not in known:
                known[key] = chunk_rows(*key, limit)
            found[i] = known[key]
        self._chunks[limit, parts] = found
        return found

    @cached_property
    def parameters(self) -> Array:
        """Elements of this rank's shards."""
        weights = [*self.tables, *self.norm_weights(1)] + ([] if self.c.tied else [self.head_weight])
        block = added(w.shard for w in self.block_weights) + self.head_norms
        return added(w.shard for w in weights) + self.c.layers * block


def groups(cuboids: Sequence[Cuboid], context: Array, node: int) -> dict[str, Group]:
    """Of each axis, of the neighbours on x that share a sequence, and of all ranks. Members of a group are a stride
    apart: the product of the axes that run faster over ranks. A group that nodes cut unevenly is as slow as its
    smallest part: with 8 ranks a node, one of the groups of 3 neighbours has but one rank on a node."""
    sizes = {axis: np.array([getattr(each, axis) for each in cuboids], dtype=np.int64) for axis in AXES}
    strides = {axis: np.empty(len(cuboids), dtype=np.int64) for axis in AXES}
    for i, each in enumerate(cuboids):
        stride = 1
        for axis in reversed(each.order):
            strides[axis][i] = stride
            stride *= getattr(each, axis)
    world = np.array([each.ranks for each in cuboids], dtype=np.int64)

    def group(size: Array, stride: Array | int) -> Group:
        least = np.maximum(np.gcd(stride * size, node) // stride, 1)
        return Group(size, np.where(world > node, least, size))

    found = {axis: group(size, strides[axis]) for axis, size in sizes.items()}
    return found | {"x/context": group(context, strides["x"]), "world": group(world, 1)}


def _picked(config: ModelConfig, cuboid: Cuboid) -> int:
    """How many heads of keys the first rank's queries need, or one each where the need is uneven."""
    parts = cuboid.y * cuboid.z
    if config.kv_heads % parts == 0:
        return config.kv_heads // parts
    heads = config.heads // parts
    need = [h * config.kv_heads // config.heads for h in range(heads)]
    each = sorted(set(need))
    even = [head for head in each for _ in range(heads // len(each))] == need
    return len(each) if even else heads
