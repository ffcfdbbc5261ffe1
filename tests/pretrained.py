"""Random models made by `transformers`, one for each kind that we read, and what `transformers` computes with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

#: 12 heads and a width of 48 go into every grid that is tried; no vocabulary is a multiple of anything.
_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 70,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GPT2: dict[str, Any] = {
    "vocab_size": 61,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 12,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CONFIGS: dict[str, transformers.PreTrainedConfig] = {
    "gpt2": transformers.GPT2Config(**_GPT2),
    "gpt2-untied": transformers.GPT2Config(**_GPT2 | {"n_inner": 70, "tie_word_embeddings": False, "vocab_size": 53}),
    "llama": transformers.LlamaConfig(**_SIZES, rms_norm_eps=1e-5),
    "llama-tied": transformers.LlamaConfig(
        **_SIZES | {"num_key_value_heads": 2}, rope_parameters=_LLAMA3, tie_word_embeddings=True
    ),
    "llama-biased": transformers.LlamaConfig(
        **_SIZES,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 100.0},
    ),
    "mistral": transformers.MistralConfig(**_SIZES | {"num_key_value_heads": 3}, sliding_window=24, head_dim=6),
    "qwen2": transformers.Qwen2Config(**_SIZES | {"num_key_value_heads": 2}, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**_SIZES | {"num_key_value_heads": 1}, head_dim=8),
    "qwen3-tied": transformers.Qwen3Config(**_SIZES, head_dim=2, tie_word_embeddings=True),
}


@contextmanager
def wide() -> Iterator[None]:
    """`transformers` does norms, rotary angles, softmax and loss in fp32 whatever the model's precision. Here it does
    them in fp64, by its own code."""
    with patch.multiple(torch, float32=torch.float64, float=torch.float64):
        with patch.object(Tensor, "float", Tensor.double):
            yield


@torch.no_grad()
def make(name: str, folder: Path, dtype: torch.dtype = torch.float64, max_shard_size: str = "1GB") -> Path:
    """A folder with a model whose norms are not one and whose biases are not zero."""
    generator = torch.Generator().manual_seed(len(name))
    with wide():
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).double()
    for parameter in model.parameters():
        parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def load(folder: Path) -> Any:
    """The folder's model as `transformers` has it, in fp64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    if model.config.model_type != "gpt2":
        with wide():  # its angles anew
            model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    return model


def tokens_for(folder: Path, batch: int = 4, seq: int = 13) -> Tensor:
    vocab = transformers.AutoConfig.from_pretrained(folder).vocab_size
    return torch.randint(vocab, (batch, seq), generator=torch.Generator().manual_seed(1))
