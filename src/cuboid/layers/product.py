"""The 3-D parallel product: one equation and its two transposes.

Roles m (tokens), k (in-features), n (out-features). Each matrix is split along its own two roles and once more along
the role it lacks:

    X[m k] / n        W[n k] / m        Y[m n] / k

    forward   Y  = RS_k( AG_n(X)  · AG_m(W)ᵀ )        (1)
    dgrad     dX = RS_n( AG_k(dY) · AG_m(W)  )        (2)
    wgrad     dW = RS_m( AG_k(dY)ᵀ · AG_n(X) )        (3)

AG_m and RS_m of the weights are the bucket's (step/weights.py); the rest is here. It pauses wherever it would wait:

    forward    launch AG_n(X) | wait, multiply (1), launch RS_k(Y) | wait, add the bias
    backward   launch AG_k(dY), and AG_n(X) unless it was kept or is on its way | wait, multiply (2), launch RS_n(dX)
               and AG_n(X) of the product that backward comes to next, multiply (3) | wait

X may be split over n by tokens or by heads, Y over k likewise. Split by heads, the gathered tensor is a stack of
blocks, one per rank, and the product is written block by block, so that neither gather nor scatter needs a copy.

With `chunks` all this is done for so many chunks of the tokens, one after another: a chunk is the same rows of every
rank's part. Whole sequences are then put together again in their order; tokens split over k come out chunk by chunk,
and an *out of* product that takes as many chunks gives them back in order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cuboid.comm.axis import Axis
from cuboid.comm.collectives import all_gather, reduce_scatter
from cuboid.comm.flight import Flight, Pause, Steps, landed
from cuboid.step.op import Ahead, Back
from cuboid.step.weights import Gathered, joined


class Affine(NamedTuple):
    """The parameters of one linear: a weight [n, k], a bias [n], and the global shape of the weight."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    shape: tuple[int, int]


@dataclass(frozen=True)
class Out:
    """Linears whose outputs travel in one reduce-scatter, side by side in the last dim, split over k by heads or by
    tokens. `places` are theirs among all outputs of the product."""

    linears: Sequence[Affine]
    places: Sequence[int]
    heads: bool = False


class Again:
    """AG_n(X) for backward: kept, or gathered again when somebody first asks for it."""

    def __init__(self, launch: Callable[[], list[Flight]] | None, flights: list[Flight]) -> None:
        self._launch, self._flights = launch, flights

    def launch(self) -> None:
        if self._launch is not None:
            launch, self._launch = self._launch, None  # the shard goes with it
            self._flights = launch()

    def take(self) -> list[Flight]:
        self.launch()
        flights, self._flights = self._flights, []
        return flights


