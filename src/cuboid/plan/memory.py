"""Memory of a rank at the peaks of a step, by kind.

At rest: parameters, AdamW's two moments, gradients once they are summed, activations that forward has saved. Transient:
gathered weights, gradients in flight, gathered operands, the head's chunk. Transients do not grow with depth, and saved
activations fall and gradients rise evenly, so the peak is at one of a few moments:

    head     everything is saved; a chunk of logits, dX on its way, or the table's gradient on its way
    scaled   the head's gradients as they were saved, and times dloss
    inside   of the last few layers' backward, or the first's: the MLP's operands and their gradients, or the last
             matmul's with all gradients of the layer
    between  layers: its weights are released, small gradients packed for the way over x, those of two layers more
             still on it
    lookup   all gradients are there but the embedding's, which is added up
    table    … and on its way over x
    forward  of a layer below those that are trained, where there are such: nothing is saved
    replicas all gradients are there; the largest bucket's are joined, and their sum over replicas on its way

Of several micro-batches the first leaves its gradients, and those of the others are added to them in place.
"""

from dataclasses import dataclass

import numpy as np

from cuboid.mesh.cuboid import Cuboid
from cuboid.model.freeze import Trained
from cuboid.plan.cost.cuboid import step_cost
from cuboid.plan.hardware import Hardware
from cuboid.plan.layer import ITEMSIZE, STORED, Choice, Work
from cuboid.plan.operands import Operands
from cuboid.plan.sizes import WHOLE, Segment, Sizes, Weight, added
from cuboid.plan.time import Array
from cuboid.step.weights import MOST_IN_FLIGHT


@dataclass(frozen=True)
class Footprint:
    """Bytes at the peak."""

    parameters: Array
    gradients: Array
    optimizer: Array
    activations: Array
    buffers: Array

    @property
    def peak(self) -> Array:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


def memory(hw: Hardware, work: Work, sizes: Sizes, choice: Choice, saved: Array, segment: Segment = WHOLE) -> Footprint:
    """The peak of a step. `saved`: activations that forward leaves for backward, of all layers and the head or a
    stage."""
    held = _Moments(hw, work, sizes, choice, saved, segment)
    parameters, trained = sizes.elements(Trained(work.config), segment) * STORED, held.gradients()
    earlier = trained if work.micro_batches > 1 else np.zeros_like(trained)
    found = [(np.maximum(gradients, earlier), *others) for gradients, *others in held.moments()] + [held.replicas()]
    if choice.schedule.beside and work.micro_batches > 1:
        earlier = earlier * (work.micro_batches > 2)  # the first backward beside a forward finds none
        found += [(np.maximum(gradients, earlier), *others) for gradients, *others in held.both()]
    which = np.stack([sum(moment) for moment in found]).argmax(0)
    gradients, activations, buffers = (
        np.choose(which, [moment[i] for moment in found]).astype(np.int64) for i in range(3)
    )
    return Footprint(parameters, gradients, 2 * trained, activations, buffers)


def planned(hw: Hardware, work: Work, cuboid: Cuboid, choice: Choice) -> Footprint:
    """Of the first rank of one cuboid."""
    sizes, at = Sizes(work.config, [cuboid], hw.node, work.batch, work.seq), cuboid.coordinates(0)
    settings = choice.policy, choice.recompute, STORED, ITEMSIZE[work.precision], choice.schedule
    cost = step_cost(work.config, cuboid, at, work.batch, work.seq, *settings, freeze=work.freeze)
    return memory(hw, work, sizes, choice, np.array([cost.saved]))


#: Gradients, activations, buffers.
Moment = tuple[Array, Array, Array]


