"""The 3-D parallel product: one equation and its two transposes.

Roles m (tokens), k (in-features), n (out-features). Each matrix is split along its own two roles and once more along
the role it lacks:

    X[m k] / n        W[n k] / m        Y[m n] / k

    forward   Y  = RS_k( AG_n(X)  · AG_m(W)ᵀ )        (1)
    dgrad     dX = RS_n( AG_k(dY) · AG_m(W)  )        (2)
    wgrad     dW = RS_m( AG_k(dY)ᵀ · AG_n(X) )        (3)

The bucket does AG_m and RS_m of the weights (step/weights.py); the rest is here. It pauses wherever it would wait:

    forward    launch AG_n(X) | wait, multiply (1), launch RS_k(Y) | wait, add the bias
    backward   launch AG_k(dY), and AG_n(X) unless it was retained or is in flight | wait, multiply (2), launch
               RS_n(dX) and AG_n(X) of the next product in backward, multiply (3) | wait

X is split over n by tokens or by heads, and Y over k likewise. If it is split by heads, the gathered tensor is a stack
of blocks, one per rank, which are multiplied one by one, so that neither gather nor scatter needs a copy.

With `chunks`, all this is done for one chunk of the tokens after another. A chunk has the same rows of every rank's
shard. Unsharded sequences are joined in order; tokens split over k come out chunk by chunk, and an *out of* product
with the same number of chunks restores their order.
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
from cuboid.device import is_gpu
from cuboid.mesh.layout import shard_range
from cuboid.step.op import Ahead, Back
from cuboid.step.weights import Gathered, joined


class Affine(NamedTuple):
    """The parameters of one linear, a weight [n, k] and a bias [n], the weight's global shape, and its way: "into" or
    "out_of", by which it is sharded."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    shape: tuple[int, int]
    way: str

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for p in (self.weight, self.bias) if p is not None]


def check_way(way: str, *linears: Affine) -> None:
    """Raise ValueError if a linear was made to go the other way: its shards would be taken for others."""
    for linear in linears:
        if linear.way != way:
            raise ValueError(
                f"parallel.{way} got a Linear of weight {list(linear.shape)} that was made as {linear.way!r}, and is "
                f"split for that; use parallel.{linear.way}, or make it as Linear(parallel, {way!r}, …)"
            )


