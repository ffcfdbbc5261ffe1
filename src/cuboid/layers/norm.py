"""LayerNorm and RMSNorm of rows whose features are cut over z.

A row's statistics are merged from its parts': (mean, M2) by Chan's rule, since E[x²]−E[x]² loses everything to rounding
when the mean is large; Σx² for RMSNorm. Backward needs two row sums (one for RMSNorm), all-reduced over z in one call.

    y  = x̂ w + b,  x̂ = (x − mean) r
    dx = r (g − mean(g) − x̂ mean(g x̂)),  g = dy w          (RMSNorm: without mean(g))

Saved: x, and one or two numbers a row.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cuboid.comm.axis import Axis
from cuboid.comm.collectives import all_gather, all_reduce
from cuboid.comm.flight import Flight, Pause, Steps, token
from cuboid.step.fuse import Fuse, plain
from cuboid.step.weights import Bucket, Weights


@dataclass
class Norm:
    """What the two nodes of one norm share."""

    bucket: Bucket
    weight: nn.Parameter
    bias: nn.Parameter | None
    z: Axis
    eps: float
    centred: bool  # LayerNorm; else RMSNorm
    fuse: Fuse = plain
    flight: Flight | None = None
    x: Tensor | None = None
    backward: tuple[Tensor, Tensor, Tensor] | None = None


def norm(x: Tensor, W: Weights, call: Norm) -> Steps:
    if call.z.size == 1 and call.bias is not None and x.dtype.itemsize >= 4:
        return _LayerNorm.apply(x, call, W[call.weight], W[call.bias])
    launched = _Launch.apply(x, call)
    yield Pause(sent=launched.element_size() * x.shape[0] * x.shape[1] * (call.z.size - 1))
    weights = [W[call.weight]] + ([] if call.bias is None else [W[call.bias]])
    return _Normalise.apply(launched, call, *weights)


def statistics(x: Tensor, centred: bool) -> Tensor:
    """[s b d] -> [1, 2, s, b] (mean, M2) or [1, 1, s, b] (Σx²), in fp32 or better."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if not centred:
        return torch.linalg.vector_norm(x, dim=-1).square()[None, None]
    mean = x.mean(-1, keepdim=True)  # `torch.var_mean` would do, but takes ten times as long on a CPU
    return torch.stack((mean[..., 0], torch.linalg.vector_norm(x - mean, dim=-1).square()))[None]


def merge(parts: Tensor, n: int, eps: float, centred: bool) -> Tensor:
    """Every part's statistics, of n features in all -> [2, s, b] (mean, r) or [1, s, b] (r)."""
    if not centred:
        return torch.rsqrt(parts.sum(0) / n + eps)
    means, M2s = parts[:, 0], parts[:, 1]
    mean = means.mean(0)
    M2 = M2s.sum(0) + (means - mean).square().sum(0) * (n // len(parts))
    return torch.stack((mean, torch.rsqrt(M2 / n + eps)))


def normalised(x: Tensor, stats: Tensor) -> Tensor:
    """x̂"""
    stats = stats[..., None]
    return (x - stats[0]).mul_(stats[1]) if len(stats) == 2 else x * stats[0]


def scaled(x: Tensor, stats: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """y"""
    x_hat = normalised(x, stats)
    return (x_hat * w if b is None else torch.addcmul(b, x_hat, w)).to(x.dtype)


def backward_sums(dy: Tensor, x: Tensor, stats: Tensor, w: Tensor, n: int) -> tuple[Tensor, ...]:
    """g and x̂; this part of the row sums, mean(g) (LayerNorm) and mean(g x̂); dw, and db (LayerNorm)."""
    x_hat = normalised(x, stats)
    dy, w = dy.to(x_hat.dtype), w.to(x_hat.dtype)
    products = (dy, dy * x_hat) if len(stats) == 2 else (dy * x_hat,)
    sums = torch.stack([each @ w for each in products]) / n
    return dy * w, x_hat, sums, *[each.sum((0, 1)) for each in reversed(products)]


def gradient(g: Tensor, x_hat: Tensor, r: Tensor, sums: Tensor) -> Tensor:
    """dx"""
    dx = torch.addcmul(g, x_hat, sums[-1], value=-1)
    if len(sums) == 2:
        dx -= sums[0]
    return dx.mul_(r)


class _LayerNorm(torch.autograd.Function):
    """PyTorch's own, where z cuts nothing; its CPU kernel has statistics as narrow as x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Norm, w: Tensor, b: Tensor) -> Tensor:
        y, mean, r = torch.native_layer_norm(x, w.shape, w, b, call.eps)
        ctx.call = call
        ctx.save_for_backward(x, mean, r)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call, (x, mean, r) = ctx.call, ctx.saved_tensors
        w, b = call.bucket.again(call.weight), call.bucket.again(call.bias)
        backward = torch.ops.aten.native_layer_norm_backward
        dx, dw, db = backward(dy.contiguous(), x, w.shape, mean, r, w, b, [True] * 3)
        return dx, None, dw, db


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Norm) -> Tensor:
        ctx.call = call
        parts = call.fuse(statistics)(x, call.centred)
        call.flight = (all_gather if call.centred else all_reduce)(parts, call.z)
        call.x = x
        return token(x)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        call = ctx.call
        dx = call.fuse(gradient)(*call.backward, call.flight.wait()[..., None])
        call.backward = call.flight = None
        return dx, None


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, launched: Tensor, call: Norm, w: Tensor, b: Tensor | None = None) -> Tensor:
        assert call.flight is not None
        assert call.x is not None
        x, ctx.call = call.x, call
        stats = merge(call.flight.wait(), x.shape[-1] * call.z.size, call.eps, call.centred)
        call.flight = call.x = None
        ctx.save_for_backward(x, stats)
        y: Tensor = call.fuse(scaled)(x, stats, w, b)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call, (x, stats) = ctx.call, ctx.saved_tensors
        w, n = call.bucket.again(call.weight), x.shape[-1] * call.z.size
        g, x_hat, sums, *gradients = call.fuse(backward_sums)(dy, x, stats, w, n)
        call.flight = all_reduce(sums, call.z)
        call.backward = g, x_hat, stats[-1][..., None]
        return token(x), None, *gradients


class RMSNorm(torch.autograd.Function):
    """F.rms_norm, made again in backward: PyTorch's own keeps several tensors as large as X."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, w: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(X, w)
        ctx.eps = eps
        return F.rms_norm(X, w.shape, w, eps)

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> tuple[Tensor, Tensor, None]:
        X, w = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            dX, dw = torch.autograd.grad(F.rms_norm(X, w.shape, w, ctx.eps), (X, w), dY)
        return dX, dw, None
