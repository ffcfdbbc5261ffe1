"""What a rank holds at the fullest moments of a step, by kind.

At rest: parameters, AdamW's two moments, gradients once they are summed, activations that forward has saved. For a
moment: weights gathered, gradients on their way, operands gathered, the head's chunk. None of it grows with depth, and
what does (saved activations fall, gradients rise) does so evenly, so the fullest moment is one of a few:

    head     everything is saved; a chunk of logits, or the table's gradient on its way
    scaled   the head's gradients as they were saved, and times dloss
    inside   of the last few layers' backward, or the first's: the MLP's operands and their gradients
    between  layers: small gradients packed for the way over x, those of two layers more still on it
    lookup   all gradients are there but the embedding's, which is added up
    table    … and on its way over x
    tied     … and added to the head's
    data     all gradients are there; the largest part's are joined, and their sum over replicas on its way

Of several micro-batches the first leaves its gradients, and those of the others are added to them.
"""

from dataclasses import dataclass

import numpy as np

from cuboid.comm.collectives import LEAST_ALONE
from cuboid.plan.hardware import Hardware
from cuboid.plan.layer import ITEMSIZE, STORED, Choice, Work
from cuboid.plan.sizes import Sizes, Weight, added
from cuboid.plan.time import Array
from cuboid.step.weights import MOST_IN_FLIGHT


@dataclass(frozen=True)
class Footprint:
    """Bytes at the fullest moment."""

    parameters: Array
    gradients: Array
    optimizer: Array
    activations: Array
    buffers: Array

    @property
    def peak(self) -> Array:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


def memory(hw: Hardware, work: Work, sizes: Sizes, choice: Choice, saved: Array) -> Footprint:
    """`saved` is what a forward leaves for backward, all layers' and the head's."""
    held = _Moments(hw, work, sizes, choice, saved)
    parameters = sizes.parameters * STORED
    earlier = parameters if work.micro_batches > 1 else np.zeros_like(parameters)
    found = [(np.maximum(gradients, earlier), *others) for gradients, *others in held.moments()] + [held.data()]
    which = np.stack([sum(moment) for moment in found]).argmax(0)
    gradients, activations, buffers = (
        np.choose(which, [moment[i] for moment in found]).astype(np.int64) for i in range(3)
    )
    return Footprint(parameters, gradients, 2 * parameters, activations, buffers)


#: Gradients, activations, buffers.
Moment = tuple[Array, Array, Array]


