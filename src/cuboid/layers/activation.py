"""The MLP's nonlinearities."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cuboid.step.fuse import Fuse, plain


def _gated(g: Tensor, u: Tensor) -> Tensor:
    return F.silu(g) * u


def _gated_backward(dy: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    sigma = torch.sigmoid(g)
    silu = g * sigma
    return dy * u * (sigma + silu * (1 - sigma)), dy * silu


class _SwiGLU(torch.autograd.Function):
    """silu(g) · u, saving g and u alone."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, u: Tensor, fuse: Fuse) -> Tensor:
        ctx.fuse = fuse
        ctx.save_for_backward(g, u)
        y: Tensor = fuse(_gated)(g, u)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        dg, du = ctx.fuse(_gated_backward)(dy, *ctx.saved_tensors)
        return dg, du, None


def swiglu(g: Tensor, u: Tensor, fuse: Fuse = plain) -> Tensor:
    return _SwiGLU.apply(g, u, fuse)


def gelu(x: Tensor) -> Tensor:
    """GPT-2's: the tanh form."""
    return F.gelu(x, approximate="tanh")
