"""Runs a step: micro-batches through the stages that a rank has, in an order that is data.

Without a pipe, a rank has one stage, which is the model. On a pipe it has one or several (`step/pipeline.py`), a
`Runner` each, which exchange messages (`step/post.py`). The last stage broadcasts the losses.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from cuboid.comm.axis import Axis
from cuboid.comm.collectives import broadcast
from cuboid.comm.flight import run
from cuboid.mesh.layout import sharded_as
from cuboid.mesh.mesh import Lanes
from cuboid.step.pipeline import Split, backward_until
from cuboid.step.post import Post, exchange
from cuboid.step.runner import At, Pass, Runner, settle
from cuboid.step.schedule import Clock, Move, Order, Task, interleave
from cuboid.step.weights import Gathered, Sums, Tensors, When

Batch = tuple[Tensor, At]


class Player:
    """Runs the stages of a pipeline that a rank has, by number. Gradients of `shared` parameters, which the first and
    the last place hold, are summed between them. `on_moves` is called with the moves of a step as they begin."""

    def __init__(
        self,
        runners: Mapping[int, Runner],
        split: Split,
        pipe: Axis,
        lanes: Lanes,
        shared: Sequence[nn.Parameter] = (),
    ) -> None:
        self.runners, self.split, self.pipe, self.lanes, self.shared = runners, split, pipe, lanes, shared
        self.uses = sum((runner.uses for runner in runners.values()), Counter[Any]())
        self.parameters = [p for bucket in self.uses for p in bucket.parameters]
        first = next(iter(self.uses))
        self._like = torch.empty(0, dtype=first.dtype, device=first.parameters[0].device)  # the residual stream
        self._sub_batches = next(iter(runners.values())).schedule.sub_batches
        self.on_moves: Callable[[Sequence[Move]], None] | None = None

    @torch.no_grad()
    def play(
        self, batches: Sequence[Batch], orders: Sequence[Order], scale: float | Tensor = 1.0, lowest: int = 0
    ) -> list[Tensor]:
        """Run forward and backward of several micro-batches, in an order per place of the pipe, and return the losses.
        Adds the gradient of `scale` times the mean loss to the parameters, as `backward()` would. Stages below `lowest`
        are not trained."""
        order = orders[self.pipe.index]
        named = sorted({move.batch for moves in order for move in moves})
        if not named or named != list(range(len(batches))):
            raise ValueError(
                f"the order has micro-batches {named}, but there are {len(batches)} micro-batches; it must name each "
                "of them, from 0 on"
            )
        below = [runner for stage, runner in self.runners.items() if stage < lowest]
        if any(p.requires_grad for runner in below for p in runner.parameters):
            raise ValueError(
                f"a parameter that `freeze` froze is trained again, in a stage before {lowest}, the lowest that is "
                "trained: no gradient reaches it; freeze it with requires_grad_(False) instead"
            )
        orders = backward_until(lowest, orders)
        order, post = orders[self.pipe.index], self._post(batches, orders, lowest)
        beside = any(len(moves) > 1 for moves in order)
        wgrads: When = "spare" if beside else "now"
        if any(move.kind == "W" for moves in order for move in moves):
            wgrads = "late"
        clock = Clock(alone=self._sub_batches == 1 and not beside)
        sums = Sums({bucket: len(batches) * uses for bucket, uses in self.uses.items()})
        dloss = torch.ones((), dtype=torch.float64, device=self._like.device) * scale / len(batches)
        losses, passes, pending = dict[int, Any](), dict[tuple[int, int], Pass](), dict[Any, list[Gathered]]()
        for moves, coming in pairwise([*order, ()]):
            if self.on_moves is not None:
                self.on_moves(moves)
            post.expect([*moves, *coming])
            tasks: dict[Move, Task] = {}
            for move in moves:
                kind, i, stage = move
                if kind == "F":
                    tasks[move] = self._forward(move, *batches[i], clock, post, stage > lowest)
                elif kind == "B":
                    passed = passes.pop((i, stage))
                    pending[i, stage] = passed.pending_wgrads
                    dY = dloss if stage == self.split.last else post.take(move)
                    task = self.runners[stage].backward(passed, dY, sums, wgrads)
                    tasks[move] = task if stage == lowest else post.sending(task, move)
                    del passed, dY, task
                else:
                    run(settle(pending.pop((i, stage)), sums, clock))
            for (kind, i, stage), found in zip(tasks, interleave(list(tasks.values()), clock), strict=True):
                if kind == "F":
                    losses[i], passed = found  # the loss of the last stage overwrites others'
                    if stage >= lowest:
                        passes[i, stage] = passed
                    del passed
            clock.forward = False
            post.reap()
        total = self._from_last(torch.stack([losses[i] for i in named]) if self._has_last else None, [len(named)], True)
        gradients = self._summed(sums.finish())
        post.finish()
        mine = [p for p in self.parameters if p in gradients]
        if mine:  # not if all parameters are frozen
            with torch.enable_grad():
                _Gradients.apply([sharded_as(p, gradients.pop(p)) for p in mine], *mine).backward()
        return list(total.unbind())

    @torch.no_grad()
    def forward(self, X: Tensor, at: At, shape: Sequence[int] = ()) -> Tensor:
        """Without backward, on every place: the mean loss of one batch, or Y of this `shape` if the last stage gives no
        loss."""
        clock, batch = Clock(alone=self._sub_batches == 1), (X, at.without_backward())
        orders = [[[Move("F", 0, stage)] for stage in self.split.stages(place)] for place in range(self.pipe.size)]
        post = self._post([batch], orders)
        for (move,) in orders[self.pipe.index]:
            post.expect([move])
            ((found, _),) = interleave([self._forward(move, *batch, clock, post)], clock)
        total = self._from_last(found if self._has_last else None, shape, loss=not shape)
        post.finish()
        return total

    def _forward(self, move: Move, X: Tensor, at: At, clock: Clock, post: Post, below: bool = False) -> Task:
        """Task of (loss, Pass). Only the last stage gives a loss, or Y. `below`: whether a stage below is trained."""
        runner, arrived = self.runners[move.stage], X if move.stage == 0 else post.take(move)
        if move.stage == self.split.last and runner.gives_loss:
            return runner.forward(arrived, at, clock, below)
        task, passed = runner.outputs(arrived, at, clock, below)
        if move.stage == self.split.last:
            return Task(task.steps, lambda found: (torch.cat(found, 1), passed))
        return Task(post.sending(task, move).steps, lambda _: (None, passed))

    @property
    def _has_last(self) -> bool:
        return self.split.last in self.runners

    def _post(self, batches: Sequence[Batch], orders: Sequence[Order], lowest: int = 0) -> Post:
        ats = [at for _, at in batches]
        sizes = self._sub_batches, self._like, self.split.last, lowest
        return Post(self.lanes, self.pipe.index, orders, ats, *sizes)

    def _from_last(self, found: Tensor | None, shape: Sequence[int], loss: bool) -> Tensor:
        """Broadcast the losses (in fp32 or better) or Y of the last stage."""
        dtype = torch.promote_types(self._like.dtype, torch.float32) if loss else self._like.dtype
        mine = self._like.new_empty(shape, dtype=dtype) if found is None else found
        return broadcast(mine, self.pipe, self.pipe.size - 1, shape).wait()

    def _summed(self, gradients: Tensors) -> Tensors:
        shared = [p for p in self.shared if p in gradients]
        if shared:
            mine = [gradients[p] for p in shared]
            flat = torch.cat([each.reshape(-1) for each in mine])
            parts = exchange(flat, self.lanes, self.pipe.index == 0).split([each.numel() for each in mine])
            gradients |= {p: part.view(each.shape) for p, each, part in zip(shared, mine, parts, strict=True)}
        return gradients


class _Gradients(torch.autograd.Function):
    """Hands gradients to autograd, which accumulates them and calls the parameters' hooks."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: nn.Parameter) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, []
        return None, *gradients
