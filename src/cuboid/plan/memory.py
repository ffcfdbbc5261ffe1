"""What a rank holds at the fullest moments of a step, by kind.

At rest: parameters, AdamW's two moments, gradients once they are summed, activations that forward has saved. For a
moment: weights gathered, gradients on their way, operands gathered, the head's chunk. None of it grows with depth, and
what does (saved activations fall, gradients rise) does so evenly, so the fullest moment is one of a few:

    head     everything is saved; the logits' chunk and the table's gradient are alive
    inside   of the last few layers' backward, or the first's: the MLP's operands and their gradients
    between  layers: gradients packed for the way over x, those of two layers more still on it
    table    all gradients are there, the embedding's on its way
    data     all gradients joined for the sum over replicas
"""

from dataclasses import dataclass

import numpy as np

from cuboid.plan.hardware import Hardware
from cuboid.plan.layer import ITEMSIZE, STORED, Choice, Work
from cuboid.plan.sizes import Sizes
from cuboid.plan.time import Array
from cuboid.weights import MOST_IN_FLIGHT


@dataclass(frozen=True)
class Memory:
    """Bytes at the fullest moment."""

    parameters: Array
    gradients: Array
    optimizer: Array
    activations: Array
    buffers: Array

    @property
    def peak(self) -> Array:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


def memory(
    hw: Hardware, work: Work, sizes: Sizes, choice: Choice, saved: Array, holds: bool = True, moments: bool = True
) -> Memory:
    """`saved` is what a forward leaves for backward, all layers' and the head's. `holds`: the backend keeps what it
    sends until that is awaited, as gloo and NCCL do."""
    held = _Held(hw, work, sizes, choice, saved, holds)
    parameters = sizes.parameters * STORED
    found = held.moments()
    which = np.stack([sum(moment) for moment in found]).argmax(0)
    gradients, activations, buffers = (
        np.choose(which, [moment[i] for moment in found]).astype(np.int64) for i in range(3)
    )
    if work.micro_batches > 1:  # gradients of the micro-batches before
        gradients = gradients + parameters
    return Memory(parameters, gradients, (2 if moments else 0) * parameters, activations, buffers)


#: Gradients, activations, buffers.
Moment = tuple[Array, Array, Array]


