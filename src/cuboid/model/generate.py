"""Generates text token by token, with a cache of keys and values, on one rank or any cuboid."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from cuboid.comm.collectives import all_reduce
from cuboid.layers.randomness import key_of
from cuboid.mesh.place import Place
from cuboid.model.config import ModelConfig
from cuboid.model.transformer import Transformer


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Temperature 0 takes the most likely."""

    temperature: float = 0.6
    top_k: int = 0  # among the k most likely; 0: among all
    top_p: float = 1.0  # among the most likely that together have this probability
    seed: int = 0

    def __post_init__(self) -> None:
        if not (isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature} must be at least 0, which takes the likeliest token")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must not be negative; 0 is no limit")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")

    def draw(self, logits: Tensor, position: int) -> int:
        """Draws a token from logits [v]. It depends only on them, the seed and the position: all ranks draw the
        same."""
        logits = logits.double().cpu()
        if self.temperature == 0:
            return int(logits.argmax())
        sharpened = (logits - logits.max()) / self.temperature  # at most 0: no temperature is too small
        ordered, tokens = sharpened.softmax(-1).sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        allowed = before < self.top_p
        if self.top_k:
            allowed[self.top_k :] = False
        generator = torch.Generator().manual_seed(key_of(self.seed, f"token.{position}"))
        return int(tokens[torch.multinomial(ordered * allowed, 1, generator=generator)])


@torch.no_grad()
def generate(
    model: Transformer, prompt: Sequence[int], count: int, sampling: Sampling = Sampling(), vocab: int | None = None
) -> Iterator[int]:
    """Yields up to `count` tokens after the prompt; fewer if the model's longest sequence ends before. Every rank calls
    it.

    `vocab` is the tokenizer's, if the model has more rows: only tokens below it are drawn.
    """
    config, parallel = model.config, model.parallel
    check_prompt(config, prompt)
    count = min(count, config.longest - len(prompt))
    caches: dict[Any, Any] = {}
    new, start = torch.tensor([list(prompt)], device=parallel.mesh.device), 0
    for _ in range(count):
        place = parallel.place(1, new.shape[1], start, decode=True)
        logits = last_logits(model, model.logits(place.take(new, 0), place, caches), place)
        start += new.shape[1]
        token = sampling.draw(logits[:vocab], start)
        yield token
        new = torch.tensor([[token]], device=parallel.mesh.device)


def check_prompt(config: ModelConfig, prompt: Sequence[int]) -> None:
    if not prompt:
        raise ValueError("the prompt has no tokens; give at least one")
    for token in (min(prompt), max(prompt)):
        if not 0 <= token < config.vocab:
            raise ValueError(f"the prompt has token {token} but the model knows {config.vocab}; use its own tokenizer")
    if len(prompt) >= config.longest:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens and the model's positions end at {config.longest}; shorten it"
        )


def last_logits(model: Transformer, logits: Tensor, place: Place) -> Tensor:
    """Returns the last token's unsharded logits [v], on every rank. On a pipe all places have the same shards; the
    first place contributes them."""
    s, b, v = place.logits
    mine = model.parallel.mesh.pipe.index == 0
    last = ((s == place.start + place.seq - 1) & mine).to(logits.dtype)[:, None, None]
    first = (b == 0).to(logits.dtype)[:, None]
    whole = logits.new_zeros(model.config.vocab, dtype=torch.float32)
    whole[v] = (logits * last * first).sum((0, 1)).float()
    return all_reduce(whole, model.parallel.mesh.world).wait()
