"""Look up token (and position) rows in tables split over the vocabulary by y, over the features by z.

    forward    X = RS_y( rows of this y's block of the table, zero where the token is another's )
    backward   dTable = rows of AG_y(dX) added up

Like an *out of* product with one-hot tokens, but the table is stored like the head's weight, so that both can be one.
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
from cuboid.step.op import Ahead, Back, Layer, chain, moved
from cuboid.step.weights import Gathered


def lookup(tables: Sequence[nn.Parameter], rows: Sequence[int], y: Axis, width: float, kind: Kind) -> Layer:
    """ids [s, b] -> [s/y, b, d/z], the sum over tables of their rows: of the tokens' and, if there is a second table,
    of the positions'. `rows` are the global numbers of rows, `width` is d/z. Where `kind` is all_reduce, not
    reduce_scatter, X is whole: [s, b, d/z]."""
    return chain(PartialRows(tables, rows, y), moved(kind, y, width))


@dataclass(eq=False)
class PartialRows:
    """ids [s, b] -> [s, b, d/z]: zero where a row is in the block of another y."""

    tables: Sequence[nn.Parameter]
    rows: Sequence[int]
    y: Axis

    takes, gives = "ids", "residual"

    def __call__(self, ids: Tensor, w: Gathered, at: Any) -> Steps:
        all_ids = (ids, at.place.positions[:, None])[: len(self.tables)]
        starts = [shard_range(n, self.y.size, self.y.index)[0] for n in self.rows]
        first, *others = (_rows(w[t], ids, i) for t, ids, i in zip(self.tables, all_ids, starts, strict=True))
        for rows in others:
            first.add_(rows)

        def run(dX: Tensor, w: Gathered, before: Ahead) -> Steps:
            for table, each, start in zip(self.tables, all_ids, starts, strict=True):
                if table.requires_grad:
                    _add_rows(dX, each, start, *w.gradient([table], wide=True, extra=1))
            return None
            yield

        return first, Back(run) if at.train else None
        yield


def _add_rows(dX: Tensor, ids: Tensor, start: int, total: Tensor, add: bool) -> None:
    """Into the gradient of a block of the table, whose last row takes what is another's."""
    own = _own(ids, start, total.shape[0] - 1)
    dRows = dX.sum_to_size(*own.shape, dX.shape[-1])
    if not add:
        total.zero_()
    total.index_add_(0, own.reshape(-1), dRows.reshape(-1, total.shape[1]).to(total.dtype))


def _own(ids: Tensor, start: int, rows: int) -> Tensor:
    """Row of this block for each id; `rows` where it is in another's block or padding."""
    local = ids - start
    return torch.where((local >= 0) & (local < rows), local, rows)


def _rows(table: Tensor, ids: Tensor, start: int) -> Tensor:
    """The rows of this block's ids, zero for the others."""
    n = table.shape[0]
    if n == 0:
        return table.new_zeros(*ids.shape, table.shape[1])
    own = _own(ids, start, n)
    return F.embedding(own.clamp(max=n - 1), table).mul_((own < n)[..., None])