class _Moments:
    def __init__(self, hw: Hardware, work: Work, s: Sizes, choice: Choice, saved: Array) -> None:
        self.c, self.s, self.choice, self.saved = work.config, s, choice, saved
        self.e, self.micro_batches = ITEMSIZE[work.precision], work.micro_batches
        self.wide, self.low = max(self.e, 4), self.e < 4
        self.m = s.m
        self.apart = s.x > 1
        self.whole = added(w.n * w.k for w in s.block_weights) * self.e
        self.shard = sum(w.shard for w in s.block_weights) * STORED
        self.direct = hw.direct or self.low
        self.copying = hw.direct
        self.way = 1 + self.received(s.x)  # a reduce-scatter over x: what is sent until it is awaited, and received
        one = added(w.shard for w in s.block_weights) * self.e
        filled = np.logical_or.reduce([w.shard * s.x != w.n * w.k for w in s.block_weights])
        sent = np.maximum(one * (self.low | filled), self.copies("x", one))  # else as the shards lie
        self.coming = self.apart * (self.whole + sent)  # a layer's weights on their way
        self.head_saved = self.m // s.y * s.d * self.e + s.head_weight.shard * STORED
        self.layer = (saved - self.head_saved) // max(work.config.layers, 1)
        self.moved = self.apart | (self.e < STORED)  # whole weights are tensors of their own, no parameters
        self.gathered = added(map(self.padded, s.block_weights)) * self.moved  # copies out of what has arrived
        self.kept = self.gathered * (choice.policy.weights == "retain")  # of each layer
        tables = s.tables[1:] if self.c.tied else s.tables  # a tied one goes with the head
        self.kept_tables = sum(map(self.padded, tables)) * (self.kept > 0)

    def padded(self, w: Weight) -> Array:
        """A weight gathered over x, or its gradient packed: every part as long as the longest."""
        return w.shard * self.s.x * self.e

    def copies(self, axis: str, part: Array) -> Array:
        """What gloo sends of a small part that is gathered: a copy for each rank."""
        ranks, inside = self.s.groups[axis]
        return self.copying * (ranks > 2) * (inside == ranks) * (part < LEAST_ALONE) * ranks * part

    def received(self, axis: Array) -> Array:
        """Of what is scattered over an axis: everyone's parts, of two ranks the other's alone; NCCL's are sums."""
        return np.where(axis == 2, 0.5, 1.0 if self.direct else 1 / axis)

    def summed(self, axis: Array, whole: Array) -> Array:
        """The sum of parts received of `whole` bytes: of two ranks in place, unless wider. Of more ranks' parts the
        first is widened by itself."""
        copies = np.where(axis == 2, self.low, self.direct * (1 + self.low))
        return (axis > 1) * copies * (whole // axis * self.wide // self.e)

    def moments(self) -> list[Moment]:
        last = self.c.layers
        numbers = sorted({1, 2, 3, last} & set(range(1, last + 1)))
        layers = [moment for j in numbers for moment in (self.inside(j), self.between(j))]
        return [self.head(), self.scaled(), *layers, self.lookup(), self.table(), self.tied()]

    def head(self) -> Moment:
        s, X, parts = self.s, self.m * self.s.d * self.e, self.choice.schedule.parts
        last = self.gathered * (self.kept == 0) * self.choice.schedule.prefetch
        weights = self.kept * self.c.layers + last + self.kept_tables + self.padded(s.head_weight) * self.moved
        held = weights + s.vocab * s.d * self.wide + X  # dW, and of each part X or dX
        one = X // parts  # the last: both; the others' dX are on their way
        inside = one + (parts - 1) * one * (s.y > 1) * self.received(s.y) + self.chunk()
        return self.none(), self.saved - self.head_saved, held + np.maximum(inside, self.reduced(X))

    def chunk(self) -> Array:
        """At most. Some of it is left until the next one's takes its place."""
        s, e, low, parts = self.s, self.e, self.low, self.choice.schedule.parts
        length = s.chunk(self.choice.policy.head_elements, parts)
        again, rows = length < s.s, length * (s.b // parts)
        partial, logits = rows * s.vocab * e, rows // s.z * s.vocab * self.wide
        dlogits = partial * ((s.z > 1) | low)  # whole over z; else they are the logits' memory
        left = logits + dlogits + 4 * rows // s.z * s.y * self.wide  # and the parts of the loss
        received = self.received(s.z) * partial
        arrived = received + (s.z == 2) * partial + self.summed(s.z, partial)
        scattered = np.where(s.z > 1, np.maximum(partial + received, arrived), low * partial + logits)
        exponentials = 2 * logits + again * dlogits
        one = partial // s.z
        gathered = left + np.maximum(low * (s.z > 1) * one, self.copies("z", one))  # dlogits, and what is sent of them
        products = left + low * s.vocab * s.d * e  # dW's, to be added
        return np.maximum.reduce([again * left + scattered, exponentials, gathered, products])

    def reduced(self, dX: Array) -> Array:
        """The head's dX on its way over y and dW on its way over x, launched or landing."""
        s, w = self.s, self.s.head_weight
        whole, uneven = self.padded(w), w.n % s.x != 0
        narrow = self.low * w.n * w.k * self.e  # dW as it is sent
        copy = np.where(uneven, whole, narrow)  # … or filled up
        received = self.received(s.x) * whole
        launch = np.where(self.apart, narrow + uneven * whole + received, narrow + self.low * w.shard * STORED)
        flying = np.where(self.apart, copy + received, self.low * w.shard * STORED)
        landing = np.where(self.apart, received + (s.x == 2) * copy + self.summed(s.x, whole), flying)
        sums = self.summed(s.y, dX)
        most = np.maximum.reduce([launch, sums + flying, np.minimum(sums, dX // s.y) + landing])
        return (s.y > 1) * self.received(s.y) * dX + most

    def scaled(self) -> Moment:
        return self.none(), self.saved, self.weights(1) + self.head_saved

    def none(self) -> Array:
        return np.zeros_like(self.saved)

    def remaining(self, j: int) -> tuple[Array, Array]:
        """Gradients there and activations saved while the j-th last layer runs backward."""
        over = np.where(self.apart, max(j - 1 - MOST_IN_FLIGHT, 0), j - 1)
        gradients = over * self.shard + self.s.head_weight.shard * STORED
        return gradients, self.saved - self.head_saved - (j - 1) * self.layer

    def weights(self, j: int) -> Array:
        """Gathered for this layer and on the way for the next, and the gradients of layers before."""
        ahead = self.coming * (j < self.c.layers) * self.choice.schedule.prefetch
        held = np.where(self.kept > 0, self.kept * (self.c.layers - j + 1), self.gathered + ahead)
        flying = self.apart * min(j - 1, MOST_IN_FLIGHT) * self.way * self.whole
        return held + self.kept_tables + flying

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
        down = down + regathers * self.copies("z", spread // s.z)
        ahead = narrow * (s.y > 1) * regathers  # X of the product before, on its way
        down, nonlinear = down + ahead, spread // s.z * (7 if c.gated else 2) + one - X_down + ahead
        up = ups * spread * (s.z > 1) + ups * spread // s.z + (1 + ups) * one - X_down - inner
        up = up + narrow * (1 + (s.y > 1) * (regathers + self.received(s.y)))
        up = up + regathers * self.copies("y", narrow // s.y)
        buffers = np.maximum.reduce([down, nonlinear, up]) + 2 * narrow // s.y
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
        # where x is 1: widened, and sent on to the replicas (of several micro-batches when earlier gradients are gone)
        alone = self.whole + (self.low + 2 * (self.s.data > 1) * (self.micro_batches == 1)) * self.shard
        flying = (1 + self.received(self.s.x)) * self.whole
        if j > MOST_IN_FLIGHT:  # the first of those on their way lands: what it sent goes, unless part of the sum
            gone = (self.s.x > 2) * self.whole
            flying = flying + np.maximum(self.summed(self.s.x, self.whole) - gone, 0)
        small = added(w.n * w.k * (w.shard * self.e < LEAST_ALONE) for w in self.s.block_weights) * self.e
        layer = np.where(self.apart, np.maximum(self.whole + small, flying), alone)  # small ones packed, or on its way
        rest = 2 * self.m // self.s.y * self.s.d * self.e
        if j < self.c.layers and self.choice.policy.activations != "retain" and self.choice.recompute != "full":
            rest = rest + self.m * self.s.f * self.e * (self.s.z > 1)  # X of the layer before's last product
        return gradients, activations - self.layer, self.weights(j) + layer + rest

    def gradients(self) -> Array:
        return self.s.parameters * STORED

    def others(self) -> Array:
        """Gradients but the tables'; a tied table's of the head is one of them."""
        tables = sum(w.shard for w in self.s.tables) - self.c.tied * self.s.head_weight.shard
        return self.gradients() - tables * STORED

    def lookup(self) -> Moment:
        s, parts = self.s, self.choice.schedule.parts
        flying = self.apart * min(self.c.layers, MOST_IN_FLIGHT) * self.whole * self.way
        rows = self.m // parts * s.d * (self.e + self.low * self.wide)
        sizes = [w.n * w.k for w in s.tables]
        tables = sum(sizes) * (self.wide + (parts > 1) * self.e) + self.low * sizes[0] * self.e  # of a part before too
        return self.others(), self.none(), tables + rows + flying + self.kept_tables

    def table(self) -> Moment:
        """The last to be launched; learned positions go before it."""
        table, *positions = self.s.tables
        layers = min(self.c.layers, MOST_IN_FLIGHT - len(positions))
        flying = (layers * self.whole + sum(map(self.padded, positions))) * self.way
        filled = table.n % self.s.x != 0
        packed = self.padded(table) * (self.received(self.s.x) + filled)
        return (
            self.others(),
            self.none(),
            table.n * table.k * self.e + self.apart * (packed + flying) + self.kept_tables,
        )

    def tied(self) -> Moment:
        """Where x is 1: else less than what was received of it."""
        table = self.s.head_weight.shard * (self.c.tied & (self.s.x == 1))
        return self.others(), self.none(), table * (2 * STORED + self.low * self.e)

    def data(self) -> Moment:
        tables = [w.shard for w in (*self.s.tables, self.s.head_weight)]
        largest = np.maximum.reduce([added(w.shard for w in self.s.block_weights), *tables])
        return self.gradients(), self.none(), np.where(self.s.data > 1, 2 * largest * STORED, 0)
