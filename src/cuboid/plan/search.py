"""Every cuboid of a cluster with every choice, ranked by the predicted step."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import permutations, product
from typing import get_args

import numpy as np

from cuboid.config import ModelConfig
from cuboid.cost import Cost
from cuboid.cost.cuboid import step_cost
from cuboid.mesh import AXES, Cuboid
from cuboid.model import Recompute
from cuboid.parallel.cuboid import Policy
from cuboid.plan.hardware import Hardware
from cuboid.plan.memory import memory
from cuboid.plan.sizes import Sizes, groups
from cuboid.plan.step import ITEMSIZE, STORED, Choice, Work, step_totals
from cuboid.plan.tape import Totals
from cuboid.plan.time import Array
from cuboid.schedule import Schedule

#: The layouts people know, as corners of the block.
CORNERS = {
    "FSDP": lambda k: k.y == k.z == 1,
    "TP+SP": lambda k: k.x == k.z == 1,
    "FSDP×TP": lambda k: k.z == 1,
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
    fits: bool

    @property
    def peak(self) -> int:
        return sum(self.memory.values())

    def cost(self, work: Work) -> Cost:
        """Calls, bytes and FLOPs of a micro-batch, exact."""
        at, c = self.cuboid.coordinates(0), self.choice
        sizes = STORED, ITEMSIZE[work.precision]
        return step_cost(work.config, self.cuboid, at, work.batch, work.seq, c.policy, c.recompute, *sizes, c.schedule)


@dataclass
class Ranking:
    """The best choice for every cuboid that fits, fastest first; those that do not fit, smallest first."""

    work: Work
    hardware: Hardware
    devices: int
    plans: list[Plan]
    too_large: list[Plan]
    considered: int
    corners: dict[str, Plan | None] = field(default_factory=dict)

    def tokens_per_second(self, plan: Plan) -> float:
        return self.work.tokens / plan.seconds

    def mfu(self, plan: Plan) -> float:
        peak = self.hardware.peak[self.work.precision] * self.devices
        return model_flops(self.work) / plan.seconds / peak

    def find(self, cuboid: Cuboid) -> Plan | None:
        return next((plan for plan in (*self.plans, *self.too_large) if plan.cuboid.sizes == cuboid.sizes), None)


def model_flops(work: Work) -> int:
    """Of a step, nothing computed again and causal scores counted in full, as is the custom."""
    whole = step_cost(work.config, Cuboid(), Cuboid().coordinates(0), work.batch, work.seq)
    return whole.flops * work.micro_batches


def shapes(config: ModelConfig, devices: int, batch: int) -> Iterator[tuple[int, int, int, int]]:
    """Every (data, x, y, z) of so many devices that the model's heads, hidden size and batch can be cut into."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for y, z in product(divisors, repeat=2):
        if config.heads % (y * z) or config.hidden % z or devices % (y * z):
            continue
        for data in divisors:
            if devices // (y * z) % data == 0 and batch % data == 0:
                yield data, devices // (y * z) // data, y, z


