"""A training step as one rank plays it: the model's own order of products, launches and waits, on a `Tape`.

The same shape as nn.py and product.py: a block is a generator that yields between launching a collective and needing
it, two half-batches are stepped in turn by the model's own `in_step`, backward is the forward's schedule in reverse.
Bytes, calls, FLOPs and saved activations add up to cost/cuboid.py's; the tests hold them to it. Elementwise operations
are counted as PyTorch runs them one by one: reads plus writes.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cuboid.comm import Steps, run
from cuboid.config import ModelConfig
from cuboid.model import Recompute
from cuboid.parallel.cuboid import Policy
from cuboid.plan.hardware import Hardware
from cuboid.plan.sizes import Sizes, Weight
from cuboid.plan.tape import Flight, Tape, Totals
from cuboid.plan.time import Array, Prices
from cuboid.schedule import PREFETCH, Schedule, in_step
from cuboid.weights import MOST_IN_FLIGHT

STORED = 4  # bytes of a parameter at rest, whatever products are computed in
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
STEADY = 4  # layers after which every further one takes as long as the last

#: How often an operand is read or written in all, elementwise operation by elementwise operation.
NORM, NORM_BACKWARD = {True: 9, False: 7}, {True: 27, False: 20}  # LayerNorm, RMSNorm
NONLINEAR, NONLINEAR_BACKWARD = {True: 5, False: 2}, {True: 22, False: 3}  # SwiGLU, GELU
LOSS, OPTIMIZER = 14, 12
ROTATE = 9


@dataclass(frozen=True)
class Choice:
    """What a plan chooses besides the cuboid."""

    recompute: Recompute = "none"
    policy: Policy = Policy()
    schedule: Schedule = PREFETCH


@dataclass(frozen=True)
class Work:
    """What a step computes."""

    config: ModelConfig
    batch: int  # sequences of a forward and backward
    seq: int
    precision: str = "bf16"
    micro_batches: int = 1  # in a step, each of `batch` sequences

    def __post_init__(self) -> None:
        if self.precision not in ITEMSIZE:
            raise ValueError(f"precision {self.precision!r} is not one of {', '.join(ITEMSIZE)}")

    @property
    def tokens(self) -> int:
        return self.batch * self.micro_batches * self.seq


def step_totals(
    prices: Prices, work: Work, sizes: Sizes, choice: Choice, overlap: bool = True, update: bool = True
) -> Totals:
    """Of a forward and backward of every candidate, and of the optimizer's update unless told not to."""
    layers = work.config.layers
    if layers <= STEADY:
        return _Step(prices, work, sizes, choice, layers, overlap, update).tape.totals()
    shallow, deep = (_Step(prices, work, sizes, choice, n, overlap, update).tape.totals() for n in (STEADY - 1, STEADY))
    return deep.plus(deep, layers - STEADY, without=shallow)  # each further layer adds what the last one added


def prices_of(hw: Hardware, work: Work, sizes: Sizes) -> Prices:
    if work.precision not in hw.rate:
        raise ValueError(f"hardware {hw.name!r} has no figures for {work.precision}; it has {', '.join(hw.rate)}")
    return Prices(hw, work.precision, ITEMSIZE[work.precision], sizes.groups)