class _Moments(Operands):
    def moments(self) -> list[Moment]:
        layers = [moment for j in self.chosen() for moment in (self.inside(j), self.between(j))]
        ends = [self.lookup(), self.table()] if self.tables() else []
        below = [self.forward()] if self.lowest else []
        head = [self.head(), self.scaled()] if self.segment.ends else []
        return [*head, *layers, *ends, *below]

    def chosen(self) -> list[int]:
        """Layers, counted from the last, among whom the fullest is: any, where some are frozen."""
        last = self.backward
        every = set(range(1, last + 1))
        return sorted(every if self.trained.freeze else every & {1, 2, 3, last - 1, last})

    def block(self, j: int) -> frozenset[str]:
        """What is trained of the j-th last layer."""
        return self.trained.block(self.c.layers - j)

    def both(self) -> list[Moment]:
        """A layer's backward beside the forward of the next micro-batch, at the same pace: that has passed as many
        layers. Sub-batches are up to a layer apart, either way."""
        s, apart, ups = self.s, int(self.sub_batches > 1), 2 if self.c.gated else 1
        operands = self.narrow * (s.y > 1) + self.scattered(s.z, ups * self.spread) + self.dX
        found = []
        for j in self.chosen():
            gradients, activations, buffers = self.inside(j)
            passed = min(j + apart, self.backward)
            held = self.gathered * (1 + apart) + self.coming * self.choice.schedule.prefetch
            held = np.where(self.kept > 0, self.kept * passed, held)
            buffers = buffers + held + operands * (self.sub_batches + 1) // (2 * self.sub_batches)
            found.append((gradients, activations + (passed + apart * (j > 1)) * self.layer, buffers))
        return found

    def forward(self) -> Moment:
        """Of a layer below those that are trained: nothing is saved, so that operands are most of it."""
        s, inner = self.s, self.spread * (2 if self.c.gated else 1)
        whole = self.narrow * (s.y > 1)
        launched, landed = whole + self.scattered(s.z, inner), self.landed(s.z, inner)
        bent = (inner + self.spread * (2 if self.c.gated else 1)) // s.z  # and what the nonlinearity makes of it
        held = self.gathered + self.coming * self.choice.schedule.prefetch
        return self.none(), self.none(), held + 2 * self.dX + np.maximum.reduce([launched, landed, bent])

    # The head

    def head(self) -> Moment:
        s, n, w = self.s, self.sub_batches, self.s.head_weight
        last = self.gathered * (self.kept == 0) * self.choice.schedule.prefetch * self.segment.whole
        held = self.kept * self.backward + last * (self.backward > 0) + self.behind(MOST_IN_FLIGHT)
        one, dW = self.narrow // n, self.trained.head * w.n * w.k * self.wide
        others = (n - 1) * self.scattered(s.y, one)  # dX of other sub-batches, on its way
        weight = self.padded(w) * self.moved
        inside = weight + dW + 2 * one + others + self.chunk()  # X and dX of this one
        ending = weight + dW + n * self.scattered(s.y, one)
        reduced = self.dX + self.trained.head * np.maximum(weight + self.launched(w, dW), self.landing(w))
        return self.none(), self.saved - self.head_saved, held + np.maximum.reduce([inside, ending, reduced])

    def chunk(self) -> Array:
        """At most. Some of it is left until the next one's takes its place."""
        s, e, low, sub_batches = self.s, self.e, self.low, self.choice.schedule.sub_batches
        length = s.chunk(self.choice.policy.head_elements, sub_batches)
        again, rows = length < s.s, length * (s.b // sub_batches)
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

    def launched(self, w: Weight, gradient: Array) -> Array:
        """A table's gradient, in fp32 or better, as it is sent over x: filled up, made narrow, what is received."""
        filled = self.padded(w) // self.e * self.wide * (w.n % self.s.x != 0)
        source = np.where(filled > 0, filled, gradient)
        sent = np.where(self.low, self.padded(w), source)
        most = np.maximum.reduce([gradient + filled, source + self.low * sent, self.scattered(self.s.x, sent)])
        return np.where(self.apart, most, gradient)

    def landing(self, w: Weight) -> Array:
        sent = self.padded(w)
        return self.apart * (self.received(self.s.x) * sent + (self.s.x == 2) * sent + self.summed(self.s.x, sent))

    def scaled(self) -> Moment:
        """The gradient of the head's weight times dloss; without a tied embedding's it is summed over replicas."""
        copies = np.where((self.s.replicas > 1) & (not self.c.tied) & (self.micro_batches == 1), 2, 1)
        last = self.gathered * self.choice.schedule.prefetch * (self.backward > 0) * self.segment.whole
        held = np.where(self.kept > 0, self.kept * self.backward, last) + self.behind(MOST_IN_FLIGHT)
        return self.none(), self.saved, held + copies * self.head_dW

    def behind(self, count: int) -> Array:
        """The last `count` sums over x of the micro-batch before, on their way until others follow them: the tables',
        and the first layers' where there are fewer."""
        tables = [self.padded(w) for w in self.tables()]
        layers = [self.reduced(self.block(j)) for j in range(self.backward, 0, -1) if self.block(j)]
        layers *= self.choice.schedule.stages  # of a place
        last = added([self.none(), *[*tables[::-1], *layers][:count]])
        return self.apart * (self.micro_batches > 1) * self.way * last

    def none(self) -> Array:
        return np.zeros_like(self.saved)

    # A layer's backward

    def remaining(self, j: int) -> tuple[Array, Array]:
        """Gradients there and activations saved while the j-th last layer runs backward."""
        done = [self.shard(block) for block in map(self.block, range(1, j)) if block]
        landed = added([self.none(), *done[: max(len(done) - MOST_IN_FLIGHT, 0)]])
        gradients = np.where(self.apart, landed, added([self.none(), *done])) + self.head_dW
        return gradients, (self.backward - j + 1) * self.layer

    def ahead(self, j: int) -> Array:
        """Weights on the way for the next layer, or kept for all that are left, and gradients of those before."""
        coming = self.coming * (j < self.backward) * self.choice.schedule.prefetch
        held = np.where(self.kept > 0, self.kept * (self.backward - j), coming)
        # what the micro-batch before has on its way still; the last norm's are behind them
        before = self.behind(max(MOST_IN_FLIGHT - self.segment.ends - (j - 1), 0))
        return held + before + self.apart * self.way * self.flying(j - 1)

    def flying(self, j: int) -> Array:
        """Gradients on their way once the j-th last layer is done."""
        done = [self.reduced(block) for block in map(self.block, range(1, j + 1)) if block]
        return added([self.none(), *done[-MOST_IN_FLIGHT:]])

    def inside(self, j: int) -> Moment:
        self.of_block = self.block(j)
        gradients, activations = self.remaining(j)
        buffers = np.maximum.reduce([self.down(), self.nonlinear(), self.up(), self.first()]) + self.dX
        if self.choice.recompute == "full":
            buffers = np.maximum(buffers, self.computed_again() + self.dX)
        n = self.sub_batches
        buffers = buffers * (n + 1) // (2 * n)  # of other sub-batches only what is in flight
        if self.choice.recompute == "full":
            buffers, activations = buffers + self.recomputed(), activations - self.layer
        return gradients, activations, self.gathered + self.ahead(j) + buffers

    def between(self, j: int) -> Moment:
        """The layer's weights are released before its gradients are packed."""
        self.of_block = self.block(j)
        s, made, mine = self.s, self.every_dW(), self.s.trained(self.of_block)
        gradients, activations = self.remaining(j)
        largest = np.maximum.reduce([self.none(), *(w.n * w.k for w in mine)]) * self.e * (self.g > self.e)
        whole = self.reduced(self.of_block)
        flying = self.way * whole
        if j > MOST_IN_FLIGHT:  # the first of those on their way lands: what it sent goes, unless part of the sum
            gone, shard = (s.x > 2) * whole, self.shard(self.of_block)
            flying = flying + np.maximum(self.summed(s.x, whole) + 2 * (s.replicas > 1) * shard - gone, 0)
        packed = np.maximum.reduce([made + largest, whole + self.packed(mine), flying])
        rest = self.dX
        if j < self.backward and self.regathers and self.choice.recompute != "full":
            down = "mlp.down.weight" in self.block(j + 1)
            rest = rest + down * self.spread * (s.z > 1)  # X of the layer before's last product
        layer = np.where(self.apart, packed, self.unsplit(made))
        return gradients, activations - self.layer, self.ahead(j) + layer + rest

    def unsplit(self, made: Array) -> Array:
        """Where x is 1: widened, and sent on to the replicas; added in place to those of micro-batches before."""
        shard = self.shard(self.of_block)
        sent = 2 * (self.s.replicas > 1) * shard
        if self.micro_batches > 1:
            return np.maximum(made, sent)
        return shard + np.maximum((self.g < STORED) * made, sent)

    # The embedding

    def gradients(self) -> Array:
        return self.s.elements(self.trained, self.segment) * STORED

    def tables(self) -> list[Weight]:
        """Those that are trained, of the stage that has them."""
        tables = zip(self.s.tables, self.trained.tables(), strict=True)
        return [w for w, trained in tables if trained and self.segment.embeds]

    def others(self) -> Array:
        """Gradients but the tables' and those on their way; a tied table's of the head is one of them."""
        tables = sum(w.shard for w in self.tables()) * STORED - self.c.tied * self.head_dW
        blocks = [block for block in map(self.block, range(self.backward, 0, -1)) if block]
        flying = added([self.none(), *map(self.shard, blocks[:MOST_IN_FLIGHT])])
        return self.gradients() - tables - self.apart * flying

    def lookup(self) -> Moment:
        rows = self.m // self.sub_batches * self.s.d * (self.e + self.low * self.wide)
        tables = sum((w.n + 1) * w.k for w in self.tables()) * self.wide
        return self.others(), self.none(), tables + rows + self.apart * self.flying(self.backward) * self.way

    def table(self) -> Moment:
        """Launched behind the layers' gradients; learned positions follow it."""
        table, *positions = self.tables()
        waiting = sum((w.n + 1) * w.k for w in positions) * self.wide
        first = self.launched(table, (table.n + 1) * table.k * self.wide) + waiting
        second = self.way * (self.padded(table) + sum(map(self.padded, positions)))
        flying = self.flying(self.backward) * self.way
        return self.others(), self.none(), self.apart * (np.maximum(first, second) + flying)

    def replicas(self) -> Moment:
        tables = [w.shard * STORED for w in self.tables()]
        blocks = [self.shard(block) for block in {self.block(j) for j in range(1, self.backward + 1)}]
        largest = np.maximum.reduce([self.head_dW, *blocks, *tables])
        return self.gradients(), self.none(), np.where(self.s.replicas > 1, 2 * largest, 0)
