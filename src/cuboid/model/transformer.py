"""The Transformer, written once for every `Parallel`."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from cuboid.layers.loss import Loss
from cuboid.mesh.place import Place
from cuboid.model.nn import Block, Model, Norm, Part, Table
from cuboid.model.parallel import Parallel
from cuboid.step.op import chain, recomputed
from cuboid.step.runner import At
from cuboid.step.schedule import interleave

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
        self.blocks: Sequence[Block] = nn.ModuleList(
            Block(parallel, str(i), recompute == "selective") for i in range(c.layers)
        )  # type: ignore[assignment]
        self.norm = Norm(parallel, c.hidden, c.norm_bias)
        self.head = None if c.tied else Table(parallel, c.vocab, c.hidden, c.init_std)
        self.finish(seed, dtype)

    @property
    def classifier(self) -> Table:
        """The table of the head: its own, or the embedding's."""
        return self.embed if self.head is None else self.head

    def parts(self) -> Sequence[Part]:
        parallel, table = self.parallel, self.classifier
        return [*self._trunk(), Part("head", parallel.head_loss(table.weight, table.rows), [table], again=False)]

    def _trunk(self) -> Sequence[Part]:
        """All but the head."""
        parallel = self.parallel
        tables = [table for table in (self.embed, self.positions) if table is not None]
        embed = parallel.embed([table.weight for table in tables], [table.rows for table in tables])
        if parallel.config.dropout:
            embed = chain(embed, parallel.dropout("embed"))
        full = self.recompute == "full"
        return [
            Part("embed", embed, tables, again=False),
            *(Part(f"block {i}", recomputed(b) if full else b, [b]) for i, b in enumerate(self.blocks)),
            Part("norm", self.norm, [self.norm]),
        ]

    def forward(
        self, tokens: Tensor, targets: Tensor, place: Place, loss: Loss = Loss(), dropout: int | None = None
    ) -> Tensor:
        """The loss of a batch."""
        return self.runner(tokens, At(place, targets, loss, dropout))

    @torch.no_grad()
    def logits(self, tokens: Tensor, place: Place, caches: dict[Any, Any] | None = None) -> Tensor:
        """This rank's part of the logits, [s, b, v] at `place.logits`. `caches`, empty at first, remembers keys and
        values from call to call."""
        table = self.classifier
        last = Part("logits", self.parallel.logits(table.weight, table.rows), [table])
        runner = self.runner_of([*self._trunk(), last])
        task, _ = runner.outputs(tokens, At(place, train=False, caches=caches))
        (found,) = interleave([task])
        return torch.cat(found, 1)
