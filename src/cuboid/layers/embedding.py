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
from cuboid.comm.collectives import COLLECTIVES, TRANSPOSE, Kind
from cuboid.comm.flight import Pause, Steps
from cuboid.mesh.layout import cut
from cuboid.step.op import Ahead, Back
from cuboid.step.weights import Gathered


@dataclass(eq=False)
class Lookup:
    """ids [s, b] -> [s/y, b, d/z], the sum over tables of their rows: of the tokens' and, if there is a second table,
    of the positions'. `rows` are the global numbers of rows. Where `kind` is all_reduce, X is whole: [s, b, d/z]."""

    tables: Sequence[nn.Parameter]
    rows: Sequence[int]
    y: Axis
    kind: Kind = "reduce_scatter"

    takes, gives = "ids", "residual"

    def __call__(self, ids: Tensor, w: Gathered, at: Any) -> Steps:
        all_ids = (ids, at.place.positions[:, None])[: len(self.tables)]
        starts = [cut(n, self.y.size, self.y.index)[0] for n in self.rows]
        partial = None
        for table, each, start in zip(self.tables, all_ids, starts, strict=True):
            rows = _rows(w[table], each, start)
            partial = rows if partial is None else partial.add_(rows)
        assert partial is not None
        flight, pause = (
            COLLECTIVES[self.kind](partial, self.y),
            Pause(sent=partial.nbytes * (1 - 1 / self.y.size), axis=self.y.name),
        )
        del partial, rows, w
        yield pause
        X = flight.wait()
        del flight

        def run(dX_s: Tensor, w: Gathered, before: Ahead) -> Steps:
            flight = COLLECTIVES[TRANSPOSE[self.kind]](dX_s, self.y)
            del dX_s
            yield pause
            dX = flight.wait()
            del flight
            for table, each, start in zip(self.tables, all_ids, starts, strict=True):
                if table.requires_grad:
                    _add_rows(dX, each, start, *w.gradient([table], wide=True, extra=1))

        return X, Back(run) if at.train else None


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
