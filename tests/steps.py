"""A small Transformer and a batch for tests of a step, in fp64, against the same on one device."""

import torch
from sharded import Batches, move_parameters, plainly
from torch import Tensor

from cuboid.baselines.serial import Serial
from cuboid.model.config import ModelConfig
from cuboid.model.parallel import Parallel
from cuboid.model.transformer import Recompute, Transformer
from cuboid.step.runner import At

GPT2 = ModelConfig("gpt2", layers=2, hidden=8, heads=4, vocab=11, context=6, ffn=9)
LLAMA = ModelConfig("llama", layers=2, hidden=8, heads=4, kv_heads=2, head_dim=4, vocab=11, ffn=9, qk_norm=True)
EXACT = 1e-12  # relative
SAMPLES, SEQ, MICRO = 16, 5, 2


def model_on(parallel: Parallel, recompute: Recompute = "none") -> Transformer:
    model = Transformer(parallel, 1, torch.float64, recompute)
    move_parameters(model, 2)
    return model


def batches_on(parallel: Parallel, count: int = MICRO) -> Batches:
    """One batch in `count` micro-batches. All targets count, so the mean of their losses is the loss of the batch."""
    tokens = torch.randint(parallel.config.vocab, (SAMPLES, SEQ + 1), generator=torch.Generator().manual_seed(3))
    place = parallel.place(SAMPLES // count, SEQ)
    return [(place.take(each[:, :-1], 0), At(place, place.take(each[:, 1:], -100))) for each in tokens.chunk(count)]


def loss_of(model: Transformer, batch: tuple[Tensor, At]) -> Tensor:
    tokens, at = batch
    assert at.targets is not None
    return model(tokens, at.targets, at.place)


def reference(config: ModelConfig) -> Transformer:
    """On one device, after a backward of the unsplit batch."""
    model = model_on(Serial(config))
    plainly(model, batches_on(model.parallel, 1))
    return model
