"""The loss of a model on given tokens, on one rank or any cuboid."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import exp

import torch
from torch import Tensor

from cuboid.data.samples import PADDED_TARGET
from cuboid.data.tokens import Tokens
from cuboid.model.nn import evaluating
from cuboid.model.transformer import Transformer


@dataclass(frozen=True)
class Evaluation:
    tokens: int  # predicted
    nats: float  # per token, the mean

    @property
    def perplexity(self) -> float:
        return exp(self.nats)


def windows(tokens: Tokens, seq: int, batch: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yields tokens and targets [batch, seq] and how many targets count. Every token but the first is predicted once,
    from those before it in its window. The last batch is padded.

    >>> [(targets.tolist(), count) for _, targets, count in windows(torch.arange(6).numpy(), 2, 2)]
    [([[1, 2], [3, 4]], 4), ([[5, -100], [-100, -100]], 1)]
    """
    for top in range(0, len(tokens) - 1, batch * seq):
        ids = torch.from_numpy(tokens[top : top + batch * seq + 1].astype("int64"))
        count = len(ids) - 1
        inputs, targets = torch.zeros(batch * seq, dtype=torch.int64), torch.full((batch * seq,), PADDED_TARGET)
        inputs[:count], targets[:count] = ids[:-1], ids[1:]
        yield inputs.view(batch, seq), targets.view(batch, seq), count


@torch.no_grad()
def evaluate(
    model: Transformer, tokens: Tokens, seq: int, batch: int, progress: Callable[[int], object] = lambda count: None
) -> Evaluation:
    """Returns the mean loss of all tokens but the first, without dropout. Every rank calls it. `progress` is called
    with the number of further tokens that are done."""
    if len(tokens) < 2:
        raise ValueError(f"{len(tokens)} tokens leave nothing to predict; give more text")
    place, device = model.parallel.place(batch, seq), model.parallel.mesh.device
    total, done = 0.0, 0
    for inputs, targets, count in windows(tokens, seq, batch):
        mine = place.take(inputs.to(device), 0), place.take(targets.to(device), PADDED_TARGET)
        with evaluating(model):
            total += count * float(model(*mine, place))
        done += count
        progress(count)
    return Evaluation(done, total / done)
