"""A stage of a pipeline by itself: what its forward and backward take, and what it holds. Sizes are arrays over
candidates. The first, a middle and the last stage are simulated on a `Tape` each; further blocks take the same time. A
stage with frozen parameters is simulated with them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from cuboid.model.freeze import Trained, block_names
from cuboid.plan.layer import Choice, Work
from cuboid.plan.memory import Footprint, memory
from cuboid.plan.operands import Operands
from cuboid.plan.sizes import Segment, Sizes
from cuboid.plan.step import STEADY, StageTotals, prices_of, stage_totals
from cuboid.plan.tape import Totals
from cuboid.plan.time import Array, Prices

FIRST, MIDDLE, LAST = Segment(ends=False), Segment(embeds=False, ends=False), Segment(embeds=False)


def stage_work(work: Work, layers: int = STEADY + 1, freeze: str = "") -> Work:
    """The work of a stage of `layers` blocks. Both ends have a tied embedding."""
    return replace(work, config=work.config.replace(layers=layers, tied=False), freeze=freeze)


class LoneStage(NamedTuple):
    """A stage by itself: its blocks, and a pattern of its frozen parameters."""

    segment: Segment
    blocks: int
    freeze: str = ""


def lone_stage(trained: Trained, segment: Segment, layers: range) -> LoneStage:
    """The stage that has these blocks of a model. If nothing below it is trained, backward ends in it, as if it had a
    frozen embedding."""
    if not trained.freeze:
        return LoneStage(segment, len(layers))
    config, every = trained.config, frozenset(block_names(trained.config))
    names = [f"blocks.{i}.{name}" for i, layer in enumerate(layers) for name in sorted(every - trained.block(layer))]
    tables, ends = ["embed.weight", "positions.weight"], ["norm.weight", "norm.bias"]
    if segment.embeds:
        names += [name for name, each in zip(tables, trained.tables(), strict=False) if not each]
    elif trained.lowest > layers.start:
        names += tables[: 2 - config.rotary]
    if segment.ends:
        names += [name for name, each in zip(ends, trained.norm(), strict=False) if not each]
        names += ["head.weight"] * (not trained.head)
    return LoneStage(segment, len(layers), f"^({'|'.join(map(re.escape, names))})$" if names else "")


class StageCosts:
    """Simulated stages of one choice, by segment. `of`: totals that are known already."""

    def __init__(
        self,
        prices: Prices,
        work: Work,
        sizes: Sizes,
        choice: Choice,
        overlap: bool = True,
        of: Mapping[Segment, StageTotals] | None = None,
        level: bool = False,
    ) -> None:
        self.prices, self.work, self.sizes, self.choice, self.overlap = prices, work, sizes, choice, overlap
        self.level = level  # see `_Moments.both`
        self._memory: dict[tuple[LoneStage, bool, bool, bool, int], Footprint] = {}
        self._frozen: dict[tuple[LoneStage, bool], tuple[Totals, Totals]] = {}
        self.of = of or {
            segment: stage_totals(prices, stage_work(work), sizes, choice, segment, overlap, last=False)
            for segment in (FIRST, MIDDLE, LAST)
        }

    def at(self, which: Array, sizes: Sizes) -> "StageCosts":
        """The costs of the candidates `which`, with their sizes."""
        prices = prices_of(self.prices.hw, self.work, sizes)
        of = {segment: totals.at(which) for segment, totals in self.of.items()}
        return StageCosts(prices, self.work, sizes, self.choice, self.overlap, of, self.level)

    @cached_property
    def tails(self) -> dict[Segment, Totals]:
        """The extra totals of the last micro-batch: sums over replicas, and the optimizer."""
        layers = max(1, round(self.work.config.layers / int(self.sizes.pipe[0])))
        each, found = (self.prices, stage_work(self.work, layers), self.sizes, self.choice), {}
        for segment in (FIRST, MIDDLE, LAST):
            last, other = (stage_totals(*each, segment, self.overlap, last).of(layers)[1] for last in (True, False))
            found[segment] = last.plus(other, -1)
        return found

    def totals(self, stage: LoneStage) -> tuple[Totals, Totals]:
        """The totals of a stage's forward, and of its forward and backward."""
        return self._simulated(stage, last=False) if stage.freeze else self.of[stage.segment].of(stage.blocks)

    def tail(self, stage: LoneStage) -> Totals:
        """As `tails`, of a stage with frozen parameters."""
        last, other = (self._simulated(stage, last)[1] for last in (True, False))
        return last.plus(other, -1)

    def _simulated(self, stage: LoneStage, last: bool) -> tuple[Totals, Totals]:
        if (stage, last) not in self._frozen:
            work = stage_work(self.work, stage.blocks, stage.freeze)
            found = stage_totals(self.prices, work, self.sizes, self.choice, stage.segment, self.overlap, last)
            self._frozen[stage, last] = found.of(stage.blocks)
        return self._frozen[stage, last]

    def memory(self, stage: LoneStage, before: bool, choice: Choice, left: Array | None) -> Footprint:
        """The peak of one stage's backward, with or without gradients of earlier micro-batches. `left`: what its weight
        gradients are made of, if they are postponed."""
        beside = choice.schedule.beside
        key = stage, before, beside, left is not None, choice.schedule.stages
        if key not in self._memory:
            count = 1 + before + beside
            work = replace(stage_work(self.work, stage.blocks, stage.freeze), micro_batches=count)
            saved = self.totals(stage)[1].saved
            of = self.prices.hw, work, self.sizes, choice, saved, stage.segment
            self._memory[key] = memory(*of, left, self.level)
        return self._memory[key]

    def kept(self, stage: LoneStage) -> Array:
        """Bytes of unsharded weights that a forward of a stage keeps for its backward."""
        if self.choice.policy.weights == "regather":
            return np.zeros_like(self.sizes.x)
        work, nothing = stage_work(self.work, stage.blocks, stage.freeze), np.zeros_like(self.sizes.x)
        held = Operands(self.prices.hw, work, self.sizes, self.choice, nothing, stage.segment)
        return held.kept * held.backward

    def block(self, segment: Segment) -> Array:
        """Seconds that a block adds to a stage."""
        before, after, back_before, back_after = (each.seconds for each in self.of[segment].marks)
        return after - before + back_after - back_before


def merged(variants: Sequence[tuple[Array, Any]]) -> Any:
    """For each candidate the totals, or the footprint, of the variant whose flag is set."""

    def choose(here: Array, one: Any, other: Any) -> Any:
        if isinstance(one, dict):
            return {key: choose(here, one.get(key, 0), other.get(key, 0)) for key in one.keys() | other.keys()}
        return np.where(here, one, other)

    (_, found), *others = variants
    for here, each in others:
        values = (choose(here, getattr(each, field.name), getattr(found, field.name)) for field in fields(found))
        found = type(found)(*values)
    return found


def segment_of(stage: int, last: int) -> Segment:
    return FIRST if stage == 0 else LAST if stage == last else MIDDLE
