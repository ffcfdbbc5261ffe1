"""SUMMA, the 2-D parallel product on q × q ranks: axis y cuts the tokens, axis z the features.

    X [m/y, k/z]        W [n/z, k/y]        Y [m/y, n/z]

Three kernels, each the others' gradients. Block i of an operand visits an axis, broadcast by rank i of it; block i of a
result is summed over an axis, reduced to rank i of it:

    kernel   product        for each i of q                    visitors
    (1) AB   Y  = X Wᵀ      Y   += X_i W_iᵀ                    X_i over z, W_i over y
    (2) ABᵀ  dX = dY W      dX_i = reduce_z( dY W_i )          W_i over y
    (3) AᵀB  dW = dYᵀ X     dW_i = reduce_y( dYᵀ X_i )         X_i over z

A table [V/y, d/z] is a weight the other way round: the head's logits are (2), their gradients (1) and (3). A look-up is
(1) with one-hot tokens, which every rank of z has, so the table alone moves; its gradient is (3) likewise.

Each is a `sweep` over i: the next blocks are on their way while these are multiplied, and the last sums while the next
are made. Saved for backward: shards.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cuboid.comm.collectives import all_gather, all_reduce, broadcast, reduce
from cuboid.comm.flight import Flight
from cuboid.layers.loss import Loss
from cuboid.layers.product import Linear, mm
from cuboid.mesh.layout import Range, cut
from cuboid.mesh.mesh import Mesh
from cuboid.step.weights import Bucket, Weights

Flights = Sequence[Flight]


AHEAD = 2  # turns


def turns(q: int) -> list[int]:
    """Every i of q, from 0 on: neighbours on an axis may share a host, so one turn's blocks come from its first half
    and the next one's from its second, and both halves' links are busy.

    >>> turns(8)
    [0, 4, 1, 5, 2, 6, 3, 7]
    """
    return sorted(range(q), key=lambda i: i % -(-q // 2))


def sweep(q: int, launch: Callable[[int], Flights], work: Callable[..., Flights]) -> list[list[Tensor]]:
    """For each i of q, `work(i, *blocks)` with what `launch(i)` sent for, AHEAD turns before. The flights it returns
    are awaited as many turns later; what they brought is returned, by i."""
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


def product(X: Tensor, W: Weights, linears: Sequence[Linear], mesh: Mesh) -> Tensor:
    """X [s, b, k/z] -> [s, b, n/z], the outputs of all linears side by side: one visit of X serves them all."""
    call = _Linears(W.bucket, linears, mesh)
    biases = [linear.bias for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears)), "linears side by side have a bias each or none at all"
    Y = _Product.apply(X, call, *(W[linear.weight] for linear in linears))
    return Y.add_(torch.cat([W[bias] for bias in biases])) if biases else Y


class _Linears(NamedTuple):
    bucket: Bucket
    linears: Sequence[Linear]
    mesh: Mesh


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, X_s: Tensor, call: _Linears, *Ws: Tensor) -> Tensor:
        y, z, ctx.call = call.mesh.y, call.mesh.z, call
        ctx.save_for_backward(X_s)
        X, W = X_s.flatten(0, 1), torch.cat(Ws) if len(Ws) > 1 else Ws[0]
        Y = X.new_empty(*X_s.shape[:2], len(W))

        def launch(i: int) -> Flights:
            return broadcast(X, z, i, X.shape), broadcast(W, y, i, W.shape)

        def add(i: int, X_i: Tensor, W_i: Tensor) -> Flights:
            mm(X_i, W_i.T, Y.view(-1, len(W)), add=i > 0)  # (1)
            return ()

        sweep(z.size, launch, add)
        return Y

    @staticmethod
    def backward(ctx: Any, dY_s: Tensor) -> tuple[Tensor | None, ...]:
        call: _Linears = ctx.call
        y, z = call.mesh.y, call.mesh.z
        (X_s,) = ctx.saved_tensors
        Ws = [call.bucket.again(linear.weight) for linear in call.linears]
        X, dY, W = X_s.flatten(0, 1), dY_s.flatten(0, 1), torch.cat(Ws) if len(Ws) > 1 else Ws[0]

        def launch(i: int) -> Flights:
            return broadcast(W, y, i, W.shape), broadcast(X, z, i, X.shape)

        def multiply(i: int, W_i: Tensor, X_i: Tensor) -> Flights:
            return reduce(dY @ W_i, z, i), reduce(dY.T @ X_i, y, i)  # (2), and (3) under its sum

        sums = sweep(z.size, launch, multiply)
        dX, dW = sums[z.index][0], sums[y.index][1]
        return dX.view(X_s.shape), None, *dW.split([len(W) for W in Ws])


# Tables


def blocks_of(rows: int, q: int) -> list[Range]:
    return [cut(rows, q, i) for i in range(q)]


def lookup(
    ids: Sequence[Tensor], tables: Sequence[tuple[Weights, nn.Parameter]], lengths: Sequence[int], mesh: Mesh
) -> Tensor:
    """Σ over tables, of `lengths` rows in all, of the rows of `ids`, which broadcast to [s, b] -> [s, b, d/z]"""
    call = _Ids(ids, [blocks_of(rows, mesh.y.size) for rows in lengths], mesh)
    return _Lookup.apply(call, *(W[table] for W, table in tables))


class _Ids(NamedTuple):
    ids: Sequence[Tensor]
    blocks: Sequence[Sequence[Range]]  # of rows, for each table
    mesh: Mesh

    def own(self, i: int) -> list[Tensor]:
        """For each table, the row of block i that an id means; one past its end where that is another block's."""
        return [
            torch.where((ids >= blocks[i][0]) & (ids < blocks[i][1]), ids, blocks[i][1]) - blocks[i][0]
            for ids, blocks in zip(self.ids, self.blocks, strict=True)
        ]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Ids, *tables: Tensor) -> Tensor:
        ctx.call, ctx.dtype = call, tables[0].dtype
        y, d = call.mesh.y, tables[0].shape[1]
        X = tables[0].new_zeros(*call.ids[0].shape, d)

        def launch(i: int) -> Flights:
            shapes = [(blocks[i][1] - blocks[i][0], d) for blocks in call.blocks]
            return [broadcast(table, y, i, shape) for table, shape in zip(tables, shapes, strict=True)]

        def add(i: int, *blocks: Tensor) -> Flights:
            for block, own in zip(blocks, call.own(i), strict=True):
                X.add_(F.embedding(own, F.pad(block, (0, 0, 0, 1))))  # a row of zeros past the end
            return ()

        sweep(y.size, launch, add)
        return X

    @staticmethod
    def backward(ctx: Any, dX: Tensor) -> tuple[Tensor | None, ...]:
        call: _Ids = ctx.call
        y, d = call.mesh.y, dX.shape[-1]
        wide = torch.promote_types(ctx.dtype, torch.float32)

        def rows(i: int) -> Flights:
            flights = []
            for blocks, own in zip(call.blocks, call.own(i), strict=True):
                total = dX.new_zeros(blocks[i][1] - blocks[i][0] + 1, d, dtype=wide)
                total.index_add_(0, own.flatten(), dX.sum_to_size(*own.shape, d).view(-1, d).to(wide))
                flights.append(reduce(total[:-1], y, i, ctx.dtype))
            return flights

        return None, *sweep(y.size, lambda i: (), rows)[y.index]


