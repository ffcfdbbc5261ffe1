"""2-D (Optimus) and 2.5-D (Tesseract) parallelism: the products of summa.py on x layers of y × z = q × q ranks.

    tensor                held by a rank
    residual stream       [s, b/(x y), d/z]
    attention             [s, b/(x y), heads/z]      full sequences of a block of heads
    MLP inner             [s, b/(x y), ffn/z]
    logits                [s, b/(x y), V/z]
    weight [n, k]         [n/z, k/y]                 into and out_of alike
    bias, norm [n]        [n/z]                      replicated over y
    embeddings [V, d]     [V/y, d/z]

With x = 1 this is 2-D. Otherwise every layer holds the weights and its own slice of the batch, and gradients are summed
over x: the depth of 2.5-D splits no product, it replicates, like axis replicas.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cuboid.baselines.summa import SummaLogits, SummaLookup, SummaLoss, SummaProduct
from cuboid.comm.axis import Axis
from cuboid.layers.attend import Attend
from cuboid.layers.loss import OwnLoss
from cuboid.layers.norm import Normalise
from cuboid.layers.product import Affine, check_way
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import Spec, round_up, shard_range
from cuboid.mesh.mesh import Mesh
from cuboid.mesh.place import Index, Place
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import residual_dropout
from cuboid.model.parallel import Role
from cuboid.model.rotary import rotation
from cuboid.step.op import Layer
from cuboid.step.schedule import OFF, Schedule

SPECS: dict[Role, tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]] = {
    "into.weight": ((("z",), ("y",)), ("x",)),
    "into.bias": ((("z",),), ("x", "y")),  # each y-rank has seen its own tokens
    "out_of.weight": ((("z",), ("y",)), ("x",)),
    "out_of.bias": ((("z",),), ("x", "y")),
    "norm": ((("z",),), ("x", "y")),
    "table": ((("y",), ("z",)), ("x",)),
}


def check(config: ModelConfig, cuboid: Cuboid, batch: int, seq: int) -> None:
    """Raise ValueError if this model cannot run 2-D parallel with `batch` sequences of `seq` tokens."""
    q = cuboid.y
    if cuboid.z != q:
        raise ValueError(
            f"cuboid {cuboid} has y={q} and z={cuboid.z}, but 2-D parallel needs a square of ranks; "
            f"use y = z, and x for layers of such squares"
        )
    for name in ("hidden", "heads", "kv_heads", "ffn"):
        n = getattr(config, name)
        if n % q:
            smaller = [p for p in range(q - 1, 0, -1) if n % p == 0][:3]
            raise ValueError(
                f"{name}={n} cannot be split into z={q}; use {name} {round_up(n, q)}, or y = z one of {smaller}"
            )
    config.check_plain("2-D parallel", cuboid.pipe)
    config.check(Cuboid(), batch, seq)
    count = cuboid.replicas * cuboid.x * q
    if batch % count:
        raise ValueError(f"batch={batch} cannot be split into replicas·x·y={count}; use batch {round_up(batch, count)}")


class TwoD:
    schedule: Schedule = OFF
    retain_weights = False  # they are not gathered
    sums_over: Sequence[str] = ("replicas", "x", "y")

    def __init__(self, config: ModelConfig, mesh: Mesh, dtype: torch.dtype | None = None) -> None:
        check(config, mesh.cuboid, mesh.cuboid.ranks, 1)
        self.config, self.mesh, self.dtype = config, mesh, dtype

    def spec(self, role: Role, shape: tuple[int, ...]) -> Spec:
        splits, sums = SPECS[role]
        return Spec(shape, splits, sums)

    # Tokens

    def place(self, batch: int, seq: int, start: int = 0, decode: bool = False) -> Place:
        mesh, config, device = self.mesh, self.config, self.mesh.device
        count = mesh.replicas.size * mesh.x.size * mesh.y.size
        padded = round_up(batch, count) if decode else batch
        check(config, mesh.cuboid, padded, start + seq)
        index = (mesh.replicas.index * mesh.x.size + mesh.x.index) * mesh.y.size + mesh.y.index
        samples = torch.arange(*shard_range(padded, count, index), device=device)
        positions = torch.arange(start, start + seq, device=device)
        hidden, classes = (
            torch.arange(*shard_range(n, mesh.z.size, mesh.z.index), device=device)
            for n in (config.hidden, config.vocab)
        )
        residual, logits = Index(positions, samples, hidden), Index(positions, samples, classes)
        turn = rotation(config, positions) if config.rotary else None
        return Place(batch, seq, start, samples, positions, Axis("x", 1, 0), residual, logits, turn)

    # Layers

    def embed(self, tables: Sequence[nn.Parameter], rows: Sequence[int]) -> Layer:
        return SummaLookup(tables, rows, self.mesh)

    def norm(self, weight: nn.Parameter, bias: nn.Parameter | None) -> Layer:
        return Normalise(weight, bias, self.mesh.z, self.config.norm_eps)

    def into(self, linears: Sequence[Affine], heads: Sequence[int] = ()) -> Layer:
        check_way("into", *linears)
        return SummaProduct(linears, self.mesh, "residual", "heads" if heads else "inner")

    def attend(self, norms: Sequence[nn.Parameter] = (), causal: bool = True) -> Layer:
        c, alone = self.config, Axis("", 1, 0)
        return Attend(c.heads, c.kv_heads, c.head_dim, alone, alone, norms, c.norm_eps, causal)

    def out_of(self, linear: Affine, heads: bool = False) -> Layer:
        check_way("out_of", linear)
        return SummaProduct([linear], self.mesh, "attended" if heads else "inner", "residual")

    def dropout(self, name: str) -> Layer:
        return residual_dropout(self.config, name)

    def logits(self, weight: nn.Parameter, rows: int) -> Layer:
        return SummaLogits(weight, rows, self.mesh)

    def head_loss(self, weight: nn.Parameter, rows: int) -> Layer:
        return SummaLoss(weight, rows, self.mesh)

    def own_loss(self, fn: Callable[[Tensor, Tensor], tuple[Tensor, Any]]) -> Layer:
        return OwnLoss(fn, [self.mesh.z])
