"""Runs consecutive stages of a model over sub-batches of a micro-batch, forward and backward.

    forward     Each sub-batch runs through the stages, and saves a `Back` per stage.
    backward    Each sub-batch runs through the stages in reverse, and releases each `Back` as it runs.
    weights     The first sub-batch that reaches a stage gathers them, and the last one releases them. Meanwhile the
                next stage's are prefetched.
    gradients   They are added up over sub-batches, reduce-scattered over x after the last one, and summed over replicas
                when no micro-batch will use the weights any more. Frozen weights have none.

Backward ends with the lowest stage that is trained. Stages below it save nothing.

All state of a step is in a `Pass` (between forward and backward of one micro-batch) and in `Sums`, so several forwards
may be alive, in any order (`step/play.py`). Autograd sees one node.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cuboid.comm.axis import Axis
from cuboid.comm.collectives import all_reduce
from cuboid.comm.flight import Pause, Steps
from cuboid.mesh.layout import sharded_as
from cuboid.mesh.place import Place
from cuboid.step.op import Back, Layer, nothing, scaled
from cuboid.step.schedule import Clock, Schedule, Task, interleave
from cuboid.step.weights import MOST_IN_FLIGHT, Bucket, Gathered, Landing, Sums, Tensors, When


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage of a model. The weights of its modules are gathered together, and are unsharded while it runs.

    Args:
        name: Shown in messages and traces.
        layer: What the stage computes.
        modules: The modules whose weights it needs; empty: the layer, if it is a module.
        in_backward: Whether backward needs these weights too.
    """

    name: str
    layer: Layer
    modules: Sequence[Any] = ()
    in_backward: bool = True

    @property
    def needs(self) -> Sequence[Any]:
        """The modules whose weights this stage gathers."""
        named = self.modules or ((self.layer,) if isinstance(self.layer, nn.Module) else ())
        return [module for module in named if next(module.parameters(), None) is not None]


@dataclass(frozen=True)
class At:
    """The tokens that a layer works on.

    Args:
        place: Which tokens of the batch.
        targets: This rank's targets, `[s, b]`.
        loss: Options of the loss, `Loss` for cross entropy.
        seed: Seed of dropout, or its keys by layer, which is what layers read; None: no dropout.
        train: Whether backward will follow.
        needs_dX: Whether something below this layer is trained.
        caches: Keys and values of earlier tokens, by layer.
    """

    place: Place
    targets: Tensor | None = None
    loss: Any = None
    seed: int | Mapping[str, Tensor] | None = None
    train: bool = True
    needs_dX: bool = True
    caches: dict[Any, Any] | None = None

    def without_backward(self) -> "At":
        """The same tokens, for a forward without backward."""
        return replace(self, train=False) if self.train else self

    def split(self, count: int) -> list["At"]:
        """One `At` per sub-batch: `count` of them, or one if the samples cannot be split."""
        places = self.place.sub_batches(count if self.caches is None else 1)
        if len(places) == 1:
            return [self]
        targets = [None] * len(places) if self.targets is None else self.targets.chunk(len(places), 1)
        return [replace(self, place=p, targets=t) for p, t in zip(places, targets, strict=True)]


@dataclass
class _StageWeights:
    """The unsharded weights of stages, which a pass visits in one `direction`. The first sub-batch at a stage gathers
    them, the last one releases them. While one stage is held alone, the next one's are prefetched."""

    buckets: Sequence[Sequence[Bucket]]  # by stage
    needed: Sequence[Sequence[Bucket]]  # by stage: those to gather; the others only add up gradients
    direction: int  # 1 in forward, -1 in backward
    kept: dict[Bucket, Tensors]  # unsharded already
    sub_batches: int
    prefetch: bool
    clock: Clock
    wgrads: When = "now"

    def __post_init__(self) -> None:
        self._pending = [self.sub_batches] * len(self.buckets)
        self._flying: dict[int, tuple[float, Sequence[Landing]]] = {}
        self._held: dict[int, Gathered] = {}

    def _launch(self, i: int) -> None:
        if i in range(len(self.buckets)) and self._pending[i] and i not in self._flying and i not in self._held:
            needed, kept = self.needed[i], self.kept
            message = self.clock.launch(sum(each.sent for each in needed if each not in kept))
            self._flying[i] = message, [partial(dict, kept.pop(b)) if b in kept else b.gather() for b in needed]

    def acquire(self, i: int) -> Steps:
        """Returns the weights of stage i."""
        if i not in self._held:
            self._launch(i)
            yield Pause(message=self._flying[i][0])
        if i not in self._held:  # unless another sub-batch was first
            weights: Tensors = {}
            for land in self._flying.pop(i)[1]:
                weights |= land()
            self._held[i] = Gathered(self.buckets[i], weights, self.sub_batches, self.wgrads)
            if self.prefetch and len(self._held) == 1:
                self._launch(i + self.direction)  # not earlier: both would share the link, and this stage would wait
        return self._held[i]

    def release(self, i: int) -> Gathered | None:
        """Returns the weights of stage i after its last sub-batch, else None."""
        self._pending[i] -= 1
        if self._pending[i]:
            return None
        gathered = self._held.pop(i)
        if self.prefetch and self._held:
            self._launch(next(iter(self._held)) + self.direction)
        return gathered


