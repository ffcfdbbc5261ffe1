"""Attention over unsharded sequences, and rotary positions. This module does not communicate."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from cuboid.device import is_gpu


class Cache:
    """Keys and values of earlier tokens, for this rank's heads and samples: [s, b, h, e]."""

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Append the first `tokens` of k and v (the rest is padding); return all."""
        k, v = k[:tokens], v[:tokens]
        self.k = k if self.k is None else torch.cat((self.k, k))
        self.v = v if self.v is None else torch.cat((self.v, v))
        return self.k, self.v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + e/2) of features of x [s, b, h, e] by its position's angle. cos and sin [s, 1, 1, e/2]
    are in fp32 or fp64."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention: q [s, b, h, e], k and v [t, b, g, e] -> [s, b, (h e)]. The queries are the last s of t tokens,
    and g divides h."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # s b h e -> b h s e
    s, t, grouped = q.shape[2], k.shape[2], q.shape[1] != k.shape[1]
    if s == t:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    else:
        # the GPU kernel supports this shape; the CPU kernel needs the mask
        mask = lower_right(s, t) if is_gpu(q.device) else q.new_ones(s, t, dtype=torch.bool).tril(t - s)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return y.permute(2, 0, 1, 3).flatten(2)  # b h s e -> s b (h e)


def lower_right(s: int, t: int) -> CausalBias:
    """A mask that kernels recognise by its type. It has no values; without modes it is not counted as a tensor."""
    with _disable_current_modes():
        return causal_lower_right(s, t)


def attend_both_ways(q: Tensor, k: Tensor, v: Tensor, tokens: int) -> Tensor:
    """Attention without a mask: q [s, b, h, e], k and v [t, b, g, e] -> [s, b, (h e)]. Keys from `tokens` on are
    padding."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k[:tokens], v[:tokens]))  # s b h e -> b h s e
    y = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
    return y.permute(2, 0, 1, 3).flatten(2)  # b h s e -> s b (h e)


def attend_cached(q: Tensor, k: Tensor, v: Tensor, cache: Cache, tokens: int) -> Tensor:
    """Append the first `tokens` of k and v to the cache, and attend from q to all of it."""
    k, v = cache.extend(k, v, tokens)
    return F.pad(attend(q[:tokens], k, v), (0, 0, 0, 0, 0, len(q) - tokens))
