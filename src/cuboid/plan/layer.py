"""Simulates one layer of a rank, forward and backward, in the order of nn.py and product.py, on a `Tape`.

A block is a generator that yields between launching a collective and needing it; backward is the forward's schedule in
reverse. Elementwise operations are counted as PyTorch runs them one by one: reads plus writes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuboid.comm.flight import Pause, Steps, run
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import Policy
from cuboid.model.freeze import Trained
from cuboid.model.transformer import Recompute
from cuboid.plan.shared import tape_of
from cuboid.plan.sizes import Sizes, added
from cuboid.plan.tape import Message
from cuboid.plan.time import Array, Prices
from cuboid.step.schedule import PREFETCH, Schedule

STORED = 4  # bytes of a parameter at rest, whatever the compute dtype
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}

#: How often an operand is read or written in all, elementwise operation by elementwise operation.
NORM, NORM_BACKWARD = {True: 9, False: 7}, {True: 27, False: 20}  # LayerNorm, RMSNorm
NONLINEAR, NONLINEAR_BACKWARD = {True: 5, False: 2}, {True: 22, False: 3}  # SwiGLU, GELU
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
    freeze: str = ""  # a pattern of the parameters that are not trained

    def __post_init__(self) -> None:
        if self.precision not in ITEMSIZE:
            raise ValueError(f"precision {self.precision!r} is not one of {', '.join(ITEMSIZE)}")
        if Trained(self.config, self.freeze).nothing:
            raise ValueError(f"freeze={self.freeze!r} leaves nothing to train; freeze less")

    @property
    def tokens(self) -> int:
        return self.batch * self.micro_batches * self.seq


@dataclass(frozen=True)
class Outputs:
    """Outputs that share one reduce-scatter, by the names of their linears."""

    ns: Mapping[str, Array]
    blocks: Array | int = 1  # pieces that a product is written in

    @property
    def n(self) -> Array:
        return added(self.ns.values())


class TimedLayer:
    """Simulates layers with `b` sequences and `m` tokens of the x-slice: all, or those of a sub-batch."""

    def __init__(self, prices: Prices, work: Work, sizes: Sizes, choice: Choice, overlap: bool) -> None:
        self.hw, self.c, self.sizes, self.precision = prices.hw, work.config, sizes, work.precision
        self.e = ITEMSIZE[work.precision]
        self.wide, self.choice = max(self.e, 4), choice
        self.tape = tape_of(prices, overlap)
        self.retain = choice.policy.activations == "retain"
        self.b, self.m = sizes.b, sizes.m
        self.saving = True
        self.trained = Trained(work.config, work.freeze)
        self.of_block = self.trained.block(0)  # trained parameters of the current layer

    def rows(self) -> Array:
        """Rows of the residual stream."""
        return self.m // self.sizes.y

    def save(self, size: Array | int) -> None:
        if self.saving:
            self.tape.saved += size

    # Products

    def trains(self, outs: Sequence[Outputs]) -> bool:
        """Whether any of their weights is trained, so that backward needs X."""
        return any(f"{name}.weight" in self.of_block for out in outs for name in out.ns)

    def multiply(self, out: Outputs, k: Array, k_blocks: Array | int, equation: int) -> None:
        """(1), (2) or (3) of product.py for each weight of an output, in blocks of n and k as it is run."""
        m, k_i = self.m, k / k_blocks
        for name, n in out.ns.items():
            if equation == 3 and f"{name}.weight" not in self.of_block:
                continue
            n_j = n / out.blocks
            sides = {1: (m, n_j, k_i), 2: (m, k_i, n_j), 3: (n_j, k_i, m)}[equation]
            seconds = out.blocks * k_blocks * self.tape.prices.product(*sides)
            self.tape.compute("matmuls", seconds * (n > 0))
            if equation == 3:
                self.tape.dW += seconds * (n > 0)
            self.tape.flops += 2 * m * n * k

    def product(self, k: Array, outs: Sequence[Outputs], k_axis: str, n_axis: str, k_blocks: Array | int = 1) -> Steps:
        t = self.tape
        X = t.launch(n_axis, "all_gather", self.m * k)
        yield Pause()
        t.wait(X)
        if self.trains(outs):
            self.save(self.m * k * self.e // (1 if self.retain else self.sizes.axes[n_axis]))
        Ys = []
        for out in outs:
            self.multiply(out, k, k_blocks, 1)
            Ys.append(t.launch(k_axis, "reduce_scatter", self.m * out.n))
        yield Pause()
        for out, Y in zip(outs, Ys, strict=True):
            t.wait(Y)
            t.stream("elementwise", 2 * bool(self.c.bias) * self.m * out.n // self.sizes.axes[k_axis] * self.e)

    def product_backward(
        self,
        k: Array,
        outs: Sequence[Outputs],
        k_axis: str,
        n_axis: str,
        k_blocks: Array | int = 1,
        X: Message | None = None,
        before: Callable[[], tuple[Any, ...]] | None = None,
    ) -> Steps:
        """Backward. Its X may be in flight already; returns the launched X of the linear `before` it."""
        t, ahead = self.tape, None
        dYs = [t.launch(k_axis, "all_gather", self.m * out.n) for out in outs]
        if X is None and not self.retain and self.trains(outs):
            X = t.launch(n_axis, "all_gather", self.m * k)
        yield Pause()
        for dY in dYs:
            t.wait(dY)
        for out in outs:
            self.multiply(out, k, k_blocks, 2)
        dX = t.launch(n_axis, "reduce_scatter", self.m * k)
        if before is not None and not self.retain:
            k_before, outs_before, _, n_before, *_ = before()
            ahead = t.launch(n_before, "all_gather", self.m * k_before) if self.trains(outs_before) else None
        if X is not None:
            t.wait(X)
        for out in outs:
            self.multiply(out, k, k_blocks, 3)
            t.stream("elementwise", bool(self.c.bias) * self.m * out.n * self.e)
        yield Pause()
        t.wait(dX)
        return ahead

    def qkv(self) -> tuple[Array, list[Outputs], str, str]:
        """q, k and v share a reduce-scatter by heads; with too few key heads, k and v have their own, by tokens."""
        s = self.sizes
        keys = ("attention.k", "attention.v")
        outs = [Outputs({"attention.q": s.q} | dict.fromkeys(keys, s.kv * ~s.few), s.z)]
        if s.few.any():
            outs.append(Outputs(dict.fromkeys(keys, s.kv * s.few)))
        return s.d, outs, "z", "y"

    def up(self) -> tuple[Array, list[Outputs], str, str]:
        names = ("mlp.gate", "mlp.up") if self.c.gated else ("mlp.up",)
        return self.sizes.d, [Outputs(dict.fromkeys(names, self.sizes.f))], "z", "y"

    def out(self) -> tuple[Array, list[Outputs], str, str, Array]:
        return self.sizes.q, [Outputs({"attention.out": self.sizes.d})], "y", "z", self.sizes.z

    def down(self) -> tuple[Array, list[Outputs], str, str]:
        return self.sizes.f, [Outputs({"mlp.down": self.sizes.d})], "y", "z"

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
        X = yield from self.product_backward(*self.down(), before=self.up)
        self.nonlinear(NONLINEAR_BACKWARD)
        X = yield from self.product_backward(*self.up(), X=X, before=self.out)
        yield from self.norm_backward()
        self.tape.stream("elementwise", 3 * residual)
        X = yield from self.product_backward(*self.out(), X=X, before=self.qkv)
        if self.choice.recompute == "selective":
            saving, self.saving = self.saving, False
            run(self.attend())
            self.saving = saving
        yield from self.attend_backward()
        yield from self.product_backward(*self.qkv(), X=X)
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
        yield Pause()
        self.tape.wait(flight)
        self.tape.stream("elementwise", (NORM[centred] - (1 if centred else 3)) * size, 6)
        self.save(rows * self.sizes.d * self.e + rows * (1 + centred) * self.wide)

    def norm_backward(self) -> Steps:
        rows, centred = self.rows(), self.c.norm_bias
        size = rows * self.sizes.d * self.wide
        self.tape.stream("elementwise", (NORM_BACKWARD[centred] - 7) * size, 12)
        flight = self.tape.launch("z", "all_reduce", rows * (1 + centred), itemsize=self.wide)
        yield Pause()
        self.tape.wait(flight)
        self.tape.stream("elementwise", 7 * size, 3)

    # Attention

    def pair(self, axis: str, whole: Array, back: bool) -> Steps:
        flight = self.tape.launch(axis, "reduce_scatter" if back else "all_gather", whole)
        yield Pause()
        self.tape.wait(flight)

    def gathers(self) -> list[tuple[str, Array]]:
        """Gathers of keys and values, if there are fewer heads than y·z or x splits the sequence."""
        s, c = self.sizes, self.c
        apart = s.few & (c.kv_heads % s.y != 0)
        kv = np.where(apart, c.kv_dim, s.kv)
        keys = self.m * 2 * s.picked * c.head_dim * s.context * (s.context > 1)
        over_y = self.m // s.z * 2 * s.kv * s.y * apart
        return [("y", over_y), ("z", self.m * 2 * kv * s.few), ("x/context", keys)]

    def scores(self) -> tuple[Array, Array]:
        """Pairs of queries and keys: all, which are counted as usual, and those not masked."""
        s = self.sizes
        piece = s.s // 2
        split = s.context > 1
        counted = np.where(split, piece * piece * (2 * s.context + 1), s.s * s.s)
        return counted, counted - np.where(split, piece * piece, s.s * s.s // 2)

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
        if c.qk_norm:
            self.head_norms(outputs, keys // 2)
        if c.rotary:
            self.tape.stream("elementwise", ROTATE * (outputs + keys // 2) * self.wide + keys * self.e, 12)
        yield from self.pair(*self.gathers()[2], back=False)
        self.attention_seconds(backward=False)
        split = s.context > 1
        masks = 2 * s.context * (s.s // 2) ** 2  # of the piece that looks back at all others
        saved = outputs + keys * s.context + np.where(split, outputs + masks, 0)  # outputs before the pieces are joined
        alone = "attention.out.weight" not in self.of_block  # else it is what the next product saves
        saved = saved + np.where(~split & (((s.z > 1) & self.retain) | alone), outputs, 0)
        self.save(saved * self.e + m * s.heads * self.wide)

    def head_norms(self, queries: Array, keys: Array) -> None:
        """QK-norm. It saves its inputs, and the values too if they share the keys' buffer and x splits the sequence."""
        s = self.sizes
        self.tape.stream("elementwise", NORM[False] * (queries + keys) * self.wide, 18)
        self.save((queries + keys * (1 + ((s.context > 1) & ~s.few))) * self.e)

    def attend_backward(self) -> Steps:
        s, c, m = self.sizes, self.c, self.m
        self.attention_seconds(backward=True)
        yield from self.pair(*self.gathers()[2], back=True)
        if c.rotary:
            self.tape.stream("elementwise", ROTATE * m * (s.heads + s.picked) * c.head_dim * self.wide, 12)
        if c.qk_norm:
            size = m * (s.heads + s.picked) * c.head_dim * self.wide
            self.tape.stream("elementwise", NORM_BACKWARD[False] * size, 30)
        for axis, whole in reversed(self.gathers()[:2]):
            yield from self.pair(axis, whole, back=True)