@dataclass(eq=False)
class Product:
    """X [s, b, k] -> a tensor [s, b, n] for each linear; the tensor itself where there is one linear."""

    outs: Sequence[Out]
    k: Axis
    n: Axis
    heads: bool = False  # X is split by heads over n; else by tokens
    retain: bool = False  # keep AG_n(X) for backward instead of gathering again
    chunks: int = 1  # at most
    takes: str = ""
    gives: str = ""

    def __post_init__(self) -> None:
        k, n = self.k.size, self.n.size
        self.linears = [linear for out in self.outs for linear in out.linears]
        self.blocks = n if self.heads else 1  # of gathered X
        self.parts = k if self.heads else 1  # that a chunk of X takes rows from
        self.out_blocks = [k if out.heads else 1 for out in self.outs]  # of Y before it is scattered
        self.out_parts = [n if out.heads else 1 for out in self.outs]
        # those multiplied as one matrix: all of an out, unless each of its blocks has some rows of every weight
        self.groups = [
            [out.linears] if blocks == 1 else [[linear] for linear in out.linears]
            for out, blocks in zip(self.outs, self.out_blocks, strict=True)
        ]
        self.all_groups = [group for groups in self.groups for group in groups]
        for out in self.outs:
            biases = [linear.bias for linear in out.linears if linear.bias is not None]
            assert len(biases) in (0, len(out.linears)), "linears that share a scatter have a bias each or none at all"

    def pauses(self, X_s: Tensor) -> tuple[float, float, float]:
        """Bytes of X and of Y that a rank receives, and FLOPs: by global shapes, the same on all ranks."""
        n = sum(linear.shape[0] for linear in self.linears) / self.n.size
        k = self.linears[0].shape[1] / self.k.size
        m = X_s.shape[0] * X_s.shape[1] * (1 if self.heads else self.n.size)
        X, Y = (m * size * X_s.element_size() * (1 - 1 / axis.size) for size, axis in ((k, self.n), (n, self.k)))
        return X, Y, 2 * m * k * n

    def gather(self, X_s: Tensor, chunks: int) -> list[Flight]:
        return [all_gather(chunk, self.n) for chunk in cut(X_s, chunks, self.parts)]

    def __call__(self, X_s: Tensor, w: Gathered, at: Any) -> Steps:
        s, b, _ = X_s.shape
        chunks = chunk_count(s * (1 if self.heads else self.n.size), self.k.size, self.n.size, self.chunks)
        X_bytes, Y_bytes, flops = self.pauses(X_s)
        Xs, regather = self.gather(X_s, chunks), partial(self.gather, X_s, chunks)
        del X_s
        yield Pause(X_bytes, flops)
        kept, Ys = list[Flight](), list[list[Flight]]()
        while Xs:
            X = Xs.pop(0).wait()
            Ys.append([reduce_scatter(Y_mn, self.k) for Y_mn in self.outputs(X, w)])  # (1)
            if self.retain:
                kept.append(landed(X))
            del X
        biases = [self.bias(i, w) for i in range(len(self.outs))]
        back = None
        if at.train:
            again = Again(None, kept) if self.retain else Again(regather, [])
            back = Back(partial(self.run, again, (X_bytes, Y_bytes, flops), b, chunks), again.launch)
            del again
        outs = zip(self.outs, self.out_blocks, strict=True)
        widths = [[len(w[linear.weight]) // blocks for linear in out.linears] for out, blocks in outs]
        del regather, kept, w
        yield Pause(Y_bytes)
        found: list[Any] = [None] * len(self.linears)
        for i, out in enumerate(self.outs):
            Y_s = join([unstack(each[i].wait(), b) for each in Ys], self.out_parts[i])
            bias = biases[i]
            Y_s = Y_s if bias is None else Y_s.add_(bias)
            for place, Y in zip(out.places, [Y_s] if len(out.places) == 1 else Y_s.split(widths[i], -1), strict=True):
                found[place] = Y
        return tuple(found) if len(found) > 1 else found[0], back

    def run(self, again: Again, sizes: Any, b: int, chunks: int, dYs: Any, w: Gathered, before: Ahead) -> Steps:
        """(2) and (3)."""
        X_bytes, Y_bytes, flops = sizes
        flights = self.gather_gradients(dYs if len(self.linears) > 1 else (dYs,), chunks)
        del dYs
        again.launch()
        yield Pause(Y_bytes, 2 * flops)
        Ws = [joined([w[linear.weight] for linear in group]) for group in self.all_groups]
        dX_flights, dY_mn = list[Flight](), list[list[Tensor]]()
        while flights:
            dY = self.gradients(flights.pop(0), Ws)
            dX_mk = dY[0].new_empty(self.blocks, dY[0].shape[1], Ws[0].shape[1] // self.blocks)
            for i, (dY_n, W) in enumerate(zip(dY, Ws, strict=True)):
                multiply_transposed(dY_n, W, dX_mk, add=i > 0)
            dX_flights.append(reduce_scatter(dX_mk.flatten(0, 1), self.n))  # (2), under wgrad's product
            dY_mn.append(dY)
            del dX_mk, dY
        before()
        del Ws
        w.make(partial(self.weight_gradients, again.take(), dY_mn, w))  # (3)
        del dY_mn, w
        yield Pause(X_bytes)
        return join([unstack(flight.wait(), b) for flight in dX_flights], self.parts)

    def outputs(self, X: Tensor, w: Gathered) -> Iterable[Tensor]:
        """Y [(blocks m) n] of each out, before it is scattered."""
        X_mk = stack(X, self.blocks)
        for groups, blocks in zip(self.groups, self.out_blocks, strict=True):
            Ws = [joined([w[linear.weight] for linear in group]) for group in groups]
            Y_mn = X.new_empty(blocks, X_mk.shape[1], sum(W.shape[0] for W in Ws) // blocks)
            for Y, W in zip(columns(Y_mn, Ws), Ws, strict=True):
                multiply(X_mk, W, Y)
            yield Y_mn.flatten(0, 1)

    def bias(self, i: int, w: Gathered) -> Tensor | None:
        """Of this rank's columns of out i: of all of them split by tokens, of the k-th block split by heads."""
        block, biases = self.k.index if self.outs[i].heads else 0, [linear.bias for linear in self.outs[i].linears]
        parts = [w[bias].view(self.out_blocks[i], -1)[block] for bias in biases if bias is not None]
        return torch.cat(parts) if parts else None

    def gather_gradients(self, dYs: Sequence[Tensor], chunks: int) -> list[list[Flight]]:
        """AG_k(dY) by chunk and out, launched."""
        parts = []
        for out, count in zip(self.outs, self.out_parts, strict=True):
            mine = [dYs[place] for place in out.places]
            parts.append(cut(torch.cat(mine, -1) if len(mine) > 1 else mine[0], chunks, count))
        return [[all_gather(dY, self.k) for dY in chunk] for chunk in zip(*parts, strict=True)]

    def gradients(self, flights: Sequence[Flight], Ws: Sequence[Tensor]) -> list[Tensor]:
        """dY [blocks, m, n] of each group's weight, gathered."""
        found: list[Tensor] = []
        for flight, groups, blocks in zip(flights, self.groups, self.out_blocks, strict=True):
            found += columns(stack(flight.wait(), blocks), Ws[len(found) : len(found) + len(groups)])
        return found

    def weight_gradients(self, Xs: list[Flight], dYs: list[list[Tensor]], w: Gathered) -> None:
        while Xs:
            X_mk = stack(Xs.pop(0).wait(), self.blocks)
            for dY_n, group in zip(dYs.pop(0), self.all_groups, strict=True):
                for linears, dY in _trained(group, dY_n, w):
                    weights = [linear.weight for linear in linears if linear.weight.requires_grad]
                    biases = [each.bias for each in linears if each.bias is not None and each.bias.requires_grad]
                    if weights:
                        weight_gradient(dY, X_mk, *w.gradient(weights))
                    if biases:
                        add_up(dY, *w.gradient(biases))  # dY is whole over k, so db needs no sum over k


def _trained(group: Sequence[Affine], dY: Tensor, w: Gathered) -> Iterable[tuple[Sequence[Affine], Tensor]]:
    """Linears whose gradients are made together, and their part of dY: one by one where some parameters are frozen."""
    if all(p is None or p.requires_grad for weight, bias, _ in group for p in (weight, bias)):
        return [(group, dY)]
    parts = dY.split([w.shape(linear.weight)[0] // dY.shape[0] for linear in group], -1)
    return [([linear], part) for linear, part in zip(group, parts, strict=True)]


def add_up(dY: Tensor, db: Tensor, add: bool) -> None:
    """db (+)= the sum of dY [blocks, m, n] over m"""
    if add:
        db += dY.sum(1, dtype=db.dtype).view(-1)
    else:
        torch.sum(dY, 1, dtype=db.dtype, out=db.view(dY.shape[0], -1))


def chunk_count(s: int, y: int, z: int, wanted: int) -> int:
    """Into how many equal chunks of whole rows a sequence of s can be taken, split by y as by z: at most `wanted`.

    >>> chunk_count(48, 2, 3, 4), chunk_count(36, 2, 3, 4)
    (4, 3)
    """
    rows = s // lcm(y, z)
    return next(n for n in range(min(wanted, rows), 0, -1) if rows % n == 0)


def cut(X: Tensor, chunks: int, parts: int) -> Iterable[Tensor]:
    """[(parts chunks r) b k] -> chunks of [(parts r) b k]"""
    if chunks == 1:
        return (X,)
    return (chunk.flatten(0, 1) for chunk in X.unflatten(0, (parts, -1)).chunk(chunks, 1))


def join(chunks: Sequence[Tensor], parts: int) -> Tensor:
    """The inverse of `cut`."""
    if len(chunks) == 1:
        return chunks[0]
    return torch.cat([chunk.unflatten(0, (parts, -1)) for chunk in chunks], 1).flatten(0, 1)


def stack(X: Tensor, blocks: int) -> Tensor:
    """[(blocks s) b k] -> [blocks, m, k]."""
    s, b, k = X.shape
    return X.reshape(blocks, s // blocks * b, k)


def unstack(X: Tensor, b: int) -> Tensor:
    """[(s b) k] -> [s, b, k]"""
    m, k = X.shape
    return X.view(m // b, b, k)


def columns(Y: Tensor, Ws: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The part of Y [blocks, m, n] that belongs to each weight."""
    if len(Ws) == 1:
        return (Y,)
    return Y.split([W.shape[0] // Y.shape[0] for W in Ws], dim=-1)


def tiles(Y: Tensor, X: Tensor, W: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor]]:
    """Of every pair of blocks j, i: Y[j], X[i] and their tile W[j,i], all without a copy. W [n, k] has as many blocks
    of rows as Y [blocks, m, n] and as many of columns as X [blocks, m, k]."""
    (n, k), Ys, Xs = W.shape, Y.unbind(), X.unbind()
    for j, rows in enumerate(W.split(n // len(Ys)) if len(Ys) > 1 and n else [W] * len(Ys)):
        for i, tile in enumerate(rows.split(k // len(Xs), 1) if len(Xs) > 1 else [rows]):
            yield j, i, Ys[j], Xs[i], tile


def multiply(X: Tensor, W: Tensor, Y: Tensor) -> None:
    """Y[j] = Σ_i X[i] W[j,i]ᵀ"""
    for _, i, Y_j, X_i, W_ji in tiles(Y, X, W):
        mm(X_i, W_ji.T, Y_j, add=i > 0)


def multiply_transposed(dY: Tensor, W: Tensor, dX: Tensor, add: bool) -> None:
    """dX[i] (+)= Σ_j dY[j] W[j,i]"""
    for j, _, dY_j, dX_i, W_ji in tiles(dY, dX, W):
        mm(dY_j, W_ji, dX_i, add=add or j > 0)


def weight_gradient(dY: Tensor, X: Tensor, dW: Tensor, add: bool) -> None:
    """dW[j,i] (+)= dY[j]ᵀ X[i]"""
    for _, _, dY_j, X_i, dW_ji in tiles(dY, X, dW):
        mm(dY_j.T, X_i, dW_ji, add)


def mm(A: Tensor, B: Tensor, out: Tensor, add: bool) -> None:
    """out (+)= A B, into a view. A wider `out` adds up matmuls of low precision."""
    if out.dtype != A.dtype:
        out.add_(A @ B) if add else out.copy_(A @ B)
    elif add:
        out.addmm_(A, B)
    else:
        torch.mm(A, B, out=out)
