"""Maps each parameter of ours to one of their tensors.

Ours are [n, k] everywhere. GPT-2 stores linears as [k, n], and queries, keys and values in one tensor, side by side.
"""

import re
from typing import NamedTuple

from cuboid.model.config import ModelConfig

#: Module of ours -> theirs; `{}` is the layer.
_LLAMA = {
    "embed": "model.embed_tokens",
    "norm1": "model.layers.{}.input_layernorm",
    "attention.q": "model.layers.{}.self_attn.q_proj",
    "attention.k": "model.layers.{}.self_attn.k_proj",
    "attention.v": "model.layers.{}.self_attn.v_proj",
    "attention.norm_q": "model.layers.{}.self_attn.q_norm",
    "attention.norm_k": "model.layers.{}.self_attn.k_norm",
    "attention.out": "model.layers.{}.self_attn.o_proj",
    "norm2": "model.layers.{}.post_attention_layernorm",
    "mlp.gate": "model.layers.{}.mlp.gate_proj",
    "mlp.up": "model.layers.{}.mlp.up_proj",
    "mlp.down": "model.layers.{}.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
_GPT2 = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "norm1": "transformer.h.{}.ln_1",
    "attention.q": "transformer.h.{}.attn.c_attn",
    "attention.k": "transformer.h.{}.attn.c_attn",
    "attention.v": "transformer.h.{}.attn.c_attn",
    "attention.out": "transformer.h.{}.attn.c_proj",
    "norm2": "transformer.h.{}.ln_2",
    "mlp.up": "transformer.h.{}.mlp.c_fc",
    "mlp.down": "transformer.h.{}.mlp.c_proj",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
_FUSED = ("attention.q", "attention.k", "attention.v")
_PREFIX = {"gpt2": "transformer.", "llama": "model."}
#: Tensors of old files that are not weights.
_IDLE = re.compile(r".*\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq")


class Source(NamedTuple):
    """A parameter of ours is rows [slot · n, (slot + 1) · n) of one of their tensors, which fuses `slots` of ours and
    may be stored transposed."""

    name: str
    transposed: bool = False
    slot: int = 0
    slots: int = 1

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of their tensor, from our parameter's."""
        n, *rest = ours
        fused = (self.slots * n, *rest)
        return fused[::-1] if self.transposed else fused


def source_of(config: ModelConfig, parameter: str) -> Source:
    """Where the parameter of this name is stored."""
    module, _, what = parameter.rpartition(".")
    layer = ""
    if module.startswith("blocks."):
        _, layer, module = module.split(".", 2)
    if config.family == "llama":
        return Source(f"{_LLAMA[module]}.{what}".format(layer))
    linear = module.startswith(("attention.", "mlp."))
    fused = (_FUSED.index(module), len(_FUSED)) if module in _FUSED else (0, 1)
    return Source(f"{_GPT2[module]}.{what}".format(layer), linear and what == "weight", *fused)


def canonical(config: ModelConfig, name: str) -> str | None:
    """A tensor's name in `Source`, from its name in a file, which may lack the model's prefix. None: not needed."""
    prefix = _PREFIX[config.family]
    if not name.startswith((prefix, "lm_head.")):
        name = prefix + name
    idle = _IDLE.fullmatch(name) or (config.tied and name == "lm_head.weight")
    return None if idle else name
