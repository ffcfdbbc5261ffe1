"""Models of known sizes, as published."""

from difflib import get_close_matches

from cuboid.model.config import ModelConfig, RopeScaling


def _gpt(layers: int, hidden: int, heads: int, context: int) -> ModelConfig:
    return ModelConfig("gpt2", layers, hidden, heads, 50257, context)


def _llama(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    context: int,
    rope_theta: float = 10000.0,
    rope_scaling: RopeScaling | None = None,
    tied: bool = False,
    head_dim: int = 0,
    norm_eps: float = 1e-5,
    qkv_bias: bool | None = None,
    qk_norm: bool = False,
) -> ModelConfig:
    return ModelConfig(
        "llama",
        layers,
        hidden,
        heads,
        vocab,
        context,
        kv_heads=kv_heads,
        ffn=ffn,
        tied=tied,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        head_dim=head_dim,
        norm_eps=norm_eps,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )


def _qwen2(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, tied: bool) -> ModelConfig:
    return _llama(
        layers, hidden, heads, kv_heads, ffn, vocab, 32768, 1000000.0, tied=tied, norm_eps=1e-6, qkv_bias=True
    )


def _qwen3(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, tied: bool) -> ModelConfig:
    vocab, context, theta = 151936, 40960, 1000000.0
    return _llama(
        *(layers, hidden, heads, kv_heads, ffn, vocab, context, theta),
        tied=tied,
        head_dim=128,
        norm_eps=1e-6,
        qk_norm=True,
    )


# GPT-3's published sizes are inconsistent: 24 heads of 128 in a hidden of 2048, and a hidden of 5140. The head size is
# kept. Llama's 405B and 3.2 have the long context of 3.1. Mistral is version 0.3, which has no sliding window.
PRESETS: dict[str, ModelConfig] = {
    "gpt2-124m": _gpt(12, 768, 12, 1024),
    "gpt2-355m": _gpt(24, 1024, 16, 1024),
    "gpt2-774m": _gpt(36, 1280, 20, 1024),
    "gpt2-1.5b": _gpt(48, 1600, 25, 1024),
    "gpt3-1.3b": _gpt(24, 2048, 16, 2048),
    "gpt3-6.7b": _gpt(32, 4096, 32, 2048),
    "gpt3-13b": _gpt(40, 5120, 40, 2048),
    "gpt3-175b": _gpt(96, 12288, 96, 2048),
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008, 32000, 4096),
    "llama-2-13b": _llama(40, 5120, 40, 40, 13824, 32000, 4096),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28672, 32000, 4096),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14336, 128256, 8192, 500000.0),
    "llama-3-70b": _llama(80, 8192, 64, 8, 28672, 128256, 8192, 500000.0),
    "llama-3-405b": _llama(126, 16384, 128, 8, 53248, 128256, 131072, 500000.0, RopeScaling(8.0)),
    "llama-3.2-1b": _llama(16, 2048, 32, 8, 8192, 128256, 131072, 500000.0, RopeScaling(32.0), tied=True),
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, 32768, 32768, 1000000.0),
    "qwen2.5-0.5b": _qwen2(24, 896, 14, 2, 4864, 151936, tied=True),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18944, 152064, tied=False),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 3072, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288, tied=False),
}


def nearest_preset(name: str, guess: bool = True) -> str:
    """The preset that a name, or the last part of a name such as "owner/name", begins; with `guess` also one of similar
    spelling. Empty if there is none."""
    last = name.rpartition("/")[2].lower()
    near = [each for each in PRESETS if len(last) > 2 and each.startswith(last)]
    near = near or (get_close_matches(last, PRESETS, 1) if guess else [])
    return near[0] if near else ""
