"""Step times of any layout by the planner's figures: `cuboid plan` predicts a cuboid; for other layouts, the operations
of a rank are simulated on the same clock.

The rank runs alone, on an emulated device that does not sleep, and sends nothing. Its operations, launches and waits
are recorded in order and simulated on a `Tape`, with the times of the planner's formulas.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from cuboid.bench.layouts import Layout
from cuboid.bench.problem import Problem
from cuboid.bench.turn import take_step
from cuboid.comm.ledger import Span
from cuboid.emulate.device import UNLIMITED, Device, Emulated
from cuboid.plan.hardware import Hardware
from cuboid.plan.layer import Work
from cuboid.plan.search import Plan, predict
from cuboid.plan.shared import tape_of
from cuboid.plan.sizes import groups
from cuboid.plan.tape import Message
from cuboid.plan.time import Prices
from cuboid.run.launch import World
from cuboid.run.silent import silently

ITEM = 4  # bytes per element: steps are in fp32
NATIVE_AXES = {"fsdp": "x", "tp": "y"}  # their places in the layout's shape


def planned_seconds(hw: Hardware, layout: Layout, problem: Problem) -> float:
    """Seconds per step, with the links and devices of `hw`."""
    if layout.cuboidal:
        return predicted(hw, layout, problem).seconds
    return played_seconds(hw, layout, problem)


def predicted(hw: Hardware, layout: Layout, problem: Problem) -> Plan:
    """The plan of a cuboid, or of a pipe of cuboids."""
    batch, count = problem.batch // layout.micro_batches, layout.count(problem)
    work = Work(problem.config, batch, problem.seq, "fp32", count)
    return predict(hw, work, layout.shape, layout.chosen(problem), overlap=layout.overlap)


def played_seconds(hw: Hardware, layout: Layout, problem: Problem) -> float:
    """Seconds of a step of the first rank, by running its code."""
    ranks = layout.shape.ranks
    return float(silently(_play, 0, ranks, hw, layout, problem, per_host=min(hw.node, ranks)))


def _play(world: World, hw: Hardware, layout: Layout, problem: Problem) -> float:
    runner = layout.runner(problem, world)
    with Emulated(Device(replace(hw, memory=UNLIMITED))) as device, device.rehearsal(), runner.counted():
        take_step(runner, problem, problem.seq)  # creates the optimizer's state
        device.record, runner.ledger.spans = [], []
        take_step(runner, problem, problem.seq)
    return _seconds(hw, layout, device.record, runner.ledger.spans)


def _seconds(hw: Hardware, layout: Layout, work: Sequence[tuple[float, float]], spans: Sequence[Span]) -> float:
    """Seconds of a device's operations, with their launch times, and of collectives, on the planner's clock."""
    found = groups([layout.shape], np.ones(1, dtype=np.int64), hw.node)
    tape = tape_of(Prices(hw, "fp32", ITEM, found, layout.by_host), overlap=True)
    flights: dict[int, Message] = {}

    def compute(seconds: float) -> None:
        tape.compute("", np.array([seconds]))

    def launch(span: Span) -> None:
        axis = NATIVE_AXES.get(span.axis, span.axis)
        p, kind = found[axis].size, span.kind
        whole = span.bytes * p // (p - 1) // (2 if kind == "all_reduce" else 1) // ITEM
        if layout.native and kind == "reduce_scatter":  # gloo's own is an all-reduce inside
            kind = "all_reduce"
        flights[id(span)] = replace(tape.launch(axis, kind, whole), summing=None)  # it is among the operations

    def wait(span: Span) -> None:
        tape.wait(flights[id(span)])

    events: list[tuple[float, Callable[[], None]]] = [(moment, partial(compute, seconds)) for moment, seconds in work]
    events += [(span.launched, partial(launch, span)) for span in spans]
    events += [(span.waited, partial(wait, span)) for span in spans if span.waited]
    for _, happen in sorted(events, key=lambda event: event[0]):
        happen()
    return float(tape.now[0])
