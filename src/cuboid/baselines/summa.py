"""SUMMA, the 2-D parallel product on q × q ranks: axis y splits the tokens, axis z the features.

    X [m/y, k/z]        W [n/z, k/y]        Y [m/y, n/z]

Three kernels, each the gradient of the others. Rank i of an axis broadcasts block i of an operand over it; block i of a
result is reduced over an axis to its rank i:

    kernel   product        for each i of q                    visitors
    (1) AB   Y  = X Wᵀ      Y   += X_i W_iᵀ                    X_i over z, W_i over y
    (2) ABᵀ  dX = dY W      dX_i = reduce_z( dY W_i )          W_i over y
    (3) AᵀB  dW = dYᵀ X     dW_i = reduce_y( dYᵀ X_i )         X_i over z

An embedding [V/y, d/z] is a transposed weight: the head's logits are (2), their gradients (1) and (3). A look-up is (1)
with one-hot tokens, which every rank of z has, so only the embedding is sent; its gradient is (3) likewise.

Each is a `sweep` over i: the next blocks are in flight while these are multiplied, and the last sums while the next are
computed. Saved for backward: shards.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cuboid.comm.collectives import all_gather, broadcast, reduce
from cuboid.comm.flight import Flight, Steps
from cuboid.layers.head import shrinkage
from cuboid.layers.loss import Loss
from cuboid.layers.product import Affine, mm
from cuboid.mesh.layout import Range, shard_range
from cuboid.mesh.mesh import Mesh
from cuboid.step.op import Ahead, Back, scaled
from cuboid.step.weights import Gathered, joined

Flights = Sequence[Flight]
AHEAD = 2  # turns between launch and use


def turns(q: int) -> list[int]:
    """The order of the q turns: alternately from the first and the second half of an axis. Neighbours may share a host,
    so the links of both halves are busy.

    >>> turns(8)
    [0, 4, 1, 5, 2, 6, 3, 7]
    """
    return sorted(range(q), key=lambda i: i % -(-q // 2))


def sweep(q: int, launch: Callable[[int], Flights], work: Callable[..., Flights]) -> list[list[Tensor]]:
    """For each i of q, `work(i, *blocks)` with the blocks that `launch(i)` launched AHEAD turns before. Flights that it
    returns are awaited AHEAD turns later; returns their results, by i."""
    order, brought = turns(q), {}
    blocks = deque(launch(i) for i in order[:AHEAD])
    sums: deque[tuple[int, Flights]] = deque()

    def land() -> None:
        i, flights = sums.popleft()
        brought[i] = [flight.wait() for flight in flights]

    for turn, i in enumerate(order):
        landed = [flight.wait() for flight in blocks.popleft()]
        if turn + AHEAD < q:
            blocks.append(launch(order[turn + AHEAD]))
        sums.append((i, work(i, *landed)))
        if len(sums) > AHEAD:
            land()
    while sums:
        land()
    return [brought[i] for i in range(q)]


# Linears


@dataclass(eq=False)
class SummaProduct:
    """X [s, b, k/z] -> [s, b, n/z] of each linear, side by side in memory, so that one broadcast of X serves all; a
    tuple if there are several."""

    linears: Sequence[Affine]
    mesh: Mesh
    takes: str
    gives: str

    def __post_init__(self) -> None:
        self.biases = [linear.bias for linear in self.linears if linear.bias is not None]
        assert len(self.biases) in (0, len(self.linears)), "linears side by side have a bias each or none at all"

    def __call__(self, X_s: Tensor, w: Gathered, at: Any) -> Steps:
        y, z, Ws = self.mesh.y, self.mesh.z, [w[linear.weight] for linear in self.linears]
        X, W = X_s.flatten(0, 1), joined(Ws)
        Y = X.new_empty(*X_s.shape[:2], len(W))

        def launch(i: int) -> Flights:
            return broadcast(X, z, i, X.shape), broadcast(W, y, i, W.shape)

        def add(i: int, X_i: Tensor, W_i: Tensor) -> Flights:
            mm(X_i, W_i.T, Y.view(-1, len(W)), add=i > 0)  # (1)
            return ()

        sweep(z.size, launch, add)
        if self.biases:
            Y.add_(joined([w[bias] for bias in self.biases]))
        Ys = Y.split([len(W) for W in Ws], -1)
        return Ys if len(Ys) > 1 else Y, Back(partial(self._run, [X_s])) if at.train else None
        yield

    def _run(self, saved: list[Tensor], dYs: Any, w: Gathered, before: Ahead) -> Steps:
        y, z, X_s, Ws = self.mesh.y, self.mesh.z, saved.pop(), [w[linear.weight] for linear in self.linears]
        X, W = X_s.flatten(0, 1), joined(Ws)
        dY = (torch.cat(dYs, -1) if len(Ws) > 1 else dYs).flatten(0, 1)
        del dYs

        def launch(i: int) -> Flights:
            return broadcast(W, y, i, W.shape), broadcast(X, z, i, X.shape)

        def multiply(i: int, W_i: Tensor, X_i: Tensor) -> Flights:
            return reduce(dY @ W_i, z, i), reduce(dY.T @ X_i, y, i)  # (2), and (3) under its sum

        sums = sweep(z.size, launch, multiply)
        dX, dW = sums[z.index][0], sums[y.index][1]
        rows = [len(W) for W in Ws]
        for linear, gradient in zip(self.linears, dW.split(rows), strict=True):
            w.add(linear.weight, gradient)
        for bias, part in zip(self.biases, dY.split(rows, -1), strict=False):
            w.add(bias, part.sum(0))
        return dX.view(X_s.shape)
        yield


# Tables


def blocks_of(rows: int, q: int) -> list[Range]:
    return [shard_range(rows, q, i) for i in range(q)]


def own(ids: Tensor, block: Range) -> Tensor:
    """The row of the block that each id means; one past its end where that is another block's."""
    start, stop = block
    return torch.where((ids >= start) & (ids < stop), ids, stop) - start


