"""Runs consecutive stages of a model over sub-batches of a micro-batch, forward and backward.

    forward     each sub-batch goes through the stages; what backward needs of it is a `Back` per stage
    backward    each sub-batch goes through the stages in reverse, and gives its `Back`s up as they run
    weights     gathered for the first sub-batch that comes to a stage, released after the last; the next stage's are
                on their way meanwhile
    gradients   of a stage added up over sub-batches, reduce-scattered over x when the last is through, then summed
                over replicas when no micro-batch will use the weights again; none of frozen weights

Backward ends with the lowest stage that has something to train: those below it save nothing.

All state of a step lives in a `Pass` (between forward and backward of one micro-batch) and in `Sums`: so several
forwards may be alive, in any order (`step/play.py`). Autograd sees one node.
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
from cuboid.comm.flight import Message, Pause, Steps
from cuboid.mesh.layout import sharded_as
from cuboid.mesh.place import Place
from cuboid.step.op import Back, Layer, nothing
from cuboid.step.schedule import Clock, Schedule, Task, interleave
from cuboid.step.weights import MOST_IN_FLIGHT, Bucket, Gathered, Landing, Sums, Tensors


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage of a model. The weights of its modules are gathered together and are unsharded while it runs.

    Args:
        name: Shown in messages and traces.
        layer: What it computes.
        modules: Whose weights it needs; empty: the layer's own, if it is a module.
        again: Whether backward needs these weights too.
    """

    name: str
    layer: Layer
    modules: Sequence[Any] = ()
    again: bool = True

    @property
    def needs(self) -> Sequence[Any]:
        """The modules whose weights this stage gathers."""
        return self.modules or ((self.layer,) if isinstance(self.layer, nn.Module) else ())


@dataclass(frozen=True)
class At:
    """What a layer knows of the tokens it works on.

    Args:
        place: Which tokens of the batch they are.
        targets: This rank's targets, `[s, b]`.
        loss: Options of the loss, `Loss` for cross entropy.
        seed: Of dropout, or the keys made of it, which layers find here; None: there is none.
        train: Whether backward will follow.
        lowest: Whether nothing before this layer is trained, so that no gradient of its input is needed.
        caches: Keys and values of tokens seen before, by layer.
    """

    place: Place
    targets: Tensor | None = None
    loss: Any = None
    seed: int | Mapping[str, Tensor] | None = None
    train: bool = True
    lowest: bool = False
    caches: dict[Any, Any] | None = None

    def without_backward(self) -> "At":
        """The same tokens, for a forward that no backward follows."""
        return replace(self, train=False) if self.train else self

    def split(self, count: int) -> list["At"]:
        """For each of so many sub-batches, or for one where the samples cannot be split so."""
        places = self.place.sub_batches(count if self.caches is None else 1)
        if len(places) == 1:
            return [self]
        targets = [None] * len(places) if self.targets is None else self.targets.chunk(len(places), 1)
        return [replace(self, place=p, targets=t) for p, t in zip(places, targets, strict=True)]


@dataclass
class _Shelf:
    """The weights of stages, to which a pass comes one `step` after another: unsharded from the first sub-batch that
    takes them to the last that leaves them, the next stage's on their way where one is held alone."""

    buckets: Sequence[Sequence[Bucket]]  # of each stage
    needed: Sequence[Sequence[Bucket]]  # of these; of the others the gradients alone are kept
    step: int
    kept: dict[Bucket, Tensors]  # what is in it is not gathered
    sub_batches: int
    ahead: bool
    clock: Clock
    late: bool = False
    left: bool = False

    def __post_init__(self) -> None:
        self._left = [self.sub_batches] * len(self.buckets)
        self._flying: dict[int, tuple[Message, Sequence[Landing]]] = {}
        self._held: dict[int, Gathered] = {}

    def _launch(self, i: int) -> None:
        if i in range(len(self.buckets)) and self._left[i] and i not in self._flying and i not in self._held:
            message = self.clock.launch(sum(each.sent for each in self.needed[i] if each not in self.kept), "x")
            kept = self.kept
            self._flying[i] = message, [partial(dict, kept.pop(b)) if b in kept else b.gather() for b in self.needed[i]]

    def take(self, i: int) -> Steps:
        """Gives the weights."""
        if i not in self._held:
            self._launch(i)
            yield Pause(message=self._flying[i][0])
        if i not in self._held:  # another sub-batch may have come here first
            weights: Tensors = {}
            for land in self._flying.pop(i)[1]:
                weights |= land()
            self._held[i] = Gathered(self.buckets[i], weights, self.sub_batches, self.late, self.left)
            if self.ahead and len(self._held) == 1:
                self._launch(i + self.step)  # once these are here: they would share the link, and all would wait longer
        return self._held[i]

    def leave(self, i: int) -> Gathered | None:
        """The weights, if that was the last sub-batch."""
        self._left[i] -= 1
        if self._left[i]:
            return None
        gathered = self._held.pop(i)
        if self.ahead and self._held:
            self._launch(next(iter(self._held)) + self.step)
        return gathered


