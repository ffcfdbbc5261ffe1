"""Attention of whole sequences, and rotary positions. Nothing here knows of devices."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cuboid.config import ModelConfig


class Cache:
    """Keys and values of the tokens seen so far, of the heads (and samples) a rank owns: [s, b, h, e]."""

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Add the first `tokens` of k and v (the rest is padding); return all so far."""
        k, v = k[:tokens], v[:tokens]
        self.k = k if self.k is None else torch.cat((self.k, k))
        self.v = v if self.v is None else torch.cat((self.v, v))
        return self.k, self.v


def frequencies(config: ModelConfig) -> Tensor:
    """Radians a token for each pair of a head's features, in fp64."""
    e = config.head_dim
    turn = config.rope_theta ** (-torch.arange(0, e, 2, dtype=torch.float64) / e)
    scaling = config.rope_scaling
    if scaling is None:
        return turn
    # Llama 3: wavelengths far beyond the first context are stretched by `factor`, short ones kept, a ramp between
    turns = scaling.original_context * turn / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ramp = ramp.clamp(0, 1)
    return turn * (ramp + (1 - ramp) / scaling.factor)


def rotation(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin for each position: [s, 1, 1, e/2], fp64."""
    angle = positions.to(torch.float64)[:, None] * frequencies(config).to(positions.device)
    return angle.cos()[:, None, None], angle.sin()[:, None, None]


class _Rotate(torch.autograd.Function):
    """Saves nothing: a rotation's transpose is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.turn = cos, sin
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.turn
        a, b = dy.chunk(2, -1)
        return torch.cat((a * cos + b * sin, b * cos - a * sin), -1), None, None


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + e/2) of the features of x [s, b, h, e] by its position's angle."""
    cos, sin = (part.to(torch.promote_types(x.dtype, torch.float32)) for part in turn)
    return _Rotate.apply(x, cos, sin).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, q_positions: Tensor | None = None, k_positions: Tensor | None = None) -> Tensor:
    """Causal attention: q [s, b, h, e], k and v [t, b, g, e] with g dividing h -> [s, b, (h e)].

    Without positions, q and k are the same tokens in their order. With them, a query sees the keys at its position and
    before."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # s b h e -> b h s e
    mask = None
    if q_positions is not None and k_positions is not None:
        mask = q_positions[:, None] >= k_positions
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y.permute(2, 0, 1, 3).flatten(2)  # b h s e -> s b (h e)
