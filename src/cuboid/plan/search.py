"""Ranks all cuboids of a cluster, with all choices, by the predicted step."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import product
from typing import Any, get_args

import numpy as np

from cuboid.mesh.cuboid import AXES, Cuboid
from cuboid.mesh.cuboid import orders as every_order
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import Policy
from cuboid.model.transformer import Recompute
from cuboid.plan.cost import Cost
from cuboid.plan.cost.cuboid import cost_of_all, step_cost
from cuboid.plan.hardware import Hardware
from cuboid.plan.layer import ITEMSIZE, STORED, Choice, Work
from cuboid.plan.memory import Footprint, memory
from cuboid.plan.pipeline import Pipelines, PlannedStage, pipeline_of
from cuboid.plan.sizes import Sizes, groups
from cuboid.plan.stage import StageCosts
from cuboid.plan.step import prices_of, step_totals
from cuboid.plan.tape import Totals
from cuboid.plan.time import Array, Prices
from cuboid.step.pipeline import Split
from cuboid.step.pipeline import orders as pipeline_orders
from cuboid.step.schedule import Schedule

MOST_PLACES = 16  # most places of a pipeline that are searched
#: Schedules of a pipeline that are searched. gpipe is never faster than 1f1b, and holds more; beside is priced like it.
SEARCHED = ("1f1b", "interleaved", "zero-bubble")
#: Well-known layouts, as corners of the block.
CORNERS = {
    "FSDP": lambda k: k.y == k.z == 1 < k.x,
    "TP+SP": lambda k: k.x == k.z == 1 < k.y,
    "FSDP×TP": lambda k: k.z == 1 < k.x * k.y,
    "cube": lambda k: k.x == k.y == k.z > 1,
}


@dataclass(frozen=True)
class Plan:
    """One cuboid with one choice, predicted: seconds and bytes of a step of a rank."""

    cuboid: Cuboid
    choice: Choice
    seconds: float
    memory: dict[str, int]
    compute: dict[str, float]  # seconds by kind of work
    exposed: dict[str, float]  # seconds of waiting, by axis
    in_flight: dict[str, float]  # seconds of each axis' collectives, without any overlap
    calls: dict[str, int]  # by axis
    sent: dict[str, int]  # bytes
    fits: bool
    hardware: Hardware
    places: tuple[PlannedStage, ...] = ()  # of a pipeline; memory is the fullest one's, times are the busiest one's
    micro_batches: int = 1

    @property
    def bubble(self) -> float:
        """The share of the step in which the places of a pipeline are idle, including the time of messages."""
        return sum(each.idle for each in self.places) / (max(len(self.places), 1) * self.seconds)

    @property
    def peak(self) -> int:
        return sum(self.memory.values())

    def cost(self, work: Work, rank: int = 0) -> Cost:
        """Exact calls, bytes and FLOPs of the last micro-batch or, on a pipe, of all micro-batches."""
        at, c, count = self.cuboid.coordinates(rank), self.choice, work.micro_batches if self.cuboid.pipe > 1 else 1
        settings = c.policy, c.recompute, STORED, ITEMSIZE[work.precision], c.schedule
        of = work.config, self.cuboid, at, work.batch, work.seq, *settings
        return cost_of_all(count, *of, freeze=work.freeze)


@dataclass
class Ranking:
    """The best choice for every cuboid that fits, fastest first; those that do not fit, smallest first."""

    work: Work
    hardware: Hardware
    devices: int
    plans: list[Plan]
    too_large: list[Plan]
    considered: int
    seconds: float = 0.0  # taken by the ranking itself
    corners: dict[str, Plan | None] = field(default_factory=dict)
    pipeline: str = ""  # the only schedule of pipes, if one was asked for
    tried: tuple[int, ...] = ()  # numbers of micro-batches

    def tokens_per_second(self, plan: Plan) -> float:
        return self.work.tokens / plan.seconds

    def mfu(self, plan: Plan) -> float:
        peak = self.hardware.peak[self.work.precision] * self.devices
        return model_flops(self.work) / plan.seconds / peak


def model_flops(work: Work) -> int:
    """FLOPs of a step without recomputation, causal scores counted in full, as usual."""
    whole = step_cost(work.config, Cuboid(), Cuboid().coordinates(0), work.batch, work.seq, freeze=work.freeze)
    return whole.flops * work.micro_batches


def shapes(config: ModelConfig, devices: int, batch: int) -> Iterator[tuple[int, int, int, int]]:
    """All (replicas, x, y, z) of this many devices that divide the model's heads, hidden size and batch."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for y, z in product(divisors, repeat=2):
        if config.heads % (y * z) or config.hidden % z or devices % (y * z):
            continue
        for replicas in divisors:
            if devices // (y * z) % replicas == 0 and batch % replicas == 0:
                yield replicas, devices // (y * z) // replicas, y, z


