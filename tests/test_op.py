"""Combinators and the weights they are given, against plain autograd or alone: `Serial` is made of them too."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch
from weakref import ref

import torch
from silent import silently
from torch import Tensor, nn

from cuboid.comm.flight import run
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import Spec
from cuboid.mesh.mesh import Mesh
from cuboid.run.launch import Pool, World
from cuboid.step.op import Layer, Local, OnItems, chain, diagonal, fork, local, nothing, recomputed, residual, vjp
from cuboid.step.weights import MOST_IN_FLIGHT, Bucket, Gathered, Sums, Tensors


@dataclass(frozen=True)
class Where:
    """As much of an `At` as these layers look at."""

    factor: float
    train: bool = True

    def without_backward(self) -> "Where":
        return Where(self.factor, train=False)


def times(at: Where, X: Tensor) -> Tensor:
    return X * at.factor


def combined(a: nn.Parameter, b: nn.Parameter) -> tuple[Layer, Callable[[Tensor], Tensor]]:
    """A layer of all combinators, and the same as a function."""
    branches = fork(local(torch.sin), local(torch.mul, a), local(torch.mul, b))
    joined = chain(branches, OnItems(0, 1, Local(lambda x, y: (x * y, x + y))), local(lambda x, y, z: x + y * z))
    layer = chain(residual(joined), recomputed(diagonal(times), local(torch.tanh)), recomputed(Local(torch.mul, b)))

    def function(X: Tensor) -> Tensor:
        s, m, n = X.sin(), X * a, X * b
        return torch.tanh(3 * (X + s * m + (s + m) * n)) * b

    return layer, function


def combinator_errors(world: World) -> list[float]:
    """Of Y, dX and the parameters' gradients."""
    dice = torch.Generator().manual_seed(0)
    values = [torch.randn(5, generator=dice, dtype=torch.float64) for _ in range(4)]
    a, b = (nn.Parameter(value) for value in values[:2])
    X, dY = values[2].requires_grad_(), values[3]
    bucket = Bucket({p: Spec((5,), ((),)) for p in (a, b)}, Mesh(Cuboid(), alone=True), None)
    w = Gathered([bucket], bucket.gather()(), 1)
    layer, function = combined(a, b)
    Y, back = run(layer(X.detach(), w, Where(3.0)))
    dX = run(back.run(dY, w, nothing))
    ((_, land),) = w.reduce()
    wanted = function(X)
    wanted_gradients = torch.autograd.grad(wanted, (X, a, b), dY)
    pairs = zip([Y, dX, *land().values()], [wanted, *wanted_gradients], strict=True)
    return [float((one - other).detach().abs().max()) for one, other in pairs]


def test_combinators_match_plain_autograd(pool: Callable[[int], Pool]) -> None:
    assert max(pool(1).run(combinator_errors)[0]) < 1e-12


def test_vjp_of_unused_input_is_zero() -> None:
    """Of its own shape and dtype, without keeping it alive."""
    X, unused = torch.ones(3), torch.ones(2, 5, dtype=torch.float64)
    alive = ref(unused)
    _, back = vjp(lambda a, b: a.sin(), X, unused)
    del unused
    assert alive() is None
    dX, zeros = back(torch.ones(3))
    assert dX.equal(X.cos())
    assert zeros.equal(torch.zeros(2, 5, dtype=torch.float64))
    assert zeros.dtype == torch.float64


def bytes_held(world: World) -> tuple[int, int]:
    """By a small weight that may be kept, and by what was gathered with it."""
    parameters = {nn.Parameter(torch.zeros(n // 2)): Spec((n,), (("x",),)) for n in (8, 4096)}
    bucket = Bucket(parameters, Mesh(Cuboid(x=2), world.rank), None)
    w = Gathered([bucket], bucket.gather()(), 1)
    small, _ = parameters
    return w.lasting(small).untyped_storage().nbytes(), w[small].untyped_storage().nbytes()


def test_gathered_lasting_weight_does_not_hold_what_was_gathered_with_it() -> None:
    ((kept, gathered),) = silently([0], 2, bytes_held)
    assert kept == 8 * 4
    assert gathered > 4096


def most_in_flight(world: World) -> int:
    """Of sums over x that a deep model's backward launches."""
    mesh, flying, most = Mesh(Cuboid(x=2), world.rank), 0, 0
    buckets = [Bucket({nn.Parameter(torch.zeros(2)): Spec((4,), (("x",),))}, mesh, None) for _ in range(9)]
    sums = Sums(dict.fromkeys(buckets, 1))

    def landing(bucket: Bucket) -> Tensors:
        nonlocal flying
        flying -= 1
        return {p: torch.ones(2) for p in bucket.parameters}

    for bucket in buckets:
        flying += 1
        stage = Gathered([bucket], {}, 1)
        with patch.object(stage, "reduce", lambda each=bucket: [(each, partial(landing, each))]):
            sums.add(stage)
        most = max(most, flying)
    assert len(sums.finish()) == len(buckets)
    return most


def test_sums_keep_few_gradients_in_flight() -> None:
    assert silently([0], 2, most_in_flight) == [MOST_IN_FLIGHT]