def orders(shape: tuple[int, int, int, int], node: int) -> list[Cuboid]:
    """The shape with its axes in every order that makes a difference to which ranks share a node."""
    sizes = dict(zip(AXES, shape, strict=True))
    long = [axis for axis in AXES if sizes[axis] > 1]
    short = [axis for axis in AXES if sizes[axis] == 1]
    found: dict[tuple[int, ...], Cuboid] = {}
    for order in permutations(long):
        stride, inside = 1, []
        for axis in reversed(order):
            inside.append((axis, max(1, min(sizes[axis], node // stride))))
            stride *= sizes[axis]
        key = tuple(count for _, count in sorted(inside))
        if key not in found:
            data, x, y, z = shape
            found[key] = Cuboid(x, y, z, data, (*short, *order))
    return list(found.values())


def choices() -> Iterator[Choice]:
    ways = ("regather", "retain")
    for recompute, activations, weights, halves in product(get_args(Recompute), ways, ways, (False, True)):
        yield Choice(recompute, Policy(activations, weights), Schedule(halves=halves))  # type: ignore[arg-type]


def step_seconds(work: Work, totals: Totals, update: Totals | None) -> Array:
    """Micro-batches run one after the other; the optimizer once."""
    if work.micro_batches == 1 or update is None:
        return totals.seconds
    return totals.seconds + (work.micro_batches - 1) * update.seconds


def rank(hw: Hardware, work: Work, devices: int, only: Cuboid | None = None) -> Ranking:
    """`only` ranks the orders and choices of one shape."""
    config = work.config
    if only is not None:
        config.check(only, work.batch, work.seq)
        found = orders((only.data, only.x, only.y, only.z), hw.node)
    else:
        config.check(Cuboid(), work.batch, work.seq)
        found = [cuboid for shape in shapes(config, devices, work.batch) for cuboid in orders(shape, hw.node)]
    if not found:
        return Ranking(work, hw, devices, [], [], 0)
    sizes, considered = Sizes(config, found, hw.node, work.batch, work.seq), 0
    best: dict[tuple[bool, tuple[int, ...]], tuple[float, int, Choice]] = {}
    for choice in choices():
        seconds, peak, valid = _evaluate(hw, work, sizes, choice)
        considered += int(valid.sum())
        fits = peak <= hw.memory
        score = np.where(fits, seconds, peak)
        for i in np.flatnonzero(valid).tolist():
            cuboid = found[i]
            key = bool(fits[i]), (cuboid.data, cuboid.x, cuboid.y, cuboid.z)
            if key not in best or score[i] < best[key][0]:
                best[key] = float(score[i]), i, choice
    plans = [_plan(hw, work, found[i], choice) for (fit, _), (_, i, choice) in best.items() if fit]
    fitting = {shape for fit, shape in best if fit}
    large = [(s, i, c) for (fit, shape), (s, i, c) in best.items() if not fit and shape not in fitting]
    too_large = [_plan(hw, work, found[i], choice) for _, i, choice in sorted(large, key=lambda each: each[0])[:20]]
    plans.sort(key=lambda plan: plan.seconds)
    ranking = Ranking(work, hw, devices, plans, too_large, considered)
    for name, is_corner in CORNERS.items():
        ranking.corners[name] = next((plan for plan in plans if is_corner(plan.cuboid)), None)
    return ranking


def _evaluate(hw: Hardware, work: Work, sizes: Sizes, choice: Choice) -> tuple[Array, Array, Array]:
    """Seconds and peak bytes of each candidate, and whether the choice makes sense for it."""
    valid = np.ones(len(sizes.cuboids), dtype=bool)
    if choice.schedule.halves:
        valid &= (sizes.b % 2 == 0) & (sizes.y * sizes.z > 1)
    if choice.policy.weights == "retain":
        valid &= sizes.x > 1
    if choice.policy.activations == "retain":
        valid &= sizes.y * sizes.z > 1
    if not valid.any():
        return np.zeros(len(valid)), np.zeros(len(valid)), valid
    few = Sizes(work.config, sizes.take(valid), hw.node, work.batch, work.seq)
    totals = step_totals(hw, work, few, choice)
    without = step_totals(hw, work, few, choice, update=False) if work.micro_batches > 1 else None
    seconds, peak = np.zeros(len(valid)), np.zeros(len(valid))
    seconds[valid] = step_seconds(work, totals, without)
    peak[valid] = memory(hw, work, few, choice, totals.saved).peak
    return seconds, peak, valid


def _plan(hw: Hardware, work: Work, cuboid: Cuboid, choice: Choice) -> Plan:
    return predict(hw, work, cuboid, choice)


def predict(hw: Hardware, work: Work, cuboid: Cuboid, choice: Choice, overlap: bool = True) -> Plan:
    sizes = Sizes(work.config, [cuboid], hw.node, work.batch, work.seq)
    totals = step_totals(hw, work, sizes, choice, overlap)
    without = None
    if work.micro_batches > 1:
        without = step_totals(hw, work, sizes, choice, overlap, update=False)
    held = memory(hw, work, sizes, choice, totals.saved)

    def once(name: str) -> dict[str, float]:
        first, more = getattr(totals, name), getattr(without, name, {})
        return {key: float(v[0] + (work.micro_batches - 1) * more[key][0] * (key in more)) if key in more else float(v[0])
                for key, v in first.items()}

    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers")
    by_kind = {kind: int(getattr(held, kind)[0]) for kind in kinds}
    return Plan(
        cuboid,
        choice,
        float(step_seconds(work, totals, without)[0]),
        by_kind,
        once("compute"),
        once("exposed"),
        once("in_flight"),
        fits=sum(by_kind.values()) <= hw.memory,
    )