@dataclass
class Pass:
    """One micro-batch between its forward and its backward."""

    backs: list[list[Back | None]]  # by sub-batch, by stage
    clock: Clock  # of the step
    lowest: int  # stage that is trained; those below it have no Back
    count: Tensor | None = None  # of the losses that are averaged
    #: gradients that stages made in forward: of the sum of losses, not their mean, and times a factor
    early: list[tuple[Landing, float]] = field(default_factory=list)
    kept: dict[Bucket, Tensors] = field(default_factory=dict)  # unsharded weights
    left: list[Gathered] = field(default_factory=list)  # by backward: weight gradients to be made


class Runner:
    """Of a model's stages, with a bucket for each module they need. The last gives [sum of losses, how many count],
    partial sums over the axes `sums_over`. With `retain` unsharded weights are kept from forward to backward; without
    `keep` not even those of the last block are, because other micro-batches' forwards come between.

    `between` is called with the number of a stage when its input is there, and when the gradient of that is.
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
        self._again = [each if stage.again else [] for stage, each in zip(stages, self._buckets, strict=True)]
        self.uses = Counter(bucket for each in self._buckets for bucket in each)
        self.parameters = [p for bucket in self.uses for p in bucket.parameters]
        self.between: Callable[[int], None] | None = None
        later = (set[Bucket]().union(*self._buckets[i + 1 :]) for i in range(len(stages)))
        self._for_later = [each if retain else set() for each in later]
        self._for_backward = self._to_keep(retain, keep and schedule.prefetch)

    def _to_keep(self, retain: bool, last: bool) -> list[set[Bucket]]:
        """The buckets whose weights stay for backward when forward leaves each stage: those of the `last` large one,
        with which backward begins; if they are to be retained, all."""
        again = [set(each) for each in self._again]
        large = [i for i, each in enumerate(again) if any(p.dim() > 1 for bucket in each for p in bucket.parameters)]
        first = large[-1:] if last else []
        return [each if retain or i in first else set() for i, each in enumerate(again)]

    def _lowest(self, X: Tensor | Sequence[Any], below: bool) -> int:
        """The first stage whose backward anything needs, if only what is `below`, on other ranks."""
        trained = (any(p.requires_grad for bucket in each for p in bucket.parameters) for each in self._buckets)
        needed = below or (isinstance(X, Tensor) and X.requires_grad)
        return 0 if needed else next((i for i, each in enumerate(trained) if each), len(self.stages))

    # Forward

    def forward(self, X: Tensor | Sequence[Any], at: At, clock: Clock, below: bool = False) -> Task:
        """Gives (loss, Pass): the mean loss over the tokens of all ranks. `below`: the gradient of X is needed."""
        task, passed = self.outputs(X, at, clock, below)

        def finish(sums: list[Tensor]) -> tuple[Tensor, Pass]:
            total = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
            for axis in self.sums_over:
                total = all_reduce(total, axis).wait()
            passed.count = total[1].clamp(min=1)
            passed.early = [(partial(dict, land()), shrunk) for land, shrunk in passed.early]
            return total[0] / passed.count, passed

        return Task(task.steps, finish)

    def outputs(self, X: Tensor | Sequence[Any], at: At, clock: Clock, below: bool = False) -> tuple[Task, Pass]:
        """Gives the last stage's Y of each sub-batch, of X whole or by sub-batch; the Pass is filled meanwhile."""
        ats = at.split(self.schedule.sub_batches)
        passed, n = Pass([[] for _ in ats], clock, self._lowest(X, below)), len(ats)
        shelf = _Shelf(self._buckets, self._buckets, 1, passed.kept, n, self.schedule.prefetch, clock)
        each = zip(X.chunk(n, 1) if isinstance(X, Tensor) else X, ats, passed.backs, strict=True)
        return Task([self._through(*one, shelf, passed) for one in each], list), passed

    def _through(self, X: Any, at: At, backs: list[Back | None], shelf: _Shelf, passed: Pass) -> Steps:
        """One sub-batch through all stages."""
        here = at.without_backward()
        for i, stage in enumerate(self.stages):
            if self.between is not None:
                self.between(i)
            if i >= passed.lowest:
                spared = i == passed.lowest > 0 and getattr(stage.layer, "spares_dX", False)
                here = replace(at, lowest=True) if spared else at
            steps = stage.layer(X, (yield from shelf.take(i)), here)
            del X
            X, back = yield from steps
            backs.append(back)
            gathered = shelf.leave(i)
            if gathered is not None and at.train:
                passed.early += [(land, gathered.shrunk) for _, land in gathered.reduce()]
                stay = self._for_later[i] | (self._for_backward[i] if i >= passed.lowest else set())
                for bucket in self._buckets[i]:
                    passed.kept.pop(bucket, None)
                    if bucket in stay:
                        passed.kept[bucket] = {p: gathered[p] for p in bucket.parameters}
            del gathered  # with its weights, not a stage later
        return X

    # Backward

    def backward(
        self, passed: Pass, dY: Tensor | Sequence[Any], sums: Sums, late: bool = False, leave: bool = False
    ) -> Task:
        """Gives dX of each sub-batch, of dloss or of dY by sub-batch. If `late`, weight gradients are made when there
        is nothing else to do; what is to be left (`leave`) is for `settle`."""
        count = len(passed.backs)
        if isinstance(dY, Tensor):
            assert passed.count is not None
            scale = dY / passed.count
            for land, shrunk in passed.early:
                sums.put({p: gradient * (scale / shrunk) for p, gradient in land().items()})
            passed.early.clear()
            dY = [scale] * count
        needed = [each if i >= passed.lowest else [] for i, each in enumerate(self._again)]
        ways = self.schedule.prefetch, passed.clock, late, leave
        shelf = _Shelf(self._buckets, needed, -1, passed.kept, count, *ways)
        each, settled = zip(dY, passed.backs, strict=True), None if leave else sums
        return Task([self._back_through(dY, backs, shelf, passed.left, settled) for dY, backs in each], list)

    def _back_through(
        self, dY: Any, backs: list[Back | None], shelf: _Shelf, left: list[Gathered], sums: Sums | None
    ) -> Steps:
        """One sub-batch through the stages in reverse, as far as they are trained."""
        while backs and (back := backs.pop()) is not None:
            i, then = len(backs), backs[-1] if backs else None
            before = None if then is None else then.ahead
            steps = back.run(dY, (yield from shelf.take(i)), before or nothing)
            del dY, back
            dY = yield from steps
            if self.between is not None:
                self.between(i)
            gathered = shelf.leave(i)
            if gathered is not None:
                gathered.release()
                left.append(gathered)
                if sums is not None:
                    yield from settle(left, sums, shelf.clock)
        return dY

    def __call__(self, X: Tensor, at: At) -> Tensor:
        """The mean loss over the tokens of all ranks, which autograd differentiates."""
        if torch.is_grad_enabled() and (X.requires_grad or any(p.requires_grad for p in self.parameters)):
            return _Step.apply(X, self, at, *self.parameters)
        ((loss, _),) = interleave([self.forward(X, at.without_backward(), clock := Clock())], clock)
        return loss


