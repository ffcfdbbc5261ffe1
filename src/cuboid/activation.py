"""The MLP's nonlinearities."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _SwiGLU(torch.autograd.Function):
    """silu(g) · u, saving g and u alone."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, u: Tensor) -> Tensor:
        ctx.save_for_backward(g, u)
        return F.silu(g) * u

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        g, u = ctx.saved_tensors
        sigma = torch.sigmoid(g)
        silu = g * sigma
        return dy * u * (sigma + silu * (1 - sigma)), dy * silu


def swiglu(g: Tensor, u: Tensor) -> Tensor:
    return _SwiGLU.apply(g, u)


def gelu(x: Tensor) -> Tensor:
    """GPT-2's: the tanh form."""
    return F.gelu(x, approximate="tanh")
