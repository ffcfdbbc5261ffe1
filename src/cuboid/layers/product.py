"""The 3-D parallel product: one equation and its two transposes.

Roles m (tokens), k (in-features), n (out-features). Each matrix is cut along its own two roles and once more along the
role it lacks:

    X[m k] / n        W[n k] / m        Y[m n] / k

    forward   Y  = RS_k( AG_n(X)  · AG_m(W)ᵀ )        (1)
    dgrad     dX = RS_n( AG_k(dY) · AG_m(W)  )        (2)
    wgrad     dW = RS_m( AG_k(dY)ᵀ · AG_n(X) )        (3)

AG_m and RS_m of the weights are the bucket's (weights.py); the rest is here, as three autograd nodes that share one
`Product`. A block can be suspended between them, in forward and in backward:

    node       forward                            backward
    launch     launch AG_n(X)                     wait for dX
    multiply   wait, multiply, launch RS_k(Y)     wait for dY; (2), launch RS_n(dX), and AG_n(X) of the product before
                                                  this one, which is next in backward; wait for X; (3)
    finish     wait for Y, add the bias           launch AG_k(dY), and AG_n(X) unless it was kept or is on its way

X may be cut over n by tokens or by heads, Y over k likewise. Cut by heads, the gathered tensor is a stack of blocks,
one per rank, and the product is written block by block, so that neither gather nor scatter needs a copy.

With `chunks` the three nodes do all this for so many chunks of the tokens, one after another: a chunk is the same rows
of every rank's part. Whole sequences are then put together again in their order; tokens cut over k come out chunk by
chunk, and an *out of* product that takes as many chunks gives them back in order.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cuboid.comm.axis import Axis
from cuboid.comm.collectives import all_gather, reduce_scatter
from cuboid.comm.flight import Flight, Pause, Steps, landed, token
from cuboid.step.weights import Bucket, Weights, joined


class Linear(NamedTuple):
    weight: nn.Parameter
    bias: nn.Parameter | None


@dataclass
class Out:
    """Outputs that travel in one reduce-scatter: side by side in the last dim, cut over k by heads or by tokens."""

    linears: Sequence[Linear]
    heads: bool = False


@dataclass
class Product:
    """What the nodes of one product share. No tensor stays in it between forward and backward."""

    bucket: Bucket
    outs: Sequence[Out]
    k: Axis
    n: Axis
    heads: bool = False  # X is cut by heads over n; else by tokens
    retain: bool = False  # keep AG_n(X) for backward instead of gathering again
    chunks: int = 1
    before: "Product | None" = None  # of the same pass: backward comes to it next
    again: bool = False  # X has been gathered for backward
    b: int = 0
    X_s: Tensor | None = None
    bias: list[Tensor | None] = field(default_factory=list)
    # of each chunk, and of Y and dY each out of it; X again in backward
    X: list[Flight] = field(default_factory=list)
    Y: list[list[Flight]] = field(default_factory=list)
    dY: list[list[Flight]] = field(default_factory=list)
    dX: list[Flight] = field(default_factory=list)

    @property
    def linears(self) -> list[Linear]:
        return [linear for out in self.outs for linear in out.linears]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The weights, then the biases there are: the order in which `multiply` takes and differentiates them."""
        linears = self.linears
        return [linear.weight for linear in linears] + [linear.bias for linear in linears if linear.bias is not None]

    @property
    def blocks(self) -> int:
        """Of gathered X."""
        return self.n.size if self.heads else 1

    def out_blocks(self, out: Out) -> int:
        """Of Y before it is scattered."""
        return self.k.size if out.heads else 1

    def groups(self, out: Out) -> Sequence[Sequence[Linear]]:
        """Those multiplied as one matrix: all of an out, unless each of its blocks has some rows of every weight."""
        return [out.linears] if self.out_blocks(out) == 1 else [[linear] for linear in out.linears]

    def gather_X(self, X_s: Tensor) -> None:
        self.X = [all_gather(chunk, self.n) for chunk in self.cut_X(X_s)]

    def gather_again(self, X_s: Tensor) -> None:
        if not self.again:
            self.again = True
            self.gather_X(X_s)

    def cut_X(self, X_s: Tensor) -> Iterable[Tensor]:
        return cut(X_s, self.chunks, self.k.size if self.heads else 1)

    def join_X(self, X: Sequence[Tensor]) -> Tensor:
        return join(X, self.k.size if self.heads else 1)

    def cut_Y(self, Y_s: Tensor, out: Out) -> Iterable[Tensor]:
        return cut(Y_s, self.chunks, self.n.size if out.heads else 1)

    def join_Y(self, Y: Sequence[Tensor], out: Out) -> Tensor:
        return join(Y, self.n.size if out.heads else 1)

    def pauses(self, X_s: Tensor) -> tuple[Pause, Pause]:
        """While X is gathered, and while Y is scattered. Of the whole weights, which all ranks have in common."""
        shapes = [self.bucket.specs[self.bucket.index(linear.weight)].shape for linear in self.linears]
        n, k = sum(shape[0] for shape in shapes) / self.n.size, shapes[0][1] / self.k.size
        m = X_s.shape[0] * X_s.shape[1] * (1 if self.heads else self.n.size)
        X, Y = (m * size * X_s.element_size() * (1 - 1 / axis.size) for size, axis in ((k, self.n), (n, self.k)))
        return Pause(sent=X, work=2 * m * k * n), Pause(sent=Y)


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