def settle(left: list[Gathered], sums: Sums, clock: Clock) -> Steps:
    """Make the weight gradients that backward has left, and launch their sums."""
    while left:
        gathered = left.pop(0)
        clock.compute(gathered.settle())
        if len(sums.launched) == MOST_IN_FLIGHT:
            yield Pause(message=sums.launched[0])  # which `add` will wait for
        sums.launched.append(clock.launch(sum(bucket.sent for bucket in gathered.buckets), "x"))
        sums.add(gathered.reduce())
        sums.used(gathered.buckets)


class _Step(torch.autograd.Function):
    """The one node of a step that autograd sees."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, runner: Runner, at: At, *parameters: nn.Parameter) -> Tensor:
        ((loss, ctx.passed),) = interleave([runner.forward(X, at, clock := Clock())], clock)
        ctx.runner, clock.forward = runner, False
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: the gradients of a step cannot be differentiated again, because what its layers "
                "save is not a graph; compute second derivatives on one device"
            )
        if ctx.passed is None:
            raise RuntimeError(
                "backward() has already run for this loss, and what its forward saved was released on the way; run the "
                "forward again"
            )
        runner, passed, ctx.passed = ctx.runner, ctx.passed, None
        sums = Sums(runner.uses)
        (dXs,) = interleave([runner.backward(passed, dloss, sums)], passed.clock)
        gradients = sums.finish()
        dX = torch.cat(dXs, 1) if ctx.needs_input_grad[0] else None
        handed = (sharded_as(p, gradients.pop(p)) if p in gradients else None for p in runner.parameters)
        return dX, None, None, *handed
