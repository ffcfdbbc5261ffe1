"""Simulates a training step of one rank: the model's order of matmuls, launches and waits, on a `Tape`.

Layer after layer as transformer.py runs them, with weights.py's gathers ahead of them and reductions behind.
Sub-batches take turns, in all candidates alike; the model's `interleave` chooses turns by size and hides more.
Bytes, calls, FLOPs and saved activations add up to cost/cuboid.py's; the tests hold them to it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np

from cuboid.comm.flight import Pause, Steps
from cuboid.plan.hardware import Hardware
from cuboid.plan.layer import ITEMSIZE, STORED, Choice, TimedLayer, Work
from cuboid.plan.sizes import WHOLE, Segment, Sizes, Weight, added
from cuboid.plan.tape import Message, Totals
from cuboid.plan.time import Array, Fare, Prices
from cuboid.step.weights import MOST_IN_FLIGHT

STEADY = 5  # simulated layers; further ones take as long as the last but one in forward, the second in backward
LOSS, OPTIMIZER = 14, 12  # reads and writes of a logit, of a parameter


def step_totals(
    prices: Prices, work: Work, sizes: Sizes, choice: Choice, overlap: bool = True, last: bool = True
) -> Totals:
    """Totals of a forward and backward of every candidate; the `last` micro-batch adds the sums over replicas and the
    optimizer's update."""
    return stage_totals(prices, work, sizes, choice, WHOLE, overlap, last).of(work.config.layers)[1]


@dataclass(frozen=True)
class StageTotals:
    """Totals of a stage's forward, and of forward and backward, with what one layer adds to each."""

    layers: int
    forward: Totals
    both: Totals
    marks: Sequence[Totals]  # before and after a layer, in forward, then in backward; none: all layers are simulated
    behind: dict[str, Array]  # seconds by axis for which collectives wait longer at the end, per further layer

    def of(self, layers: Array | int) -> tuple[Totals, Totals]:
        """The totals with this many layers."""
        forward, both = self.forward, self.both
        if self.marks:
            before, after = self.marks[:2]
            forward = forward.plus(after, layers - self.layers, without=before)
        for before, after in zip(self.marks[::2], self.marks[1::2], strict=True):
            both = both.plus(after, layers - self.layers, without=before)
        seconds, exposed = both.seconds, dict(both.exposed)
        for axis, each in self.behind.items():
            seconds = seconds + (layers - self.layers) * each
            exposed[axis] = exposed[axis] + (layers - self.layers) * each
        return forward, replace(both, seconds=seconds, exposed=exposed)

    def at(self, which: Array) -> "StageTotals":
        """The totals of the candidates `which`."""
        marks = [each.at(which) for each in self.marks]
        behind = {axis: each[which] for axis, each in self.behind.items()}
        return StageTotals(self.layers, self.forward.at(which), self.both.at(which), marks, behind)


def stage_totals(
    prices: Prices,
    work: Work,
    sizes: Sizes,
    choice: Choice,
    segment: Segment,
    overlap: bool = True,
    last: bool = True,
) -> StageTotals:
    """Totals of a pipeline stage. Messages to and from other stages are counted, but not awaited."""
    step = _TimedStep(prices, work, sizes, choice, overlap, last, segment)
    return StageTotals(step.layers, step.halfway, step.tape.totals(), step.marks, step.behind())


def prices_of(hw: Hardware, work: Work, sizes: Sizes) -> Prices:
    if work.precision not in hw.rate:
        raise ValueError(
            f"hardware {hw.name!r} has no figures for {work.precision}; it has {', '.join(hw.rate)}: "
            f"use --dtype {next(iter(hw.rate))}, or calibrate with --dtype {work.precision}"
        )
    hw.check_links(sizes.cuboids[0].ranks)
    return Prices(hw, work.precision, ITEMSIZE[work.precision], sizes.groups)