class _Step:
    def __init__(
        self, prices: Prices, work: Work, sizes: Sizes, choice: Choice, layers: int, overlap: bool, update: bool
    ) -> None:
        self.hw, self.c, self.sizes, self.precision = prices.hw, work.config, sizes, work.precision
        self.e = ITEMSIZE[work.precision]
        self.wide, self.choice, self.layers = max(self.e, 4), choice, layers
        self.tape = Tape(prices, overlap)
        self.retain = choice.policy.activations == "retain"
        self.kept = choice.policy.weights == "retain"
        self.parts = 2 if choice.schedule.halves else 1
        self.b, self.m = sizes.b, sizes.m
        self.saving = True
        self._in_flight: deque[Flight] = deque()
        self._gathers: dict[int, Flight] = {}  # of layers, on their way; the final norm is the last
        self._buckets = [sizes.block_weights()] * layers + [sizes.norm_weights(1)]
        self.forward()
        self.backward()
        if update:
            self.update()

    # The step

    def forward(self) -> None:
        for table in self.sizes.tables():
            self.whole(self.gather([table]), [table])
        self.play(self.lookup)
        for i in range(self.layers):
            self.prefetch(i)
            self.arrive(i)
            if self.choice.recompute == "full":
                self.save(self.rows() * self.sizes.d * self.e)  # the block's input
                self.saving = False
            self.play(self.block)
            self.saving = True
        self.prefetch(self.layers)
        classifier = [] if self.c.tied and self.kept else [self.sizes.head_weight()]
        flight = self.gather(classifier) if classifier else None
        self.arrive(self.layers)
        run(self.norm())
        if flight is not None:
            self.whole(flight, classifier)
        self.head()

    def backward(self) -> None:
        s, t = self.sizes, self.tape
        t.stream("head", 3 * self.rows() * s.d * self.e, 2)
        self.again(self.layers)
        self.again(self.layers - 1)
        self.arrive(self.layers, backward=True)
        run(self.norm_backward())
        self.reduce(self._buckets[self.layers])
        for i in reversed(range(self.layers)):
            self.arrive(i, backward=True)
            if self.choice.recompute == "full":
                self.saving = False
                self.play(self.block)
                self.saving = True
            self.again(i - 1)
            self.play(self.block_backward)
            self.reduce(self._buckets[i])
        self.play(self.lookup_backward)
        for table in s.tables():
            self.reduce([table])
        while self._in_flight:
            t.wait(self._in_flight.popleft())
        vectors = (2 * self.layers + 1) * (1 + self.c.norm_bias)
        t.wait(t.launch("y", "all_reduce", vectors * -(-s.d // s.x), itemsize=STORED))
        t.wait(t.launch("data", "all_reduce", self.parameters(), itemsize=STORED))

    def update(self) -> None:
        """Clipping and AdamW."""
        self.tape.wait(self.tape.launch("world", "all_reduce", np.full_like(self.b, 2), itemsize=8))
        self.tape.stream("optimizer", OPTIMIZER * self.parameters() * STORED, 4 + 2 * self.layers)

    def play(self, steps: Callable[[], Steps]) -> None:
        """With the whole batch, or with its halves in step."""
        whole = self.b, self.m
        self.b, self.m = self.b // self.parts, self.m // self.parts
        in_step([steps() for _ in range(self.parts)])
        self.b, self.m = whole

    def parameters(self) -> Array:
        s = self.sizes
        ends = [*s.tables(), *s.norm_weights(1)] + ([] if self.c.tied else [s.head_weight()])
        return sum(w.shard for w in ends) + self.layers * sum(w.shard for w in s.block_weights())

    def rows(self) -> Array:
        """Of the residual stream."""
        return self.m // self.sizes.y

    def save(self, size: Array) -> None:
        if self.saving:
            self.tape.saved = self.tape.saved + size

    # Weights: shards -> whole -> gradients -> shards

    def gather(self, weights: Sequence[Weight]) -> Flight:
        shard = sum(w.shard for w in weights)
        self.tape.stream("weights", 3 * shard * self.e * (self.sizes.x > 1), 1 + len(weights))
        return self.tape.launch("x", "all_gather", shard * self.sizes.x)

    def whole(self, flight: Flight, weights: Sequence[Weight]) -> None:
        self.tape.wait(flight)
        size, moved = sum(w.n * w.k for w in weights), (self.sizes.x > 1) | (self.e < STORED)
        self.tape.stream("weights", 2 * size * self.e * moved, len(weights))

    def prefetch(self, i: int) -> None:
        """The weights of layer i and of the next, in forward."""
        for layer in (i, i + 1) if self.choice.schedule.prefetch else (i,):
            if layer <= self.layers and layer not in self._gathers:
                self._gathers[layer] = self.gather(self._buckets[layer])

    def again(self, i: int) -> None:
        """The weights of layer i on their way, in backward."""
        if i >= 0 and not self.kept and i not in self._gathers:
            self._gathers[i] = self.gather(self._buckets[i])

    def arrive(self, i: int, backward: bool = False) -> None:
        if backward:
            self.again(i)
        if i in self._gathers:
            self.whole(self._gathers[i], self._buckets[i])
            if not backward:
                del self._gathers[i]

    def reduce(self, weights: Sequence[Weight]) -> None:
        """Launch the sum over x of the gradients; no more than a few layers' are on their way."""
        size = sum(w.shard for w in weights) * self.sizes.x
        self.tape.stream("weights", 3 * size * self.e * (self.sizes.x > 1), 2 * len(weights))
        self._in_flight.append(self.tape.launch("x", "reduce_scatter", size))
        if len(self._in_flight) > MOST_IN_FLIGHT:
            self.tape.wait(self._in_flight.popleft())

    # Products

    def multiply(self, rows: Array, ns: Sequence[Array], k: Array, blocks: Array | int = 1) -> None:
        """One product for each n, in so many pieces."""
        for n in ns:
            self.tape.compute("products", blocks * self.tape.prices.product(rows, n / blocks, k))
            self.tape.flops = self.tape.flops + 2 * rows * n * k

    def product(self, k: Array, outs: Sequence["Out"], k_axis: str, n_axis: str, k_blocks: Array | int = 1) -> Steps:
        t = self.tape
        X = t.launch(n_axis, "all_gather", self.m * k)
        yield
        t.wait(X)
        self.save(self.m * k * self.e // (1 if self.retain else self.sizes.axes[n_axis]))
        Ys = []
        for out in outs:
            self.multiply(self.m, out.ns, k, out.blocks * k_blocks)
            Ys.append(t.launch(k_axis, "reduce_scatter", self.m * out.n))
        yield
        for out, Y in zip(outs, Ys, strict=True):
            t.wait(Y)
            t.stream("elementwise", 2 * bool(self.c.bias) * self.m * out.n // self.sizes.axes[k_axis] * self.e)

    def product_backward(
        self, k: Array, outs: Sequence["Out"], k_axis: str, n_axis: str, k_blocks: Array | int = 1
    ) -> Steps:
        t = self.tape
        dYs = [t.launch(k_axis, "all_gather", self.m * out.n) for out in outs]
        yield
        X = None if self.retain else t.launch(n_axis, "all_gather", self.m * k)
        for dY in dYs:
            t.wait(dY)
        for out in outs:
            self.multiply(self.m, out.ns, k, out.blocks * k_blocks)
        dX = t.launch(n_axis, "reduce_scatter", self.m * k)
        if X is not None:
            t.wait(X)
        for out in outs:
            self.multiply(self.m, out.ns, k, out.blocks * k_blocks)
            t.stream("elementwise", bool(self.c.bias) * self.m * out.n * self.e)
        yield
        t.wait(dX)

    def qkv(self) -> tuple[Array, list["Out"], str, str]:
        """All three travel together by heads, or keys and values apart by tokens where they have too few heads."""
        s = self.sizes
        return s.d, [Out([s.q, *[s.kv * ~s.few] * 2], s.z), Out([s.kv * s.few] * 2)], "z", "y"

    def up(self) -> tuple[Array, list["Out"], str, str]:
        return self.sizes.d, [Out([self.sizes.f] * (2 if self.c.gated else 1))], "z", "y"

    def out(self) -> tuple[Array, list["Out"], str, str, Array]:
        return self.sizes.q, [Out([self.sizes.d])], "y", "z", self.sizes.z

    def down(self) -> tuple[Array, list["Out"], str, str]:
        return self.sizes.f, [Out([self.sizes.d])], "y", "z"

    # A block

    def block(self) -> Steps:
        s, residual = self.sizes, self.rows() * self.sizes.d * self.e
        yield from self.norm()
        yield from self.product(*self.qkv())
        if self.choice.recompute == "selective":
            self.save(self.m * (s.q + 2 * s.kv) // s.z * self.e)
            saving, self.saving = self.saving, False
            run(self.attend())
            self.saving = saving
        else:
            yield from self.attend()
        yield from self.product(*self.out())
        self.tape.stream("elementwise", 3 * residual)
        yield from self.norm()
        yield from self.product(*self.up())
        self.nonlinear(NONLINEAR)
        self.save(self.m // s.z * s.f * (2 if self.c.gated else 1) * self.e)
        yield from self.product(*self.down())
        self.tape.stream("elementwise", 3 * residual)

    def block_backward(self) -> Steps:
        residual = self.rows() * self.sizes.d * self.e
        yield from self.product_backward(*self.down())
        self.nonlinear(NONLINEAR_BACKWARD)
        yield from self.product_backward(*self.up())
        yield from self.norm_backward()
        self.tape.stream("elementwise", 3 * residual)
        yield from self.product_backward(*self.out())
        if self.choice.recompute == "selective":
            saving, self.saving = self.saving, False
            run(self.attend())
            self.saving = saving
        yield from self.attend_backward()
        yield from self.product_backward(*self.qkv())
        yield from self.norm_backward()
        self.tape.stream("elementwise", 3 * residual)

    def nonlinear(self, passes: dict[bool, int]) -> None:
        size = self.m // self.sizes.z * self.sizes.f * self.e
        self.tape.stream("elementwise", passes[self.c.gated] * size, passes[self.c.gated] // 2)

    def norm(self) -> Steps:
        rows, centred = self.rows(), self.c.norm_bias
        size = rows * self.sizes.d * self.wide
        self.tape.stream("elementwise", (1 if centred else 3) * size, 3)
        if centred:
            flight = self.tape.launch("z", "all_gather", 2 * rows * self.sizes.z, itemsize=self.wide)
        else:
            flight = self.tape.launch("z", "all_reduce", rows, itemsize=self.wide)
        yield
        self.tape.wait(flight)
        self.tape.stream("elementwise", (NORM[centred] - (1 if centred else 3)) * size, 6)
        self.save(rows * self.sizes.d * self.e + rows * (1 + centred) * self.wide)

    def norm_backward(self) -> Steps:
        rows, centred = self.rows(), self.c.norm_bias
        size = rows * self.sizes.d * self.wide
        self.tape.stream("elementwise", (NORM_BACKWARD[centred] - 7) * size, 12)
        flight = self.tape.launch("z", "all_reduce", rows * (1 + centred), itemsize=self.wide)
        yield
        self.tape.wait(flight)
        self.tape.stream("elementwise", 7 * size, 3)

    # Attention

    def pair(self, axis: str, whole: Array, back: bool) -> Iterator[None]:
        flight = self.tape.launch(axis, "reduce_scatter" if back else "all_gather", whole)
        yield
        self.tape.wait(flight)

    def gathers(self) -> list[tuple[str, Array]]:
        """Of keys and values, where there are fewer heads than y·z or x cuts the sequence."""
        s, c = self.sizes, self.c
        apart = s.few & (c.kv_heads % s.y != 0)
        kv = np.where(apart, c.kv_dim, s.kv)
        keys = self.m * 2 * s.picked * c.head_dim * s.context * (s.context > 1)
        over_y = self.m // s.z * 2 * s.kv * s.y * apart
        return [("y", over_y), ("z", self.m * 2 * kv * s.few), ("x/context", keys)]

    def scores(self) -> tuple[Array, Array]:
        """Of queries and keys: counted as is the custom, and those not masked."""
        s = self.sizes
        piece = s.s // 2
        cut = s.context > 1
        counted = np.where(cut, piece * piece * (2 * s.context + 1), s.s * s.s)
        return counted, counted - np.where(cut, piece * piece, s.s * s.s // 2)

    def attention_seconds(self, backward: bool) -> None:
        s, e = self.sizes, self.c.head_dim
        counted, seen = self.scores()
        flops = 10 if backward else 4
        rate = self.hw.rate[self.precision] * self.hw.attention[backward]
        self.tape.compute("attention", flops * self.b * s.heads * seen * e / rate + self.hw.launch)
        self.tape.flops = self.tape.flops + flops * self.b * s.heads * counted * e

    def attend(self) -> Steps:
        s, c, m = self.sizes, self.c, self.m
        for axis, whole in self.gathers()[:2]:
            yield from self.pair(axis, whole, back=False)
        outputs = m * s.heads * c.head_dim
        keys = m * 2 * s.picked * c.head_dim
        if c.rotary:
            self.tape.stream("elementwise", ROTATE * (outputs + keys // 2) * self.wide + keys * self.e, 12)
        yield from self.pair(*self.gathers()[2], back=False)
        self.attention_seconds(backward=False)
        cut = s.context > 1
        masks = 2 * s.context * (s.s // 2) ** 2  # of the piece that looks back at all others
        saved = outputs + keys * s.context + np.where(cut, outputs + masks, 0)  # outputs before the pieces are joined
        saved = saved + np.where(~cut & (s.z > 1) & self.retain, outputs, 0)
        self.save(saved * self.e + m * s.heads * self.wide)

    def attend_backward(self) -> Steps:
        s, c, m = self.sizes, self.c, self.m
        self.attention_seconds(backward=True)
        yield from self.pair(*self.gathers()[2], back=True)
        if c.rotary:
            self.tape.stream("elementwise", ROTATE * m * (s.heads + s.picked) * c.head_dim * self.wide, 12)
        for axis, whole in reversed(self.gathers()[:2]):
            yield from self.pair(axis, whole, back=True)

    # Both ends

    def lookup(self) -> Steps:
        size = self.m * self.sizes.d * self.e
        self.tape.stream("ends", (4 if self.c.rotary else 10) * size, 6)
        flight = self.tape.launch("y", "reduce_scatter", self.m * self.sizes.d)
        yield
        self.tape.wait(flight)

    def lookup_backward(self) -> Steps:
        flight = self.tape.launch("y", "all_gather", self.m * self.sizes.d)
        yield
        self.tape.wait(flight)
        tables = sum(w.n * w.k for w in self.sizes.tables())
        self.tape.stream("ends", 4 * self.m * self.sizes.d * self.wide + 3 * tables * self.wide, 6)

    def head(self) -> None:
        s, t = self.sizes, self.tape
        chunk = s.chunk(self.choice.policy.head_elements)
        chunks, rows = s.s // chunk, chunk * self.b
        X = t.launch("y", "all_gather", self.m * s.d)
        t.wait(X)
        seconds = t.prices.product(rows, s.vocab, s.d)
        t.compute("head", chunks * seconds)
        t.wait(t.launch("z", "reduce_scatter", rows * s.vocab, times=chunks))
        t.stream("head", LOSS * self.m // s.z * s.vocab * self.wide, 12)
        t.wait(t.launch("y", "all_gather", 4 * rows // s.z * s.y, times=chunks, itemsize=self.wide))
        t.wait(t.launch("z", "all_gather", rows * s.vocab, times=chunks))
        t.compute("head", 2 * chunks * seconds)
        t.stream("head", 3 * s.vocab * s.d * self.wide * (1 + chunks * (self.e < 4)), 2)
        dX = t.launch("y", "reduce_scatter", self.m * s.d)
        dW = t.launch("x", "reduce_scatter", s.head_weight().shard * s.x)
        for axis in ("x", "z", "data"):
            t.wait(t.launch(axis, "all_reduce", np.full_like(self.m, 2), itemsize=self.wide))
        t.wait(dX)
        t.wait(dW)
        t.flops = t.flops + 3 * 2 * self.m * s.d * s.vocab
        self.save(self.m // s.y * s.d * self.e + s.head_weight().shard * STORED + self.wide)  # dX, dW and the count


@dataclass(frozen=True)
class Out:
    """Outputs that travel in one reduce-scatter."""

    ns: Sequence[Array]
    blocks: Array | int = 1  # pieces that a product is written in

    @property
    def n(self) -> Array:
        return sum(self.ns)  # type: ignore[return-value]