class _Held:
    def __init__(self, hw: Hardware, work: Work, s: Sizes, choice: Choice, saved: Array, holds: bool) -> None:
        self.c, self.s, self.choice, self.saved = work.config, s, choice, saved
        self.e = ITEMSIZE[work.precision]
        self.wide = max(self.e, 4)
        self.m = s.m
        self.apart = s.x > 1
        self.whole = sum(w.n * w.k for w in s.block_weights) * self.e
        self.shard = sum(w.shard for w in s.block_weights) * STORED
        self.direct = hw.direct or self.e < 4
        self.way = 1 - (not holds) + self.received(s.x)  # a reduce-scatter over x: what is sent, what is received
        self.head_saved = self.m // s.y * s.d * self.e + s.head_weight.shard * STORED
        self.layer = (saved - self.head_saved) // max(work.config.layers, 1)
        kept = self.apart & (choice.policy.weights == "retain")
        self.kept = np.where(kept, self.whole, 0)  # of each layer

    def received(self, axis: Array) -> Array:
        """Of what is scattered over an axis: everyone's parts, of two ranks the other's alone."""
        return np.where(axis == 2, 0.5, 1.0) * self.direct

    def moments(self) -> list[Moment]:
        last = self.c.layers
        numbers = sorted({1, 2, 3, last} & set(range(1, last + 1)))
        layers = [moment for j in numbers for moment in (self.inside(j), self.between(j))]
        return [self.head(), *layers, self.table(), self.data()]

    def head(self) -> Moment:
        s, e = self.s, self.e
        table, rows = s.vocab * s.d, s.chunk(self.choice.policy.head_elements) * s.b
        partial, logits = rows * s.vocab * e, rows // s.z * s.vocab * self.wide
        summed = partial + logits * (2 if e < 4 else 1)
        chunk = np.where(s.z > 1, np.maximum((1 + self.received(s.z)) * partial, summed), 2 * logits)
        reduced = self.apart * table * e * (1 + (e < 4)) + (e < 4) * table * e
        gathered = table * e * (self.apart | (e < STORED)) + table * self.wide
        last = np.where(self.apart & (self.kept == 0), self.whole, 0) * self.choice.schedule.prefetch
        kept = self.kept * self.c.layers + last
        X = 2 * self.m * s.d * e + (s.y > 1) * self.m // s.y * s.d * e
        return self.none(), self.saved - self.head_saved, kept + gathered + X + np.maximum(chunk, reduced)

    def none(self) -> Array:
        return np.zeros_like(self.saved)

    def remaining(self, j: int) -> tuple[Array, Array]:
        """Gradients there and activations saved while the j-th last layer runs backward."""
        over = np.where(self.apart, max(j - 1 - MOST_IN_FLIGHT, 0), j - 1)
        landed = over * np.where(self.apart, self.shard, self.whole)
        return landed + self.s.head_weight.shard * STORED, self.saved - self.head_saved - (j - 1) * self.layer

    def weights(self, j: int) -> Array:
        """Gathered for this layer and on the way for the next, and the gradients of layers before."""
        own = np.where(self.apart | (self.e < STORED), self.whole, 0)
        following = np.where(self.apart, self.whole, 0) * (j < self.c.layers)
        flying = self.apart * min(j - 1, MOST_IN_FLIGHT) * self.way * self.whole
        if self.choice.policy.weights == "retain":
            return np.where(self.apart, self.kept * (self.c.layers - j + 1), own) + flying
        return own + following + flying

    def inside(self, j: int) -> Moment:
        s, c, m, e = self.s, self.c, self.m, self.e
        gradients, activations = self.remaining(j)
        ups = 2 if c.gated else 1
        one = s.f * s.d * e
        spread, narrow = m * s.f * e, m * s.d * e
        regathers = self.choice.policy.activations != "retain"
        X_down, inner = spread // (s.z if regathers else 1), ups * spread // s.z  # saved, until their product is done
        # dY whole over y, X whole over z again, dX and what of its scatter is received
        down = narrow * (s.y > 1) + spread * (1 + (s.z > 1) * (regathers + self.received(s.z))) + one
        nonlinear = spread // s.z * (7 if c.gated else 2) + one - X_down
        up = ups * spread * (s.z > 1) + ups * spread // s.z + (1 + ups) * one - X_down - inner
        up = up + narrow * (1 + (s.y > 1) * (regathers + self.received(s.y)))
        buffers = np.maximum(np.maximum(down, nonlinear), up) + 2 * narrow // s.y
        parts = self.choice.schedule.parts
        buffers = buffers * (parts + 1) // (2 * parts)  # of other parts only what is in flight
        if self.choice.recompute == "full":
            buffers = buffers + self.recomputed()
        return gradients, activations, self.weights(j) + buffers

    def recomputed(self) -> Array:
        """What one layer saves once it has been computed again."""
        s, c, m, e = self.s, self.c, self.m, self.e
        retain = self.choice.policy.activations == "retain"
        y, z = (np.ones_like(s.y), np.ones_like(s.z)) if retain else (s.y, s.z)
        products = 2 * m * s.d // y + m * (s.q + s.f) // z
        attention = m * (s.heads + 2 * s.picked * s.context) * c.head_dim
        inner = m // s.z * s.f * (2 if c.gated else 1)
        return (2 * m // s.y * s.d + products + attention + inner) * e

    def between(self, j: int) -> Moment:
        gradients, activations = self.remaining(j)
        packed = np.where(self.apart, (1 + self.received(self.s.x)) * self.whole, 0)
        rest = 2 * self.m // self.s.y * self.s.d * self.e
        return gradients, activations - self.layer, self.weights(j) + self.whole + packed + rest

    def gradients(self) -> Array:
        return self.s.parameters * STORED

    def table(self) -> Moment:
        s = self.s
        size = sum(w.n * w.k for w in s.tables)
        way = np.where(self.apart, size * self.e * (1 + self.received(s.x)), 0)
        flying = self.apart * min(self.c.layers, MOST_IN_FLIGHT) * self.whole * self.way
        rows = self.m * s.d * self.e * (1 + (s.y > 1))
        tables = sum(w.shard for w in s.tables) * STORED
        return self.gradients() - tables, self.none(), size * self.wide + way + flying + rows

    def data(self) -> Moment:
        joined = np.where(self.s.data > 1, 2 * self.gradients(), 0)
        return self.gradients(), self.none(), joined