@dataclass(frozen=True)
class Head:
    """A table as the classifier: `weight` of `bucket`, of `vocab` rows in all."""

    bucket: Bucket
    weight: nn.Parameter
    vocab: int
    mesh: Mesh

    def logits(self, X: Tensor, T: Tensor, dtype: torch.dtype) -> Tensor:
        """X [m, d/z], T [V/y, d/z] -> [m, V/z]"""
        y, z, blocks = self.mesh.y, self.mesh.z, blocks_of(self.vocab, self.mesh.z.size)

        def launch(i: int) -> Flights:
            return (broadcast(T, y, i, (blocks[i][1] - blocks[i][0], T.shape[1])),)

        def multiply(i: int, T_i: Tensor) -> Flights:
            return (reduce(X @ T_i.T, z, i, dtype),)  # (2)

        return sweep(z.size, launch, multiply)[z.index][0]

    def gradients(self, dlogits: Tensor, X: Tensor, T: Tensor) -> tuple[Tensor, Tensor]:
        """dX and dT; one visit of dlogits serves both."""
        y, z, blocks = self.mesh.y, self.mesh.z, blocks_of(self.vocab, self.mesh.z.size)
        dX = torch.empty_like(X)

        def launch(i: int) -> Flights:
            rows = blocks[i][1] - blocks[i][0]
            return broadcast(dlogits, z, i, (len(X), rows)), broadcast(T, y, i, (rows, T.shape[1]))

        def multiply(i: int, dlogits_i: Tensor, T_i: Tensor) -> Flights:
            sums = reduce(dlogits_i.T @ X, y, i, self.weight.dtype)  # (3)
            mm(dlogits_i, T_i, dX, add=i > 0)  # (1), under its sum
            return (sums,)

        dT = sweep(z.size, launch, multiply)[y.index][0]
        return dX, dT


