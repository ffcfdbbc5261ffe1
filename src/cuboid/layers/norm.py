"""LayerNorm and RMSNorm of rows whose features are split over z.

Each rank computes statistics of its shard of a row, which are then merged: Σx² for RMSNorm, (mean, M2) by Chan's rule
for LayerNorm, because E[x²]−E[x]² loses everything to rounding when the mean is large. Backward needs two row sums (one
for RMSNorm), all-reduced over z in one call.

    y  = x̂ w + b,  x̂ = (x − mean) r
    dx = r (g − mean(g) − x̂ mean(g x̂)),  g = dy w          (RMSNorm: without mean(g))

Saved: x, and one or two numbers per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cuboid.comm.axis import Axis
from cuboid.comm.collectives import all_gather, all_reduce
from cuboid.comm.flight import Pause, Steps
from cuboid.fuse import Fuse, plain
from cuboid.step.op import Ahead, Back
from cuboid.step.weights import Gathered


@dataclass(eq=False)
class Normalise:
    """x [s, b, d/z] -> y [s, b, d/z]: LayerNorm if there is a bias, else RMSNorm."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    z: Axis
    eps: float
    fuse: Fuse = plain

    takes = gives = "residual"

    def __post_init__(self) -> None:
        self._parameters = [p for p in (self.weight, self.bias) if p is not None]

    def __call__(self, x: Tensor, w: Gathered, at: Any) -> Steps:
        centred, n = self.bias is not None, x.shape[-1] * self.z.size
        if self.z.size == 1 and centred and x.dtype.itemsize >= 4:
            return self._native(x, w, at)
        flight = (all_gather if centred else all_reduce)(self.fuse(statistics)(x, centred), self.z)
        pause = Pause(sent=max(x.element_size(), 4) * x.shape[0] * x.shape[1] * (self.z.size - 1))
        yield pause
        y, stats = self.fuse(merged_scaled)(flight.wait(), x, n, self.eps, centred, *(w[p] for p in self._parameters))
        del flight, w

        def run(dy: Tensor, w: Gathered, before: Ahead) -> Steps:
            if self.fuse is plain:
                g, x_hat, sums, *dw = backward_sums(dy, x, stats, w[self.weight], n, self._trained)
                finish = partial(gradient, g, x_hat, stats[-1][..., None])
            else:  # recomputes g and x̂: fused, that is faster than writing and reading them
                sums, *dw = self.fuse(sums_alone)(dy, x, stats, w[self.weight], n, self._trained)
                finish = partial(self.fuse(fused_gradient), dy, x, stats, w[self.weight])
            flight = all_reduce(sums, self.z)
            self._add(w, dw)
            del dy, dw, sums, w
            yield pause
            return finish(flight.wait()[..., None]).to(x.dtype)

        return y, Back(run) if at.train else None

    def _native(self, x: Tensor, w: Gathered, at: Any) -> tuple[Tensor, Back | None]:
        """PyTorch's kernel, for z = 1. On a CPU it keeps statistics in the dtype of x."""
        shape, (weight, bias) = x.shape[-1:], (w[p] for p in self._parameters)
        y, mean, r = torch.native_layer_norm(x, shape, weight, bias, self.eps)

        def run(dy: Tensor, w: Gathered, before: Ahead) -> Steps:
            backward, weights = torch.ops.aten.native_layer_norm_backward, (w[p] for p in self._parameters)
            dx, *dw = backward(dy.contiguous(), x, shape, mean, r, *weights, [True, *self._trained])
            self._add(w, [each for each in dw if each is not None])
            return dx
            yield

        return y, Back(run) if at.train else None

    @property
    def _trained(self) -> list[bool]:
        return [p.requires_grad for p in self._parameters]

    def _add(self, w: Gathered, gradients: Sequence[Tensor]) -> None:
        """Add the gradients of trained parameters."""
        for parameter, gradient in zip([p for p in self._parameters if p.requires_grad], gradients, strict=True):
            w.add(parameter, gradient)


