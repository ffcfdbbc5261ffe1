"""Converts between config.json and `ModelConfig`.

| model_type | ModelConfig |
|---|---|
| gpt2 | family gpt2 |
| llama | family llama; `bias` is both of attention_bias and mlp_bias |
| mistral | the same with a `window`, if sliding_window is not null |
| qwen2 | family llama with `qkv_bias` |
| qwen3 | family llama with `qk_norm` |
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cuboid.model.config import ModelConfig, RopeScaling

CONFIG = "config.json"
CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
#: Keys that change the model, with the values that we support.
_EXPECTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    "llama": {"hidden_act": ("silu", "swish")},
    "mistral": {"hidden_act": ("silu", "swish")},
    "qwen2": {"hidden_act": ("silu", "swish")},
    "qwen3": {"hidden_act": ("silu", "swish"), "attention_bias": (False,)},
}


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json."""
    path = folder / CONFIG
    try:
        values = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; give a folder of a Hugging Face model") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; download it again") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a JSON object; download it again")
    return values


def model_config(folder: Path) -> ModelConfig:
    """The configuration of a folder's model. Raises ValueError if it is not supported."""
    values, path = read_config(folder), folder / CONFIG
    kind = values.get("model_type")
    if kind not in CLASSES:
        named = ", ".join(values.get("architectures") or ()) or "no architecture"
        raise ValueError(f"{path}: model_type {kind!r} ({named}) is not known; there are {', '.join(CLASSES)}")
    if values.get("quantization_config"):
        raise ValueError(f"{path}: the weights are quantised (quantization_config); use a folder of plain weights")
    for key, known in _EXPECTED[kind].items():
        if key in values and values[key] not in known:
            listed = ", ".join(map(repr, known))
            raise ValueError(f"{path}: {key} = {values[key]!r} is not supported for {kind}; only {listed}")
    try:
        return _gpt2(values) if kind == "gpt2" else _llama(kind, values)
    except KeyError as error:
        raise ValueError(f"{path} has no {error.args[0]}, which {kind} needs; download it again") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _gpt2(v: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(
        family="gpt2",
        layers=v["n_layer"],
        hidden=v["n_embd"],
        heads=v["n_head"],
        vocab=v["vocab_size"],
        context=v["n_positions"],
        ffn=v.get("n_inner") or 0,
        tied=v.get("tie_word_embeddings", True),
        norm_eps=v.get("layer_norm_epsilon", 1e-5),
        init_std=v.get("initializer_range", 0.02),
    )


def _llama(kind: str, v: Mapping[str, Any]) -> ModelConfig:
    attention_bias, mlp_bias = v.get("attention_bias", False), v.get("mlp_bias", False)
    if kind == "llama" and attention_bias != mlp_bias:
        raise ValueError(f"attention_bias = {attention_bias} with mlp_bias = {mlp_bias} is not supported; both or none")
    theta, scaling = _rope(v)
    return ModelConfig(
        family="llama",
        layers=v["num_hidden_layers"],
        hidden=v["hidden_size"],
        heads=v["num_attention_heads"],
        vocab=v["vocab_size"],
        context=v["max_position_embeddings"],
        kv_heads=v.get("num_key_value_heads") or 0,
        head_dim=v.get("head_dim") or (128 if kind == "qwen3" else 0),
        ffn=v["intermediate_size"],
        tied=v.get("tie_word_embeddings", False),
        bias=kind == "llama" and attention_bias,
        qkv_bias=kind == "qwen2" or (kind == "llama" and attention_bias),
        qk_norm=kind == "qwen3",
        window=_window(kind, v),
        norm_eps=v.get("rms_norm_eps", 1e-6),
        init_std=v.get("initializer_range", 0.02),
        rope_theta=theta,
        rope_scaling=scaling,
    )


def _window(kind: str, v: Mapping[str, Any]) -> int:
    """The window, if any layer has one: longer sequences are rejected, and shorter ones do not notice it."""
    if kind == "mistral":
        return v.get("sliding_window", 4096) or 0
    used = v.get("use_sliding_window", False) and v.get("max_window_layers", 28) < v["num_hidden_layers"]
    return (v.get("sliding_window", 4096) or 0) if used else 0


def _rope(v: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """theta and scaling, from rope_parameters or from the older rope_theta and rope_scaling."""
    given = v.get("rope_parameters") or v.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ValueError("rope_parameters differ from layer to layer, which is not supported")
    if (given.get("partial_rotary_factor") or v.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    theta = float(given.get("rope_theta") or v.get("rope_theta") or 10000.0)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(float(given["factor"]), kind="linear")
    if kind == "llama3":
        low, high = float(given["low_freq_factor"]), float(given["high_freq_factor"])
        return theta, RopeScaling(float(given["factor"]), low, high, given["original_max_position_embeddings"])
    raise ValueError(f"rope_type {kind!r} is not supported; only default, linear and llama3")


def kind_of(c: ModelConfig) -> str:
    """The model_type that describes this model. Raises ValueError if none does."""
    for kind, says in _FITS.items():
        if says(c):
            return kind
    raise ValueError(
        f"no Hugging Face architecture has family={c.family}, bias={c.bias}, qkv_bias={c.qkv_biased}, "
        f"qk_norm={c.qk_norm}, kv_heads={c.kv_heads} of {c.heads}, head_dim={c.head_dim}, window={c.window} together"
    )


_FITS: dict[str, Callable[[ModelConfig], bool]] = {
    "gpt2": lambda c: (
        c.family == "gpt2"
        and bool(c.bias and c.qkv_biased)
        and not (c.qk_norm or c.window)
        and c.kv_heads == c.heads
        and c.q_dim == c.hidden
    ),
    "llama": lambda c: c.family == "llama" and c.bias == c.qkv_biased and not (c.qk_norm or c.window),
    "mistral": lambda c: c.family == "llama" and not (c.bias or c.qkv_biased or c.qk_norm),
    "qwen2": lambda c: c.family == "llama" and c.qkv_biased and not (c.bias or c.qk_norm or c.window),
    "qwen3": lambda c: c.family == "llama" and c.qk_norm and not (c.bias or c.qkv_biased or c.window),
}


def config_json(c: ModelConfig, dtype: str, end: int | None = None) -> dict[str, Any]:
    """config.json of a model, in keys that old and new versions of `transformers` read. `end`: the token that ends a
    document."""
    kind = kind_of(c)
    values: dict[str, Any] = {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "torch_dtype": dtype,
        "vocab_size": c.vocab,
        "tie_word_embeddings": c.tied,
        "initializer_range": c.init_std,
        "bos_token_id": end,
        "eos_token_id": end,
    }
    return values | (_gpt2_json(c) if kind == "gpt2" else _llama_json(kind, c))


def _gpt2_json(c: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": c.layers,
        "n_embd": c.hidden,
        "n_head": c.heads,
        "n_positions": c.context,
        "n_inner": c.ffn,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": c.norm_eps,
        "resid_pdrop": c.dropout,
        "embd_pdrop": c.dropout,
        "attn_pdrop": 0.0,
    }


def _llama_json(kind: str, c: ModelConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "num_hidden_layers": c.layers,
        "hidden_size": c.hidden,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.ffn,
        "max_position_embeddings": c.context,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": _rope_json(c.rope_scaling),
    }
    if kind == "llama":
        values |= {"attention_bias": bool(c.bias), "mlp_bias": bool(c.bias)}
    if kind == "mistral":
        values["sliding_window"] = c.window or None
    return values


def _rope_json(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    values: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        values["low_freq_factor"] = scaling.low_freq_factor
        values["high_freq_factor"] = scaling.high_freq_factor
        values["original_max_position_embeddings"] = scaling.original_context
    return values
