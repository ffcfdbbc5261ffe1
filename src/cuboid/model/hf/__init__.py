"""Hugging Face folders in and out: config.json, (sharded) safetensors, tokenizer.json. `transformers` is not needed.

architecture   config.json  <->  ModelConfig
names          each parameter of ours as a slice of one of their tensors
folder         safetensors files: checked completely, read by slices, written tensor by tensor
load, save     a folder into a model on any cuboid, and back
"""

from typing import TYPE_CHECKING

from cuboid.lazy import lazily

if TYPE_CHECKING:
    from cuboid.model.hf.load import from_pretrained
    from cuboid.model.hf.save import save_pretrained
else:
    __getattr__ = lazily(__name__, {"load": "from_pretrained", "save": "save_pretrained"})

__all__ = ["from_pretrained", "save_pretrained"]
