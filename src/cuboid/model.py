"""The Transformer, written once for every `Parallel`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from cuboid.attention import Cache
from cuboid.comm import all_reduce, run
from cuboid.loss import Loss
from cuboid.nn import Block, Norm, Table, declared, initialise, recomputed
from cuboid.parallel import Parallel, Place
from cuboid.randomness import key_of

#: What backward computes again rather than keep: nothing, attention, or everything inside a block.
Recompute = Literal["none", "selective", "full"]


class Transformer(nn.Module):
    """A GPT-2 or Llama language model; `forward` gives the loss of a batch, the mean over the tokens of all ranks.

    Tokens and targets are this rank's, [s, b], as `Place.take` cuts them out of the whole batch. `dropout` is a seed
    for this batch's dropout; None is none.
    """

    def __init__(
        self,
        parallel: Parallel,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        recompute: Recompute = "none",
    ) -> None:
        super().__init__()
        if recompute not in get_args(Recompute):
            raise ValueError(f"recompute={recompute!r} is not one of {', '.join(get_args(Recompute))}")
        c = self.config = parallel.config
        self.parallel, self.recompute = parallel, recompute
        self.embed = Table(parallel, c.vocab, c.hidden, c.init_std)
        self.positions = None if c.rotary else Table(parallel, c.context, c.hidden, c.init_std)
        self.blocks = nn.ModuleList(Block(parallel, str(i), recompute == "selective") for i in range(c.layers))
        self.norm = Norm(parallel, c.hidden, c.norm_bias)
        self.head = None if c.tied else Table(parallel, c.vocab, c.hidden, c.init_std)
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        initialise(self, seed)
        parts = [part for part in (self.embed, self.positions, *self.blocks, self.norm, self.head) if part is not None]
        self._buckets = {
            part: parallel.bucket([(parameter, d.spec) for _, parameter, d in declared(part)]) for part in parts
        }

    def forward(
        self, tokens: Tensor, targets: Tensor, place: Place, loss: Loss = Loss(), dropout: int | None = None
    ) -> Tensor:
        opened = self._open()
        X = self._residual(opened, tokens, place, dropout)
        with self._weights(opened, self._classifier) as W:
            return run(self.parallel.head_loss(X, W, self._classifier.weight, targets, loss))

    def logits(self, tokens: Tensor, place: Place, caches: Sequence[Cache] | None = None) -> Tensor:
        """This rank's part of the logits, [s, b, v] at `place.logits`."""
        opened = self._open()
        X = self._residual(opened, tokens, place, None, caches)
        with self._weights(opened, self._classifier) as W:
            return run(self.parallel.logits(X, W, self._classifier.weight))

    @property
    def _classifier(self) -> Table:
        return self.embed if self.head is None else self.head

    def _open(self) -> dict[nn.Module, Any]:
        return dict(zip(self._buckets, self.parallel.open(list(self._buckets.values())), strict=True))

    @contextmanager
    def _weights(self, opened: dict[nn.Module, Any], part: nn.Module) -> Iterator[Any]:
        try:
            yield self.parallel.gather(self._buckets[part], opened[part])
        finally:
            self.parallel.release(self._buckets[part])

    def _residual(
        self,
        opened: dict[nn.Module, Any],
        tokens: Tensor,
        place: Place,
        dropout: int | None,
        caches: Sequence[Cache] | None = None,
    ) -> Tensor:
        """The residual stream after the last norm."""
        X = self._embed(opened, tokens, place)
        if dropout is not None:
            X = self.parallel.dropout(X, key_of(dropout, "embed"), place)

        def through(block: nn.Module, X: Tensor, cache: Cache | None = None) -> Tensor:
            with self._weights(opened, block) as W:  # inside, so that a recomputation gathers too and nothing is kept
                return run(block(X, W, place, dropout, cache))

        for i, block in enumerate(self.blocks):
            if self.recompute == "full" and torch.is_grad_enabled():
                X = recomputed(through, block, X)
            else:
                X = through(block, X, caches[i] if caches else None)
        with self._weights(opened, self.norm) as W:
            return run(self.norm(X, W))

    def _embed(self, opened: dict[nn.Module, Any], tokens: Tensor, place: Place) -> Tensor:
        with self._weights(opened, self.embed) as W:
            if self.positions is None:
                return run(self.parallel.embed(tokens, [(W, self.embed.weight)], place))
            with self._weights(opened, self.positions) as P:
                tables = [(W, self.embed.weight), (P, self.positions.weight)]
                return run(self.parallel.embed(tokens, tables, place))

    @torch.no_grad()
    def gradient_square(self) -> Tensor:
        """This rank's share of the squared norm of the whole gradient: what several ranks hold, each counts in part."""
        cuboid = self.parallel.mesh.cuboid
        total = torch.zeros((), dtype=torch.float64, device=self.parallel.mesh.device)
        for _, parameter, d in declared(self):
            if parameter.grad is not None:
                total += parameter.grad.square().sum(dtype=torch.float64) / d.spec.copies(cuboid)
        return total

    def gradient_norm(self) -> Tensor:
        """The norm of the whole model's gradient, exact on every rank: one small all-reduce over all ranks."""
        return all_reduce(self.gradient_square(), self.parallel.mesh.world).wait().sqrt()
