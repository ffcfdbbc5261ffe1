"""The head and the loss in one: logits live a chunk of the sequence at a time, and never whole over the vocabulary.

The head is an *into* product (n = y cuts the vocabulary, k = z the features). For each chunk of rows, with (1)–(3):

    logits = RS_z( X W_yᵀ )  [s/z, b, V/y]  ->  loss, dlogits  ->  dX = AG_z(dlogits) W_y,  dW_y += AG_z(dlogits)ᵀ X

and dX is reduce-scattered over y, dW over x, once. The gradients are computed in forward, unscaled, and multiplied
in backward by dloss / (tokens that count): the largest tensors of the step, partial logits and dlogits, are never
saved, and the tokens that count need not be known before the loss is. Saved: the shards of dX and dW.

X comes in parts of the batch, each on its way over y since it left the last norm (`to_head`); each part's dX is on its
way back while the next part is multiplied.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cuboid.comm.axis import Axis
from cuboid.comm.collectives import all_gather, all_reduce, reduce_scatter
from cuboid.comm.flight import Flight, token
from cuboid.layers.loss import Loss
from cuboid.layers.product import mm
from cuboid.mesh.layout import ceil_div
from cuboid.mesh.mesh import Mesh
from cuboid.step.weights import Bucket, Weights


@dataclass
class Rows:
    """A part of X on its way in, and of dX on its way out."""

    X: Flight | None = None
    dX_s: Tensor | None = None


#: Rows, and the token that ties the head to what made them.
Launched = tuple[Tensor, Rows]


@dataclass
class Head:
    """What the head knows besides X and W."""

    bucket: Bucket
    weight: nn.Parameter
    rows: Sequence[Rows]
    targets: Tensor  # [s, b] of this rank's x-slice
    start: int  # first class of this rank's block
    vocab: int
    loss: Loss
    mesh: Mesh
    chunk: int  # rows of the sequence at a time
    train: bool


def chunk_rows(s: int, z: int, row: int, limit: int) -> int:
    """How much of the sequence to take at a time: a multiple of z that divides s, of at most `limit` elements of the
    partial logits if possible; a row of the sequence has `row` of them.

    >>> chunk_rows(24, 2, 1000, 8000)
    8
    """
    pieces = s // z
    wanted = ceil_div(s * row, max(limit, 1))
    count = next((n for n in range(wanted, pieces + 1) if pieces % n == 0), pieces)
    return s // count


def to_head(X_s: Tensor, y: Axis) -> Launched:
    """X_s [s/y, b, d/z], on its way."""
    rows = Rows()
    return _Launch.apply(X_s, rows, y), rows


def head_loss(W: Weights, call: Head, tokens: Sequence[Tensor]) -> Tensor:
    """The mean loss over the tokens of all ranks."""
    return _Loss.apply(W[call.weight], call, *tokens)


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, X_s: Tensor, rows: Rows, y: Axis) -> Tensor:
        ctx.rows = rows
        rows.X = all_gather(X_s, y)
        return token(X_s)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        dX_s, ctx.rows.dX_s = ctx.rows.dX_s, None
        return dX_s, None, None


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, W: Tensor, call: Head, *_: Tensor) -> Tensor:
        mesh, ctx.call = call.mesh, call
        wide = torch.promote_types(W.dtype, torch.float32)
        sums = torch.zeros(2, dtype=wide, device=W.device)  # loss, tokens that count
        dW = torch.zeros_like(W, dtype=wide) if call.train else None
        dX_s = []
        for rows, targets in zip(call.rows, call.targets.chunk(len(call.rows), 1), strict=True):
            assert rows.X is not None
            X, rows.X = rows.X.wait(), None
            dX = _part(X, W, targets, call, sums, dW)
            if dX is not None:
                dX_s.append(reduce_scatter(dX, mesh.y))
            del X, dX
        if dW is not None:
            dW_s = call.bucket.reduce_one(call.weight, dW.to(W.dtype))
        for axis in (mesh.x, mesh.z, mesh.data):
            sums = all_reduce(sums, axis).wait()
        count = sums[1].clamp(min=1)
        if dW is not None:
            landed = [flight.wait() for flight in dX_s]
            ctx.save_for_backward(count, dW_s.wait(), *landed)
        return sums[0] / count

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        call: Head = ctx.call
        count, dW_s, *dX_s = ctx.saved_tensors
        scale = dloss / count
        for rows, each in zip(call.rows, dX_s, strict=True):
            rows.dX_s = each * scale.to(each.dtype)
        call.bucket.add(call.weight, dW_s * scale)
        return None, None, *(token(each) for each in dX_s)


def _part(X: Tensor, W: Tensor, targets: Tensor, call: Head, sums: Tensor, dW: Tensor | None) -> Tensor | None:
    """dX [s, b, d/z] of a part of the batch, whose loss and dW are added to `sums` and `dW`; None where there is no
    dW."""
    mesh, dX = call.mesh, None if dW is None else torch.empty_like(X)
    for top in range(0, X.shape[0], call.chunk):
        rows = slice(top, top + call.chunk)
        X_m = X[rows].flatten(0, 1)
        mine = targets[rows].chunk(mesh.z.size)[mesh.z.index].flatten()
        logits = reduce_scatter(X_m @ W.T, mesh.z, dtype=sums.dtype).wait()  # (1)
        parts = all_gather(call.loss.parts(logits, mine, call.start)[None], mesh.y).wait()
        loss, counted, lse = call.loss.merge(parts, mine, call.vocab)
        sums += torch.stack((loss, counted.to(sums.dtype)))
        if dX is not None and dW is not None:
            dlogits = call.loss.gradient(logits, mine, call.start, lse, call.vocab)
            dlogits = all_gather(dlogits.to(X.dtype), mesh.z).wait()
            mm(dlogits, W, dX[rows].flatten(0, 1), add=False)  # (2)
            if dW.dtype == X.dtype:
                dW.addmm_(dlogits.T, X_m)  # (3)
            else:
                dW += dlogits.T @ X_m
    return dX