class _TimedStep(TimedLayer):
    def __init__(
        self, prices: Prices, work: Work, sizes: Sizes, choice: Choice, overlap: bool, last: bool, segment: Segment
    ) -> None:
        super().__init__(prices, work, sizes, choice, overlap)
        self.last, self.segment = last, segment
        self.layers = layers = self.c.layers if work.freeze else min(self.c.layers, STEADY)  # simulated
        self.lowest = self.trained.lowest - 1  # layer where backward ends; -1: the embedding, `layers`: the last norm
        self._held: list[Array] = []  # of wires, at the marks
        self.marks: list[Totals] = []  # before and after a layer like those that are not simulated
        self.kept = choice.policy.weights == "retain"
        self.sub_batches = choice.schedule.sub_batches
        self._in_flight: deque[tuple[Message, Array]] = deque()  # sums over x, and the elements of a rank's shards
        self._replicas: deque[Message] = deque()  # sums over replicas
        self._rows: deque[Message] = deque()  # the head's X, then its dX, of each sub-batch
        self._gathers: dict[int, Message] = {}  # in flight, by layer; the final norm is the last
        norm = [sizes.norm_weight] * len(self.trained.norm())
        self._buckets = [list(sizes.block_weights.values())] * layers + [norm] * segment.ends
        self.forward()
        self.halfway = self.tape.totals().copy()
        self.backward()
        if last:
            self.update()

    # The step

    def forward(self) -> None:
        if self.segment.embeds:
            for table in self.sizes.tables:
                self.whole(self.gather([table]), [table])
            self.play(self.lookup)
        else:
            self.count_messages("receive")
        for i in range(self.layers):
            self.of_block, self.saving = self.trained.block(i), i >= self.lowest
            self.mark(i in (STEADY - 2, STEADY - 1))
            self.prefetch(i)
            self.arrive(i)
            if self.choice.recompute == "full":
                self.save(self.rows() * self.sizes.d * self.e)  # the block's input
                self.saving = False
            self.play(self.block)
        if not self.segment.ends:
            self.count_messages("send")
            return
        self.saving = self.layers >= self.lowest
        self.prefetch(self.layers)
        classifier = [] if self.c.tied and self.kept else [self.sizes.head_weight]
        flight = self.gather(classifier) if classifier else None
        self.arrive(self.layers)
        self.play(self.to_head)
        if flight is not None:
            self.whole(flight, classifier)
        self.head()

    def backward(self) -> None:
        s, t = self.sizes, self.tape
        if self.segment.ends:
            t.stream("head", 3 * self.rows() * s.d * self.e, 2)
            if self.last and self.trained.head and not self.c.tied:
                self.send_on(s.head_weight.shard)
        else:
            self.count_messages("receive")
        if self.layers >= self.lowest:
            self.layers_backward()
        if self.segment.embeds:
            if self.lowest < 0:
                self.play(self.lookup_backward)
            for table, trained in zip(s.tables, self.trained.tables(), strict=True):
                if trained:
                    self.reduce([table])
        elif self.lowest < 0:
            self.count_messages("send")
        while self._in_flight:
            self.land()
        if self.last:
            self.sum_replicas()

    def layers_backward(self) -> None:
        """Reduce the gradients of a layer, or of the last norm, as far as they are trained."""
        if self.segment.ends:
            self.regather(self.layers)
        if self.choice.schedule.prefetch:
            self.regather(self.layers - 1)
        if self.segment.ends:
            self.arrive(self.layers, backward=True)
            self.play(self.norm_backward)
            self.reduce([self.sizes.norm_weight] * sum(self.trained.norm()))
        for i in reversed(range(max(self.lowest, 0), self.layers)):
            self.of_block = self.trained.block(i)
            self.mark(i in (0, 1))
            self.arrive(i, backward=True)
            if self.choice.recompute == "full":
                self.saving = False
                self.play(self.block)
                self.saving = True
            if self.choice.schedule.prefetch:
                self.regather(i - 1)
            self.play(self.block_backward)
            self.reduce(self.sizes.trained(self.of_block), self.sizes.head_norms(self.of_block))

    def sum_replicas(self) -> None:
        """Sum the remaining gradients over replicas at the end."""
        s, t = self.sizes, self.tape
        while self._replicas:
            t.wait(self._replicas.popleft())
        blocks = [self.trained.block(i) for i in range(self.c.layers)]
        count = sum(name.startswith("norm") for block in blocks for name in block)
        count += sum(self.trained.norm()) * self.segment.ends
        norms = count * -(-s.d // s.x)
        of_heads = np.full_like(norms, sum(map(s.head_norms, blocks)))
        for axis, summed in (("x", of_heads), ("y", norms + of_heads), ("z", of_heads)):
            t.wait(t.launch(axis, "all_reduce", summed, itemsize=STORED))

    def update(self) -> None:
        """Clipping and AdamW."""
        self.tape.wait(self.tape.launch("world", "all_reduce", np.full_like(self.b, 4), itemsize=8))
        trained = self.sizes.elements(self.trained, self.segment)
        self.tape.stream("optimizer", OPTIMIZER * trained * STORED, 4 + 2 * self.c.layers)

    def mark(self, here: bool) -> None:
        if here and self.c.layers > self.layers:
            self.marks.append(self.tape.totals().copy())
            self._held.append(self.tape.held())

    def behind(self) -> dict[str, Array]:
        """How much longer a layer of backward occupies a wire than it takes. Its own waits do not show this, because
        sums over x and replicas of a few layers are in flight before any is awaited."""
        if not self.marks:
            return {}
        *_, before, after = self.marks
        wire = (self._held[-1] - self._held[-2]).max(0)
        late, sums = np.maximum(wire - (after.seconds - before.seconds), 0.0), self.sizes.replicas > 1
        return {"replicas": late * sums, "x": late * ~sums}

    def play(self, steps: Callable[[], Steps]) -> None:
        """Simulate the sub-batches of a micro-batch in turn."""
        whole = self.b, self.m
        self.b, self.m = self.b // self.sub_batches, self.m // self.sub_batches
        for _ in zip_longest(*(steps() for _ in range(self.sub_batches))):
            pass
        self.b, self.m = whole

    # Weights: shards -> unsharded -> gradients -> shards

    def gather(self, weights: Sequence[Weight]) -> Message:
        shard = sum(w.shard for w in weights)
        self.tape.stream("weights", 3 * shard * self.e * (self.sizes.x > 1), 1 + len(weights))
        return self.tape.launch("x", "all_gather", shard * self.sizes.x)

    def whole(self, flight: Message, weights: Sequence[Weight]) -> None:
        self.tape.wait(flight)
        size, moved = sum(w.n * w.k for w in weights), (self.sizes.x > 1) | (self.e < STORED)
        self.tape.stream("weights", 2 * size * self.e * moved, len(weights))

    def prefetch(self, i: int) -> None:
        """Gather the weights of layer i and of the next, in forward."""
        for layer in (i, i + 1) if self.choice.schedule.prefetch else (i,):
            if layer < len(self._buckets) and layer not in self._gathers:
                self._gathers[layer] = self.gather(self._buckets[layer])

    def regather(self, i: int) -> None:
        """Gather the weights of layer i, in backward."""
        if i >= max(self.lowest, 0) and not self.kept and i not in self._gathers:
            self._gathers[i] = self.gather(self._buckets[i])

    def arrive(self, i: int, backward: bool = False) -> None:
        if backward:
            self.regather(i)
        if i in self._gathers:
            self.whole(self._gathers[i], self._buckets[i])
            stays = i == self.layers - 1 and self.choice.schedule.prefetch and self.segment.whole
            if not backward and not stays:
                del self._gathers[i]

    def reduce(self, weights: Sequence[Weight], uncut: int = 0) -> None:
        """Launch the sum over x of gradients, beside others that x does not split. Only a few layers' are in flight."""
        if not weights and not uncut:
            return
        shard = added([np.zeros_like(self.sizes.x), *(w.shard for w in weights)])
        size = shard * self.sizes.x
        self.tape.stream("weights", 3 * size * self.e * (self.sizes.x > 1), 2 * len(weights))
        self._in_flight.append((self.tape.launch("x", "reduce_scatter", size), shard + uncut))
        if len(self._in_flight) > MOST_IN_FLIGHT:
            self.land()

    def land(self) -> None:
        flight, elements = self._in_flight.popleft()
        self.tape.wait(flight)
        self.send_on(elements)

    def send_on(self, elements: Array) -> None:
        """Launch the sum over replicas. The model awaits all at the end; here a few at a time, so that each layer has
        its share of the wait."""
        if self.last:
            self._replicas.append(self.tape.launch("replicas", "all_reduce", elements, itemsize=STORED))
        if len(self._replicas) > MOST_IN_FLIGHT:
            self.tape.wait(self._replicas.popleft())

    # Both ends

    def count_messages(self, kind: str) -> None:
        """Count messages between stages: the residual stream, or its gradient."""
        size = self.rows() * self.sizes.d * self.e // self.sub_batches
        fare = Fare(np.zeros(len(size)), size * (kind == "send"), size > 0, None)
        self.tape.count("pipe", kind, fare, self.sub_batches, fare.seconds)

    def lookup(self) -> Steps:
        size = self.m * self.sizes.d * self.e
        self.tape.stream("ends", (4 if self.c.rotary else 10) * size, 6)
        flight = self.tape.launch("y", "reduce_scatter", self.m * self.sizes.d)
        yield Pause()
        self.tape.wait(flight)

    def lookup_backward(self) -> Steps:
        flight = self.tape.launch("y", "all_gather", self.m * self.sizes.d)
        yield Pause()
        self.tape.wait(flight)
        tables = sum(w.n * w.k for w in self.sizes.tables)
        self.tape.stream("ends", 4 * self.m * self.sizes.d * self.wide + 3 * tables * self.wide, 6)

    def to_head(self) -> Steps:
        yield from self.norm()
        self._rows.append(self.tape.launch("y", "all_gather", self.m * self.sizes.d))

    def head(self) -> None:
        s, t = self.sizes, self.tape
        self.play(self.part)
        dW = t.launch("x", "reduce_scatter", s.head_weight.shard * s.x) if self.trained.head else None
        for axis in ("x", "z", "replicas"):
            t.wait(t.launch(axis, "all_reduce", np.full_like(self.m, 2), itemsize=self.wide))
        while self._rows:
            t.wait(self._rows.popleft())
        if dW is not None:
            t.wait(dW)
        t.saved += self.trained.head * s.head_weight.shard * STORED + self.wide  # dW and the count

    def part(self) -> Steps:
        s, t = self.sizes, self.tape
        chunk = s.chunk(self.choice.policy.head_elements, self.sub_batches)
        chunks, rows = s.s // chunk, chunk * self.b
        t.wait(self._rows.popleft())
        seconds = t.prices.product(rows, s.vocab, s.d)
        t.compute("head", chunks * seconds)
        t.wait(t.launch("z", "reduce_scatter", rows * s.vocab, times=chunks))
        t.stream("head", LOSS * self.m // s.z * s.vocab * self.wide, 12)
        t.wait(t.launch("y", "all_gather", 4 * rows // s.z * s.y, times=chunks, itemsize=self.wide))
        t.wait(t.launch("z", "all_gather", rows * s.vocab, times=chunks))
        below, gradients = self.layers >= self.lowest, (self.layers >= self.lowest) + self.trained.head
        t.compute("head", gradients * chunks * seconds)
        t.stream("head", self.trained.head * 3 * s.vocab * s.d * self.wide * (1 + chunks * (self.e < 4)), 2)
        if below:
            self._rows.append(t.launch("y", "reduce_scatter", self.m * s.d))  # dX
        t.flops += (1 + gradients) * 2 * self.m * s.d * s.vocab
        self.save(self.m // s.y * s.d * self.e)
        yield Pause()
