"""What a rank holds at the fullest moments of a step, by kind.

At rest: parameters, AdamW's two moments, gradients once they are summed, and the activations that forward has saved. For a
moment: gathered weights and their gradients on the way, gathered operands, the head's chunk. None of it grows with depth,
so the fullest moment is one of three:

    head      everything is saved; the logits' chunk and the table's gradient are alive
    last      everything is saved; the last layer runs backward with its weights and the next one's gathered
    first     nothing is saved any more, but all gradients are there; the first layer's are still on their way
"""

from dataclasses import dataclass

import numpy as np

from cuboid.plan.hardware import Hardware
from cuboid.plan.sizes import Sizes
from cuboid.plan.step import ITEMSIZE, STORED, Choice, Work
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


def memory(hw: Hardware, work: Work, sizes: Sizes, choice: Choice, saved: Array) -> Memory:
    """`saved` is what a forward leaves for backward, all layers' and the head's."""
    s, parameters = sizes, sizes.parameters * STORED
    block = sum(w.shard for w in s.block_weights()) * STORED
    head_saved = s.m // s.y * s.d * ITEMSIZE[work.precision] + s.head_weight().shard * STORED
    kept = np.zeros_like(saved)
    if choice.policy.weights == "retain":
        kept = work.config.layers * _whole(s, work) * (s.x > 1)
    before = saved - head_saved  # the head's are not there before it has run
    moments = (
        (np.zeros_like(saved), before + kept, head_buffers(hw, work, s, choice)),
        (head_saved * 0, saved + kept, backward_buffers(hw, work, s, choice)),
        (parameters - block, before // work.config.layers, first_buffers(hw, work, s, choice)),
    )
    totals = np.stack([sum(moment) for moment in moments])
    which = totals.argmax(0)
    gradients, activations, buffers = (
        np.choose(which, [moment[i] for moment in moments]).astype(np.int64) for i in range(3)
    )
    if work.micro_batches > 1:  # gradients of the micro-batches before
        gradients = gradients + parameters
    return Memory(parameters, gradients, 2 * parameters, activations, buffers)


def _whole(s: Sizes, work: Work) -> Array:
    """Bytes of a layer's weights, gathered."""
    return sum(w.n * w.k for w in s.block_weights()) * ITEMSIZE[work.precision]


def weights_in_flight(hw: Hardware, work: Work, s: Sizes, layers: int) -> Array:
    """Gradients of so many layers on their way over x: a buffer sent, and one received where no ring sums underway."""
    direct = hw.direct or ITEMSIZE[work.precision] < 4
    return (s.x > 1) * layers * _whole(s, work) * (2 if direct else 1)


def head_buffers(hw: Hardware, work: Work, s: Sizes, choice: Choice) -> Array:
    e = ITEMSIZE[work.precision]
    wide = max(e, 4)
    table = s.vocab * s.d
    rows = s.chunk(choice.policy.head_elements) * s.b
    partial = rows * s.vocab * e
    logits = rows // s.z * s.vocab * wide
    # the sum of the parts is made beside them; later the gathered dlogits take their place
    chunk = np.where(s.z > 1, 2 * partial + 2 * logits, partial + logits * (e < 4) + logits)
    weights = table * (e + wide) + np.where(s.x > 1, table * e, 0)
    return weights + 2 * s.m * s.d * e + chunk


def backward_buffers(hw: Hardware, work: Work, s: Sizes, choice: Choice) -> Array:
    """The widest product of the last layer, the MLP's down: its operands, their gradients, and weights."""
    e, c = ITEMSIZE[work.precision], work.config
    parts = 2 if choice.schedule.halves else 1
    whole, m = _whole(s, work), s.m // parts
    weights = np.where(s.x > 1, (2 * whole + whole) * (choice.policy.weights != "retain"), 0) + whole
    ups = 2 if c.gated else 1
    inner = m * s.f * e
    operands = m * s.d * e + inner + inner // s.z * (1 + ups)
    received = np.where(s.z > 1, inner * 2, 0)
    recomputed = 0
    if choice.recompute == "full":
        layer = m // s.y * s.d * 6 + m // s.z * s.f * (ups + 1) + m // s.z * (s.q + 2 * s.kv) * 2
        recomputed = layer * e * parts
    return weights + operands + received + recomputed


def first_buffers(hw: Hardware, work: Work, s: Sizes, choice: Choice) -> Array:
    whole = _whole(s, work)
    layers = min(MOST_IN_FLIGHT + 1, work.config.layers)
    return weights_in_flight(hw, work, s, layers) + 2 * whole