@dataclass(eq=False)
class SummaLookup:
    """ids [s, b] -> X [s, b, d/z]: rows of the token embedding, plus those of the position embedding if there is one.
    `rows` are the global numbers of rows."""

    tables: Sequence[nn.Parameter]
    rows: Sequence[int]
    mesh: Mesh
    takes: str = "ids"
    gives: str = "residual"

    def __call__(self, ids: Tensor, w: Gathered, at: Any) -> Steps:
        all_ids = (ids, at.place.positions[:, None])[: len(self.tables)]
        y, tables, blocks = self.mesh.y, [w[table] for table in self.tables], self._blocks()
        d = tables[0].shape[1]
        X = tables[0].new_zeros(*ids.shape, d)

        def launch(i: int) -> Flights:
            shapes = [(each[i][1] - each[i][0], d) for each in blocks]
            return [broadcast(table, y, i, shape) for table, shape in zip(tables, shapes, strict=True)]

        def add(i: int, *visitors: Tensor) -> Flights:
            for visitor, each, block in zip(visitors, all_ids, blocks, strict=True):
                X.add_(F.embedding(own(each, block[i]), F.pad(visitor, (0, 0, 0, 1))))  # a row of zeros past the end
            return ()

        sweep(y.size, launch, add)
        return X, Back(partial(self._run, all_ids)) if at.train else None
        yield

    def _blocks(self) -> list[list[Range]]:
        return [blocks_of(rows, self.mesh.y.size) for rows in self.rows]

    def _run(self, all_ids: Sequence[Tensor], dX: Tensor, w: Gathered, before: Ahead) -> Steps:
        y, d, blocks, wide = self.mesh.y, dX.shape[-1], self._blocks(), torch.promote_types(dX.dtype, torch.float32)

        def add_rows(i: int) -> Flights:
            flights = []
            for ids, (start, stop) in zip(all_ids, (each[i] for each in blocks), strict=True):
                total, rows = dX.new_zeros(stop - start + 1, d, dtype=wide), own(ids, (start, stop))
                total.index_add_(0, rows.flatten(), dX.sum_to_size(*rows.shape, d).view(-1, d).to(wide))
                flights.append(reduce(total[:-1], y, i))
            return flights

        gradients = sweep(y.size, lambda i: (), add_rows)[y.index]
        for table, gradient in zip(self.tables, gradients, strict=True):
            w.add(table, gradient)
        return None
        yield


