"""Transient memory of one layer's backward: gathered operands, products and their sums, weight gradients.

Each method of a moment returns what is alive besides the saved activations, minus those already released.
"""

from collections.abc import Sequence

import numpy as np

from cuboid.comm.transport.base import Transport
from cuboid.comm.transport.gloo import Gloo
from cuboid.model.freeze import Trained
from cuboid.plan.hardware import Hardware
from cuboid.plan.layer import ITEMSIZE, STORED, Choice, Work
from cuboid.plan.sizes import WHOLE, Segment, Sizes, Weight, added
from cuboid.plan.time import Array


class Operands:
    """Sizes in bytes on a candidate's rank, or of its stage. `saved`: activations that forward saves."""

    def __init__(
        self, hw: Hardware, work: Work, s: Sizes, choice: Choice, saved: Array, segment: Segment = WHOLE
    ) -> None:
        self.c, self.s, self.choice, self.saved, self.segment = work.config, s, choice, saved, segment
        self._shards: dict[frozenset[str], Array] = {}
        self._reduced: dict[frozenset[str], Array] = {}
        self.e, self.micro_batches, self.sub_batches = (
            ITEMSIZE[work.precision],
            work.micro_batches,
            choice.schedule.sub_batches,
        )
        self.wide, self.low = max(self.e, 4), self.e < 4
        summed = max(self.sub_batches, choice.schedule.chunks) > 1
        self.g = self.wide if summed else self.e  # a weight's gradient: sub-batches and chunks are summed in fp32
        self.m, self.narrow, self.spread = s.m, s.m * s.d * self.e, s.m * s.f * self.e
        self.apart = s.x > 1
        self.trained = Trained(work.config, work.freeze)
        self.lowest = max(self.trained.lowest - 1, 0)  # layer where backward ends
        self.backward = max(work.config.layers - self.lowest, 0)  # layers that have a backward
        self.of_block = self.trained.block(0)  # trained parameters of the current layer
        weights = list(s.block_weights.values())
        self.whole = added(w.n * w.k for w in weights) * self.e
        self.direct = hw.direct or self.low
        self.copying = hw.direct
        self.way = 1 + self.received(s.x)  # a reduce-scatter over x: send buffer and receive buffer
        one = added(w.shard for w in weights) * self.e
        sent = np.maximum(one * self.low, self.copies("x", one))  # else the shards themselves are sent
        self.coming = np.where(self.apart, self.whole + sent, self.low * self.whole)  # a layer's weights in flight
        rows = self.m // s.y
        self.dX = rows * s.d * self.e  # the residual stream, or its gradient
        below = segment.ends and self.trained.lowest <= work.config.layers + 1  # backward passes the head
        self.head_dW = segment.ends * self.trained.head * s.head_weight.shard * STORED
        self.head_saved = below * self.dX + self.head_dW
        norm = below * (self.dX + rows * (1 + self.c.norm_bias) * self.wide)  # the last norm
        self.layer = (saved - self.head_saved - norm - segment.ends * self.wide) // max(self.backward, 1)
        self.moved = self.apart | (self.e < STORED)  # unsharded weights are separate tensors, not the parameters
        alone = [w.shard * self.e >= Transport.least_alone for w in weights]
        self.small = self.packed(weights)
        # small weights are copied out of the receive buffer, which lives on if large ones are views of it
        both = self.apart * np.logical_or.reduce(alone) * self.small
        self.gathered = added(map(self.padded, weights)) * self.moved + both
        self.kept = self.gathered * (choice.policy.weights == "retain")  # of each layer
        self.regathers = choice.policy.activations != "retain"

    def packed(self, weights: Sequence[Weight]) -> Array:
        """Bytes of the weights that are too small for a separate message."""
        small = [w.n * w.k * (w.shard * self.e < Transport.least_alone) for w in weights]
        return added([np.zeros_like(self.s.x), *small]) * self.e

    def trains(self, *linears: str) -> bool:
        """Whether any of these weights is trained in the current layer, so that its X is saved and regathered."""
        return any(f"{name}.weight" in self.of_block for name in linears)

    def shard(self, block: frozenset[str]) -> Array:
        """The gradients of a block's shards."""
        if block not in self._shards:
            self._shards[block] = added([np.zeros_like(self.s.x), *(w.shard for w in self.s.trained(block))]) * STORED
        return self._shards[block]

    def reduced(self, block: frozenset[str]) -> Array:
        """The gradients of a block's weights in flight over x."""
        if block not in self._reduced:
            whole = added([np.zeros_like(self.s.x), *(w.n * w.k for w in self.s.trained(block))])
            self._reduced[block] = whole * self.e
        return self._reduced[block]

    def padded(self, w: Weight) -> Array:
        """A weight gathered over x, or its packed gradient: all shards padded to the longest."""
        return w.shard * self.s.x * self.e

    def copies(self, axis: str, shard: Array) -> Array:
        """gloo's send buffer for gathering a small shard: one copy per rank."""
        ranks, inside, _ = self.s.groups[axis]
        return self.copying * (ranks > 2) * (inside == ranks) * (shard < Gloo.least_alone) * ranks * shard

    def received(self, axis: Array) -> Array:
        """The receive buffer of a reduce-scatter, as a share of its input: the shards of all ranks, the other's of two,
        or with NCCL the sum."""
        return np.where(axis == 2, 0.5, 1.0 if self.direct else 1 / axis)

    def scattered(self, axis: Array, whole: Array) -> Array:
        """Bytes of a reduce-scatter over an axis: send buffer and receive buffer."""
        return whole * (1 + (axis > 1) * self.received(axis))

    def summed(self, axis: Array, whole: Array) -> Array:
        """The sum of what was received of `whole` bytes. Over two ranks it is in place, unless it is in a wider dtype.
        Over more ranks the first summand is converted separately."""
        copies = np.where(axis == 2, self.low, self.direct * (1 + self.low))
        return (axis > 1) * copies * (whole // axis * self.wide // self.e)

    def landed(self, axis: Array, whole: Array) -> Array:
        """Bytes while received shards are summed. A sum of low precision is converted back."""
        sent = (axis == 2) * whole + self.low * whole // axis
        return (axis > 1) * (self.received(axis) * whole + self.summed(axis, whole) + sent)

    # Moments of a layer's backward

    def dW(self, *linears: str) -> Array:
        """Gradients of these weights."""
        made = [w.n * w.k for name, w in self.s.linears.items() if name in linears and self.trains(name)]
        return added([np.zeros_like(self.s.x), *made]) * self.g

    def every_dW(self) -> Array:
        """Gradients of all trained weights of the current layer."""
        return self.reduced(self.of_block) // self.e * self.g

    def down(self) -> Array:
        """The MLP's output: dY gathered over y, X regathered over z, dX scattered, X of the next matmul."""
        s, regathers = self.s, self.regathers * self.trains("mlp.down")
        dY, dX = self.narrow * (s.y > 1), self.scattered(s.z, self.spread)
        X, shard = self.spread * (s.z > 1) * regathers, self.spread // s.z * (s.z > 1) * regathers
        ahead = self.ahead_of_down()
        sent = regathers * self.copies("z", self.spread // s.z)
        launched, one = dY + X + sent + dX + ahead, self.dW("mlp.down")
        landing = ahead + one + self.landed(s.z, self.spread) - self.kept_X()
        return np.maximum.reduce([launched, launched - sent - shard + one, landing])

    def ahead_of_down(self) -> Array:
        """X of the next matmul of backward, prefetched."""
        return self.narrow * (self.s.y > 1) * self.regathers * self.trains("mlp.gate", "mlp.up")

    def kept_X(self) -> Array:
        """What forward has saved of X of the MLP's output."""
        return self.trains("mlp.down") * self.spread // (self.s.z if self.regathers else 1)

    def nonlinear(self) -> Array:
        """dY and, for SwiGLU, silu and two gradients; for GELU one gradient. X of the MLP's output is released."""
        one = self.spread // self.s.z
        return one * (4 if self.c.gated else 2) + self.dW("mlp.down") - self.kept_X() + self.ahead_of_down()

    def up(self) -> Array:
        """The MLP's input: gradients of all inner features gathered over z, dX, X regathered, X of the next matmul."""
        s, ups, regathers = self.s, 2 if self.c.gated else 1, self.regathers * self.trains("mlp.gate", "mlp.up")
        inner, down = ups * self.spread // s.z, self.dW("mlp.down")
        gone = self.kept_X() + inner  # what the two operations above had saved
        X = self.narrow * (s.y > 1) * regathers
        joined = 2 * inner + X + down
        sent = inner * (1 + (s.z > 1) * s.z) + X + regathers * self.copies("y", self.dX) + down
        before = self.m * s.q * self.e * (s.z > 1) * self.regathers * self.trains("attention.out")
        ended = ups * self.spread + X - X // s.y + self.scattered(s.y, self.narrow) + before
        return np.maximum.reduce([joined, sent, ended + self.dW("mlp.down", "mlp.gate", "mlp.up")]) - gone

    def first(self) -> Array:
        """The layer's first matmul: all gradients exist, and all activations but the norm's are released."""
        s, needed = self.s, self.trains("attention.q", "attention.k", "attention.v")
        dY = self.m * (s.q + 2 * s.kv) * self.e
        X = self.narrow * (s.y > 1) * self.regathers * needed
        left = self.dX + np.where((s.y == 1) | (not self.regathers), self.narrow * needed, 0)
        mine = left + dY + X + self.scattered(s.y, self.narrow) + self.every_dW()
        return mine - (self.recomputed() if self.choice.recompute == "full" else self.layer)

    def recomputing(self) -> Array:
        """Near the end of a layer's recomputed forward, when the MLP's inner features are summed."""
        s, inner = self.s, self.spread * (2 if self.c.gated else 1)
        return self.landed(s.z, inner) - inner // s.z - self.kept_X()

    def recomputed(self) -> Array:
        """What one recomputed layer saves."""
        s, c, m, e = self.s, self.c, self.m, self.e
        retain = self.choice.policy.activations == "retain"
        y, z = (np.ones_like(s.y), np.ones_like(s.z)) if retain else (s.y, s.z)
        into = self.trains("attention.q", "attention.k", "attention.v") + self.trains("mlp.gate", "mlp.up")
        out = self.trains("attention.out")
        products = into * m * s.d // y + m * (s.q * out + s.f * self.trains("mlp.down")) // z
        apart = (s.context > 1) | (retain & (s.z > 1)) | (not out)  # attention's output is not the next X itself
        attention = m * (s.heads * (1 + apart) + 2 * s.picked * s.context) * c.head_dim
        inner = m // s.z * s.f * (2 if c.gated else 1)
        rows = 2 * m // s.y * (1 + c.norm_bias) + m * s.heads  # statistics of the norms, and of attention
        return (2 * m // s.y * s.d + products + attention + inner) * e + rows * self.wide