def orders(shape: tuple[int, int, int, int], node: int, group: int = 0, pipe: int = 1) -> list[Cuboid]:
    """The shape with its axes in every order that makes a difference to which ranks share a node, or a group of nodes;
    stages of a pipeline one after another."""
    replicas, x, y, z = shape
    cuboids = []
    for each in every_order(Cuboid(x, y, z, replicas)):
        cuboids.append(replace(each, order=("pipe", *(axis for axis in each.order if axis != "pipe")), pipe=pipe))
    found: dict[tuple[Any, ...], Cuboid] = {}
    of = groups(cuboids, np.ones(len(cuboids), dtype=np.int64), node, group)
    levels = [of[axis].inside.tolist() for axis in AXES]
    levels += [np.broadcast_to(of[axis].behind, len(cuboids)).tolist() for axis in AXES]
    for cuboid, *together in zip(cuboids, *levels, strict=True):
        found.setdefault(tuple(together), cuboid)
    return list(found.values())


def choices() -> Iterator[Choice]:
    ways = ("regather", "retain")
    for recompute, activations, weights, count in product(get_args(Recompute), ways, ways, (1, 2)):
        yield Choice(recompute, Policy(activations, weights), Schedule(sub_batches=count))  # type: ignore[arg-type]


def pipes(work: Work, devices: int, pipeline: str = "") -> list[int]:
    """Numbers of places to search. With fewer micro-batches than places most of a step is idle."""
    most = min(work.config.layers, work.micro_batches, MOST_PLACES)
    return [n for n in range(2, most + 1) if devices % n == 0 and pipeline_schedules(work, n, pipeline)]


def scheduled(work: Work, pipe: int, name: str) -> Schedule:
    """The schedule of this name. Raises if the model has too few blocks for it, or the step other micro-batches."""
    schedule = Schedule(pipeline=name, stages=2 if name == "interleaved" else 1)
    Split.of(work.config.layers, pipe, schedule)
    pipeline_orders(schedule, pipe, work.micro_batches)
    return schedule


def pipeline_schedules(work: Work, pipe: int, pipeline: str = "") -> list[Schedule]:
    """The possible schedules of those to search, or the one of this name."""
    found = []
    for name in [pipeline] if pipeline else SEARCHED:
        with suppress(ValueError):
            found.append(scheduled(work, pipe, name))
    return found


def rank(hw: Hardware, work: Work, devices: int, only: Cuboid | None = None, pipeline: str = "") -> Ranking:
    """`only` ranks the orders and choices of one shape, and the schedules of a pipeline: all that are searched, or
    the one called `pipeline`."""
    (ranking,) = rankings(hw, work, [(devices, work.batch)], only, pipeline)
    return ranking


def rankings(
    hw: Hardware,
    work: Work,
    cells: Sequence[tuple[int, int]],
    only: Cuboid | None = None,
    pipeline: str = "",
    limit: Callable[[Cuboid], float] | None = None,
) -> list[Ranking]:
    """A ranking per (devices, sequences of a micro-batch). All candidates are priced together. `limit`: seconds that a
    cuboid's plan has to be below, or it is left out."""
    began = time.perf_counter()
    every_work, tried = [replace(work, batch=n) for _, n in cells], (work.micro_batches,)
    found = [
        Ranking(each, hw, devices, [], [], 0, pipeline=pipeline, tried=tried)
        for each, (devices, _) in zip(every_work, cells, strict=True)
    ]
    for of_pipes, cell, sizes in _candidates(hw, work, cells, only, pipeline):
        prices = prices_of(hw, work, sizes)
        below = np.array([limit(cuboid) if limit else np.inf for cuboid in sizes.cuboids])
        some = _pipelines(prices, work, sizes, pipeline, below) if of_pipes else _flat(prices, work, sizes, below)
        for predictions, of in some:
            _add_best_of_each_shape(predictions, cell[of], found, with_too_large=limit is None)
    for ranking in found:
        ranking.plans.sort(key=lambda plan: plan.seconds)
        ranking.too_large.sort(key=lambda plan: plan.peak)
        flat = [plan for plan in ranking.plans if plan.cuboid.pipe == 1]
        for name, is_corner in CORNERS.items():
            ranking.corners[name] = next((plan for plan in flat if is_corner(plan.cuboid)), None)
        ranking.seconds = time.perf_counter() - began
    return found