def logits(X: Tensor, W: Weights, head: Head) -> Tensor:
    """X [s, b, d/z] -> [s, b, V/z]"""
    return _Logits.apply(X, W[head.weight], head)


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, X_s: Tensor, T: Tensor, head: Head) -> Tensor:
        ctx.head = head
        ctx.save_for_backward(X_s)
        return head.logits(X_s.flatten(0, 1), T, X_s.dtype).view(*X_s.shape[:2], -1)

    @staticmethod
    def backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor, Tensor, None]:
        head: Head = ctx.head
        (X_s,) = ctx.saved_tensors
        dX, dT = head.gradients(dlogits.flatten(0, 1), X_s.flatten(0, 1), head.bucket.again(head.weight))
        return dX.view(X_s.shape), dT, None


def head_loss(X: Tensor, W: Weights, head: Head, targets: Tensor, loss: Loss) -> Tensor:
    """X [s, b, d/z], targets [s, b] -> the mean loss over the tokens of all ranks."""
    return _HeadLoss.apply(X, W[head.weight], head, targets.flatten(), loss, torch.is_grad_enabled())


class _HeadLoss(torch.autograd.Function):
    """Gradients are made in forward, unscaled, and multiplied in backward by dloss / (tokens that count), so that the
    logits are never saved. Saved: the shards of dX and dT."""

    @staticmethod
    def forward(ctx: Any, X_s: Tensor, T: Tensor, head: Head, targets: Tensor, loss: Loss, train: bool) -> Tensor:
        mesh, vocab, ctx.head = head.mesh, head.vocab, head
        X, wide = X_s.flatten(0, 1), torch.promote_types(X_s.dtype, torch.float32)
        start, _ = cut(vocab, mesh.z.size, mesh.z.index)
        logits = head.logits(X, T, wide)
        parts = all_gather(loss.parts(logits, targets, start)[None], mesh.z).wait()
        total, counted, lse = loss.merge(parts, targets, vocab)
        sums = torch.stack((total, counted.to(wide)))
        for axis in (mesh.data, mesh.x, mesh.y):
            sums = all_reduce(sums, axis).wait()
        count = sums[1].clamp(min=1)
        if train:
            dlogits = loss.gradient(logits, targets, start, lse, vocab).to(X.dtype)
            dX, dT = head.gradients(dlogits, X, T)
            ctx.save_for_backward(dX.view(X_s.shape), dT, count)
        return sums[0] / count

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        head: Head = ctx.head
        dX, dT, count = ctx.saved_tensors
        scale = dloss / count
        head.bucket.add(head.weight, dT * scale)
        return dX * scale.to(dX.dtype), None, None, None, None, None
