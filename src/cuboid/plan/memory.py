"""Memory of a rank at the peaks of a step, by kind.

At rest: parameters, AdamW's two moments, summed gradients, saved activations. Transient: gathered weights, gradients in
flight, gathered operands, the head's chunk. Transients do not grow with depth; from layer to layer of backward, saved
activations fall and gradients rise by the same amount. So the peak is at one of a few moments:

    head     all activations are saved; a chunk of logits, dX in flight, or the head's gradient in flight
    scaled   the head's gradients as saved, and multiplied by dloss
    inside   the backward of one of the last layers, or of the first: the MLP's operands and their gradients, or those
             of the last matmul with all gradients of the layer
    between  two layers: weights are released, small gradients are packed to be summed over x, and those of two more
             layers are in flight
    lookup   all gradients exist but the embedding's, which is added up
    table    the same, with the embedding's gradient in flight over x
    forward  the forward of a layer below all trained ones, if there is one: nothing is saved
    replicas all gradients exist; those of the largest bucket are concatenated, and their sum over replicas is in flight
    postponed  weight gradients are left for later: all their operands are alive, then one layer's gradients are made

With several micro-batches, the first one's gradients stay, and those of the others are added to them in place.
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


def memory(
    hw: Hardware,
    work: Work,
    sizes: Sizes,
    choice: Choice,
    saved: Array,
    segment: Segment = WHOLE,
    left: Array | None = None,
    level: bool = False,
) -> Footprint:
    """The peak of a step. `saved`: activations that forward saves, of all layers and the head, or of a stage. `left`:
    what its weight gradients are made of, if backward postpones them. `level`: see `both`."""
    held = _Moments(hw, work, sizes, choice, saved, segment)
    parameters, trained = sizes.elements(Trained(work.config), segment) * STORED, held.gradients()
    earlier = trained if work.micro_batches > 1 else np.zeros_like(trained)
    moments = held.moments() if left is None else [*held.moments(), *held.postponed(left)]
    found = [(np.maximum(gradients, earlier), *others) for gradients, *others in moments] + [held.replicas()]
    if choice.schedule.beside and work.micro_batches > 1:
        earlier = earlier * (work.micro_batches > 2)  # there are none at the first backward beside a forward
        found += [(np.maximum(gradients, earlier), *others) for gradients, *others in held.both(level)]
    which = np.stack([sum(moment) for moment in found]).argmax(0)
    gradients, activations, buffers = (
        np.choose(which, [moment[i] for moment in found]).astype(np.int64) for i in range(3)
    )
    return Footprint(parameters, gradients, 2 * trained, activations, buffers)


def planned(hw: Hardware, work: Work, cuboid: Cuboid, choice: Choice) -> Footprint:
    """The footprint of the first rank of one cuboid, sub-batches level."""
    sizes, at = Sizes(work.config, [cuboid], hw.node, work.batch, work.seq), cuboid.coordinates(0)
    settings = choice.policy, choice.recompute, STORED, ITEMSIZE[work.precision], choice.schedule
    cost = step_cost(work.config, cuboid, at, work.batch, work.seq, *settings, freeze=work.freeze)
    return memory(hw, work, sizes, choice, np.array([cost.saved]), level=True)


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
        """Layers, counted from the last, that may have the peak: all if some parameters are frozen."""
        last = self.backward
        every = set(range(1, last + 1))
        return sorted(every if self.trained.freeze else every & {1, 2, 3, last - 1, last})

    def block(self, j: int) -> frozenset[str]:
        """The trained parameters of the j-th last layer."""
        return self.trained.block(self.c.layers - j)

    def both(self, level: bool) -> list[Moment]:
        """A layer's backward beside the forward of another micro-batch, which is as far. Sub-batches are up to one
        layer apart, either way: an upper bound, as how far follows from the sizes of all that is sent. `level` takes
        them to be as far as each other, which is hardly more than they hold."""
        s, apart, ups = self.s, int(self.sub_batches > 1 and not level), 2 if self.c.gated else 1
        operands = self.narrow * (s.y > 1) + self.scattered(s.z, ups * self.spread) + self.dX
        found = []
        for j in self.chosen():
            gradients, activations, buffers = self.inside(j, self.layer)
            passed = min(j + apart, self.backward)
            held = self.gathered * (1 + apart) + self.coming * self.choice.schedule.prefetch
            held = np.where(self.kept > 0, self.kept * passed, held)
            buffers = buffers + held + operands * (self.sub_batches + 1) // (2 * self.sub_batches)
            found.append((gradients, activations + (passed - 1 + apart * (j > 1)) * self.layer, buffers))
        return found

    def forward(self) -> Moment:
        """The forward of a layer below all trained ones: nothing is saved, so operands dominate."""
        s, inner = self.s, self.spread * (2 if self.c.gated else 1)
        whole = self.narrow * (s.y > 1)
        launched, landed = whole + self.scattered(s.z, inner), self.landed(s.z, inner)
        nonlinear = (inner + self.spread * (2 if self.c.gated else 1)) // s.z  # and the nonlinearity's output
        held = self.gathered + self.coming * self.choice.schedule.prefetch
        return self.none(), self.none(), held + 2 * self.dX + np.maximum.reduce([launched, landed, nonlinear])

    # The head

    def head(self) -> Moment:
        s, n, w = self.s, self.sub_batches, self.s.head_weight
        last = self.gathered * (self.kept == 0) * self.choice.schedule.prefetch * self.segment.whole
        held = self.kept * self.backward + last * (self.backward > 0) + self.behind(MOST_IN_FLIGHT)
        one, dW = self.narrow // n, self.trained.head * w.n * w.k * self.wide
        others = (n - 1) * self.scattered(s.y, one)  # dX of other sub-batches, in flight
        weight = self.padded(w) * self.moved
        inside = weight + dW + 2 * one + others + self.chunk()  # X and dX of this sub-batch
        ending = weight + dW + n * self.scattered(s.y, one)
        reduced = self.dX + self.trained.head * np.maximum(weight + self.launched(w, dW), self.landing(w))
        return self.none(), self.saved - self.head_saved, held + np.maximum.reduce([inside, ending, reduced])

    def chunk(self) -> Array:
        """The most that a chunk of logits needs. Some of it lives until the next chunk replaces it."""
        s, e, low, sub_batches = self.s, self.e, self.low, self.choice.schedule.sub_batches
        length = s.chunk(self.choice.policy.head_elements, sub_batches)
        several, rows = length < s.s, length * (s.b // sub_batches)
        partial, logits = rows * s.vocab * e, rows // s.z * s.vocab * self.wide
        dlogits = partial * ((s.z > 1) | low)  # gathered over z; else in the logits' memory
        left = logits + dlogits + 4 * rows // s.z * s.y * self.wide  # and the loss's four numbers per row
        received = self.received(s.z) * partial
        arrived = received + (s.z == 2) * partial + self.summed(s.z, partial)
        scattered = np.where(s.z > 1, np.maximum(partial + received, arrived), low * partial + logits)
        exponentials = 2 * logits + several * dlogits
        one = partial // s.z
        gathered = left + np.maximum(low * (s.z > 1) * one, self.copies("z", one))  # dlogits, and their send buffer
        products = left + low * s.vocab * s.d * e  # dW, before it is added
        return np.maximum.reduce([several * left + scattered, exponentials, gathered, products])

    def launched(self, w: Weight, gradient: Array) -> Array:
        """A gradient in fp32 or better while it is summed over x: padded, converted, received."""
        filled = self.padded(w) // self.e * self.wide * (w.n % self.s.x != 0)
        source = np.where(filled > 0, filled, gradient)
        sent = np.where(self.low, self.padded(w), source)
        most = np.maximum.reduce([gradient + filled, source + self.low * sent, self.scattered(self.s.x, sent)])
        return np.where(self.apart, most, gradient)

    def landing(self, w: Weight) -> Array:
        sent = self.padded(w)
        return self.apart * (self.received(self.s.x) * sent + (self.s.x == 2) * sent + self.summed(self.s.x, sent))

    def scaled(self) -> Moment:
        """The head's gradient times dloss; if the embedding is not tied, it is also summed over replicas."""
        copies = np.where((self.s.replicas > 1) & (not self.c.tied) & (self.micro_batches == 1), 2, 1)
        last = self.gathered * self.choice.schedule.prefetch * (self.backward > 0) * self.segment.whole
        held = np.where(self.kept > 0, self.kept * self.backward, last) + self.behind(MOST_IN_FLIGHT)
        return self.none(), self.saved, held + copies * self.head_dW

    def behind(self, count: int) -> Array:
        """The last `count` sums over x of the previous micro-batch, in flight until others follow them: those of the
        embeddings, then of the first layers."""
        tables = [self.padded(w) for w in self.tables()]
        layers = [self.reduced(self.block(j)) for j in range(self.backward, 0, -1) if self.block(j)]
        layers *= self.choice.schedule.stages  # of a place
        last = added([self.none(), *[*tables[::-1], *layers][:count]])
        return self.apart * (self.micro_batches > 1) * self.way * last

    def none(self) -> Array:
        return np.zeros_like(self.saved)

    # A layer's backward

    def remaining(self, j: int) -> tuple[Array, Array]:
        """Summed gradients and saved activations during the backward of the j-th last layer."""
        done = [self.shard(block) for block in map(self.block, range(1, j)) if block]
        landed = added([self.none(), *done[: max(len(done) - MOST_IN_FLIGHT, 0)]])
        gradients = np.where(self.apart, landed, added([self.none(), *done])) + self.head_dW
        return gradients, (self.backward - j + 1) * self.layer

    def ahead(self, j: int) -> Array:
        """Weights in flight for the next layer, or kept for all remaining ones, and gradients in flight."""
        return self.next_weights(j) + self.reducing(j)

    def next_weights(self, j: int) -> Array:
        coming = self.coming * (j < self.backward) * self.choice.schedule.prefetch
        return np.where(self.kept > 0, self.kept * (self.backward - j), coming)

    def reducing(self, j: int) -> Array:
        """Gradients in flight at the j-th last layer: of those above it, and still of the previous micro-batch; those
        of the last norm come after them."""
        before = self.behind(max(MOST_IN_FLIGHT - self.segment.ends - (j - 1), 0))
        return before + self.apart * self.way * self.flying(j - 1)

    def flying(self, j: int) -> Array:
        """Gradients in flight after the backward of the j-th last layer."""
        done = [self.reduced(block) for block in map(self.block, range(1, j + 1)) if block]
        return added([self.none(), *done[-MOST_IN_FLIGHT:]])

    def inside(self, j: int, beside: Array | int = 0) -> Moment:
        """`beside`: what a layer's forward beside it saves meanwhile."""
        self.of_block = self.block(j)
        gradients, activations = self.remaining(j)
        up, first = self.up() + beside // 2, self.first() + beside
        buffers = np.maximum.reduce([self.down(), self.nonlinear(), up, first]) + self.dX
        if self.choice.recompute == "full":
            buffers = np.maximum(buffers, self.recomputing() + self.dX)
        n = self.sub_batches
        buffers = buffers * (n + 1) // (2 * n)  # other sub-batches only have tensors in flight
        if self.choice.recompute == "full":
            buffers, activations = buffers + self.recomputed(), activations - self.layer
        return gradients, activations, self.gathered + self.ahead(j) + buffers

    def between(self, j: int) -> Moment:
        """After a layer: its weights are released before its gradients are packed."""
        self.of_block = self.block(j)
        gradients, activations = self.remaining(j)
        rest = self.dX
        if j < self.backward and self.regathers and self.choice.recompute != "full":
            down = "mlp.down.weight" in self.block(j + 1)
            rest = rest + down * self.spread * (self.s.z > 1)  # X of the next layer's last matmul
        return gradients, activations - self.layer, self.ahead(j) + self.packing(j) + rest

    def packing(self, j: int) -> Array:
        """The gradients of the j-th last layer, made and packed to be summed."""
        s, made, mine = self.s, self.every_dW(), self.s.trained(self.of_block)
        largest = np.maximum.reduce([self.none(), *(w.n * w.k for w in mine)]) * self.e * (self.g > self.e)
        whole = self.reduced(self.of_block)
        flying = self.way * whole
        if (
            j > MOST_IN_FLIGHT
        ):  # the first of those in flight lands: its send buffer is released, unless the sum is in it
            gone, shard = (s.x > 2) * whole, self.shard(self.of_block)
            flying = flying + np.maximum(self.summed(s.x, whole) + 2 * (s.replicas > 1) * shard - gone, 0)
        packed = np.maximum.reduce([made + largest, whole + self.packed(mine), flying])
        return np.where(self.apart, packed, self.unsplit(made))

    def unsplit(self, made: Array) -> Array:
        """With x = 1: gradients are converted and summed over replicas, or added to those of earlier micro-batches."""
        shard = self.shard(self.of_block)
        sent = 2 * (self.s.replicas > 1) * shard
        if self.micro_batches > 1:
            return np.maximum(made, sent)
        return shard + np.maximum((self.g < STORED) * made, sent)

    # Postponed weight gradients

    def postponed(self, left: Array) -> list[Moment]:
        """Each layer's first matmul in a backward, whose operands stay alive, and the look-up; then each layer's
        gradients, whose operands are released."""
        n, count, before = self.sub_batches, max(self.backward, 1), self.behind(MOST_IN_FLIGHT)
        ending = 2 * self.dX + self.scattered(self.s.y, self.narrow)  # dX twice: the norm's, and what is added to it
        first = self.gathered + before + ending * (n + 1) // (2 * n)
        found = [(self.head_dW, left, self.rows() + before)] if self.tables() else []
        for j in self.chosen():
            self.of_block = self.block(j)
            operands = left * j // count + (count - j) * self.layer
            found.append((self.head_dW, operands, first + self.next_weights(j)))
            if self.choice.recompute == "full":
                _, activations, buffers = self.inside(j)
                found.append((self.head_dW, activations + left * (j - 1) // count, buffers))
            made = np.maximum(left // count + self.dW("mlp.down"), self.packing(j))
            found.append((self.remaining(j)[0], left * (count - j) // count, self.reducing(j) + made))
        return found

    # The embedding

    def gradients(self) -> Array:
        return self.s.elements(self.trained, self.segment) * STORED

    def tables(self) -> list[Weight]:
        """The trained embeddings of this stage."""
        tables = zip(self.s.tables, self.trained.tables(), strict=True)
        return [w for w, trained in tables if trained and self.segment.embeds]

    def others(self) -> Array:
        """Gradients except those of embeddings and those in flight, with the head's of a tied embedding."""
        tables = sum(w.shard for w in self.tables()) * STORED - self.c.tied * self.head_dW
        blocks = [block for block in map(self.block, range(self.backward, 0, -1)) if block]
        flying = added([self.none(), *map(self.shard, blocks[:MOST_IN_FLIGHT])])
        return self.gradients() - tables - self.apart * flying

    def lookup(self) -> Moment:
        return self.others(), self.none(), self.rows() + self.apart * self.flying(self.backward) * self.way

    def rows(self) -> Array:
        """The gradients of embeddings, and the rows that are added to them."""
        rows = self.m // self.sub_batches * self.s.d * (self.e + self.low * self.wide)
        return rows + sum((w.n + 1) * w.k for w in self.tables()) * self.wide

    def table(self) -> Moment:
        """The embedding's gradient, after those of all layers. That of learned positions follows."""
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
