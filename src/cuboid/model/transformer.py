"""The Transformer, written once for every `Parallel`."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from cuboid.mesh.place import Place
from cuboid.model.nn import Block, Model, Norm, Table
from cuboid.model.parallel import Parallel
from cuboid.step.op import chain, recomputed
from cuboid.step.runner import At, Stage
from cuboid.step.schedule import Clock, interleave

#: What backward computes again rather than keep: nothing, attention, or everything inside a block.
Recompute = Literal["none", "selective", "full"]


class Transformer(Model):
    """A GPT-2 or Llama language model; its loss is the mean over the tokens of all ranks. Tokens and targets are this
    rank's, [s, b]. A model without a `seed` is to be filled from a checkpoint."""

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

    def stages(self) -> Sequence[Stage]:
        return [*self._trunk(), Stage("head", self.classifier.head_loss(), [self.classifier], again=False)]

    def _trunk(self) -> Sequence[Stage]:
        """All but the head."""
        embed, dropout = self.embed.lookup(self.positions), self.parallel.dropout("embed")
        tables = [table for table in (self.embed, self.positions) if table is not None]
        blocks = [recomputed(block) if self.recompute == "full" else block for block in self.blocks]
        return [
            Stage("embed", chain(embed, dropout) if self.config.dropout else embed, tables, again=False),
            *(Stage(f"block {i}", layer, [self.blocks[i]]) for i, layer in enumerate(blocks)),
            Stage("norm", self.norm),
        ]

    @torch.no_grad()
    def logits(self, tokens: Tensor, place: Place, caches: dict[Any, Any] | None = None) -> Tensor:
        """This rank's part of the logits, [s, b, v] at `place.logits`. `caches`, empty at first, remembers keys and
        values from call to call."""
        super()._check_call(tokens, None, place)
        task, _ = self._to_logits.outputs(tokens, At(place, train=False, caches=caches), clock := Clock())
        (found,) = interleave([task], clock)
        return torch.cat(found, 1)

    def _run(self, stages: Sequence[Stage]) -> None:
        super()._run(stages)
        logits = Stage("logits", self.classifier.logits(), [self.classifier])
        self._to_logits = self.runner_of([*self._trunk(), logits])

    def _check_call(self, inputs: Tensor, targets: Tensor | None, place: Place) -> None:
        if targets is None:
            raise ValueError(
                "targets=None: forward gives the loss of targets; for logits call model.logits(tokens, place)"
            )
        super()._check_call(inputs, targets, place)