def product(X_s: Tensor, W: Weights, call: Product) -> Steps:
    """X_s [s, b, k] -> one tensor [s, b, n] for each of `call.outs`."""
    call.before, X_before = W.trail.last or (None, None)
    W.trail.last = call, X_s
    gathering, scattering = call.pauses(X_s)
    launched = _Launch.apply(X_s, call)
    yield gathering
    multiplied = _Multiply.apply(launched, call, X_before, *(W[parameter] for parameter in call.parameters))
    yield scattering
    return _Finish.apply(multiplied, call)


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, X_s: Tensor, call: Product) -> Tensor:
        ctx.call = call
        call.gather_X(X_s)
        call.b, call.X_s = X_s.shape[1], X_s
        return token(X_s)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        call: Product = ctx.call
        dX_s = call.join_X([unstack(flight.wait(), call.b) for flight in call.dX])
        call.dX = []
        return dX_s, None


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, launched: Tensor, call: Product, X_before: Tensor | None, *parameters: Tensor) -> Tensor:
        ctx.call = call
        values = dict(zip(map(id, call.parameters), parameters, strict=True))
        kept: list[Tensor] = []
        while call.X:
            X = call.X.pop(0).wait()
            call.Y.append([reduce_scatter(Y_mn, call.k) for Y_mn in outputs(X, call, values)])  # (1)
            if call.retain:
                kept.append(X)
        ctx.save_for_backward(*kept if call.retain else [X_before])
        call.bias = [bias_of(out, call, values) for out in call.outs]
        return token(launched)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        call: Product = ctx.call
        Xs, call.X = [landed(X) for X in ctx.saved_tensors] if call.retain else call.X, []
        groups = [group for out in call.outs for group in call.groups(out)]
        Ws = [joined([call.bucket.again(linear.weight) for linear in group]) for group in groups]
        dYs = []
        for flights in call.dY:
            dY = gradients(flights, call, Ws)
            dX_mk = dY[0].new_empty(call.blocks, dY[0].shape[1], Ws[0].shape[1] // call.blocks)
            for i, (dY_n, W) in enumerate(zip(dY, Ws, strict=True)):
                multiply_transposed(dY_n, W, dX_mk, add=i > 0)
            call.dX.append(reduce_scatter(dX_mk.flatten(0, 1), call.n))  # (2), under wgrad's product
            dYs.append(dY)
            del dX_mk
        call.dY = []
        if call.before is not None and not call.retain:
            call.before.gather_again(*ctx.saved_tensors)
        for flight, dY in zip(Xs, dYs, strict=True):
            X_mk = stack(flight.wait(), call.blocks)
            for dY_n, group in zip(dY, groups, strict=True):
                weight_gradient(dY_n, X_mk, *call.bucket.gradient([linear.weight for linear in group]))  # (3)
                if biases := [linear.bias for linear in group if linear.bias is not None]:
                    db, add = call.bucket.gradient(biases)  # dY is whole over k, so db needs no sum over k
                    db.add_(dY_n.sum(1).view(-1)) if add else torch.sum(dY_n, 1, out=db.view(dY_n.shape[0], -1))
        return token(Ws[0]), None, None, *[None] * len(call.parameters)


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, multiplied: Tensor, call: Product) -> tuple[Tensor, ...]:
        ctx.call = call
        Ys = []
        for out, flights, bias in zip(call.outs, zip(*call.Y, strict=True), call.bias, strict=True):
            Y_s = call.join_Y([unstack(flight.wait(), call.b) for flight in flights], out)
            Ys.append(Y_s if bias is None else Y_s.add_(bias))
        if not call.retain:
            ctx.save_for_backward(call.X_s)
        call.Y, call.bias, call.X_s = [], [], None
        return tuple(Ys)

    @staticmethod
    def backward(ctx: Any, *dYs: Tensor) -> tuple[Tensor, None]:
        call: Product = ctx.call
        parts = [call.cut_Y(dY, out) for dY, out in zip(dYs, call.outs, strict=True)]
        call.dY = [[all_gather(dY, call.k) for dY in chunk] for chunk in zip(*parts, strict=True)]
        if not call.retain:
            call.gather_again(*ctx.saved_tensors)
        call.bucket.launch_backward()
        return token(dYs[0]), None


