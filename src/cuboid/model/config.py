"""A model's configuration, independent of where it runs. It is checked before anything is built."""

from dataclasses import dataclass, replace
from typing import Any

from cuboid.mesh.cuboid import Cuboid

FAMILIES = ("gpt2", "llama")
ROPE_KINDS = ("llama3", "linear")


#: Largest sizes: their products still fit into 64 bits.
MOST, MOST_LAYERS = 1 << 24, 1 << 16


@dataclass(frozen=True)
class RopeScaling:
    """How rotary wavelengths are stretched for a longer context.

    Args:
        factor: By how much.
        low_freq_factor: Wavelengths above `original_context` / this are stretched in full.
        high_freq_factor: Wavelengths below `original_context` / this are not stretched.
        original_context: The context of the model's original training.
        kind: "llama3": only long wavelengths, as Llama 3 does; "linear": all alike.

    Raises:
        ValueError: If `kind` is another.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    kind: str = "llama3"

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope_scaling kind={self.kind!r} is not known; choose one of {', '.join(ROPE_KINDS)}")


@dataclass(frozen=True)
class ModelConfig:
    """A Transformer language model. Zero or None stands for the usual value of the family.

    gpt2: LayerNorm, learned positions, GELU, biases, head tied to the embedding.
    llama: RMSNorm, rotary positions, SwiGLU, no biases, untied head, grouped-query attention. With `qkv_bias` it is
    Qwen 2, with `qk_norm` Qwen 3, with a `window` the first Mistral.

    Args:
        family: "gpt2" or "llama".
        layers: Transformer blocks.
        hidden: Width of the residual stream.
        heads: Attention heads.
        vocab: Rows of the embedding.
        context: The longest sequence.
        kv_heads: Heads of keys and values; 0: same as heads.
        head_dim: Width of a head; 0: hidden / heads.
        ffn: Inner width of the MLP; 0: 4 · hidden (gpt2), 8/3 · hidden rounded up to a multiple of 64 (llama).
        tied: Whether head and embedding share one weight.
        bias: Whether linears have biases.
        qkv_bias: Whether queries, keys and values have biases; None: same as `bias`.
        qk_norm: RMSNorm of each head's queries and keys.
        window: Tokens that attention looks back on; 0: all. Longer sequences are rejected.
        dropout: Fraction of the residual stream's elements that is zeroed in training.
        norm_eps: Added to the variance in norms.
        init_std: Standard deviation of the initial weights.
        rope_theta: Base of the rotary wavelengths.
        rope_scaling: How they are stretched, if at all.

    Raises:
        ValueError: If sizes do not fit each other; the message says which do.
    """

    family: str = "gpt2"
    layers: int = 2
    hidden: int = 128
    heads: int = 8
    vocab: int = 256
    context: int = 256
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    tied: bool | None = None
    bias: bool | None = None
    qkv_bias: bool | None = None
    qk_norm: bool = False
    window: int = 0
    dropout: float = 0.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family={self.family!r} is not known; choose one of {', '.join(FAMILIES)}")
        _size("layers", self.layers, 1, MOST_LAYERS)
        for name in ("hidden", "heads", "vocab", "context"):
            _size(name, getattr(self, name), 1)
        for name in ("kv_heads", "head_dim", "ffn", "window"):
            _size(name, getattr(self, name), 0)
        gpt2 = self.family == "gpt2"
        fill: dict[str, Any] = {}
        fill["kv_heads"] = self.kv_heads or self.heads
        if not self.head_dim and self.hidden % self.heads:
            near = _multiples_near(self.hidden, self.heads)
            raise ValueError(
                f"hidden={self.hidden} is not a multiple of heads={self.heads}; "
                f"use hidden {near}, other heads, or give head_dim"
            )
        fill["head_dim"] = self.head_dim or self.hidden // self.heads
        fill["ffn"] = self.ffn or (4 * self.hidden if gpt2 else -(-8 * self.hidden // 3 // 64) * 64)
        fill["tied"] = gpt2 if self.tied is None else self.tied
        fill["bias"] = gpt2 if self.bias is None else self.bias
        fill["qkv_bias"] = None if self.qkv_bias == fill["bias"] else self.qkv_bias
        for name, value in fill.items():
            object.__setattr__(self, name, value)
        if self.heads % self.kv_heads:
            divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}; use one of {divisors}")
        if self.rotary and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd but rotary positions turn pairs; use an even head_dim")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")

    @property
    def rotary(self) -> bool:
        """Whether positions are rotary; else they are learned."""
        return self.family == "llama"

    @property
    def gated(self) -> bool:
        """Whether the MLP is SwiGLU; else it has GELU."""
        return self.family == "llama"

    @property
    def qkv_biased(self) -> bool:
        """Whether queries, keys and values have biases."""
        return bool(self.bias if self.qkv_bias is None else self.qkv_bias)

    @property
    def norm_bias(self) -> bool:
        """Whether norms are LayerNorm, with a bias; else they are RMSNorm."""
        return self.family == "gpt2"

    @property
    def q_dim(self) -> int:
        """Features of the queries of all heads."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Features of the keys, and of the values, of all heads."""
        return self.kv_heads * self.head_dim

    @property
    def longest(self) -> int:
        """The longest sequence, in tokens; a window is never slid."""
        return min(self.context, self.window or self.context)

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        d, f, b = self.hidden, self.ffn, int(bool(self.bias))
        norm = d * (1 + self.norm_bias)
        attention = 2 * d * (self.q_dim + self.kv_dim) + b * d
        attention += int(self.qkv_biased) * (self.q_dim + 2 * self.kv_dim) + 2 * self.head_dim * self.qk_norm
        into = 2 if self.gated else 1
        mlp = (into + 1) * d * f + b * (into * f + d)
        tables = self.vocab * d * (1 if self.tied else 2) + (0 if self.rotary else self.context * d)
        return self.layers * (2 * norm + attention + mlp) + norm + tables

    def check(self, cuboid: Cuboid, batch: int, seq: int) -> None:
        """Raise ValueError if this model cannot run on `cuboid` with `batch` sequences of `seq` tokens."""
        yz = cuboid.y * cuboid.z
        if self.heads % yz:
            near = [h for h in (self.heads // yz * yz, (self.heads // yz + 1) * yz) if h]
            smaller = [n for n in range(yz - 1, 0, -1) if self.heads % n == 0][:3]
            raise ValueError(
                f"heads={self.heads} cannot be split into y·z={yz}; use heads {' or '.join(map(str, near))}, "
                f"or a cuboid with y·z one of {smaller}"
            )
        if self.hidden % cuboid.z:
            raise ValueError(
                f"hidden={self.hidden} cannot be split into z={cuboid.z}; use hidden "
                f"{_multiples_near(self.hidden, cuboid.z)} or another z"
            )
        if cuboid.pipe > self.layers:
            raise ValueError(
                f"layers={self.layers} cannot be split into pipe={cuboid.pipe} stages of blocks; use at least "
                f"{cuboid.pipe} layers, or pipe at most {self.layers}"
            )
        _size("batch", batch, 1)
        _size("seq", seq, 1)
        if batch % cuboid.replicas:
            raise ValueError(
                f"batch={batch} cannot be split over replicas={cuboid.replicas}; "
                f"use batch {_multiples_near(batch, cuboid.replicas)}"
            )
        if seq > self.context:
            what = "which is exported with the model" if self.rotary else "the learned positions"
            raise ValueError(f"seq={seq} is longer than context={self.context}, {what}; raise context or shorten seq")
        if self.window and seq > self.window:
            raise ValueError(
                f"seq={seq} is longer than window={self.window}, the tokens that attention looks back on, and a window "
                f"that slides is not supported; use sequences of at most {self.window} tokens"
            )

    def check_plain(self, where: str, pipe: int = 1) -> None:
        """Raise ValueError if the model needs what only one device and cuboids support, or if `pipe` > 1. `where` names
        the parallelism in the message."""
        for name, odd in (("qk_norm", self.qk_norm), ("qkv_bias", self.qkv_biased != self.bias)):
            if odd:
                raise ValueError(f"{name}={getattr(self, name)} is not supported in {where}; run it on a cuboid")
        if pipe > 1:
            raise ValueError(f"pipe={pipe} is not supported in {where}; use pipe=1, or run it on a cuboid")

    def replace(self, **changes: Any) -> "ModelConfig":
        """This configuration with the fields in `changes` changed; checked like a new one."""
        return replace(self, **changes)


def _size(name: str, value: object, least: int, most: int = MOST) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
    if value > most:
        raise ValueError(f"{name}={value!r} must be at most {most}")


def _multiples_near(n: int, of: int) -> str:
    below, above = n // of * of, (n // of + 1) * of
    return f"{below} or {above}" if below else str(above)