def _candidates(
    hw: Hardware, work: Work, cells: Sequence[tuple[int, int]], only: Cuboid | None, pipeline: str
) -> Iterator[tuple[bool, Array, Sizes]]:
    """Those without a pipe, then those with one: the number of each candidate's cell, and their sizes."""
    work.config.check(only or Cuboid(), work.batch, work.seq)
    if only is not None and only.pipe > 1 and pipeline:
        scheduled(work, only.pipe, pipeline)
    every: dict[bool, list[tuple[int, Cuboid]]] = {False: [], True: []}  # without a pipe, with one
    for i, (devices, sequences) in enumerate(cells):
        for pipe in [only.pipe] if only is not None else [1, *pipes(work, devices, pipeline)]:
            one = None if only is None else [(only.replicas, only.x, only.y, only.z)]
            for shape in one or shapes(work.config, devices // pipe, sequences):
                every[pipe > 1] += ((i, cuboid) for cuboid in orders(shape, hw.node, hw.group, pipe))
    for of_pipes, candidates in every.items():
        if candidates:
            cell, cuboids = np.array([i for i, _ in candidates]), [cuboid for _, cuboid in candidates]
            batch = np.array([sequences for _, sequences in cells])[cell]
            yield of_pipes, cell, Sizes(work.config, cuboids, hw.node, batch, work.seq, hw.group)


def fits(hw: Hardware, work: Work, devices: int, only: Cuboid | None = None, pipeline: str = "") -> bool:
    """Whether `rank` would find a plan. Only the leanest choices are tried, with blocks split by memory, and none where
    parameters, gradients and optimizer states alone do not fit."""
    if at_rest(work) > devices * hw.memory:
        return False
    for of_pipes, _, sizes in _candidates(hw, work, [(devices, work.batch)], only, pipeline):
        prices = prices_of(hw, work, sizes)
        lean = [choice for choice in choices() if choice.recompute == "full" and choice.policy == Policy()]
        found = (Predictions(prices, work, sizes, choice) for choice in lean)
        for each in _lean_pipelines(prices, work, sizes, lean, pipeline) if of_pipes else found:
            if (each.valid & (each.peak <= hw.memory)).any():
                return True
    return False


def at_rest(work: Work) -> int:
    """What all ranks together hold at least: parameters and, unless some are frozen, gradients and two moments."""
    return work.config.parameters * STORED * (1 if work.freeze else 4)


#: Of some candidates, and which they are.
Some = tuple[Sequence["Predictions | PipelinePredictions"], Array]


def _flat(prices: Prices, work: Work, sizes: Sizes, below: Array) -> Iterator[Some]:
    found = [Predictions(prices, work, sizes, choice) for choice in choices()]
    for each in found:
        each.valid &= each.seconds < below
    yield found, np.arange(len(sizes.cuboids))


def _pipelines(prices: Prices, work: Work, sizes: Sizes, pipeline: str, below: Array) -> Iterator[Some]:
    """Predictions for pipelines. Retained weights are not searched: every micro-batch alive would have its own copy. If
    a shape does not fit, its blocks are also split by memory."""
    chosen = [choice for choice in choices() if choice.policy.weights == "regather"]
    every = [StageCosts(prices, work, sizes, choice) for choice in chosen]
    for pipe in np.unique(sizes.pipe).tolist():
        (of,) = np.nonzero(sizes.pipe == pipe)
        some = sizes.at(of)
        costs = [each.at(of, some) for each in every]
        both = list(product(costs, pipeline_schedules(work, pipe, pipeline)))
        found = [PipelinePredictions(each, schedule, costs[0], "time") for each, schedule in both]
        for each in found:
            each.valid &= each.seconds < below[of]
        fit = ~np.logical_or.reduce([each.valid for each in found])  # or is too slow
        for each in found:
            if (each.valid & ~fit).any():
                fit |= each.valid & (each.peak <= prices.hw.memory)
        if not fit.all():
            lean = [PipelinePredictions(each, schedule, costs[0], "memory") for each, schedule in both]
            for each in lean:
                each.valid &= ~fit & (each.seconds < below[of])
            found += lean
        yield found, of


def _lean_pipelines(
    prices: Prices, work: Work, sizes: Sizes, lean: Sequence[Choice], pipeline: str
) -> Iterator["PipelinePredictions"]:
    """Those that hold least: with the first schedule of those to search, blocks split by memory."""
    every = [StageCosts(prices, work, sizes, choice) for choice in lean]
    for pipe in np.unique(sizes.pipe).tolist():
        (of,) = np.nonzero(sizes.pipe == pipe)
        some, schedule = sizes.at(of), pipeline_schedules(work, pipe, pipeline)[0]
        costs = [each.at(of, some) for each in every]
        for each in costs:
            yield PipelinePredictions(each, schedule, costs[0], "memory")


def makes_difference(sizes: Sizes, choice: Choice) -> Array:
    """Whether a choice changes anything, per candidate."""
    s, policy, valid = sizes, choice.policy, np.ones(len(sizes.cuboids), dtype=bool)
    if choice.schedule.sub_batches > 1:
        valid &= (s.b % choice.schedule.sub_batches == 0) & (s.y * s.z > 1)
    if policy.activations == "retain":
        valid &= s.y * s.z > 1
    if policy.weights == "retain":
        valid &= s.x > 1
    return valid


class Predictions:
    """Predictions of one choice, for every candidate."""

    def __init__(self, prices: Prices, work: Work, sizes: Sizes, choice: Choice, overlap: bool = True) -> None:
        self.hw, self.sizes, self.choice = prices.hw, sizes, choice
        self.totals = step_totals(prices, work, sizes, choice, overlap)
        if work.micro_batches > 1:  # one after the other; replicas are summed once, and the optimizer runs once
            more = step_totals(prices, work, sizes, choice, overlap, last=False)
            self.totals = self.totals.plus(more, work.micro_batches - 1)
        self.valid, self.seconds = makes_difference(sizes, choice), self.totals.seconds
        self._work = work

    @cached_property
    def memory(self) -> Footprint:
        return memory(self.hw, self._work, self.sizes, self.choice, self.totals.saved)

    @cached_property
    def peak(self) -> Array:
        return self.memory.peak

    def plan(self, i: int) -> Plan:
        by_kind = bytes_by_kind(self.memory, i)
        fits = sum(by_kind.values()) <= self.hw.memory
        seconds, parts = float(self.seconds[i]), _parts(self.totals, i)
        of = self.sizes.cuboids[i], self.choice, seconds, by_kind
        return Plan(*of, **parts, fits=fits, hardware=self.hw, micro_batches=self._work.micro_batches)


def bytes_by_kind(footprint: Footprint, i: int) -> dict[str, int]:
    return {each.name: int(getattr(footprint, each.name)[i]) for each in fields(footprint)}


def _parts(t: Totals, i: int) -> dict[str, Any]:
    """The totals of one candidate, by their names in a plan."""
    found: dict[str, Any] = {
        part: {name: float(value[i]) for name, value in getattr(t, part).items()}
        for part in ("compute", "exposed", "in_flight")
    }
    for part in ("calls", "sent"):
        lines = getattr(t, part).items()
        found[part] = {axis: sum(int(value[i]) for (on, _), value in lines if on == axis) for axis in t.in_flight}
    return found


class PipelinePredictions(Pipelines):
    """`Pipelines`, and the candidates for which they change anything."""

    def __init__(self, costs: StageCosts, schedule: Schedule, tails: StageCosts, least: str) -> None:
        schedule = replace(schedule, sub_batches=costs.choice.schedule.sub_batches)
        super().__init__(costs, schedule, tails, least)
        self.valid = makes_difference(self.sizes, self.choice)

    def plan(self, i: int) -> Plan:
        return pipeline_plan(self, i)


def pipeline_plan(found: Pipelines, i: int) -> Plan:
    """Times are of the busiest place; the rest of the step is counted as waiting for the pipe."""
    seconds, work = float(found.seconds[i]), found.steps
    busy = [float(each.seconds[i]) for each in work]
    memories = [bytes_by_kind(each, i) for each in found.footprints]
    places = []
    for place in range(found.pipe):
        forward, both = (
            sum(float(found.totals[stage][which].seconds[i]) for stage in found.stages(place)) for which in (0, 1)
        )
        blocks = [int(found.blocks[stage, i]) for stage in found.stages(place)]
        places.append(PlannedStage(blocks, forward, both - forward, seconds - busy[place], memories[place]))
    busiest = max(range(found.pipe), key=lambda place: busy[place])
    parts = _parts(work[busiest], i)
    parts["exposed"]["pipe"] = seconds - busy[busiest]
    parts["in_flight"]["pipe"] = found.on_link(busiest, i)
    choice = replace(found.choice, schedule=replace(found.schedule, split=found.split(i)))
    fullest = max(memories, key=lambda each: sum(each.values()))
    fits, cuboid = sum(fullest.values()) <= found.hw.memory, found.sizes.cuboids[i]
    parts |= {"places": tuple(places), "micro_batches": found.m}
    return Plan(cuboid, choice, seconds, fullest, **parts, fits=fits, hardware=found.hw)


def timeline(work: Work, plan: Plan) -> list[dict[str, Any]]:
    """The planned moves of a pipeline's step, by place."""
    found = pipeline_of(plan.hardware, work, plan.cuboid, plan.choice)
    slots = found.slots(0)
    return [
        {"place": place, "move": move.kind, "micro_batch": move.batch, "stage": move.stage, "start": start, "end": end}
        for place, order in enumerate(found.orders_of(0))
        for moves in order
        for move in moves
        for start, end in (slots[move],)
    ]


def _add_best_of_each_shape(
    predictions: "Sequence[Predictions | PipelinePredictions]",
    cell: Array,
    rankings: Sequence[Ranking],
    with_too_large: bool,
) -> None:
    """The fastest order and choice of every shape that fits, the smallest of every other one. `cell` numbers each
    candidate's ranking."""
    cuboids = predictions[0].sizes.cuboids
    numbers: dict[tuple[int, ...], int] = {}
    which = zip(cell.tolist(), cuboids, strict=True)
    shape = np.array([numbers.setdefault((i, k.replicas, k.x, k.y, k.z), len(numbers)) for i, k in which])
    valid = np.stack([each.valid for each in predictions])
    seconds = np.where(valid, np.stack([each.seconds for each in predictions]), np.inf)
    known: set[int] = set()  # predictions with known memory; it takes long, so only the fastest ones' is computed
    for number in range(len(numbers)):
        (of,) = np.nonzero(shape == number)
        while True:
            choice, i = (int(each) for each in np.unravel_index(seconds[:, of].argmin(), (len(seconds), len(of))))
            if choice in known or np.isinf(seconds[choice, of[i]]):
                break
            seconds[choice, predictions[choice].peak > predictions[choice].hw.memory] = np.inf
            known.add(choice)
        fits, ranking = bool(np.isfinite(seconds[choice, of[i]])), rankings[cell[of[0]]]
        ranking.considered += int(valid[:, of].sum())
        if not (fits or with_too_large):
            continue
        if not fits:
            possible = [j for j in range(len(valid)) if valid[j, of].any()]
            peak = np.stack([np.where(valid[j, of], predictions[j].peak[of], np.inf) for j in possible])
            j, i = (int(each) for each in np.unravel_index(peak.argmin(), peak.shape))
            choice = possible[j]
        (ranking.plans if fits else ranking.too_large).append(predictions[choice].plan(int(of[i])))


def predict(hw: Hardware, work: Work, cuboid: Cuboid, choice: Choice, overlap: bool = True) -> Plan:
    work.config.check(cuboid, work.batch, work.seq)
    if cuboid.pipe > 1:
        return pipeline_plan(pipeline_of(hw, work, cuboid, choice, overlap), 0)
    sizes = Sizes(work.config, [cuboid], hw.node, work.batch, work.seq, hw.group)
    return Predictions(prices_of(hw, work, sizes), work, sizes, choice, overlap).plan(0)
