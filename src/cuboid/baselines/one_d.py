"""1-D parallelism, Megatron-LM's. Weights are split over axis y and never sent; activations are unsharded when used.

    tensor                held by a rank
    attention             [s, b, heads/y]      full sequences of a block of heads
    MLP inner             [s, b, ffn/y]
    logits                [s, b, V/y]
    into weight [n, k]    [n/y, k]             its bias [n/y]
    out_of weight [n, k]  [n, k/y]             its bias [n], like a norm's weight
    embeddings [V, d]     [V/y, d]

With sequence parallelism the residual stream is split by tokens too. The variants differ in the collective before an
into linear and in the one after an out_of linear; backward has their transposes:

    variant     residual stream   into: X, dX                    out_of: Y, dY
    plain       [s, b, d]         copy, all_reduce               all_reduce, copy
    sequence    [s/y, b, d]       all_gather, reduce_scatter     reduce_scatter, all_gather

The look-up sends what an out_of linear sends, the head what an into linear does. An into linear saves the unsharded X
for backward, and the collective of dX overlaps with the matmul of dW.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cuboid.comm.axis import Axis
from cuboid.comm.collectives import COLLECTIVES, TRANSPOSE, Kind
from cuboid.comm.flight import Pause, Steps
from cuboid.layers.attend import Attend
from cuboid.layers.embedding import lookup
from cuboid.layers.head import HeadLoss
from cuboid.layers.loss import OwnLoss
from cuboid.layers.norm import Normalise
from cuboid.layers.product import Affine, add_up, check_way, mm
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import Spec, round_up, shard_range
from cuboid.mesh.mesh import Mesh
from cuboid.mesh.place import Index, Place
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import residual_dropout
from cuboid.model.parallel import Role
from cuboid.model.rotary import rotation
from cuboid.step.op import Ahead, Back, Layer, chain, collective
from cuboid.step.schedule import OFF, Schedule
from cuboid.step.weights import Gathered

SPLITS: dict[Role, tuple[tuple[str, ...], ...]] = {
    "into.weight": (("y",), ()),
    "into.bias": (("y",),),
    "out_of.weight": ((), ("y",)),
    "out_of.bias": ((),),
    "norm": ((),),
    "table": (("y",), ()),
}
HEAD_ELEMENTS = 1 << 24  # of logits at a time, as on a cuboid
ALONE = Axis("", 1, 0)  # for dims that are not split


def check(config: ModelConfig, cuboid: Cuboid, batch: int, seq: int) -> None:
    """Raise ValueError if this model cannot run 1-D parallel with `batch` sequences of `seq` tokens."""
    if cuboid.x > 1 or cuboid.z > 1:
        raise ValueError(
            f"cuboid {cuboid} has x={cuboid.x} and z={cuboid.z}, but 1-D parallelism splits over y only; "
            f"use x=1, z=1 and y={cuboid.block}"
        )
    config.check_plain("1-D parallel", cuboid.pipe)
    config.check(cuboid, batch, seq)
    y, heads = cuboid.y, config.heads
    fits = {"kv_heads": [n for n in range(y, heads + 1, y) if heads % n == 0], "ffn": [round_up(config.ffn, y)]}
    for name, values in fits.items():
        n = getattr(config, name)
        if n % y:
            smaller = [p for p in range(y - 1, 0, -1) if n % p == 0 and heads % p == 0][:3]
            raise ValueError(
                f"{name}={n} cannot be split into y={y}; use {name} {' or '.join(map(str, values))}, "
                f"or a cuboid with y one of {smaller}"
            )


class OneD:
    schedule: Schedule = OFF
    retain_weights = False  # they are never sent
    sums_over: Sequence[str] = ("replicas",)

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        sequence: bool = False,
        dtype: torch.dtype | None = None,
        head_elements: int = HEAD_ELEMENTS,
    ) -> None:
        check(config, mesh.cuboid, mesh.cuboid.replicas, 1)
        self.config, self.mesh, self.sequence, self.dtype = config, mesh, sequence, dtype
        self.head_elements = head_elements
        self._before: Kind = "all_gather" if sequence else "copy"
        self._after: Kind = "reduce_scatter" if sequence else "all_reduce"

    def spec(self, role: Role, shape: tuple[int, ...]) -> Spec:
        splits = SPLITS[role]
        partial = self.sequence and not any(splits)  # each rank has seen only its own tokens
        return Spec(shape, splits, sums=("y",) if partial else ())

    # Tokens

    def place(self, batch: int, seq: int, start: int = 0, decode: bool = False) -> Place:
        replicas, y, device = self.mesh.replicas, self.mesh.y, self.mesh.device
        padded = round_up(batch, replicas.size) if decode else batch
        check(self.config, self.mesh.cuboid, padded, start + seq)
        samples = torch.arange(padded, device=device).chunk(replicas.size)[replicas.index]
        positions = torch.arange(start, start + round_up(seq, y.size if self.sequence else 1), device=device)
        own = positions.chunk(y.size)[y.index] if self.sequence else positions
        hidden = torch.arange(self.config.hidden, device=device)
        classes = torch.arange(*shard_range(self.config.vocab, y.size, y.index), device=device)
        residual, logits = Index(own, samples, hidden), Index(positions, samples, classes)
        turn = rotation(self.config, positions) if self.config.rotary else None
        return Place(batch, seq, start, samples, positions, self.mesh.x, residual, logits, turn)

    # Layers

    def embed(self, tables: Sequence[nn.Parameter], rows: Sequence[int]) -> Layer:
        return lookup(tables, rows, self.mesh.y, self.config.hidden, self._after)

    def norm(self, weight: nn.Parameter, bias: nn.Parameter | None) -> Layer:
        return Normalise(weight, bias, ALONE, self.config.norm_eps)

    def into(self, linears: Sequence[Affine], heads: Sequence[int] = ()) -> Layer:
        check_way("into", *linears)
        return MegatronLinear(linears, self._before, self.mesh.y, "residual", "heads" if heads else "inner")

    def attend(self, norms: Sequence[nn.Parameter] = (), causal: bool = True) -> Layer:
        c = self.config
        return Attend(c.heads, c.kv_heads, c.head_dim, ALONE, ALONE, norms, c.norm_eps, causal)

    def out_of(self, linear: Affine, heads: bool = False) -> Layer:
        check_way("out_of", linear)
        takes = "attended" if heads else "inner"
        product = MegatronLinear([linear._replace(bias=None)], "copy", ALONE, takes, "residual")
        bias = [] if linear.bias is None else [Bias(linear.bias)]
        return chain(product, collective(self._after, self.mesh.y, self.config.hidden), *bias)

    def dropout(self, name: str) -> Layer:
        return residual_dropout(self.config, name)

    def logits(self, weight: nn.Parameter, rows: int) -> Layer:
        return self.into([Affine(weight, None, (rows, self.config.hidden), "into")])

    def head_loss(self, weight: nn.Parameter, rows: int) -> Layer:
        return HeadLoss(weight, rows, self.mesh, self.head_elements, kind=self._before)

    def own_loss(self, fn: Callable[[Tensor, Tensor], tuple[Tensor, Any]]) -> Layer:
        return OwnLoss(fn, [self.mesh.y] if self.sequence else [])


@dataclass(eq=False)
class MegatronLinear:
    """X [s, b, k], after collective `kind` over the axis -> Y = X Wᵀ + b of each linear, a tuple if there are several.
    Backward: dX = Σ dY W and, overlapping with its collective, dW = dYᵀ X."""

    linears: Sequence[Affine]
    kind: Kind
    axis: Axis
    takes: str
    gives: str

    def __call__(self, X_s: Tensor, w: Gathered, at: Any) -> Steps:
        tokens, width = len(at.place.positions) * len(at.place.samples), self.linears[0].shape[1]
        pause = Pause(sent=tokens * width * X_s.element_size() * (1 - 1 / self.axis.size))
        flight = COLLECTIVES[self.kind](X_s, self.axis)
        del X_s
        yield pause
        X = flight.wait()
        del flight
        Ys = [F.linear(X, w[weight], None if bias is None else w[bias]) for weight, bias, *_ in self.linears]
        back = Back(partial(self._run, [X], pause)) if at.train else None
        return tuple(Ys) if len(Ys) > 1 else Ys[0], back

    def _run(self, saved: list[Tensor], pause: Pause, dYs: Any, w: Gathered, before: Ahead) -> Steps:
        X = saved.pop()
        dYs_m = [dY.flatten(0, 1) for dY in (dYs if len(self.linears) > 1 else (dYs,))]
        del dYs
        dX = X.new_empty(X.shape)
        for i, (dY, (weight, *_)) in enumerate(zip(dYs_m, self.linears, strict=True)):
            mm(dY, w[weight], dX.flatten(0, 1), add=i > 0)
        flight = COLLECTIVES[TRANSPOSE[self.kind]](dX, self.axis)
        flops = 2 * X.shape[0] * X.shape[1] * sum(prod(linear.shape) for linear in self.linears) / self.axis.size
        later = w.make(partial(self._weight_gradients, X.flatten(0, 1), dYs_m, w), flops)
        del dX, X, dYs_m, w
        yield pause._replace(later=later)
        return flight.wait()

    def _weight_gradients(self, X: Tensor, dYs: Sequence[Tensor], w: Gathered) -> None:
        for dY, (weight, bias, *_) in zip(dYs, self.linears, strict=True):
            if weight.requires_grad:
                mm(dY.T, X, *w.gradient([weight]))
            if bias is not None and bias.requires_grad:
                add_up(dY[None], *w.gradient([bias]))


@dataclass(eq=False)
class Bias:
    """Y + b, in the memory of Y."""

    bias: nn.Parameter
    takes: str = ""
    gives: str = ""

    def __call__(self, Y: Tensor, w: Gathered, at: Any) -> Steps:
        def run(dY: Tensor, w: Gathered, before: Ahead) -> Steps:
            w.add(self.bias, dY.sum((0, 1)))
            return dY
            yield

        return Y.add_(w[self.bias]), Back(run) if at.train else None
        yield
