"""The Transformer, written once for every `Parallel`."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from cuboid.attention import Cache
from cuboid.comm import all_reduce, run
from cuboid.loss import Loss
from cuboid.nn import Block, Norm, Table, declared, initialise, recomputed
from cuboid.parallel import Parallel, Place
from cuboid.randomness import key_of
from cuboid.schedule import PREFETCH, Schedule, in_step

#: What backward computes again rather than keep: nothing, attention, or everything inside a block.
Recompute = Literal["none", "selective", "full"]


class Transformer(nn.Module):
    """A GPT-2 or Llama language model; `forward` gives the loss of a batch, the mean over the tokens of all ranks.

    Tokens and targets are this rank's, [s, b], as `Place.take` cuts them out of the whole batch. `dropout` is a seed
    for this batch's dropout; None is none. A model without a `seed` is to be filled from a checkpoint.
    """

    def __init__(
        self,
        parallel: Parallel,
        seed: int | None = 0,
        dtype: torch.dtype = torch.float32,
        recompute: Recompute = "none",
        schedule: Schedule = PREFETCH,
    ) -> None:
        super().__init__()
        if recompute not in get_args(Recompute):
            raise ValueError(f"recompute={recompute!r} is not one of {', '.join(get_args(Recompute))}")
        c = self.config = parallel.config
        self.parallel, self.recompute, self.schedule = parallel, recompute, schedule
        self.embed = Table(parallel, c.vocab, c.hidden, c.init_std)
        self.positions = None if c.rotary else Table(parallel, c.context, c.hidden, c.init_std)
        self.blocks = nn.ModuleList(Block(parallel, str(i), recompute == "selective") for i in range(c.layers))
        self.norm = Norm(parallel, c.hidden, c.norm_bias)
        self.head = None if c.tied else Table(parallel, c.vocab, c.hidden, c.init_std)
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        if seed is not None:
            initialise(self, seed)
        parts = [part for part in (self.embed, self.positions, *self.blocks, self.norm, self.head) if part is not None]
        self._buckets: dict[nn.Module, Any] = {}
        self._order = [*self.blocks, self.norm]  # forward's; backward's is its reverse
        for part in parts:
            i = self._order.index(part) if schedule.prefetch and part in self._order else 0
            before = self._buckets[self._order[i - 1]] if i else None
            self._buckets[part] = parallel.bucket([(p, d.spec) for _, p, d in declared(part)], before)

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
        places, parts = [place], [tokens]
        if self.schedule.halves and len(place.samples) % 2 == 0 and caches is None:
            places, parts = list(place.halves()), list(tokens.chunk(2, 1))
        Xs = self._embed(opened, parts, places)
        if dropout is not None:
            key = key_of(dropout, "embed")
            Xs = [self.parallel.dropout(X, key, at) for X, at in zip(Xs, places, strict=True)]

        def through(block: nn.Module, cache: Cache | None, *Xs: Tensor) -> list[Tensor]:
            with self._weights(opened, block) as W:  # inside, so that a recomputation gathers too and nothing is kept
                return in_step([block(X, W, at, dropout, cache) for X, at in zip(Xs, places, strict=True)])

        for i, block in enumerate(self.blocks):
            self._prefetch(i)
            if self.recompute == "full" and torch.is_grad_enabled():
                Xs = recomputed(through, block, None, *Xs)
            else:
                Xs = through(block, caches[i] if caches else None, *Xs)
        self._prefetch(len(self.blocks))
        with self._weights(opened, self.norm) as W:
            return run(self.norm(Xs[0] if len(Xs) == 1 else torch.cat(Xs, 1), W))

    def _prefetch(self, i: int) -> None:
        """Have the weights of a part and of the next one on their way."""
        if self.schedule.prefetch:
            for part in [*self._order, self._classifier][i : i + 2]:
                self.parallel.prefetch(self._buckets[part])

    def _embed(self, opened: dict[nn.Module, Any], parts: Sequence[Tensor], places: Sequence[Place]) -> list[Tensor]:
        with self._weights(opened, self.embed) as W, ExitStack() as stack:
            tables = [(W, self.embed.weight)]
            if self.positions is not None:
                P = stack.enter_context(self._weights(opened, self.positions))
                tables.append((P, self.positions.weight))
            return in_step([self.parallel.embed(ids, tables, place) for ids, place in zip(parts, places, strict=True)])

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
