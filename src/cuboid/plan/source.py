"""Reads the model to plan for: a preset, or the config.json of a Hugging Face model."""

import json
from pathlib import Path
from typing import Any

from cuboid.model.config import ModelConfig
from cuboid.model.presets import PRESETS, nearest_preset

#: Their names for our sizes, by their model_type.
_LLAMA = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn",
    "vocab_size": "vocab",
    "max_position_embeddings": "context",
    "tie_word_embeddings": "tied",
}
_GPT2 = {
    "n_layer": "layers",
    "n_embd": "hidden",
    "n_head": "heads",
    "n_inner": "ffn",
    "vocab_size": "vocab",
    "n_positions": "context",
    "tie_word_embeddings": "tied",
}
NAMES = {"gpt2": ("gpt2", _GPT2)} | dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), ("llama", _LLAMA))


def model(name: str) -> ModelConfig:
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        near = nearest_preset(name)
        hint = f"did you mean {near}? " if near else ""
        raise ValueError(
            f"model {name!r} is neither a preset nor a config.json; {hint}cuboid config --presets lists the presets"
        )
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}; give a Hugging Face model's config.json") from None
    return from_hugging_face(found, str(path))


def from_hugging_face(found: Any, where: str) -> ModelConfig:
    """Reads only sizes: what their layers have besides (biases of qkv, QK-norm) is too small to matter."""
    kind = found.get("model_type") if isinstance(found, dict) else None
    if not isinstance(kind, str) or kind not in NAMES:
        raise ValueError(f"{where} has model_type={kind!r}; plans know {', '.join(NAMES)}")
    family, names = NAMES[kind]
    values = {ours: found[theirs] for theirs, ours in names.items() if found.get(theirs) is not None}
    missing = [ours for ours in ("layers", "hidden", "heads", "vocab") if ours not in values]
    if missing:
        raise ValueError(f"{where} does not say {', '.join(missing)}; it must name them as its model_type does")
    if not isinstance(values.get("tied", True), bool):
        raise ValueError(f"{where} has tie_word_embeddings={values['tied']!r}; it must be true or false")
    return ModelConfig(family, **values)
