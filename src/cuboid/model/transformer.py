"""The Transformer, written once for every `Parallel`."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from cuboid.comm.flight import Steps, run
from cuboid.layers.attention import Cache
from cuboid.layers.loss import Loss
from cuboid.layers.randomness import key_of
from cuboid.mesh.place import Place
from cuboid.model.nn import Block, Model, Norm, Table, recomputed
from cuboid.model.parallel import Parallel
from cuboid.step.schedule import in_step
from cuboid.step.weights import Trail

#: What backward computes again rather than keep: nothing, attention, or everything inside a block.
Recompute = Literal["none", "selective", "full"]

#: The weights of a part of the model, while a part of a batch runs through it.
Shared = Callable[[nn.Module], AbstractContextManager[Any]]


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
        self._order = [self.embed, *self.blocks, self.norm]  # forward's; backward's is its reverse
        self.between: Callable[[int, Tensor], None] | None = None  # a trace's, called with what goes into block i
        self.finish(parts, seed, dtype, self._order[1:] if parallel.schedule.prefetch else ())

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
        parts = self._residual(opened, tokens, place, dropout, leave=self.parallel.to_head)
        with self.weights(opened, self._classifier) as W:
            return run(self.parallel.head_loss(parts, W, self._classifier.weight, targets, loss))

    def logits(self, tokens: Tensor, place: Place, caches: Sequence[Cache] | None = None) -> Tensor:
        """This rank's part of the logits, [s, b, v] at `place.logits`."""
        opened = self.open()
        Xs = self._residual(opened, tokens, place, None, caches)
        with self.weights(opened, self._classifier) as W:
            return run(self.parallel.logits(torch.cat(Xs, 1), W, self._classifier.weight))

    @property
    def _classifier(self) -> Table:
        return self.embed if self.head is None else self.head

    def _shared(self, opened: dict[nn.Module, Any], parts: int, ahead: bool) -> list[Shared]:
        """For each of several parts of a batch, the weights of a part of the model: gathered for the first that comes,
        released after the last. With `ahead`, the next one's are on their way where one is held alone."""
        held: dict[nn.Module, Any] = {}
        left: Counter[nn.Module] = Counter()

        @contextmanager
        def weights(trail: Trail, part: nn.Module) -> Iterator[Any]:
            if part not in held:
                alone = not held
                held[part] = self.parallel.gather(self._buckets[part], opened[part])
                if ahead and alone:
                    self._prefetch(part)  # once these are here: they would share the link, and all would wait longer
            yield held[part].along(trail)
            left[part] += 1
            if left[part] == parts:
                del held[part]
                if part is self.blocks[-1] and self.parallel.schedule.prefetch and torch.is_grad_enabled():
                    self.parallel.keep(self._buckets[part])  # backward begins with it
                self.parallel.release(self._buckets[part])
                if ahead and held:
                    self._prefetch(next(iter(held)))

        return [partial(weights, Trail()) for _ in range(parts)]

    def _residual(
        self,
        opened: dict[nn.Module, Any],
        tokens: Tensor,
        place: Place,
        dropout: int | None,
        caches: Sequence[Cache] | None = None,
        leave: Callable[[Tensor], Any] = lambda X: X,
    ) -> list[Any]:
        """What `leave` makes of the residual stream after the last norm, for each part of the batch."""
        places = place.parts(self.parallel.schedule.parts if caches is None else 1)
        again = self.recompute == "full" and torch.is_grad_enabled()

        def embed(ids: Tensor, at: Place, weights: Shared) -> Steps:
            with ExitStack() as stack:
                tables = [table for table in (self.embed, self.positions) if table is not None]
                whole = [(stack.enter_context(weights(table)), table.weight) for table in tables]
                X = yield from self.parallel.embed(ids, whole, at)
            return X if dropout is None else self.parallel.dropout(X, key_of(dropout, "embed"), at)

        def block(i: int, X: Tensor, at: Place, weights: Shared) -> Steps:
            self._tell(i, X)
            with weights(self.blocks[i]) as W:
                X = yield from self.blocks[i](X, W, at, dropout, caches[i] if caches else None)
            return X

        def end(X: Tensor, at: Place, weights: Shared) -> Steps:
            self._tell(len(self.blocks), X)
            with weights(self.norm) as W:
                X = yield from self.norm(X, W)
            return leave(X)

        def through(stages: Sequence[Callable[..., Steps]], *Xs: Any) -> list[Any]:
            def steps(X: Any, at: Place, weights: Shared) -> Steps:
                for stage in stages:
                    X = yield from stage(X, at, weights)
                return X

            shared = self._shared(opened, len(Xs), ahead=not again)
            return in_step([steps(*each) for each in zip(Xs, places, shared, strict=True)])

        blocks = [partial(block, i) for i in range(len(self.blocks))]
        Xs = list(tokens.chunk(len(places), 1))
        if not again:
            return through([embed, *blocks, end], *Xs)
        Xs = through([embed], *Xs)
        for part, stage in zip(self.blocks, blocks, strict=True):
            # a block at a time: it gathers its weights itself when it is computed again, and nothing is kept
            self._prefetch(part)
            Xs = recomputed(through, [stage], *Xs)
        self._prefetch(self.norm)
        return through([end], *Xs)

    def _tell(self, i: int, X: Tensor) -> None:
        if self.between is not None:
            self.between(i, X)

    def _prefetch(self, part: nn.Module) -> None:
        """Have the weights of a part and of the next one on their way."""
        if self.parallel.schedule.prefetch:
            i = self._order.index(part)
            last = i >= len(self.blocks)  # the final norm is small: the classifier's go with it
            for each in [*self._order, self._classifier][i : i + (3 if last else 2)]:
                self.parallel.prefetch(self._buckets[each])
