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
    multiply   wait, multiply, launch RS_k(Y)     wait for dY; (2), launch RS_n(dX); (3) under it
    finish     wait for Y, add the bias           launch AG_k(dY)

X may be cut over n by tokens or by heads, Y over k likewise. Cut by heads, the gathered tensor is a stack of blocks,
one per rank, and the product is written block by block, so that neither gather nor scatter needs a copy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cuboid.comm import Flight, Steps, all_gather, reduce_scatter, token
from cuboid.mesh import Axis
from cuboid.weights import Bucket, Weights


class Linear(NamedTuple):
    weight: nn.Parameter
    bias: nn.Parameter | None


@dataclass
class Out:
    """Outputs that travel in one reduce-scatter: side by side in the last dim, each cut into `blocks` by heads."""

    linears: Sequence[Linear]
    blocks: int = 1


@dataclass
class Product:
    """What the nodes of one product share. No tensor stays in it between forward and backward."""

    bucket: Bucket
    outs: Sequence[Out]
    k: Axis
    n: Axis
    blocks: int = 1  # of X, cut by heads over n; 1: cut by tokens
    retain: bool = False  # keep AG_n(X) for backward instead of gathering again
    X: Flight | None = None
    X_s: Tensor | None = None
    b: int = 0
    bias: list[Tensor | None] = field(default_factory=list)
    Y: list[Flight] = field(default_factory=list)
    dY: list[Flight] = field(default_factory=list)
    dX: Flight | None = None

    @property
    def linears(self) -> list[Linear]:
        return [linear for out in self.outs for linear in out.linears]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The weights, then the biases there are: the order in which `multiply` takes and differentiates them."""
        linears = self.linears
        return [linear.weight for linear in linears] + [linear.bias for linear in linears if linear.bias is not None]


def product(X_s: Tensor, W: Weights, call: Product) -> Steps:
    """X_s [s, b, k] -> one tensor [s, b, n] for each of `call.outs`."""
    launched = _Launch.apply(X_s, call)
    yield
    multiplied = _Multiply.apply(launched, call, *(W[parameter] for parameter in call.parameters))
    yield
    return _Finish.apply(multiplied, call)


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, X_s: Tensor, call: Product) -> Tensor:
        ctx.call = call
        call.X, call.X_s = all_gather(X_s, call.n), X_s
        call.b = X_s.shape[1]
        return token(X_s)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        call = ctx.call
        dX_s, call.dX = call.dX.wait(), None
        return unstack(dX_s, call.b), None


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, launched: Tensor, call: Product, *parameters: Tensor) -> Tensor:
        ctx.call = call
        assert call.X is not None
        assert call.X_s is not None
        X = call.X.wait()
        ctx.save_for_backward(X if call.retain else call.X_s)
        call.X = call.X_s = None
        X_mk = stack(X, call.blocks)
        values = dict(zip(map(id, call.parameters), parameters, strict=True))
        for out in call.outs:
            Ws = [values[id(linear.weight)] for linear in out.linears]
            Y_mn = X.new_empty(out.blocks, X_mk.shape[1], sum(W.shape[0] for W in Ws) // out.blocks)
            for Y, W in zip(columns(Y_mn, Ws), Ws, strict=True):
                multiply(X_mk, W, Y)
            call.Y.append(reduce_scatter(Y_mn.flatten(0, 1), call.k))  # (1)
            call.bias.append(bias_of(out, call.k, values))
        return token(X)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        call: Product = ctx.call
        (X,) = ctx.saved_tensors
        X_flight = None if call.retain else all_gather(X, call.n)  # under dgrad's product
        dYs = [stack(flight.wait(), out.blocks) for flight, out in zip(call.dY, call.outs, strict=True)]
        call.dY = []
        dY_W = []
        for dY, out in zip(dYs, call.outs, strict=True):
            Ws = [call.bucket.again(linear.weight) for linear in out.linears]
            dY_W += list(zip(columns(dY, Ws), Ws, strict=True))
        m, k = dYs[0].shape[1], dY_W[0][1].shape[1]
        dX_mk = X.new_empty(call.blocks, m, k // call.blocks)
        for i, (dY, W) in enumerate(dY_W):
            multiply_transposed(dY, W, dX_mk, add=i > 0)
        call.dX = reduce_scatter(dX_mk.flatten(0, 1), call.n)  # (2), under wgrad's product
        del dX_mk
        X_mk = stack(X if X_flight is None else X_flight.wait(), call.blocks)
        dWs = [weight_gradient(dY, X_mk, W) for dY, W in dY_W]  # (3)
        dbs = [
            dY.sum(1).reshape(-1)  # dY is whole over k, so db needs no sum over k
            for (dY, _), linear in zip(dY_W, call.linears, strict=True)
            if linear.bias is not None
        ]
        return token(X), None, *dWs, *dbs


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, multiplied: Tensor, call: Product) -> tuple[Tensor, ...]:
        ctx.call = call
        Ys = []
        for flight, bias in zip(call.Y, call.bias, strict=True):
            Y_s = unstack(flight.wait(), call.b)
            Ys.append(Y_s if bias is None else Y_s.add_(bias))
        call.Y, call.bias = [], []
        return tuple(Ys)

    @staticmethod
    def backward(ctx: Any, *dYs: Tensor) -> tuple[Tensor, None]:
        call = ctx.call
        call.dY = [all_gather(dY, call.k) for dY in dYs]
        call.bucket.launch_backward()
        return token(dYs[0]), None


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


def bias_of(out: Out, k: Axis, values: Mapping[int, Tensor]) -> Tensor | None:
    """The bias of this rank's columns of Y: of all of them cut by tokens, of the k-th block cut by heads."""
    biases = [values[id(linear.bias)] for linear in out.linears if linear.bias is not None]
    assert len(biases) in (0, len(out.linears)), "linears that share a scatter have a bias each or none at all"
    if not biases:
        return None
    block = k.index if out.blocks > 1 else 0
    return torch.cat([bias.view(out.blocks, -1)[block] for bias in biases])


