"""The same Transformer in plain PyTorch: `torch.nn`, batch first, without knowledge of devices.

Its parameters bear the names of ours and begin with the same values; queries, keys and values are one linear.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cuboid.model.config import ModelConfig
from cuboid.model.rotary import frequencies

Turn = tuple[Tensor, Tensor]  # cos and sin, [s, e/2]


class NativeAttention(nn.Module):
    def __init__(self, c: ModelConfig, fused: bool) -> None:
        super().__init__()
        self.head_dim, self.group, self.fused, bias = c.head_dim, c.heads // c.kv_heads, fused, bool(c.bias)
        if fused:
            self.qkv = nn.Linear(c.hidden, c.q_dim + 2 * c.kv_dim, bias)  # rows as `fuse` orders them
        else:
            self.q, self.k, self.v = (nn.Linear(c.hidden, n, bias) for n in (c.q_dim, c.kv_dim, c.kv_dim))
        self.out = nn.Linear(c.q_dim, c.hidden, bias)

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, b h s e, of the heads whose weights are here."""
        if not self.fused:
            q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
            return q, k, v
        # b s (h g+2 e) -> b h s g+2 e
        heads = self.qkv(x).unflatten(-1, (-1, self.group + 2, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split((self.group, 1, 1), 3)
        # b h s g e -> b (h g) s e
        return q.transpose(2, 3).flatten(1, 2), k.squeeze(3), v.squeeze(3)

    def forward(self, x: Tensor, turn: Turn | None) -> Tensor:
        q, k, v = self._heads(x)
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.out(a.transpose(1, 2).flatten(2))


class NativeMLP(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        bias = bool(c.bias)
        self.gate = nn.Linear(c.hidden, c.ffn, bias) if c.gated else None
        self.up = nn.Linear(c.hidden, c.ffn, bias)
        self.down = nn.Linear(c.ffn, c.hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class NativeBlock(nn.Module):
    def __init__(self, c: ModelConfig, fused: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(c), norm(c)
        self.attention, self.mlp = NativeAttention(c, fused), NativeMLP(c)

    def forward(self, x: Tensor, turn: Turn | None) -> Tensor:
        x = x + self.attention(self.norm1(x), turn)
        return x + self.mlp(self.norm2(x))


class TiedHead(nn.Module):
    """A head without its own weight."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)


class NativeTransformer(nn.Module):
    """Tokens [b, s] -> logits [b, s, v]. Unless `fused`, parameters are the same as ours: q, k and v are three
    linears."""

    def __init__(self, c: ModelConfig, fused: bool = True) -> None:
        super().__init__()
        self.config = c
        self.embed = nn.Embedding(c.vocab, c.hidden)
        self.positions = None if c.rotary else nn.Embedding(c.context, c.hidden)
        self.blocks = nn.ModuleList(NativeBlock(c, fused) for _ in range(c.layers))
        self.norm = norm(c)
        self.head = TiedHead() if c.tied else nn.Linear(c.hidden, c.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, at = self.embed(tokens), torch.arange(tokens.shape[1], device=tokens.device)
        if self.positions is not None:
            x = x + self.positions(at)
        turn = rotation(self.config, at, torch.promote_types(x.dtype, torch.float32)) if self.config.rotary else None
        for block in self.blocks:
            x = block(x, turn)
        x = self.norm(x)
        return self.head(x, self.embed.weight) if self.config.tied else self.head(x)


def fuse(c: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors by name, with q, k and v fused: each head's queries, then its keys, then its values, so that tensor
    parallelism splits the rows evenly."""
    found = dict(tensors)
    for name in [name for name in tensors if ".attention.q." in name]:
        parts = [found.pop(name.replace(".q.", f".{each}.")) for each in "qkv"]
        heads = [part.unflatten(0, (c.kv_heads, -1, c.head_dim)) for part in parts]
        found[name.replace(".q.", ".qkv.")] = torch.cat(heads, 1).flatten(0, 2)
    return found


def unfuse(c: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `fuse`."""
    found = dict(tensors)
    for name in [name for name in tensors if ".attention.qkv." in name]:
        heads = found.pop(name).unflatten(0, (c.kv_heads, -1, c.head_dim))
        for each, part in zip("qkv", heads.split((c.heads // c.kv_heads, 1, 1), 1), strict=True):
            found[name.replace(".qkv.", f".{each}.")] = part.flatten(0, 2)
    return found


def norm(c: ModelConfig) -> nn.Module:
    return nn.LayerNorm(c.hidden, c.norm_eps) if c.norm_bias else nn.RMSNorm(c.hidden, c.norm_eps)


def rotation(c: ModelConfig, positions: Tensor, dtype: torch.dtype) -> Turn:
    angle = positions.to(torch.float64)[:, None] * frequencies(c).to(positions.device)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, turn: Turn) -> Tensor:
    """Rotate each pair (i, i + e/2) of the features of x [b, h, s, e] by its position's angle."""
    (cos, sin), (a, b) = turn, x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def first_values(c: ModelConfig, name: str) -> tuple[float, float]:
    """Mean and standard deviation of a parameter's initial values."""
    *_, owner, kind = name.split(".")
    if owner.startswith("norm"):
        return (1.0 if kind == "weight" else 0.0), 0.0
    if kind == "bias":
        return 0.0, 0.0
    return 0.0, c.init_std / (2 * c.layers) ** 0.5 if owner in ("out", "down") else c.init_std