def outputs(X: Tensor, call: Product, values: Mapping[int, Tensor]) -> Iterable[Tensor]:
    """Y [(blocks m) n] of each out, before it is scattered."""
    X_mk = stack(X, call.blocks)
    for out in call.outs:
        Ws = [joined([values[id(linear.weight)] for linear in group]) for group in call.groups(out)]
        blocks = call.out_blocks(out)
        Y_mn = X.new_empty(blocks, X_mk.shape[1], sum(W.shape[0] for W in Ws) // blocks)
        for Y, W in zip(columns(Y_mn, Ws), Ws, strict=True):
            multiply(X_mk, W, Y)
        yield Y_mn.flatten(0, 1)


def gradients(flights: Sequence[Flight], call: Product, Ws: Sequence[Tensor]) -> list[Tensor]:
    """dY [blocks, m, n] of each group's weight, gathered."""
    found: list[Tensor] = []
    for flight, out in zip(flights, call.outs, strict=True):
        own = Ws[len(found) : len(found) + len(call.groups(out))]
        found += columns(stack(flight.wait(), call.out_blocks(out)), own)
    return found


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
    return Y.split([W.shape[0] // Y.shape[0] for W in Ws], dim=-1)


def bias_of(out: Out, call: Product, values: Mapping[int, Tensor]) -> Tensor | None:
    """The bias of this rank's columns of Y: of all of them cut by tokens, of the k-th block cut by heads."""
    biases = [values[id(linear.bias)] for linear in out.linears if linear.bias is not None]
    assert len(biases) in (0, len(out.linears)), "linears that share a scatter have a bias each or none at all"
    if not biases:
        return None
    block = call.k.index if out.heads else 0
    return torch.cat([bias.view(call.out_blocks(out), -1)[block] for bias in biases])


def pairs(A: Tensor, B: Tensor) -> Iterable[tuple[int, int]]:
    """A block of one and a block of the other."""
    return itertools.product(range(A.shape[0]), range(B.shape[0]))


def tiles(W: Tensor, n_blocks: int, k_blocks: int) -> Tensor:
    """W [n, k] -> [n_blocks, k_blocks, n/n_blocks, k/k_blocks], without a copy."""
    n, k = W.shape
    return W.view(n_blocks, n // n_blocks, k_blocks, k // k_blocks).transpose(1, 2)


def multiply(X: Tensor, W: Tensor, Y: Tensor) -> None:
    """Y[j] = Σ_i X[i] W[j,i]ᵀ"""
    W_ji = tiles(W, Y.shape[0], X.shape[0])
    for j, i in pairs(Y, X):
        mm(X[i], W_ji[j, i].T, Y[j], add=i > 0)


def multiply_transposed(dY: Tensor, W: Tensor, dX: Tensor, add: bool) -> None:
    """dX[i] (+)= Σ_j dY[j] W[j,i]"""
    W_ji = tiles(W, dY.shape[0], dX.shape[0])
    for j, i in pairs(dY, dX):
        mm(dY[j], W_ji[j, i], dX[i], add=add or j > 0)


def weight_gradient(dY: Tensor, X: Tensor, dW: Tensor, add: bool) -> None:
    """dW[j,i] (+)= dY[j]ᵀ X[i]"""
    dW_ji = tiles(dW, dY.shape[0], X.shape[0])
    for j, i in pairs(dY, X):
        mm(dY[j].T, X[i], dW_ji[j, i], add)


def mm(A: Tensor, B: Tensor, out: Tensor, add: bool) -> None:
    """out (+)= A B, into a view."""
    if add:
        out.addmm_(A, B)
    else:
        torch.mm(A, B, out=out)
