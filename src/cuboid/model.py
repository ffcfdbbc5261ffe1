"""The Transformer, written once for every `Parallel`."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from cuboid.attention import Cache
from cuboid.flight import Steps, run
from cuboid.loss import Loss
from cuboid.nn import Block, Model, Norm, Table, recomputed
from cuboid.parallel import Parallel, Place
from cuboid.randomness import key_of
from cuboid.schedule import in_step

#: What backward computes again rather than keep: nothing, attention, or everything inside a block.
Recompute = Literal["none", "selective", "full"]


class Transformer(Model):
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
    ) -> None:
        super().__init__(parallel)
        if recompute not in get_args(Recompute):
            raise ValueError(f"recompute={recompute!r} is not one of {', '.join(get_args(Recompute))}")
        c = self.config = parallel.config
        self.recompute = recompute
        self.embed = Table(parallel, c.vocab, c.hidden, c.init_std)
        self.positions = None if c.rotary else Table(parallel, c.context, c.hidden, c.init_std)
        self.blocks = nn.ModuleList(Block(parallel, str(i), recompute == "selective") for i in range(c.layers))
        self.norm = Norm(parallel, c.hidden, c.norm_bias)
        self.head = None if c.tied else Table(parallel, c.vocab, c.hidden, c.init_std)
        parts = [part for part in (self.embed, self.positions, *self.blocks, self.norm, self.head) if part is not None]
        self._order = [*self.blocks, self.norm]  # forward's; backward's is its reverse
        self.between: Callable[[int, Tensor], None] | None = None  # a trace's, called with what goes into block i
        self.finish(parts, seed, dtype, self._order if parallel.schedule.prefetch else ())

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        place: Place,
        loss: Loss = Loss(),
        dropout: int | None = None,
        last: bool = True,
    ) -> Tensor:
        """The loss of a micro-batch; `last` of those whose gradients are added up."""
        opened = self.open(last)
        X = self._residual(opened, tokens, place, dropout)
        with self.weights(opened, self._classifier) as W:
            return run(self.parallel.head_loss(X, W, self._classifier.weight, targets, loss))

    def logits(self, tokens: Tensor, place: Place, caches: Sequence[Cache] | None = None) -> Tensor:
        """This rank's part of the logits, [s, b, v] at `place.logits`."""
        opened = self.open()
        X = self._residual(opened, tokens, place, None, caches)
        with self.weights(opened, self._classifier) as W:
            return run(self.parallel.logits(X, W, self._classifier.weight))

    @property
    def _classifier(self) -> Table:
        return self.embed if self.head is None else self.head

    def _shared(
        self, opened: dict[nn.Module, Any], parts: int, ahead: bool
    ) -> Callable[[int], AbstractContextManager[Any]]:
        """The weights of block i for each of several parts of a batch: gathered for the first that comes, released
        after the last. With `ahead`, the next block's are on their way where a block is held alone."""
        held: dict[int, Any] = {}
        left: Counter[int] = Counter()

        @contextmanager
        def weights(i: int) -> Iterator[Any]:
            block = self.blocks[i]
            if i not in held:
                alone = not held
                held[i] = self.parallel.gather(self._buckets[block], opened[block])
                if ahead and alone:
                    self._prefetch(i)  # once these are here: they would share the link, and all would wait longer
            yield held[i]
            left[i] += 1
            if left[i] == parts:
                del held[i]
                if i == len(self.blocks) - 1 and self.parallel.schedule.prefetch and torch.is_grad_enabled():
                    self.parallel.keep(self._buckets[block])  # backward begins with it
                self.parallel.release(self._buckets[block])
                if ahead and held:
                    self._prefetch(min(held))

        return weights

    def _residual(
        self,
        opened: dict[nn.Module, Any],
        tokens: Tensor,
        place: Place,
        dropout: int | None,
        caches: Sequence[Cache] | None = None,
    ) -> Tensor:
        """The residual stream after the last norm."""
        places = place.parts(self.parallel.schedule.parts if caches is None else 1)
        Xs = self._embed(opened, tokens.chunk(len(places), 1), places)
        if dropout is not None:
            key = key_of(dropout, "embed")
            Xs = [self.parallel.dropout(X, key, at) for X, at in zip(Xs, places, strict=True)]

        again = self.recompute == "full" and torch.is_grad_enabled()

        def through(blocks: range, *Xs: Tensor) -> list[Tensor]:
            weights = self._shared(opened, len(Xs), ahead=not again)

            def steps(X: Tensor, at: Place) -> Steps:
                for i in blocks:
                    if self.between is not None:
                        self.between(i, X)
                    with weights(i) as W:
                        X = yield from self.blocks[i](X, W, at, dropout, caches[i] if caches else None)
                if self.between is not None:
                    self.between(blocks.stop, X)
                return X

            return in_step([steps(X, at) for X, at in zip(Xs, places, strict=True)])

        if again:  # a block at a time: it gathers its weights itself when it is computed again, and nothing is kept
            for i in range(len(self.blocks)):
                self._prefetch(i)
                Xs = recomputed(through, range(i, i + 1), *Xs)
        else:
            Xs = through(range(len(self.blocks)), *Xs)
        self._prefetch(len(self.blocks))
        with self.weights(opened, self.norm) as W:
            return run(self.norm(Xs[0] if len(Xs) == 1 else torch.cat(Xs, 1), W))

    def _prefetch(self, i: int) -> None:
        """Have the weights of a part and of the next one on their way."""
        if self.parallel.schedule.prefetch:
            last = i >= len(self.blocks) - 1  # the final norm is small: the classifier's go with it
            for part in [*self._order, self._classifier][i : i + (3 if last else 2)]:
                self.parallel.prefetch(self._buckets[part])

    def _embed(self, opened: dict[nn.Module, Any], parts: Sequence[Tensor], places: Sequence[Place]) -> list[Tensor]:
        with self.weights(opened, self.embed) as W, ExitStack() as stack:
            tables = [(W, self.embed.weight)]
            if self.positions is not None:
                P = stack.enter_context(self.weights(opened, self.positions))
                tables.append((P, self.positions.weight))
            return in_step([self.parallel.embed(ids, tables, place) for ids, place in zip(parts, places, strict=True)])
