"""Traces steps, and the same work with the schedule off for comparison."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

from cuboid.comm.ledger import Ledger
from cuboid.device import DeviceClock
from cuboid.mesh.cuboid import AXES
from cuboid.mesh.layout import shard_of
from cuboid.model.cuboid import CuboidParallel
from cuboid.model.transformer import Transformer
from cuboid.step.schedule import Move
from cuboid.train.trace import Phase, Trace

WARM = 2  # steps before the first traced one


def check_steps(trace: int, done: int, total: int) -> None:
    if trace and total - done < trace + WARM:
        raise ValueError(
            f"--trace {trace} of schedule.steps={total} with {done} done: {total - done} are left, and tracing needs "
            f"{WARM} steps to warm up and then those it traces; trace fewer, or set schedule.steps to at least "
            f"{done + trace + WARM}"
        )


class Recorder:
    """Records a rank's collectives until `end`, when phases begin, and when the middle layer begins and ends: when its
    input and its output are there in forward, their gradients in backward."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        number, self._runner = next(iter(model.player.runners.items()))  # on a pipe, its first stage
        self.layer = len(model.split.layers(number)) // 2
        self._begun: list[tuple[str, Any]] = []
        self._moments: list[Any] = []
        mesh = model.parallel.mesh
        self._clock = mesh.ledger.clock = DeviceClock(mesh.device)
        mesh.ledger.spans, model.player.on_moves = [], self._on_moves
        self._runner.on_stage = self._on_stage

    def begin(self, phase: str) -> None:
        """Begin a phase, which ends the one before; an empty name begins none."""
        self._begun.append((phase, self._clock.mark()))

    def _on_moves(self, moves: Sequence[Move]) -> None:
        kinds = {move.kind for move in moves}
        self.begin("forward" if kinds == {"F"} else "backward" if "F" not in kinds else "forward beside backward")

    def _on_stage(self, stage: int) -> None:
        if stage - 1 - self.layer in (0, 1):  # first is the embedding, or what arrives
            self._moments.append(self._clock.mark())

    def end(self) -> Trace:
        mesh = self.model.parallel.mesh
        mesh.ledger.settle()
        spans, mesh.ledger.spans, mesh.ledger.clock = mesh.ledger.spans or [], None, None
        self._runner.on_stage = self.model.player.on_moves = None
        begun = [(name, self._clock.read(moment)) for name, moment in self._begun]
        phases = [Phase(name, start, stop) for (name, start), (_, stop) in pairwise(begun) if name]
        inside = [s for s in spans if any(p.start <= s.launched < p.stop for p in phases)]  # validation is not
        return Trace(mesh.rank, inside, phases, [self._clock.read(moment) for moment in self._moments])


def unscheduled(model: Transformer) -> Transformer:
    """A model with the same weights that awaits every collective where it launches it. It has its own gradients and
    ledger, and the same groups and journals."""
    parallel = model.parallel
    assert isinstance(parallel, CuboidParallel)
    mesh, ledger = copy(parallel.mesh), Ledger()
    mesh.ledger, mesh.overlap = ledger, False
    for name in (*AXES, "world"):
        setattr(mesh, name, replace(getattr(mesh, name), ledger=ledger, overlap=False))
    mesh.count_lanes_in(ledger)
    schedule = replace(parallel.schedule, prefetch=False, sub_batches=1, chunks=1, beside=False)
    off = CuboidParallel(parallel.config, mesh, parallel.policy, parallel.dtype, schedule)
    made = Transformer(off, None, next(model.parameters()).dtype, model.recompute)
    for mine, same in zip(made.parameters(), model.parameters(), strict=True):
        shard_of(mine).copy_(shard_of(same))
        mine.requires_grad_(same.requires_grad)
    return made