@dataclass
class Pass:
    """One micro-batch between its forward and its backward."""

    backs: list[list[Back | None]]  # by sub-batch, by stage
    clock: Clock  # of the step
    lowest: int  # the lowest stage that is trained; those below it have no Back
    count: Tensor | None = None  # number of losses in the mean
    #: gradients computed in forward, of the sum of losses (not the mean), each with the factor it was multiplied by
    early: list[tuple[Landing, float]] = field(default_factory=list)
    kept: dict[Bucket, Tensors] = field(default_factory=dict)  # unsharded weights
    pending_wgrads: list[Gathered] = field(default_factory=list)  # that backward has left to `settle`


class Runner:
    """Runs a model's stages, with a bucket for each module they need. The last stage returns [sum of losses, number
    that count], partial sums over the axes `sums_over`. With `retain`, unsharded weights are kept from forward to
    backward. Without `keep`, not even those of the last block are, because other forwards run in between.

    `on_stage` is called with the number of a stage when its input is ready, and when the gradient of its input is.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        buckets: Mapping[Any, Bucket],
        schedule: Schedule,
        sums_over: Sequence[Axis] = (),
        retain: bool = False,
        keep: bool = True,
    ) -> None:
        self.stages, self.schedule, self.sums_over = stages, schedule, sums_over
        self.gives_loss = stages[-1].layer.gives == "loss"
        self._buckets = [[buckets[module] for module in stage.needs] for stage in stages]
        self._needed = [each if stage.in_backward else [] for stage, each in zip(stages, self._buckets, strict=True)]
        self.uses = Counter(bucket for each in self._buckets for bucket in each)
        self.parameters = [p for bucket in self.uses for p in bucket.parameters]
        self.on_stage: Callable[[int], None] | None = None
        later = (set[Bucket]().union(*self._buckets[i + 1 :]) for i in range(len(stages)))
        self._kept_for_later = [each if retain else set() for each in later]
        self._kept_for_backward = self._to_keep(retain, keep and schedule.prefetch)

    def _to_keep(self, retain: bool, last: bool) -> list[set[Bucket]]:
        """For each stage, the buckets whose weights are kept for backward: all with `retain`, else those of the `last`
        large stage, with which backward begins."""
        needed = [set(each) for each in self._needed]
        large = [i for i, each in enumerate(needed) if any(p.dim() > 1 for bucket in each for p in bucket.parameters)]
        kept = large[-1:] if last else []
        return [each if retain or i in kept else set() for i, each in enumerate(needed)]

    def _lowest(self, X: Tensor | Sequence[Any], below: bool) -> int:
        """The lowest stage that needs a backward. `below`: stages of other ranks need dX of all."""
        trained = (any(p.requires_grad for bucket in each for p in bucket.parameters) for each in self._buckets)
        needed = below or (isinstance(X, Tensor) and X.requires_grad)
        return 0 if needed else next((i for i, each in enumerate(trained) if each), len(self.stages))

    # Forward

    def forward(self, X: Tensor | Sequence[Any], at: At, clock: Clock, below: bool = False) -> Task:
        """Task of (loss, Pass). The loss is the mean over the tokens of all ranks. `below`: dX is needed."""
        task, passed = self.outputs(X, at, clock, below)

        def finish(sums: list[Tensor]) -> tuple[Tensor, Pass]:
            total = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
            for axis in self.sums_over:
                total = all_reduce(total, axis).wait()
            passed.count = total[1].where(total[1] > 0, 1)
            passed.early = [(partial(dict, land()), shrunk) for land, shrunk in passed.early]
            return total[0] / passed.count, passed

        return Task(task.steps, finish)

    def outputs(self, X: Tensor | Sequence[Any], at: At, clock: Clock, below: bool = False) -> tuple[Task, Pass]:
        """Task of the last stage's Y per sub-batch, and the Pass that it fills. X is a tensor, or one per sub-batch."""
        ats = at.split(self.schedule.sub_batches)
        passed, n = Pass([[] for _ in ats], clock, self._lowest(X, below)), len(ats)
        weights = _StageWeights(self._buckets, self._buckets, 1, passed.kept, n, self.schedule.prefetch, clock)
        each = zip(X.chunk(n, 1) if isinstance(X, Tensor) else X, ats, passed.backs, strict=True)
        return Task([self._through(*one, weights, passed) for one in each], list), passed

    def _through(self, X: Any, at: At, backs: list[Back | None], weights: _StageWeights, passed: Pass) -> Steps:
        """Runs one sub-batch through all stages."""
        here = at.without_backward()
        for i, stage in enumerate(self.stages):
            if self.on_stage is not None:
                self.on_stage(i)
            if i >= passed.lowest:
                spared = i == passed.lowest > 0 and getattr(stage.layer, "spares_dX", False)
                here = replace(at, needs_dX=False) if spared else at
            steps = stage.layer(X, (yield from weights.acquire(i)), here)
            del X
            X, back = yield from steps
            backs.append(back)
            gathered = weights.release(i)
            if gathered is not None and at.train:
                passed.early += [(land, gathered.shrunk) for _, land in gathered.reduce()]
                keep = self._kept_for_later[i] | (self._kept_for_backward[i] if i >= passed.lowest else set())
                for bucket in self._buckets[i]:
                    passed.kept.pop(bucket, None)
                    if bucket in keep:
                        passed.kept[bucket] = {p: gathered[p] for p in bucket.parameters}
            del gathered  # releases its weights now, not a stage later
        return X

    # Backward

    def backward(self, passed: Pass, dY: Tensor | Sequence[Any], sums: Sums, wgrads: When = "now") -> Task:
        """Task of dX per sub-batch. `dY` is dloss, or a gradient per sub-batch."""
        count = len(passed.backs)
        if isinstance(dY, Tensor):
            assert passed.count is not None
            scale = dY / passed.count
            for land, shrunk in passed.early:
                sums.put({p: scaled(gradient, scale / shrunk) for p, gradient in land().items()})
            passed.early.clear()
            dY = [scale] * count
        needed = [each if i >= passed.lowest else [] for i, each in enumerate(self._needed)]
        options = self.schedule.prefetch, passed.clock, wgrads
        weights = _StageWeights(self._buckets, needed, -1, passed.kept, count, *options)
        each, target = zip(dY, passed.backs, strict=True), None if wgrads == "late" else sums
        return Task([self._back_through(dY, backs, weights, passed.pending_wgrads, target) for dY, backs in each], list)

    def _back_through(
        self, dY: Any, backs: list[Back | None], weights: _StageWeights, pending: list[Gathered], sums: Sums | None
    ) -> Steps:
        """Runs one sub-batch through the stages in reverse, down to the lowest that is trained."""
        while backs and (back := backs.pop()) is not None:
            i, following = len(backs), backs[-1] if backs else None
            before = None if following is None else following.ahead
            steps = back.run(dY, (yield from weights.acquire(i)), before or nothing)
            del dY, back
            dY = yield from steps
            if self.on_stage is not None:
                self.on_stage(i)
            gathered = weights.release(i)
            if gathered is not None:
                gathered.release()
                pending.append(gathered)
                if sums is not None:
                    yield from settle(pending, sums, weights.clock)
        return dY

    def __call__(self, X: Tensor, at: At) -> Tensor:
        """The mean loss over the tokens of all ranks, which autograd can differentiate."""
        return _Step.apply(X, self, at, *self.parameters)