class Side:
    """X or Y of a product: all-gathered over `axis` before a matmul, or reduce-scattered over it after one. `axis`
    splits it by heads or by tokens, the `other` axis by features."""

    def __init__(self, axis: Axis, other: Axis, heads: bool) -> None:
        self.axis = axis
        self.blocks = axis.size if heads else 1  # in the gathered tensor
        self.shards = other.size if heads else 1  # a chunk takes rows from each

    def gather(self, X_s: Tensor, chunks: int) -> list[Flight]:
        """Launch the all-gather of X_s [s, b, k], one per chunk."""
        return [all_gather(chunk, self.axis) for chunk in split_chunks(X_s, chunks, self.shards)]

    def stack(self, X: Tensor) -> Tensor:
        """[(blocks s) b k] -> [blocks, m, k]."""
        s, b, k = X.shape
        return X.reshape(self.blocks, s // self.blocks * b, k)

    def scatter(self, X_m: Tensor) -> Flight:
        """Launch the reduce-scatter of X_m [blocks, m, k]."""
        return reduce_scatter(X_m.flatten(0, 1), self.axis)

    def land(self, chunks: Sequence[Flight], b: int) -> Tensor:
        """Wait for scattered chunks [(s b) k] -> [s, b, k]."""
        Ys = (chunk.wait() for chunk in chunks)
        return join_chunks([Y.view(Y.shape[0] // b, b, Y.shape[1]) for Y in Ys], self.shards)


class Out(Side):
    """Y of linears whose outputs share one reduce-scatter, concatenated along the last dim. The keys of `linears` are
    the numbers of the product's outputs."""

    def __init__(self, k: Axis, n: Axis, heads: bool, linears: dict[int, Affine]) -> None:
        super().__init__(k, n, heads)
        self.places, self.linears, self._block = list(linears), list(linears.values()), k.index if heads else 0
        rows = [shard_range(linear.shape[0], n.size, n.index) for linear in self.linears]
        self.widths = [(stop - start) // self.blocks for start, stop in rows]  # columns of each linear in a block
        self._biases = [linear.bias for linear in self.linears if linear.bias is not None]
        # Linears of a group are multiplied as one matrix. Split by heads, each block has rows of every weight.
        self.groups = [self.linears] if self.blocks == 1 else [[linear] for linear in self.linears]
        assert len(self._biases) in (0, len(linears)), "linears that share a scatter have a bias each or none at all"

    def multiply(self, X_mk: Tensor, w: Gathered) -> Flight:
        """Compute (1) and launch its reduce-scatter."""
        Y_mn = X_mk.new_empty(self.blocks, X_mk.shape[1], sum(self.widths))
        for group, Y in zip(self.groups, self.columns(Y_mn), strict=True):
            multiply(X_mk, weight_of(group, w), Y)
        return self.scatter(Y_mn)

    def columns(self, Y: Tensor) -> Sequence[Tensor]:
        """The columns of Y [blocks, m, n] of each group."""
        return [Y] if len(self.groups) == 1 else self.by_linear(Y)

    def by_linear(self, Y: Tensor) -> Sequence[Tensor]:
        """The columns of Y [..., n] of each linear."""
        return [Y] if len(self.linears) == 1 else Y.split_with_sizes(self.widths, -1)

    def trained(self, group: Sequence[Affine], dY: Tensor) -> Iterable[tuple[Sequence[Affine], Tensor]]:
        """Linears whose gradients are computed together, with their columns of dY: the whole group, or each linear by
        itself if some parameters are frozen."""
        if len(group) == 1 or all(p.requires_grad for linear in group for p in linear.parameters):
            return [(group, dY)]
        return [([linear], columns) for linear, columns in zip(group, self.by_linear(dY), strict=True)]

    def bias(self, w: Gathered) -> Tensor | None:
        """The bias of this rank's columns: of all if Y is split by tokens, of the k-th block if by heads."""
        biases = [w[bias].view(self.blocks, -1)[self._block] for bias in self._biases]
        return torch.cat(biases) if biases else None


class SavedX:
    """AG_n(X) for backward: regathered at the first `launch`, or retained in `flights`."""

    def __init__(self, gather: Callable[[], list[Flight]] | None, sent: float) -> None:
        self._gather, self._sent = gather, sent
        self.flights: list[Flight] = []

    def launch(self) -> float:
        """Regather X unless done. Returns the bytes that this call launched."""
        if self._gather is None:
            return 0.0
        gather, self._gather = self._gather, None  # releases the shard
        self.flights = gather()
        return self._sent


@dataclass(eq=False)
class Product:
    """X [s, b, k] -> one tensor [s, b, n] per linear: a tuple if there are several linears."""

    linears: Sequence[Affine]
    k: Axis
    n: Axis
    heads: bool = False  # X is split by heads over n; else by tokens
    by_heads: Sequence[bool] = ()  # which outputs are split by heads over k (default: none); the others by tokens
    retain: bool = False  # keep AG_n(X) for backward instead of regathering it
    chunks: int = 1  # at most
    takes: str = ""
    gives: str = ""

    def __post_init__(self) -> None:
        self.X, split = Side(self.n, self.k, self.heads), self.by_heads or [False] * len(self.linears)
        chosen = {heads: {i: w for i, w in enumerate(self.linears) if split[i] == heads} for heads in (True, False)}
        self.outs = [Out(self.k, self.n, heads, linears) for heads, linears in chosen.items() if linears]
        self.groups = [(out, group) for out in self.outs for group in out.groups]

    def pauses(self, m: int, itemsize: int) -> tuple[float, float, float]:
        """Bytes of X and of Y that a rank receives, and FLOPs. INVARIANT: the same on all ranks."""
        n = sum(linear.shape[0] for linear in self.linears) / self.n.size
        k = self.linears[0].shape[1] / self.k.size
        X, Y = (m * size * itemsize * (1 - 1 / axis.size) for size, axis in ((k, self.n), (n, self.k)))
        return X, Y, 2 * m * k * n

    @property
    def trains(self) -> bool:
        return any(p.requires_grad for linear in self.linears for p in linear.parameters)

    @property
    def trained_share(self) -> float:
        """The trained share of the weights' elements. INVARIANT: the same on all ranks."""
        sizes = [(linear.shape[0], linear.weight.requires_grad) for linear in self.linears]
        return sum(n for n, trained in sizes if trained) / sum(n for n, _ in sizes)

    def __call__(self, X_s: Tensor, w: Gathered, at: Any) -> Steps:
        s, b = X_s.shape[0] * (1 if self.heads else self.n.size), X_s.shape[1]
        chunks = chunk_count(s, self.k.size, self.n.size, self.chunks)
        X_bytes, Y_bytes, flops = self.pauses(s * b, X_s.element_size())
        wgrad_flops = flops * self.trained_share if at.train else 0.0
        trained, sizes = wgrad_flops > 0, (X_bytes, Y_bytes, flops, wgrad_flops)
        Xs, Ys = self.X.gather(X_s, chunks), list[list[Flight]]()
        gather = partial(self.X.gather, X_s, chunks) if trained and not self.retain else None
        saved = SavedX(gather, X_bytes)
        del X_s, gather
        yield Pause(X_bytes, flops)
        while Xs:
            X = Xs.pop(0).wait()
            Ys.append([out.multiply(self.X.stack(X), w) for out in self.outs])  # (1)
            if self.retain and trained:
                saved.flights.append(landed(X))
            del X
        biases = [out.bias(w) for out in self.outs]
        back = Back(partial(self.run, saved, sizes, b, chunks), saved.launch) if at.train else None
        del saved, w
        yield Pause(Y_bytes)
        outputs: list[Any] = [None] * len(self.linears)
        for out, bias, flights in zip(self.outs, biases, zip(*Ys, strict=True), strict=True):
            Y_s = out.land(flights, b)
            Y_s = Y_s if bias is None else Y_s.add_(bias)
            for place, Y in zip(out.places, out.by_linear(Y_s), strict=True):
                outputs[place] = Y
        return tuple(outputs) if len(outputs) > 1 else outputs[0], back

    def run(self, saved: SavedX, sizes: Any, b: int, chunks: int, dYs: Any, w: Gathered, before: Ahead) -> Steps:
        """Backward: (2) and (3)."""
        X_bytes, Y_bytes, flops, wgrad_flops = sizes
        dYs = dYs if len(self.linears) > 1 else (dYs,)
        flights = [out.gather(side_by_side([dYs[i] for i in out.places]), chunks) for out in self.outs]
        del dYs
        yield Pause(Y_bytes, flops + wgrad_flops if w.wgrads == "now" else flops, saved.launch())
        Ws = [weight_of(group, w) for _, group in self.groups]
        dX_flights, dY_mn = list[Flight](), list[list[Tensor]]()
        while flights[0]:
            dY = list[Tensor]()
            for out, chunk in zip(self.outs, flights, strict=True):
                dY += out.columns(out.stack(chunk.pop(0).wait()))
            dX_mk = dY[0].new_empty(self.X.blocks, dY[0].shape[1], Ws[0].shape[1] // self.X.blocks)
            for i, (dY_n, W) in enumerate(zip(dY, Ws, strict=True)):
                multiply_transposed(dY_n, W, dX_mk, add=i > 0)
            dX_flights.append(self.X.scatter(dX_mk))  # (2), overlaps with wgrad's matmul
            dY_mn.append(dY)
            del dX_mk, dY
        aside = before()
        del Ws
        wgrad = partial(self.weight_gradients, saved.flights, dY_mn, w)  # (3)
        later = w.make(wgrad, wgrad_flops) if self.trains else None
        del dY_mn, w, wgrad
        yield Pause(X_bytes, 0.0, aside, later)
        return self.X.land(dX_flights, b)

    def weight_gradients(self, Xs: list[Flight], dYs: list[list[Tensor]], w: Gathered) -> None:
        wide = len(dYs) > 1  # chunks are added up
        while dYs:
            X_mk = self.X.stack(Xs.pop(0).wait()) if Xs else None  # not gathered if all weights are frozen
            for dY_n, (out, group) in zip(dYs.pop(0), self.groups, strict=True):
                for linears, dY in out.trained(group, dY_n):
                    weights = [linear.weight for linear in linears if linear.weight.requires_grad]
                    biases = [each.bias for each in linears if each.bias is not None and each.bias.requires_grad]
                    if weights and X_mk is not None:
                        weight_gradient(dY, X_mk, *w.gradient(weights, wide))
                    if biases:
                        add_up(dY, *w.gradient(biases, wide))  # dY is gathered over k, so db needs no sum over k


def weight_of(group: Sequence[Affine], w: Gathered) -> Tensor:
    """The weight of linears that are multiplied as one matrix."""
    return joined([w[linear.weight] for linear in group])


def side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors), -1) if len(tensors) > 1 else tensors[0]


def add_up(dY: Tensor, db: Tensor, add: bool) -> None:
    """db (+)= the sum of dY [blocks, m, n] over m"""
    if add:
        db += dY.sum(1, dtype=db.dtype).view(-1)
    else:
        torch.sum(dY, 1, dtype=db.dtype, out=db.view(dY.shape[0], -1))


def chunk_count(s: int, y: int, z: int, wanted: int) -> int:
    """The largest number, at most `wanted`, of equal chunks of s rows whose length y and z divide.

    >>> chunk_count(48, 2, 3, 4), chunk_count(36, 2, 3, 4)
    (4, 3)
    """
    rows = s // lcm(y, z)
    return next(n for n in range(min(wanted, rows), 0, -1) if rows % n == 0)


def split_chunks(X: Tensor, chunks: int, shards: int) -> Iterable[Tensor]:
    """[(shards chunks r) b k] -> chunks of [(shards r) b k]"""
    if chunks == 1:
        return (X,)
    return (chunk.flatten(0, 1) for chunk in X.unflatten(0, (shards, -1)).chunk(chunks, 1))


def join_chunks(chunks: Sequence[Tensor], shards: int) -> Tensor:
    """The inverse of `split_chunks`."""
    if len(chunks) == 1:
        return chunks[0]
    return torch.cat([chunk.unflatten(0, (shards, -1)) for chunk in chunks], 1).flatten(0, 1)


def tiles(Y: Tensor, X: Tensor, W: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor]]:
    """For every pair of blocks (j, i): Y[j], X[i] and their tile W[j,i], all views. W [n, k] has as many blocks of rows
    as Y [blocks, m, n] and as many blocks of columns as X [blocks, m, k]."""
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
    """out (+)= A B, into a view. `out` may be wider than A and B, to add up matmuls of low precision."""
    if out.dtype == A.dtype:
        out.addmm_(A, B, beta=float(add))
    elif is_gpu(out.device):  # only GPU matmuls can write another dtype than their operands'
        torch.addmm(out, A, B, out_dtype=out.dtype, beta=float(add), out=out)
    else:
        out.add_(A @ B) if add else out.copy_(A @ B)
