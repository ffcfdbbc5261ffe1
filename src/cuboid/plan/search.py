"""Every cuboid of a cluster with every choice, ranked by the predicted step."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from typing import get_args

import numpy as np

from cuboid.mesh.cuboid import AXES, Cuboid
from cuboid.mesh.cuboid import orders as every_order
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import Policy
from cuboid.model.transformer import Recompute
from cuboid.plan.cost import Cost
from cuboid.plan.cost.cuboid import step_cost
from cuboid.plan.hardware import Hardware
from cuboid.plan.layer import ITEMSIZE, STORED, Choice, Work
from cuboid.plan.memory import memory
from cuboid.plan.sizes import Sizes, groups
from cuboid.plan.step import prices_of, step_totals
from cuboid.plan.time import Array, Prices
from cuboid.step.schedule import Schedule

#: The layouts people know, as corners of the block.
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
    exposed: dict[str, float]  # seconds waited for each axis
    in_flight: dict[str, float]  # seconds of each axis' collectives, were they alone
    calls: dict[str, int]  # of each axis
    sent: dict[str, int]  # bytes
    fits: bool
    hardware: Hardware

    @property
    def peak(self) -> int:
        return sum(self.memory.values())

    def cost(self, work: Work) -> Cost:
        """Calls, bytes and FLOPs of the last micro-batch, exact."""
        at, c = self.cuboid.coordinates(0), self.choice
        sizes = STORED, ITEMSIZE[work.precision]
        settings = c.policy, c.recompute, *sizes, c.schedule
        return step_cost(work.config, self.cuboid, at, work.batch, work.seq, *settings, freeze=work.freeze)


@dataclass
class Ranking:
    """The best choice for every cuboid that fits, fastest first; those that do not fit, smallest first."""

    work: Work
    hardware: Hardware
    devices: int
    plans: list[Plan]
    too_large: list[Plan]
    considered: int
    seconds: float = 0.0  # that the ranking itself took
    corners: dict[str, Plan | None] = field(default_factory=dict)

    def tokens_per_second(self, plan: Plan) -> float:
        return self.work.tokens / plan.seconds

    def mfu(self, plan: Plan) -> float:
        peak = self.hardware.peak[self.work.precision] * self.devices
        return model_flops(self.work) / plan.seconds / peak


def model_flops(work: Work) -> int:
    """Of a step, nothing computed again and causal scores counted in full, as is the custom."""
    whole = step_cost(work.config, Cuboid(), Cuboid().coordinates(0), work.batch, work.seq, freeze=work.freeze)
    return whole.flops * work.micro_batches


def shapes(config: ModelConfig, devices: int, batch: int) -> Iterator[tuple[int, int, int, int]]:
    """Every (replicas, x, y, z) of so many devices that the model's heads, hidden size and batch can be cut into."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for y, z in product(divisors, repeat=2):
        if config.heads % (y * z) or config.hidden % z or devices % (y * z):
            continue
        for replicas in divisors:
            if devices // (y * z) % replicas == 0 and batch % replicas == 0:
                yield replicas, devices // (y * z) // replicas, y, z


def orders(shape: tuple[int, int, int, int], node: int) -> list[Cuboid]:
    """The shape with its axes in every order that makes a difference to which ranks share a node."""
    replicas, x, y, z = shape
    cuboids = list(every_order(Cuboid(x, y, z, replicas)))
    of = groups(cuboids, np.ones(len(cuboids), dtype=np.int64), node)
    found: dict[tuple[int, ...], Cuboid] = {}
    for cuboid, *inside in zip(cuboids, *(of[axis].inside.tolist() for axis in AXES), strict=True):
        found.setdefault(tuple(inside), cuboid)
    return list(found.values())


def choices() -> Iterator[Choice]:
    ways = ("regather", "retain")
    for recompute, activations, weights, parts in product(get_args(Recompute), ways, ways, (1, 2)):
        yield Choice(recompute, Policy(activations, weights), Schedule(parts=parts))  # type: ignore[arg-type]