def settle(pending: list[Gathered], sums: Sums, clock: Clock) -> Steps:
    """Compute the weight gradients that backward has left, and launch their sums."""
    while pending:
        gathered = pending.pop(0)
        clock.compute(gathered.settle())
        if len(sums.launched) == MOST_IN_FLIGHT:
            yield Pause(message=sums.launched[0])  # `sums.add` waits for it
        sums.launched.append(clock.launch(sum(bucket.sent for bucket in gathered.buckets)))
        sums.add(gathered)


class _Step(torch.autograd.Function):
    """The one autograd node of a step."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, runner: Runner, at: At, *parameters: nn.Parameter) -> Tensor:
        clock = Clock(alone=runner.schedule.sub_batches == 1)
        ((loss, ctx.passed),) = interleave([runner.forward(X, at, clock)], clock)
        ctx.runner, clock.forward = runner, False
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: the gradients of a step cannot be differentiated, because its layers save no "
                "graph; compute second derivatives on one device"
            )
        if ctx.passed is None:
            raise RuntimeError(
                "backward() has already run for this loss, and released what its forward saved; run the forward again"
            )
        runner, passed, ctx.passed = ctx.runner, ctx.passed, None
        sums = Sums(runner.uses)
        (dXs,) = interleave([runner.backward(passed, dloss, sums)], passed.clock)
        gradients = sums.finish()
        dX = torch.cat(dXs, 1) if ctx.needs_input_grad[0] else None
        handed = (sharded_as(p, gradients.pop(p)) if p in gradients else None for p in runner.parameters)
        return dX, None, None, *handed
