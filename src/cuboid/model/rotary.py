"""Rotary positions: the angles by which pairs of a head's features are rotated."""

import math

import torch
from torch import Tensor

from cuboid.model.config import ModelConfig


def frequencies(config: ModelConfig) -> Tensor:
    """Radians per token for each pair of a head's features, [e/2] in fp64."""
    e = config.head_dim
    turn = config.rope_theta ** (-torch.arange(0, e, 2, dtype=torch.float64) / e)
    scaling = config.rope_scaling
    if scaling is None:
        return turn
    if scaling.kind == "linear":
        return turn / scaling.factor
    # Llama 3: wavelengths far above the original context are stretched by `factor`, short ones kept, a ramp between
    turns = scaling.original_context * turn / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ramp = ramp.clamp(0, 1)
    return turn * (ramp + (1 - ramp) / scaling.factor)


def rotation(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin for each position: [s, 1, 1, e/2], fp64."""
    angle = positions.to(torch.float64)[:, None] * frequencies(config).to(positions.device)
    return angle.cos()[:, None, None], angle.sin()[:, None, None]
