"""3-D parallelism: the product of product.py on any x × y × z block.

    tensor                held by a rank
    residual stream       [s/y, b/x, d/z]
    attention             [s,   b/x, heads/(y z)]      full sequences of a block of heads
    MLP inner             [s/z, b/x, ffn/y]
    logits                [s/z, b/x, V/y]
    into weight [n, k]    [n/(y x), k/z]               roles n = y, k = z
    out_of weight [n, k]  [n/(z x), k/y]               roles n = z, k = y
    embeddings [V, d]     [V/(y x), d/z]               like an into weight

Axis x plays m. If it is longer than the batch it splits the sequence too: gcd(b, x) ranks split the batch, the rest the
sequence, dealt from both ends so that causal attention is balanced, with keys and values gathered over them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cuboid.fuse import Fuse, plain
from cuboid.layers.attend import Attend
from cuboid.layers.embedding import lookup
from cuboid.layers.head import HeadLoss
from cuboid.layers.loss import OwnLoss
from cuboid.layers.norm import Normalise
from cuboid.layers.product import Affine, Product, check_way
from cuboid.layers.randomness import dropout
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import Spec, round_up, shard_range
from cuboid.mesh.mesh import Mesh
from cuboid.mesh.place import Index, Place
from cuboid.model.config import ModelConfig
from cuboid.model.parallel import Role
from cuboid.model.rotary import rotation
from cuboid.step.op import Layer, diagonal
from cuboid.step.runner import At
from cuboid.step.schedule import PREFETCH, Schedule

SPECS: dict[Role, tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]] = {
    "into.weight": ((("y", "x"), ("z",)), ()),
    "into.bias": ((("y", "x"),), ()),  # dY is unsharded over z: every z-rank has the same gradient
    "out_of.weight": ((("z", "x"), ("y",)), ()),
    "out_of.bias": ((("z", "x"),), ()),
    "norm": ((("z", "x"),), ("y",)),  # each y-rank has seen its own tokens
    "head_norm": (((),), ("x", "y", "z")),  # each rank has seen its own tokens and heads
    "table": ((("y", "x"), ("z",)), ()),
}


#: The dtype of matmuls, by name; None: that of the stored weights.
COMPUTE: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

#: Least bytes of a sub-batch's residual stream, on a CPU and on a GPU. Smaller collectives are mostly latency, and cost
#: more than they hide. Measured on CPUs; for a GPU, what NCCL sends in its latency of some 10 µs at 400 GB/s.
LEAST_SUB_BATCH = (1 << 17, 1 << 22)

#: Least tokens of a linear if there are four sub-batches: with fewer, its matmul takes longer than what it hides.
LEAST_ROWS = (512, 2048)


@dataclass(frozen=True)
class Policy:
    """What forward keeps for backward of operands that were gathered for a matmul.

    Args:
        activations: "regather" keeps the shard, which backward regathers; "retain" keeps the gathered operand.
        weights: The same for weights.
        head_elements: The most elements of partial logits in memory at a time.

    Raises:
        ValueError: If a policy is neither.
    """

    activations: Literal["regather", "retain"] = "regather"
    weights: Literal["regather", "retain"] = "regather"
    head_elements: int = 1 << 24

    def __post_init__(self) -> None:
        for name in ("activations", "weights"):
            if getattr(self, name) not in ("regather", "retain"):
                raise ValueError(f"policy {name}={getattr(self, name)!r} is not one of regather, retain")


class CuboidParallel:
    """A Transformer on an x × y × z block of devices. A rank holds `[s/y, b/x, d/z]` of the residual stream.

    Args:
        config: The model.
        mesh: The ranks it is spread over.
        policy: What forward keeps for backward.
        dtype: In which linears compute; None: that of the stored weights.
        schedule: What overlaps with what.

    Raises:
        ValueError: If heads, hidden size or layers cannot be split over the mesh.
    """

    sums_over: Sequence[str] = ("x", "z", "replicas")

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        policy: Policy = Policy(),
        dtype: torch.dtype | None = None,
        schedule: Schedule = PREFETCH,
    ) -> None:
        self.config, self.mesh, self.policy, self.dtype, self.schedule = config, mesh, policy, dtype, schedule
        self.retain_weights, self.fuse = policy.weights == "retain", schedule.fuse(mesh.device)
        config.check(mesh.cuboid, mesh.cuboid.replicas, 1)

    def spec(self, role: Role, shape: tuple[int, ...]) -> Spec:
        splits, sums = SPECS[role]
        return Spec(shape, splits, sums)

    # Tokens

    def place(self, batch: int, seq: int, start: int = 0, decode: bool = False) -> Place:
        mesh, device = self.mesh, self.mesh.device
        replicas, x, y, z = mesh.replicas.size, mesh.x.size, mesh.y, mesh.z
        padded = round_up(batch, replicas * x) if decode else batch
        self.config.check(mesh.cuboid, padded, start + seq)
        along_batch = gcd(padded // replicas, x)
        context = mesh.neighbours_on_x(x // along_batch)
        count = padded // (replicas * along_batch)
        first = (mesh.replicas.index * along_batch + mesh.x.index // context.size) * count
        samples = torch.arange(first, first + count, device=device)
        unit = lcm(y.size, z.size, 2 if context.size > 1 else 1) * context.size
        positions = start + torch.cat(dealt(round_up(seq, unit), context.size, context.index)).to(device)
        s_y = positions.chunk(y.size)[y.index]
        s_z = positions.chunk(z.size)[z.index]
        hidden = torch.arange(*shard_range(self.config.hidden, z.size, z.index), device=device)
        classes = torch.arange(*shard_range(self.config.vocab, y.size, y.index), device=device)
        residual, logits = Index(s_y, samples, hidden), Index(s_z, samples, classes)
        turn = rotation(self.config, positions) if self.config.rotary else None
        return Place(batch, seq, start, samples, positions, context, residual, logits, turn)

    # Layers

    def embed(self, tables: Sequence[nn.Parameter], rows: Sequence[int]) -> Layer:
        width = self.config.hidden / self.mesh.z.size
        return lookup(tables, rows, self.mesh.y, width, "reduce_scatter")

    def norm(self, weight: nn.Parameter, bias: nn.Parameter | None) -> Layer:
        return Normalise(weight, bias, self.mesh.z, self.config.norm_eps, self.fuse)

    def into(self, linears: Sequence[Affine], heads: Sequence[int] = ()) -> Layer:
        check_way("into", *linears)
        y, z = self.mesh.y, self.mesh.z
        # outputs with heads that y·z does not divide are sharded by tokens; `attend` gathers them
        whole = [bool(heads) and heads[i] % (y.size * z.size) == 0 for i in range(len(linears))]
        chunks = 1 if heads and not all(whole) else self.schedule.chunks
        gives = "heads" if heads else "inner"
        return Product(linears, z, y, False, whole, self._retain, chunks, takes="residual", gives=gives)

    def attend(self, norms: Sequence[nn.Parameter] = (), causal: bool = True) -> Layer:
        c, mesh = self.config, self.mesh
        dims = c.heads, c.kv_heads, c.head_dim
        return Attend(*dims, mesh.y, mesh.z, norms, c.norm_eps, causal, self.fuse)

    def out_of(self, linear: Affine, heads: bool = False) -> Layer:
        check_way("out_of", linear)
        takes = "attended" if heads else "inner"
        y, z, chunks = self.mesh.y, self.mesh.z, self.schedule.chunks
        return Product([linear], y, z, heads, (), self._retain, chunks, takes=takes, gives="residual")

    @property
    def _retain(self) -> bool:
        return self.policy.activations == "retain"

    def dropout(self, name: str) -> Layer:
        return residual_dropout(self.config, name, self.fuse)

    def logits(self, weight: nn.Parameter, rows: int) -> Layer:
        linear = Affine(weight, None, (rows, self.config.hidden), "into")
        return Product([linear], self.mesh.z, self.mesh.y, takes="residual")

    def head_loss(self, weight: nn.Parameter, rows: int) -> Layer:
        return HeadLoss(weight, rows, self.mesh, self.policy.head_elements, fuse=self.fuse)

    def own_loss(self, fn: Callable[[Tensor, Tensor], tuple[Tensor, Any]]) -> Layer:
        return OwnLoss(fn, [self.mesh.y])


def residual_dropout(config: ModelConfig, name: str, fuse: Fuse = plain) -> Layer:
    """residual -> residual: dropout by global index; the identity without a seed."""

    def drop(at: At, X: Tensor) -> Tensor:
        if at.seed is None:
            return X
        assert not isinstance(at.seed, int), "the model has made keys of it"
        return fuse(dropout)(X, config.dropout, at.seed[name], at.place.residual)

    return diagonal(drop, "residual")


def suitable_schedule(
    config: ModelConfig, cuboid: Cuboid, batch: int, seq: int, itemsize: int, apart: bool = True, gpu: bool = False
) -> Schedule:
    """Two sub-batches, or chunks, where activations are sent and are large enough for it to pay. Four sub-batches where
    they are sent over z, which scatters and gathers the MLP's widest rows with next to nothing to compute between, if
    there are enough tokens. None where the processors that compute make the messages too (not `apart`): nothing can
    overlap there."""
    samples = batch // cuboid.replicas // gcd(batch // cuboid.replicas, cuboid.x)
    of_rank = batch * seq * config.hidden * itemsize // (cuboid.block * cuboid.replicas)  # at every place of a pipe
    most = of_rank // LEAST_SUB_BATCH[gpu]
    if cuboid.y * cuboid.z == 1 or most < 2 or not apart:
        return PREFETCH
    four = cuboid.z > 1 and batch * seq // (cuboid.replicas * cuboid.x) >= 4 * LEAST_ROWS[gpu]
    wanted = (4, 2) if four else (2,)
    count = next((n for n in wanted if n <= most and samples % n == 0), 1)
    return Schedule(sub_batches=count) if count > 1 else Schedule(chunks=min(4, most))


def dealt(s: int, ranks: int, index: int) -> tuple[Tensor, ...]:
    """The positions that rank `index` takes of a sequence of s: from both ends, if several ranks share it.

    >>> [[int(i) for p in dealt(8, 2, index) for i in p] for index in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    if ranks == 1:
        return (torch.arange(s),)
    pieces = torch.arange(s).chunk(2 * ranks)
    return pieces[index], pieces[-1 - index]
