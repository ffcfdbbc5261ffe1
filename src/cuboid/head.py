"""The head and the loss in one: logits live a chunk of the sequence at a time, and never whole over the vocabulary.

The head is an *into* product (n = y cuts the vocabulary, k = z the features). For each chunk of rows, with (1)–(3):

    logits = RS_z( X W_yᵀ )  [s/z, b, V/y]  ->  loss, dlogits  ->  dX = AG_z(dlogits) W_y,  dW_y += AG_z(dlogits)ᵀ X

and dX is reduce-scattered over y, dW over x, once. The gradients are computed in forward, unscaled, and multiplied
in backward by dloss / (tokens that count): the largest tensors of the step, partial logits and dlogits, are never
saved, and the tokens that count need not be known before the loss is. Saved: the shards of dX and dW.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cuboid.comm import all_gather, all_reduce, reduce_scatter
from cuboid.flight import Flight, Pause, Steps, token
from cuboid.layout import ceil_div
from cuboid.loss import Loss
from cuboid.mesh import Mesh
from cuboid.product import mm
from cuboid.weights import Bucket, Weights


@dataclass
class Head:
    """What the two nodes of the head share."""

    bucket: Bucket
    weight: nn.Parameter
    targets: Tensor  # [s, b] of this rank's x-slice
    start: int  # first class of this rank's block
    vocab: int
    loss: Loss
    mesh: Mesh
    chunk: int  # rows of the sequence at a time
    train: bool
    X: Flight | None = None
    dX_s: Tensor | None = None


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


def head_loss(X_s: Tensor, W: Weights, call: Head) -> Steps:
    """X_s [s/y, b, d/z] -> the mean loss over the tokens of all ranks."""
    launched = _Launch.apply(X_s, call)
    yield Pause()
    return _Loss.apply(launched, W[call.weight], call)


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, X_s: Tensor, call: Head) -> Tensor:
        ctx.call = call
        call.X = all_gather(X_s, call.mesh.y)
        return token(X_s)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        dX_s, ctx.call.dX_s = ctx.call.dX_s, None
        return dX_s, None


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, launched: Tensor, W: Tensor, call: Head) -> Tensor:
        assert call.X is not None
        mesh, ctx.call = call.mesh, call
        X, call.X = call.X.wait(), None
        wide = torch.promote_types(X.dtype, torch.float32)
        sums = torch.zeros(2, dtype=wide, device=X.device)  # loss, tokens that count
        dX = torch.empty_like(X) if call.train else None
        dW = torch.zeros_like(W, dtype=wide) if call.train else None
        for top in range(0, X.shape[0], call.chunk):
            rows = slice(top, top + call.chunk)
            X_m = X[rows].flatten(0, 1)
            targets = call.targets[rows].chunk(mesh.z.size)[mesh.z.index].flatten()
            logits = reduce_scatter(X_m @ W.T, mesh.z, dtype=wide).wait()  # (1)
            parts = all_gather(call.loss.parts(logits, targets, call.start)[None], mesh.y).wait()
            loss, counted, lse = call.loss.merge(parts, targets, call.vocab)
            sums += torch.stack((loss, counted.to(wide)))
            if dX is not None and dW is not None:
                dlogits = call.loss.gradient(logits, targets, call.start, lse, call.vocab)
                dlogits = all_gather(dlogits.to(X.dtype), mesh.z).wait()
                mm(dlogits, W, dX[rows].flatten(0, 1), add=False)  # (2)
                if dW.dtype == X.dtype:
                    dW.addmm_(dlogits.T, X_m)  # (3)
                else:
                    dW += dlogits.T @ X_m
        if dX is not None and dW is not None:
            dX_s = reduce_scatter(dX, mesh.y)
            dW_s = call.bucket.reduce_one(call.weight, dW.to(W.dtype))
        for axis in (mesh.x, mesh.z, mesh.data):
            sums = all_reduce(sums, axis).wait()
        count = sums[1].clamp(min=1)
        if dX is not None:
            ctx.save_for_backward(dX_s.wait(), dW_s.wait(), count)
        return sums[0] / count

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None]:
        call: Head = ctx.call
        dX_s, dW_s, count = ctx.saved_tensors
        scale = dloss / count
        call.dX_s = dX_s * scale.to(dX_s.dtype)
        call.bucket.add(call.weight, dW_s * scale)
        return token(dX_s), None, None
