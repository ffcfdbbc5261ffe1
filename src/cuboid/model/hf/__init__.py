"""Hugging Face folders in and out: config.json, (sharded) safetensors, tokenizer.json. `transformers` is not needed.

architecture   config.json  <->  ModelConfig
names          which slice of which of their tensors a parameter of ours is
folder         safetensors files: checked as a whole, read by slices, written a tensor at a time
load, save     a model on any cuboid from a folder; a folder from a model on any cuboid
"""

from cuboid.model.hf.load import from_pretrained
from cuboid.model.hf.save import save_pretrained

__all__ = ["from_pretrained", "save_pretrained"]
