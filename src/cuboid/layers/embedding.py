"""Token (and position) embeddings, whose rows y splits and whose features z splits.

    forward    X = RS_y( rows of this y's block, zero for tokens of other blocks )
    backward   dW = rows of AG_y(dX), added up per token

This is an *out of* product with one-hot tokens, but W is split like the head's weight, so that they can be tied.
Saved: the token ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cuboid.comm.axis import Axis
from cuboid.comm.collectives import Kind
from cuboid.comm.flight import Steps
from cuboid.mesh.layout import shard_range
from cuboid.step.op import Ahead, Back, Layer, chain, collective
from cuboid.step.weights import Gathered


def lookup(weights: Sequence[nn.Parameter], rows: Sequence[int], y: Axis, width: float, kind: Kind) -> Layer:
    """ids [s, b] -> X [s/y, b, d/z]: rows of the token embedding, plus those of the position embedding if `weights` has
    one. `rows` are the global numbers of rows, `width` is d/z. With the `kind` all_reduce, X is [s, b, d/z]."""
    return chain(PartialRows(weights, rows, y), collective(kind, y, width))


@dataclass(eq=False)
class PartialRows:
    """ids [s, b] -> [s, b, d/z], zero for rows in the block of another y."""

    weights: Sequence[nn.Parameter]
    rows: Sequence[int]
    y: Axis

    takes, gives = "ids", "residual"

    def __call__(self, ids: Tensor, w: Gathered, at: Any) -> Steps:
        all_ids = (ids, at.place.positions[:, None])[: len(self.weights)]
        starts = [shard_range(n, self.y.size, self.y.index)[0] for n in self.rows]
        first, *others = (_rows(w[t], ids, i) for t, ids, i in zip(self.weights, all_ids, starts, strict=True))
        for rows in others:
            first.add_(rows)

        def run(dX: Tensor, w: Gathered, before: Ahead) -> Steps:
            for weight, each, start in zip(self.weights, all_ids, starts, strict=True):
                if weight.requires_grad:
                    _add_rows(dX, each, start, *w.gradient([weight], wide=True, extra=1))
            return None
            yield

        return first, Back(run) if at.train else None
        yield


def _add_rows(dX: Tensor, ids: Tensor, start: int, total: Tensor, add: bool) -> None:
    """Add rows of dX to the gradient of this block. Its extra last row takes those of other blocks."""
    own = _own(ids, start, total.shape[0] - 1)
    dRows = dX.sum_to_size(*own.shape, dX.shape[-1])
    if not add:
        total.zero_()
    total.index_add_(0, own.reshape(-1), dRows.reshape(-1, total.shape[1]).to(total.dtype))


def _own(ids: Tensor, start: int, rows: int) -> Tensor:
    """The row in this block of each id; `rows` if the id belongs to another block or is padding."""
    local = ids - start
    return torch.where((local >= 0) & (local < rows), local, rows)


def _rows(block: Tensor, ids: Tensor, start: int) -> Tensor:
    """Rows of the ids in this block, zero for other ids."""
    n = block.shape[0]
    if n == 0:
        return block.new_zeros(*ids.shape, block.shape[1])
    own = _own(ids, start, n)
    return F.embedding(own.clamp(max=n - 1), block).mul_((own < n)[..., None])