def statistics(x: Tensor, centred: bool) -> Tensor:
    """[s b d] -> [1, 2, s, b] (mean, M2) or [1, 1, s, b] (Σx²), in fp32 or better."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if not centred:
        return torch.linalg.vector_norm(x, dim=-1).square()[None, None]
    mean = x.mean(-1, keepdim=True)  # `torch.var_mean` would do, but takes ten times as long on a CPU
    return torch.stack((mean[..., 0], torch.linalg.vector_norm(x - mean, dim=-1).square()))[None]


def merge(shards: Tensor, n: int, eps: float, centred: bool) -> Tensor:
    """Statistics of all shards of rows of n features -> [2, s, b] (mean, r) or [1, s, b] (r)."""
    if not centred:
        return torch.rsqrt(shards.sum(0) / n + eps)
    means, M2s = shards[:, 0], shards[:, 1]
    mean = means.mean(0)
    M2 = M2s.sum(0) + (means - mean).square().sum(0) * (n // len(shards))
    return torch.stack((mean, torch.rsqrt(M2 / n + eps)))


def normalised(x: Tensor, stats: Tensor) -> Tensor:
    """x̂"""
    stats = stats[..., None]
    return (x - stats[0]).mul_(stats[1]) if len(stats) == 2 else x * stats[0]


def merged_scaled(
    shards: Tensor, x: Tensor, n: int, eps: float, centred: bool, w: Tensor, b: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(y, merged statistics)"""
    stats = merge(shards, n, eps, centred)
    x_hat = normalised(x, stats)
    return (x_hat * w if b is None else torch.addcmul(b, x_hat, w)).to(x.dtype), stats


def sums_alone(dy: Tensor, x: Tensor, stats: Tensor, w: Tensor, n: int, trained: Sequence[bool]) -> tuple[Tensor, ...]:
    """`backward_sums` without g and x̂, to be fused: row sums, then dw and db if trained."""
    x_hat = normalised(x, stats)
    dy, w = dy.to(x_hat.dtype), w.to(x_hat.dtype) / n
    products = (dy, dy * x_hat) if len(stats) == 2 else (dy * x_hat,)
    rows = [(each * w).sum(-1) for each in products]
    of_weights = [each.sum((0, 1)) for each, wanted in zip(reversed(products), trained, strict=True) if wanted]
    return torch.stack(rows) if len(rows) > 1 else rows[0][None], *of_weights


def fused_gradient(dy: Tensor, x: Tensor, stats: Tensor, w: Tensor, sums: Tensor) -> Tensor:
    """dx, with g and x̂ recomputed"""
    x_hat = normalised(x, stats)
    g = dy.to(x_hat.dtype) * w.to(x_hat.dtype)
    return gradient(g, x_hat, stats[-1][..., None], sums).to(x.dtype)


def backward_sums(
    dy: Tensor, x: Tensor, stats: Tensor, w: Tensor, n: int, trained: Sequence[bool]
) -> tuple[Tensor, ...]:
    """g and x̂; this shard's row sums, mean(g) (LayerNorm) and mean(g x̂); dw, and db (LayerNorm), if trained."""
    x_hat = normalised(x, stats)
    dy, w = dy.to(x_hat.dtype), w.to(x_hat.dtype)
    products = (dy, dy * x_hat) if len(stats) == 2 else (dy * x_hat,)
    sums = torch.stack([each @ w for each in products]) / n
    of_weights = [each.sum((0, 1)) for each, wanted in zip(reversed(products), trained, strict=True) if wanted]
    return dy * w, x_hat, sums, *of_weights


def gradient(g: Tensor, x_hat: Tensor, r: Tensor, sums: Tensor) -> Tensor:
    """dx"""
    dx = torch.addcmul(g, x_hat, sums[-1], value=-1)
    if len(sums) == 2:
        dx -= sums[0]
    return dx.mul_(r)