@dataclass(eq=False)
class SummaLogits:
    """X [s, b, d/z] -> [s, b, V/z]: the products with an embedding of `vocab` rows."""

    weight: nn.Parameter
    vocab: int
    mesh: Mesh
    takes: str = "residual"
    gives: str = ""

    def __call__(self, X_s: Tensor, w: Gathered, at: Any) -> Steps:
        logits = self.logits(X_s.flatten(0, 1), w[self.weight], X_s.dtype)

        def run(dlogits: Tensor, w: Gathered, before: Ahead) -> Steps:
            dX, dT = self.gradients(dlogits.flatten(0, 1), X_s.flatten(0, 1), w[self.weight])
            w.add(self.weight, dT)
            return dX.view(X_s.shape)
            yield

        return logits.view(*X_s.shape[:2], -1), Back(run) if at.train else None
        yield

    def logits(self, X: Tensor, T: Tensor, dtype: torch.dtype) -> Tensor:
        """X [m, d/z], T [V/y, d/z] -> [m, V/z]"""
        y, z, blocks = self.mesh.y, self.mesh.z, blocks_of(self.vocab, self.mesh.z.size)

        def launch(i: int) -> Flights:
            return (broadcast(T, y, i, (blocks[i][1] - blocks[i][0], T.shape[1])),)

        def multiply(i: int, T_i: Tensor) -> Flights:
            return (reduce(X @ T_i.T, z, i, dtype),)  # (2)

        return sweep(z.size, launch, multiply)[z.index][0]

    def gradients(self, dlogits: Tensor, X: Tensor, T: Tensor, shrunk: float = 1.0) -> tuple[Tensor, Tensor]:
        """dX, and dT times `shrunk`; one visit of dlogits serves both."""
        y, z, blocks = self.mesh.y, self.mesh.z, blocks_of(self.vocab, self.mesh.z.size)
        dX, X = torch.empty_like(X), X if shrunk == 1 else X * shrunk

        def launch(i: int) -> Flights:
            rows = blocks[i][1] - blocks[i][0]
            return broadcast(dlogits, z, i, (len(X), rows)), broadcast(T, y, i, (rows, T.shape[1]))

        def multiply(i: int, dlogits_i: Tensor, T_i: Tensor) -> Flights:
            sums = reduce(dlogits_i.T @ X, y, i, self.weight.dtype)  # (3)
            mm(dlogits_i, T_i, dX, add=i > 0)  # (1), under its sum
            return (sums,)

        dT = sweep(z.size, launch, multiply)[y.index][0]
        return dX, dT


@dataclass(eq=False)
class SummaLoss(SummaLogits):
    """X [s, b, d/z] -> [sum of losses, how many count] of this rank's tokens, in fp32 or better. Gradients are made in
    forward, those of the sum of losses, so that the logits are never saved. Saved: the shards of dX and dT."""

    gives: str = "loss"
    early = True  # gradients are computed in forward

    def __call__(self, X_s: Tensor, w: Gathered, at: Any) -> Steps:
        z, X, T, targets, loss = self.mesh.z, X_s.flatten(0, 1), w[self.weight], at.targets.flatten(), at.loss or Loss()
        start, _ = shard_range(self.vocab, z.size, z.index)
        logits = self.logits(X, T, torch.promote_types(X.dtype, torch.float32))
        parts = all_gather(loss.parts(logits, targets, start)[None], z).wait()
        total, counted, lse = loss.merge(parts, targets, self.vocab)
        sums = torch.stack((total, counted.to(total.dtype)))
        if not at.train:
            return sums, None
        dlogits, w.shrunk = loss.gradient(logits, targets, start, lse, self.vocab, X.dtype), shrinkage(X.dtype, len(X))
        dX, dT = self.gradients(dlogits, X, T, w.shrunk)
        w.add(self.weight, dT)
        return sums, Back(partial(self._scaled, [dX.view(X_s.shape)]))
        yield

    def _scaled(self, saved: list[Tensor], scale: Tensor, w: Gathered, before: Ahead) -> Steps:
        return scaled(saved.pop(), scale)
        yield