def tiles(W: Tensor, n_blocks: int, k_blocks: int) -> Tensor:
    """W [n, k] -> [n_blocks, k_blocks, n/n_blocks, k/k_blocks], without a copy."""
    n, k = W.shape
    return W.view(n_blocks, n // n_blocks, k_blocks, k // k_blocks).transpose(1, 2)


def multiply(X: Tensor, W: Tensor, Y: Tensor) -> None:
    """Y[j] = Σ_i X[i] W[j,i]ᵀ"""
    W_ji = tiles(W, len(Y), len(X))
    for j, Y_j in enumerate(Y):
        for i, X_i in enumerate(X):
            mm(X_i, W_ji[j, i].T, Y_j, add=i > 0)


def multiply_transposed(dY: Tensor, W: Tensor, dX: Tensor, add: bool) -> None:
    """dX[i] (+)= Σ_j dY[j] W[j,i]"""
    W_ji = tiles(W, len(dY), len(dX))
    for i, dX_i in enumerate(dX):
        for j, dY_j in enumerate(dY):
            mm(dY_j, W_ji[j, i], dX_i, add=add or j > 0)


def weight_gradient(dY: Tensor, X: Tensor, W: Tensor) -> Tensor:
    """dW[j,i] = dY[j]ᵀ X[i]"""
    dW = torch.empty_like(W)
    dW_ji = tiles(dW, len(dY), len(X))
    for j, dY_j in enumerate(dY):
        for i, X_i in enumerate(X):
            mm(dY_j.T, X_i, dW_ji[j, i], add=False)
    return dW


def mm(A: Tensor, B: Tensor, out: Tensor, add: bool) -> None:
    """out (+)= A B, into a view."""
    if add:
        out.addmm_(A, B)
    else:
        torch.mm(A, B, out=out)