def rank(hw: Hardware, work: Work, devices: int, only: Cuboid | None = None) -> Ranking:
    """`only` ranks the orders and choices of one shape."""
    config, began = work.config, time.perf_counter()
    if only is not None:
        config.check(only, work.batch, work.seq)
        found = orders((only.replicas, only.x, only.y, only.z), hw.node)
    else:
        config.check(Cuboid(), work.batch, work.seq)
        found = [cuboid for shape in shapes(config, devices, work.batch) for cuboid in orders(shape, hw.node)]
    if not found:
        return Ranking(work, hw, devices, [], [], 0)
    sizes = Sizes(config, found, hw.node, work.batch, work.seq)
    prices = prices_of(hw, work, sizes)
    predictions = [Predictions(prices, work, sizes, choice) for choice in choices()]
    plans, too_large = _best_of_each_shape(predictions)
    considered = sum(int(each.valid.sum()) for each in predictions)
    ranking = Ranking(work, hw, devices, plans, too_large, considered, time.perf_counter() - began)
    for name, is_corner in CORNERS.items():
        ranking.corners[name] = next((plan for plan in plans if is_corner(plan.cuboid)), None)
    return ranking


class Predictions:
    """Of one choice, for every candidate."""

    def __init__(self, prices: Prices, work: Work, sizes: Sizes, choice: Choice, overlap: bool = True) -> None:
        self.hw, self.sizes, self.choice = prices.hw, sizes, choice
        self.totals = step_totals(prices, work, sizes, choice, overlap)
        if work.micro_batches > 1:  # one after the other; replicas are summed once, and the optimizer runs once
            more = step_totals(prices, work, sizes, choice, overlap, last=False)
            self.totals = self.totals.plus(more, work.micro_batches - 1)
        self.memory = memory(prices.hw, work, sizes, choice, self.totals.saved)
        self.valid = self._valid()

    def _valid(self) -> Array:
        """Whether the choice makes a difference to a candidate."""
        s, policy = self.sizes, self.choice.policy
        valid = np.ones(len(s.cuboids), dtype=bool)
        if self.choice.schedule.parts > 1:
            valid &= (s.b % self.choice.schedule.parts == 0) & (s.y * s.z > 1)
        if policy.activations == "retain":
            valid &= s.y * s.z > 1
        if policy.weights == "retain":
            valid &= s.x > 1
        return valid

    def plan(self, i: int) -> Plan:
        t = self.totals
        by_kind = {each.name: int(getattr(self.memory, each.name)[i]) for each in fields(self.memory)}
        compute, exposed, in_flight = (
            {name: float(value[i]) for name, value in of.items()} for of in (t.compute, t.exposed, t.in_flight)
        )
        calls, sent = (
            {axis: sum(int(value[i]) for (on, _), value in of.items() if on == axis) for axis in in_flight}
            for of in (t.calls, t.sent)
        )
        fits = sum(by_kind.values()) <= self.hw.memory
        parts = compute, exposed, in_flight, calls, sent
        return Plan(self.sizes.cuboids[i], self.choice, float(t.seconds[i]), by_kind, *parts, fits, self.hw)


def _best_of_each_shape(predictions: Sequence[Predictions]) -> tuple[list[Plan], list[Plan]]:
    """The fastest order and choice of every shape that fits, fastest first; the smallest of those that do not."""
    cuboids = predictions[0].sizes.cuboids
    numbers: dict[tuple[int, ...], int] = {}
    shape = np.array([numbers.setdefault((k.replicas, k.x, k.y, k.z), len(numbers)) for k in cuboids])
    seconds = np.stack([np.where(each.valid, each.totals.seconds, np.inf) for each in predictions])
    peak = np.stack([np.where(each.valid, each.memory.peak, np.inf) for each in predictions])
    seconds = np.where(peak <= predictions[0].hw.memory, seconds, np.inf)
    fitting: list[Plan] = []
    too_large: list[Plan] = []
    for number in range(len(numbers)):
        (of,) = np.nonzero(shape == number)
        fits = bool(np.isfinite(seconds[:, of]).any())
        score = (seconds if fits else peak)[:, of]
        choice, i = np.unravel_index(score.argmin(), score.shape)
        (fitting if fits else too_large).append(predictions[int(choice)].plan(int(of[i])))
    return sorted(fitting, key=lambda plan: plan.seconds), sorted(too_large, key=lambda plan: plan.peak)


def predict(hw: Hardware, work: Work, cuboid: Cuboid, choice: Choice, overlap: bool = True) -> Plan:
    work.config.check(cuboid, work.batch, work.seq)
    sizes = Sizes(work.config, [cuboid], hw.node, work.batch, work.seq)
    return Predictions(prices_of(hw, work, sizes), work, sizes, choice, overlap).plan(0)
