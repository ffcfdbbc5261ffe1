"""The step of a pipeline: how its blocks are split, when its stages run, what they hold. Sizes are arrays over
candidates, all with the same number of places.

    stages    Each is simulated by itself (`plan/stage.py`).
    split     Each block goes to the stage that then takes the least time or, if that does not fit, holds the least.
    step      The moves of every place in the schedule's order, with messages on separate lanes; then the remaining sums
              over replicas, and the optimizer.
    memory    Of every place: the peak of a backward, plus what forwards of other micro-batches have saved.

With many micro-batches a few rounds are simulated, and every further round takes as long as the last.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod

import numpy as np

from cuboid.mesh.cuboid import AXES, Cuboid
from cuboid.model.freeze import Trained
from cuboid.plan.hardware import Hardware
from cuboid.plan.layer import STORED, Choice, Work
from cuboid.plan.memory import Footprint
from cuboid.plan.memory import planned as memory_planned
from cuboid.plan.sizes import Segment, Sizes, added
from cuboid.plan.stage import LoneStage, StageCosts, lone_stage, merged, segment_of, stage_work
from cuboid.plan.step import prices_of
from cuboid.plan.tape import Totals
from cuboid.plan.time import Array
from cuboid.step.pipeline import Slots, Split, backward_until, orders, simulate
from cuboid.step.schedule import Move, Order, Schedule

ROUNDS = 3  # simulated rounds, of as many micro-batches as places


# Which blocks


def dealt(layers: int, fixed: Sequence[Array], each: Sequence[Array]) -> Array:
    """The number of blocks [stages, candidates]: one per stage, then one at a time to the stage that then has the least
    of `fixed` plus `each` per block, the first one if equal."""
    load, more = np.stack(fixed) + np.stack(each), np.stack(each)
    blocks, columns = np.ones(load.shape, dtype=np.int64), np.arange(load.shape[1])
    for _ in range(layers - len(load)):
        least = (load + more).argmin(0)
        blocks[least, columns] += 1
        load[least, columns] += more[least, columns]
    return blocks


# Messages


def crossings(hw: Hardware, cuboid: Cuboid, place: int) -> tuple[int, int]:
    """The most messages from a place to the next one that leave one node, and one group of nodes."""
    ranks = cuboid.array(AXES).reshape(cuboid.pipe, -1)
    senders, receivers = ranks[place], ranks[(place + 1) % cuboid.pipe]

    def leaving(share: int) -> int:
        out = senders[senders // share != receivers // share]
        return int(np.unique(out // share, return_counts=True)[1].max()) if len(out) else 0

    return leaving(hw.node), leaving(hw.node * hw.group) if hw.group else 0


def hops(hw: Hardware, sizes: Sizes, size: Array) -> list[Array]:
    """Seconds of a message of `size` bytes from each place to the next, if all ranks of a place send at once."""
    found, known = [], dict[tuple[int, int], tuple[int, int]]()
    strides = [prod(k.sizes[axis] for axis in k.order[k.order.index("pipe") + 1 :]) for k in sizes.cuboids]
    for place in range(int(sizes.pipe[0])):
        for cuboid, stride in zip(sizes.cuboids, strides, strict=True):
            if (stride, place) not in known:
                known[stride, place] = crossings(hw, cuboid, place)
        nodes, groups = np.array([known[stride, place] for stride in strides]).T
        near, far = hw.link("inside", "all_gather"), hw.link("across", "all_gather")
        wire = min(far.bandwidth, hw.wire) if hw.wire else far.bandwidth
        seconds = np.where(nodes, far.base + nodes * size / wire, near.base + size / near.bandwidth)
        found.append(np.maximum(seconds, groups * size / hw.uplink) if hw.group else seconds)
    return found


# The step


def simulated(
    orders_of: Callable[[int], Sequence[Order]],
    places: int,
    micro_batches: int,
    seconds: Callable[[Move], Array],
    hop: Callable[[Move], Array],
) -> list[Array]:
    """When each place has done its moves."""

    def ends(count: int) -> list[Array]:
        slots, found = simulate(orders_of(count), seconds, hop, np.maximum), []
        for order in orders_of(count):
            found.append(slots[order[-1][-1]][1])
        return found

    if micro_batches <= (ROUNDS + 1) * places:
        return ends(micro_batches)
    before, after = ends((ROUNDS - 1) * places), ends(ROUNDS * places)
    further = (micro_batches - ROUNDS * places) / places
    return [b + further * (b - a) for a, b in zip(before, after, strict=True)]


@dataclass(frozen=True)
class PlannedStage:
    """What a place of a pipeline does in a step, and holds."""

    blocks: list[int]  # of each of its stages
    forward: float  # seconds of a micro-batch, all its stages
    backward: float
    idle: float  # seconds of the step
    memory: dict[str, int]

    @property
    def peak(self) -> int:
        return sum(self.memory.values())


class Pipelines:
    """The pipelines of one choice and schedule, for all candidates. `tails` may be those of another choice. Blocks are
    split as the schedule says, or for the `least` "time" or "memory"."""

    def __init__(self, costs: StageCosts, schedule: Schedule, tails: StageCosts | None = None, least: str = "") -> None:
        self.costs, self.work, self.sizes, self.hw = costs, costs.work, costs.sizes, costs.prices.hw
        self.schedule, self.choice = schedule, replace(costs.choice, schedule=schedule)
        self.pipe, self.m = int(self.sizes.pipe[0]), self.work.micro_batches
        self.count = self.pipe * schedule.stages  # number of stages
        self._trained, self._tails = Trained(self.work.config, self.work.freeze), tails or costs
        self._segments = [segment_of(stage, self.count - 1) for stage in range(self.count)]
        self.orders = orders(schedule, self.pipe, self.m)
        self.blocks = {"": self._given, "time": self._for_time, "memory": self._for_memory}[least]()
        self._left_of: dict[LoneStage, Array] = {}  # what one backward of a stage leaves
        self.variants = [self._variants(stage) for stage in range(self.count)]
        self.lowest = self._lowest()
        self.totals = [self._totals(stage) for stage in range(self.count)]
        self.seconds, self.ends = self._seconds()

    def _variants(self, stage: int) -> list[tuple[Array, LoneStage]]:
        """What a stage may be, and of which candidates."""
        first, found = self.blocks[:stage].sum(0) * bool(self.work.freeze), list[tuple[Array, LoneStage]]()
        for start, n in np.unique(np.stack([first, self.blocks[stage]]), axis=1).T.tolist():
            variant = lone_stage(self._trained, self._segments[stage], range(start, start + n))
            found.append(((first == start) & (self.blocks[stage] == n), variant))
        return found

    def _lowest(self) -> Array:
        """The first stage of each candidate that has something to train, where backward ends."""
        ends = self.blocks.cumsum(0)
        return np.minimum((ends < self._trained.lowest).sum(0), self.count - 1)

    def _totals(self, stage: int) -> tuple[Totals, Totals]:
        if not self.work.freeze:
            return self.costs.of[self._segments[stage]].of(self.blocks[stage])
        found = [(here, self.costs.totals(variant)) for here, variant in self.variants[stage]]
        return merged([(here, each[0]) for here, each in found]), merged([(here, each[1]) for here, each in found])

    # Split

    def _given(self) -> Array:
        blocks = Split.of(self.work.config.layers, self.pipe, self.schedule).blocks
        return np.repeat(np.array(blocks)[:, None], len(self.sizes.cuboids), 1)

    def _for_time(self) -> Array:
        fixed, each = [], []
        for segment in self._segments:
            each.append(self.costs.block(segment))
            fixed.append(self.costs.of[segment].both.seconds - self.costs.of[segment].layers * each[-1])
        return dealt(self.work.config.layers, fixed, each)

    def _for_memory(self) -> Array:
        """Splits blocks by bytes at rest and saved."""
        fixed, each, alive = [], [], self._most_alive()
        for stage, segment in enumerate(self._segments):
            one, two = (
                4 * self._parameters(segment, n) + alive[stage] * self.costs.of[segment].of(n)[1].saved for n in (1, 2)
            )
            each.append(two - one)
            fixed.append(2 * one - two)
        return dealt(self.work.config.layers, fixed, each)

    # Time

    def _duration(self, move: Move) -> Array:
        """Seconds of a move."""
        forward, both = self.totals[move.stage]
        if move.kind == "F":
            return forward.seconds
        if move.kind == "W":
            return np.asarray(both.dW)
        left = both.dW if self.schedule.pipeline == "zero-bubble" else 0.0
        return both.seconds - forward.seconds - left

    def _hop(self) -> Callable[[Move], Array]:
        s, itemsize = self.sizes, self.costs.prices.itemsize
        between = hops(self.hw, s, s.m // s.y * s.d * itemsize)
        last = self.count - 1

        def hop(move: Move) -> Array | float:
            place = move.stage % self.pipe
            if move.kind == "F" and move.stage < last:
                return between[place]
            return between[(place - 1) % self.pipe] if move.kind == "B" and move.stage > 0 else 0.0

        return hop  # type: ignore[return-value]

    def _seconds(self) -> tuple[Array, list[Array]]:
        """Seconds of the step, and when each place ends its moves."""
        zero, hop = np.zeros(len(self.sizes.cuboids)), self._hop()
        ends = [zero] * self.pipe
        for lowest in np.unique(self.lowest).tolist():

            def orders_of(count: int, lowest: int = lowest) -> list[Order]:
                return backward_until(lowest, orders(self.schedule, self.pipe, count))

            found = simulated(orders_of, self.pipe, self.m, self._duration, hop)
            ends = [np.where(self.lowest == lowest, *each) for each in zip(found, ends, strict=True)]
        done = [end + self.tail(place).seconds for place, end in enumerate(ends)]
        return np.maximum.reduce(done) + self._exchange(), ends

    def tail(self, place: int) -> Totals:
        first, *others = map(self._tail, self.stages(place))
        for each in others:
            first = first.plus(each, 1)
        return first

    def _tail(self, stage: int) -> Totals:
        if not self.work.freeze:
            return self._tails.tails[self._segments[stage]]
        return merged([(here, self._tails.tail(variant)) for here, variant in self.variants[stage]])

    def _exchange(self) -> Array:
        """Seconds to exchange a tied embedding's gradients between the first and the last place."""
        if not self.work.config.tied or not self._trained.embed:
            return np.zeros(len(self.sizes.cuboids))
        size = self.sizes.head_weight.shard * STORED
        return hops(self.hw, self.sizes, size)[-1]

    def stages(self, place: int) -> range:
        return range(place, self.count, self.pipe)

    @cached_property
    def steps(self) -> list[Totals]:
        """The totals of each place in a step."""
        found = []
        for place in range(self.pipe):
            found.append(self.tail(place))
            for stage in self.stages(place):
                found[-1] = found[-1].plus(self.totals[stage][1], self.m)
        return found

    def orders_of(self, i: int) -> list[Order]:
        """The moves of a candidate, by place."""
        return backward_until(int(self.lowest[i]), self.orders)

    def slots(self, i: int) -> Slots:
        """Start and end of a candidate's moves."""

        def one(value: Array | float) -> float:
            return float(np.broadcast_to(value, len(self.sizes.cuboids))[i])

        hop = self._hop()
        return simulate(self.orders_of(i), lambda move: one(self._duration(move)), lambda move: one(hop(move)))

    def on_link(self, place: int, i: int) -> float:
        """Seconds that the messages a candidate's place sends take, each alone."""
        hop, moves = self._hop(), [move for moves in self.orders_of(i)[place] for move in moves]
        return sum(float(np.broadcast_to(hop(move), len(self.sizes.cuboids))[i]) for move in moves)

    # Memory

    def _alive(self, order: Order) -> list[tuple[Move, Counter[int], Counter[int], bool, bool]]:
        """For each backward of a place: how many other forwards of each stage are alive, how many backwards have
        postponed their weight gradients, whether there are gradients of earlier micro-batches, and whether a forward
        runs beside it."""
        alive, left, found, any_before = Counter[int](), Counter[int](), [], False
        for moves in order:
            for move in moves:
                if move.kind == "B":
                    alive[move.stage] -= 1
                    found.append((move, Counter(alive), Counter(left), any_before, len(moves) > 1))
                    any_before = True
                    left[move.stage] += self.schedule.pipeline == "zero-bubble"
                elif move.kind == "W":
                    left[move.stage] -= 1
            for kind, _, stage in moves:
                alive[stage] += kind == "F"
        return found

    def _most_alive(self) -> list[int]:
        """The most forwards of each stage that are alive at a time."""
        found = [0] * self.count
        for place in range(self.pipe):
            for move, alive, *_ in self._alive(self.orders[place]):
                for stage in self.stages(place):
                    found[stage] = max(found[stage], alive[stage] + (stage == move.stage))
        return found

    def footprint(self, place: int) -> Footprint:
        """The largest footprint of a place, over its backwards; if it has none, of a forward."""
        return merged([(self.lowest == each, self._footprint(place, each)) for each in np.unique(self.lowest).tolist()])

    def _footprint(self, place: int, lowest: int) -> Footprint:
        """The same, for candidates whose lowest trained stage this is."""
        nothing = np.zeros_like(self.sizes.x)
        below = [stage for stage in self.stages(place) if stage < lowest]
        found = [self._of_stage(stage, False, False, nothing, stage > 0) for stage in below]
        order = backward_until(lowest, self.orders)[place]
        #: by stage, whether there are earlier gradients, and whether a forward runs beside
        others: dict[tuple[int, bool, bool], list[Array]] = {}
        for move, alive, left, before, beside in self._alive(order):
            held = [self._saved(each, count) for each, count in alive.items()]
            held += [self._left(each, count) for each, count in left.items()]
            others.setdefault((move.stage, before, beside), []).append(added([nothing, *held]))
        most = {case: np.maximum.reduce(held) for case, held in others.items()}
        for (stage, before, beside), held in most.items():
            later = most.get((stage, True, beside))
            if before or later is None or (held > later).any():  # else a later backward has more
                found.append(self._of_stage(stage, before, beside, held))
        peaks = np.stack([each.peak for each in found]).argmax(0)
        values = {
            name: np.choose(peaks, [getattr(each, name) for each in found])
            for name in (each.name for each in fields(Footprint))
        }
        return Footprint(**values)

    def _saved(self, stage: int, count: int) -> Array:
        """Bytes that `count` forwards of a stage have saved. Retained weights are gathered by each."""
        kept = added(here * self.costs.kept(variant) for here, variant in self.variants[stage])
        return count * (self.totals[stage][1].saved + kept)

    def _left(self, stage: int, count: int) -> Array:
        """What weight gradients of so many backwards are made of."""
        return count * added(here * self._left_of_one(variant) for here, variant in self.variants[stage])

    def _left_of_one(self, stage: LoneStage) -> Array:
        """X and dY of every product, gathered, and the shards of X that it was regathered from."""
        if stage in self._left_of:
            return self._left_of[stage]
        s, c, found = self.sizes, self.work.config, np.zeros_like(self.sizes.x)
        inner, regathers = s.f * (2 if c.gated else 1), self.choice.policy.activations == "regather"
        over_y, over_z = ((axis > 1) * regathers for axis in (s.y, s.z))
        products = {
            ("attention.q", "attention.k", "attention.v"): s.d + s.q + 2 * s.kv + over_y * s.d // s.y,
            ("attention.out",): s.q + s.d + over_z * s.q // s.z,
            ("mlp.gate", "mlp.up"): s.d + inner + over_y * s.d // s.y,
            ("mlp.down",): s.f + s.d + over_z * s.f // s.z,
        }
        trained = Trained(stage_work(self.work, stage.blocks).config, stage.freeze)
        for names, size in products.items():
            blocks = [any(f"{name}.weight" in trained.block(i) for name in names) for i in range(stage.blocks)]
            found = found + sum(blocks) * size
        self._left_of[stage] = found * s.m * self.costs.prices.itemsize
        return self._left_of[stage]

    def _of_stage(self, stage: int, before: bool, beside: bool, others: Array, receives: bool = True) -> Footprint:
        """In its backward, maybe beside a forward, with what others have saved, and what the place's other stages have
        at rest. `receives`: whether messages come to it."""
        segment, choice = self._segments[stage], replace(self.choice, schedule=replace(self.schedule, beside=beside))

        def held(stage: LoneStage) -> Footprint:
            left = self._left_of_one(stage) if self.schedule.pipeline == "zero-bubble" else None
            return self.costs.memory(stage, before, choice, left)

        found = merged([(here, held(variant)) for here, variant in self.variants[stage]])
        others_here = [each for each in self.stages(stage % self.pipe) if each != stage]
        rest, trained = ([self._held(each, of) for each in others_here] for of in (False, True))
        nothing = np.zeros_like(self.sizes.x)
        more, of_more = added([nothing, *rest]), added([nothing, *trained])
        s = self.sizes
        one_ahead = receives and not segment.ends  # received
        messages = one_ahead * s.m // s.y * s.d * self.costs.prices.itemsize
        return Footprint(
            found.parameters + more,
            found.gradients + of_more * before,
            found.optimizer + 2 * of_more,
            found.activations + others,
            found.buffers + messages,
        )

    def _parameters(self, segment: Segment, blocks: Array | int) -> Array:
        """Bytes of a stage's parameters."""
        one, two = (self.sizes.elements(Trained(stage_work(self.work, n).config), segment) for n in (1, 2))
        return STORED * (one + (blocks - 1) * (two - one))

    def _held(self, stage: int, trained: bool) -> Array:
        """Bytes of a stage's parameters, of all or those that are trained."""
        if not (trained and self.work.freeze):
            return self._parameters(self._segments[stage], self.blocks[stage])
        found = np.zeros_like(self.sizes.x)
        for here, variant in self.variants[stage]:
            work = stage_work(self.work, variant.blocks, variant.freeze)
            found = np.where(
                here, STORED * self.sizes.elements(Trained(work.config, work.freeze), variant.segment), found
            )
        return found

    @cached_property
    def footprints(self) -> list[Footprint]:
        return [self.footprint(place) for place in range(self.pipe)]

    @cached_property
    def peak(self) -> Array:
        return np.maximum.reduce([each.peak for each in self.footprints])

    def split(self, i: int) -> tuple[int, ...]:
        """A candidate's blocks per stage; empty if they equal the default split."""
        blocks = tuple(self.blocks[:, i].tolist())
        plain = Split.of(self.work.config.layers, self.pipe, replace(self.schedule, split=()))
        return () if blocks == plain.blocks else blocks


def planned(hw: Hardware, work: Work, cuboid: Cuboid, choice: Choice) -> Footprint:
    """The footprint of the first rank of a cuboid or, on a pipe, of the place with the largest peak. Where it
    depends on whose turn it is, this is hardly more than it holds."""
    if cuboid.pipe == 1:
        return memory_planned(hw, work, cuboid, choice)
    found = pipeline_of(hw, work, cuboid, choice, level=True).footprints
    return max(found, key=lambda each: int(each.peak[0]))


def pipeline_of(
    hw: Hardware, work: Work, cuboid: Cuboid, choice: Choice, overlap: bool = True, level: bool = False
) -> Pipelines:
    sizes = Sizes(work.config, [cuboid], hw.node, work.batch, work.seq, hw.group)
    costs = StageCosts(prices_of(hw, work, sizes), work, sizes, choice, overlap, level=level)
    return Pipelines(costs, choice.schedule)
