"""Look up token (and position) rows in tables cut over the vocabulary by y, over the features by z.

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
from cuboid.comm.collectives import all_gather, reduce_scatter
from cuboid.comm.flight import Flight, Pause, Steps, token
from cuboid.step.weights import Weights


@dataclass
class Lookup:
    """What the two nodes of one look-up share. `ids` are those of all tokens of this rank's x-slice."""

    ids: Sequence[Tensor]  # for each table, ids that broadcast to [s, b]
    starts: Sequence[int]  # for each table, the first row of this rank's block
    y: Axis
    flight: Flight | None = None


def lookup(tables: Sequence[tuple[Weights, nn.Parameter]], call: Lookup) -> Steps:
    """Σ over tables of the rows of `call.ids` -> [s/y, b, d]"""
    values = [W[table] for W, table in tables]
    launched = _Launch.apply(call, *values)
    row = values[0].shape[1] * values[0].element_size()
    yield Pause(sent=call.ids[0].numel() * row * (1 - 1 / call.y.size))
    return _Wait.apply(launched, call)


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


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Lookup, *tables: Tensor) -> Tensor:
        ctx.call = call
        ctx.like = [(table.shape, table.dtype) for table in tables]
        partial = None
        for ids, start, table in zip(call.ids, call.starts, tables, strict=True):
            rows = _rows(table, ids, start)
            partial = rows if partial is None else partial.add_(rows)
        assert partial is not None
        call.flight = reduce_scatter(partial, call.y)
        return token(partial)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        dX, call.flight = call.flight.wait(), None
        gradients = []
        for ids, start, (shape, dtype) in zip(call.ids, call.starts, ctx.like, strict=True):
            own = _own(ids, start, shape[0])
            dRows = dX.sum_to_size(*own.shape, dX.shape[-1])
            total = dX.new_zeros(shape[0] + 1, shape[1], dtype=torch.promote_types(dtype, torch.float32))
            total.index_add_(0, own.reshape(-1), dRows.reshape(-1, shape[1]).to(total.dtype))
            gradients.append(total[:-1].to(dtype))
        return None, *gradients


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, launched: Tensor, call: Lookup) -> Tensor:
        assert call.flight is not None
        ctx.call = call
        X_s, call.flight = call.flight.wait(), None
        return X_s

    @staticmethod
    def backward(ctx: Any, dX_s: Tensor) -> tuple[Tensor, None]:
        ctx.call.flight = all_gather(dX_s, ctx.call.y)
        return token(dX_s), None
