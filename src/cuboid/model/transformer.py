"""The Transformer, written once for every `Parallel`."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from cuboid.mesh.place import Place
from cuboid.model.freeze import Trained, matching, parameter_names
from cuboid.model.module import declared
from cuboid.model.nn import Block, Embedding, Model, Norm
from cuboid.model.parallel import Parallel
from cuboid.step.op import chain, recomputed
from cuboid.step.runner import At, Stage

#: What backward recomputes: nothing, attention, or everything inside a block.
Recompute = Literal["none", "selective", "full"]


class Transformer(Model):
    """A GPT-2 or Llama language model. `model(tokens, targets, place)` is its loss, the mean over the tokens of all
    ranks; tokens and targets are this rank's, `[s, b]`, as `place.take` gives them.

    Args:
        parallel: How the model is spread; it has the model's `config`.
        seed: Of the initial weights, the same on every cuboid; None: weights will be loaded.
        dtype: Of weights at rest.
        recompute: What backward recomputes: "none", "selective" (attention) or "full" (blocks).

    Raises:
        ValueError: If `recompute` is none of these, or the model does not fit the cuboid.
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
        self.frozen: set[str] = set()  # names that `freeze` has frozen
        self.recompute = recompute
        pipe, stages = parallel.mesh.pipe, self.split.stages(parallel.mesh.pipe.index)
        first, last, blocks = 0 in stages, self.split.last in stages, nn.ModuleList()
        shared = (0, pipe.size - 1) if c.tied and pipe.size > 1 else ()
        has_embedding = first or (last and c.tied)
        self.embed = Embedding(parallel, c.vocab, c.hidden, c.init_std, shared) if has_embedding else None
        self.positions = Embedding(parallel, c.context, c.hidden, c.init_std) if first and not c.rotary else None
        for i in (i for stage in stages for i in self.split.layers(stage)):  # named as without a pipe
            blocks.add_module(str(i), Block(parallel, str(i), recompute == "selective"))
        self.blocks: Sequence[Block] = blocks  # type: ignore[assignment]
        self.norm = Norm(parallel, c.hidden, c.norm_bias) if last else None
        self.head = Embedding(parallel, c.vocab, c.hidden, c.init_std) if last and not c.tied else None
        self.finish(seed, dtype, wraps=bool(c.tied))

    @property
    def classifier(self) -> Embedding:
        """The head's weight: its own, or the embedding if they are tied."""
        table = self.embed if self.head is None else self.head
        assert table is not None, "the last stage has the head"
        return table

    def stages(self) -> Sequence[Stage]:
        return [*self._trunk(0), self._head()]

    def segments(self) -> Mapping[int, Sequence[Stage]]:
        if self.split.last == 0:
            return {0: self.stages()}
        if type(self).stages is not Transformer.stages:
            raise ValueError(f"{type(self).__name__} lists stages of its own; override `segments` too, or use pipe=1")
        return self._segments(self._head() if self.norm is not None else None)

    def names(self) -> list[str]:
        """The names of all parameters, also of other ranks' stages."""
        every = [*parameter_names(self.config), *(name for name, _, _ in declared(self))]
        return list(dict.fromkeys(every))

    def freeze(self, pattern: str) -> None:
        super().freeze(pattern)
        self.frozen = self.frozen | matching(pattern, self.names())
        if self.parallel.mesh.pipe.size > 1:
            self.lowest = self.split.stage_of(Trained(self.config, self.frozen).lowest)

    def _head(self) -> Stage:
        return Stage("head", self.classifier.head_loss(), [self.classifier], in_backward=False)

    def _segments(self, head: Stage | None) -> dict[int, Sequence[Stage]]:
        """This rank's stages, with the `head` at the end of the last stage."""
        mine, last = self.split.stages(self.parallel.mesh.pipe.index), self.split.last
        return {i: [*self._trunk(i), *([head] if i == last and head is not None else [])] for i in mine}

    def _trunk(self, number: int) -> Sequence[Stage]:
        """A stage of the pipeline, without the head."""
        found = list[Stage]()
        if number == 0:
            assert self.embed is not None
            dropout = [self.parallel.dropout("embed")] if self.config.dropout else []
            tables = [table for table in (self.embed, self.positions) if table is not None]
            layer = chain(self.embed.lookup(self.positions), *dropout)
            found.append(Stage("embed", layer, tables, in_backward=False))
        for i in self.split.layers(number):
            block = self.get_submodule(f"blocks.{i}")
            layer = recomputed(block) if self.recompute == "full" else block  # type: ignore[arg-type, assignment]
            found.append(Stage(f"block {i}", layer, [block]))
        if number == self.split.last:
            assert self.norm is not None
            found.append(Stage("norm", self.norm))
        return found

    @torch.no_grad()
    def logits(self, tokens: Tensor, place: Place, caches: dict[Any, Any] | None = None) -> Tensor:
        """This rank's shard of the logits, without dropout.

        Args:
            tokens: This rank's token ids, `[s, b]`.
            place: Which tokens of the batch they are.
            caches: Keys and values of earlier calls; an empty dict in the first call.

        Returns:
            `[s, b, v]`, at the positions, samples and classes of `place.logits`.

        Raises:
            ValueError: In training mode with dropout.
        """
        if self.training and self.config.dropout:
            raise ValueError(
                f"logits have no dropout, but the model is in training mode with dropout={self.config.dropout}; call "
                "model.eval() first"
            )
        super()._check_call(tokens, None, place)
        at, shape = At(place, train=False, caches=caches), [len(each) for each in place.logits]
        return self._to_logits.forward(tokens, at, shape)

    def _run(self, segments: Mapping[int, Sequence[Stage]]) -> None:
        super()._run(segments)
        head = Stage("logits", self.classifier.logits(), [self.classifier]) if self.norm is not None else None
        self._to_logits = self.player_of(self._segments(head))

    def _check_call(self, inputs: Tensor, targets: Tensor | None, place: Place) -> None:
        if targets is None:
            raise ValueError(
                "targets=None: forward gives the loss of targets; for logits call model.logits(tokens, place)"
            )
        super()._check_call(inputs, targets, place)
