"""1-D parallel: Megatron-LM's. Weights are cut over axis y and never move; activations are whole where they are used.

    tensor                held by a rank
    attention             [s, b, heads/y]      whole sequences of a block of heads
    MLP inner             [s, b, ffn/y]
    logits                [s, b, V/y]
    into weight [n, k]    [n/y, k]             its bias [n/y]
    out_of weight [n, k]  [n, k/y]             its bias [n], like a norm's weight
    tables [V, d]         [V/y, d]

With sequence parallelism the residual stream is cut by tokens too. The variants differ in the collective before an into
product and in the one after an out_of product; backward has their transposes:

    variant     residual stream   into: X, dX                    out_of: Y, dY
    plain       [s, b, d]         copy, all_reduce               all_reduce, copy
    sequence    [s/y, b, d]       all_gather, reduce_scatter     reduce_scatter, all_gather

The look-up moves what an out_of product moves, the head what an into product does. X of an into product is kept whole
for backward, and dX travels under the product that makes dW.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cuboid.baselines.serial import attend_whole
from cuboid.comm.axis import Axis
from cuboid.comm.collectives import COLLECTIVES, TRANSPOSE, Kind, all_gather, all_reduce, collective
from cuboid.comm.flight import Flight, Pause, Steps, token
from cuboid.layers.embedding import Lookup, lookup
from cuboid.layers.head import chunk_rows
from cuboid.layers.loss import Loss
from cuboid.layers.norm import RMSNorm
from cuboid.layers.product import Linear
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import Spec, ceil_div, cut, round_up
from cuboid.mesh.mesh import Mesh
from cuboid.mesh.place import Index, Place
from cuboid.model.bucketed import Bucketed
from cuboid.model.config import ModelConfig
from cuboid.model.parallel import CAUSAL, Attend, Role
from cuboid.model.rotary import rotation
from cuboid.step.weights import Weights

CUTS: dict[Role, tuple[tuple[str, ...], ...]] = {
    "into.weight": (("y",), ()),
    "into.bias": (("y",),),
    "out_of.weight": ((), ("y",)),
    "out_of.bias": ((),),
    "norm": ((),),
    "table": (("y",), ()),
}
HEAD_ELEMENTS = 1 << 24  # of logits at a time, as on a cuboid


def check(config: ModelConfig, cuboid: Cuboid, batch: int, seq: int) -> None:
    """Raise if this model cannot run 1-D parallel with `batch` sequences of `seq` tokens."""
    if cuboid.x > 1 or cuboid.z > 1:
        raise ValueError(
            f"cuboid {cuboid} has x={cuboid.x} and z={cuboid.z}, but 1-D parallel cuts over y alone; "
            f"use x=1, z=1 and y={cuboid.block}"
        )
    config.check_plain("1-D parallel")
    config.check(cuboid, batch, seq)
    y, heads = cuboid.y, config.heads
    fits = {"kv_heads": [n for n in range(y, heads + 1, y) if heads % n == 0], "ffn": [round_up(config.ffn, y)]}
    for name, values in fits.items():
        n = getattr(config, name)
        if n % y:
            smaller = [p for p in range(y - 1, 0, -1) if n % p == 0 and heads % p == 0][:3]
            raise ValueError(
                f"{name}={n} cannot be cut into y={y}; use {name} {' or '.join(map(str, values))}, "
                f"or a cuboid with y one of {smaller}"
            )


class OneD(Bucketed):
    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        sequence: bool = False,
        dtype: torch.dtype | None = None,
        head_elements: int = HEAD_ELEMENTS,
    ) -> None:
        check(config, mesh.cuboid, mesh.cuboid.data, 1)
        self.config, self.mesh, self.sequence, self.dtype = config, mesh, sequence, dtype
        self.head_elements = head_elements
        self._before: Kind = "all_gather" if sequence else "copy"
        self._after: Kind = "reduce_scatter" if sequence else "all_reduce"

    def spec(self, role: Role, shape: tuple[int, ...]) -> Spec:
        cuts = CUTS[role]
        partial = self.sequence and not any(cuts)  # of what every rank has, each has seen its own tokens
        return Spec(shape, cuts, sums=("y",) if partial else ())

    # Tokens

    def place(self, batch: int, seq: int, start: int = 0, decode: bool = False) -> Place:
        replicas, y, device = self.mesh.data, self.mesh.y, self.mesh.device
        padded = round_up(batch, replicas.size) if decode else batch
        check(self.config, self.mesh.cuboid, padded, start + seq)
        samples = torch.arange(padded, device=device).chunk(replicas.size)[replicas.index]
        positions = torch.arange(start, start + round_up(seq, y.size if self.sequence else 1), device=device)
        own = positions.chunk(y.size)[y.index] if self.sequence else positions
        hidden = torch.arange(self.config.hidden, device=device)
        classes = torch.arange(*cut(self.config.vocab, y.size, y.index), device=device)
        residual, logits = Index(own, samples, hidden), Index(positions, samples, classes)
        turn = rotation(self.config, positions) if self.config.rotary else None
        return Place(batch, seq, start, samples, positions, self.mesh.x, residual, logits, turn)

    # Layers

    def embed(self, ids: Tensor, tables: Sequence[tuple[Weights, nn.Parameter]], place: Place) -> Steps:
        y, lengths = self.mesh.y, (self.config.vocab, self.config.context)
        starts = [cut(n, y.size, y.index)[0] for n, _ in zip(lengths, tables, strict=False)]
        all_ids = (ids, place.positions[:, None])[: len(tables)]
        rows = yield from lookup(tables, Lookup(all_ids, starts, self.mesh.z))  # this rank's; z has nothing to add
        X = yield from collective(self._after, rows, y)
        return X

    def norm(self, X: Tensor, W: Weights, weight: nn.Parameter, bias: nn.Parameter | None) -> Steps:
        if bias is None:
            return RMSNorm.apply(X, W[weight], self.config.norm_eps)
        return F.layer_norm(X, weight.shape, W[weight], W[bias], self.config.norm_eps)
        yield

    def into(self, X: Tensor, W: Weights, linears: Sequence[Linear], heads: Sequence[int] = ()) -> Steps:
        call = _Into(self._before, self.mesh.y)
        launched = _Launch.apply(X, call)
        yield Pause()
        Ys = _Multiply.apply(launched, call, *(W[linear.weight] for linear in linears))
        Ys = [Y if bias is None else Y + W[bias] for Y, (_, bias) in zip(Ys, linears, strict=True)]
        return [Y.unflatten(-1, (-1, self.config.head_dim)) for Y in Ys] if heads else Ys

    def attend(self, q: Tensor, k: Tensor, v: Tensor, place: Place, how: Attend = CAUSAL) -> Steps:
        return attend_whole(q, k, v, place, how)
        yield

    def out_of(self, X: Tensor, W: Weights, linear: Linear, heads: int = 0) -> Steps:
        Y = yield from collective(self._after, F.linear(X, W[linear.weight]), self.mesh.y)
        return Y if linear.bias is None else Y + W[linear.bias]

    def logits(self, X: Tensor, W: Weights, weight: nn.Parameter) -> Steps:
        (Y,) = yield from self.into(X, W, [Linear(weight, None)])
        return Y

    def head_loss(
        self, parts: Sequence[Tensor], W: Weights, weight: nn.Parameter, targets: Tensor, loss: Loss
    ) -> Steps:
        (X,) = parts
        (s, b), vocab = targets.shape, self.config.vocab
        chunk = chunk_rows(s, 1, b * ceil_div(vocab, self.mesh.y.size), self.head_elements)
        X = yield from collective(self._before, X, self.mesh.y)
        return _HeadLoss.apply(X, W[weight], _Head(targets, vocab, loss, self.mesh, chunk))


@dataclass
class _Into:
    """What the two nodes of an into product share."""

    kind: Kind
    y: Axis
    X: Flight | None = None
    dX: Flight | None = None


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, X: Tensor, call: _Into) -> Tensor:
        ctx.call = call
        call.X = COLLECTIVES[call.kind](X, call.y)
        return token(X)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        dX, ctx.call.dX = ctx.call.dX.wait(), None
        return dX, None


class _Multiply(torch.autograd.Function):
    """Y = X Wᵀ for each W of shape [n/y, k]; backward: dX = Σ dY W, and under its collective dW = dYᵀ X."""

    @staticmethod
    def forward(ctx: Any, launched: Tensor, call: _Into, *Ws: Tensor) -> tuple[Tensor, ...]:
        assert call.X is not None
        ctx.call = call
        X, call.X = call.X.wait(), None
        ctx.save_for_backward(X, *Ws)
        return tuple(F.linear(X, W) for W in Ws)

    @staticmethod
    def backward(ctx: Any, *dYs: Tensor) -> tuple[Tensor | None, ...]:
        call: _Into = ctx.call
        X, *Ws = ctx.saved_tensors
        X_m, *dYs_m = (each.flatten(0, 1) for each in (X, *dYs))
        dX = dYs_m[0] @ Ws[0]
        for dY, W in zip(dYs_m[1:], Ws[1:], strict=True):
            dX.addmm_(dY, W)
        call.dX = COLLECTIVES[TRANSPOSE[call.kind]](dX.view(X.shape), call.y)
        return token(X), None, *(dY.T @ X_m for dY in dYs_m)


class _Head(NamedTuple):
    targets: Tensor  # [s, b]
    vocab: int
    loss: Loss
    mesh: Mesh
    chunk: int  # rows of the sequence at a time


class _HeadLoss(torch.autograd.Function):
    """X [s, b, d] whole, W [V/y, d] -> the mean loss over the tokens of all ranks, vocab-parallel: four numbers a row
    are gathered over y, no logits. dX, of this rank's classes alone, and dW are made in forward, unscaled, so that the
    logits live a chunk at a time and are never saved."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, W: Tensor, call: _Head) -> Tensor:
        y, loss, vocab = call.mesh.y, call.loss, call.vocab
        start, _ = cut(vocab, y.size, y.index)
        wide = torch.promote_types(X.dtype, torch.float32)
        sums = X.new_zeros(2, dtype=wide)  # loss, tokens that count
        train = any(ctx.needs_input_grad)
        dX = X.new_empty(X.shape) if train else None
        dW = torch.zeros_like(W, dtype=wide) if train else None
        for top in range(0, X.shape[0], call.chunk):
            rows = slice(top, top + call.chunk)
            X_m, targets = X[rows].flatten(0, 1), call.targets[rows].flatten()
            logits = (X_m @ W.T).to(wide)
            parts = all_gather(loss.parts(logits, targets, start)[None], y).wait()
            total, counted, lse = loss.merge(parts, targets, vocab)
            sums += torch.stack((total, counted.to(wide)))
            if dX is not None and dW is not None:
                dlogits = loss.gradient(logits, targets, start, lse, vocab).to(X.dtype)
                torch.mm(dlogits, W, out=dX[rows].flatten(0, 1))
                if dW.dtype == X.dtype:
                    dW.addmm_(dlogits.T, X_m)
                else:
                    dW += dlogits.T @ X_m
        sums = all_reduce(sums, call.mesh.data).wait()
        count = sums[1].clamp(min=1)
        if dX is not None and dW is not None:
            ctx.save_for_backward(dX, dW.to(W.dtype), count)
        return sums[0] / count

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, Tensor, None]:
        dX, dW, count = ctx.saved_tensors
        scale = dloss / count
        return dX * scale.to(dX.dtype), dW * scale.to(dW.dtype), None
