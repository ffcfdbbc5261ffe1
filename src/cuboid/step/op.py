"""Operations with an explicit backward, and the combinators that make blocks of them.

    layer(X, w, at)            Steps -> (Y, back)   yields wherever it would wait for a collective
    back.run(dY, w, before)    Steps -> dX          hands the gradients of its weights to w, now or later
    back.ahead()               launches what `run` will wait for besides dY, while the operation after it still works

`w` are the unsharded weights of the stage (`Gathered`): in `run`, as backward has them. `at` says which tokens X are
(`At`). `before()` is the `ahead` of the operation that backward comes to next. X and Y are tensors or tuples of
tensors. Where `at.train` is False nothing is saved, and `back` is None.

A layer names the layouts it `takes` and `gives`, "" for any: combinators reject layers that do not fit when they are
made. Layers are plain objects, so that `copy.deepcopy` of a model copies them with their parameters.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from cuboid.comm.axis import Axis
from cuboid.comm.collectives import COLLECTIVES, TRANSPOSE, Kind
from cuboid.comm.flight import Pause, Steps

Ahead = Callable[[], None]


class Back(NamedTuple):
    """The backward of one call of a layer. It runs once: what it saved is released as it goes."""

    run: Callable[[Any, Any, Ahead], Steps]
    ahead: Ahead | None = None


class Layer(Protocol):
    @property
    def takes(self) -> str: ...

    @property
    def gives(self) -> str: ...

    def __call__(self, X: Any, w: Any, at: Any, /) -> Steps: ...


def nothing() -> None:
    pass


# Local mathematics: autograd knows its derivative


class _Enter(torch.autograd.Function):
    """Where a graph begins. A leaf would live as long as its graph; these live only if something saves them."""

    @staticmethod
    def forward(ctx: Any, begin: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.detach() for x in xs)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("gradients are taken before they come here")


def vjp(fn: Callable[..., Any], *xs: Tensor) -> tuple[Any, Callable[[Any], tuple[Tensor, ...]]]:
    """fn(*xs), and the function from dY to the gradients of all xs. It can be called once.

    >>> y, back = vjp(lambda a, b: a * b, torch.tensor(2.0), torch.tensor(3.0))
    >>> y, back(torch.tensor(1.0))
    (tensor(6.), (tensor(3.), tensor(2.)))
    """
    with torch.enable_grad():
        entered = _Enter.apply(torch.empty(0, requires_grad=True), *xs)
        Y = fn(*entered)
    several = isinstance(Y, tuple)
    ins, outs = [get_gradient_edge(x) for x in entered], [get_gradient_edge(y) for y in (Y if several else (Y,))]

    def back(dY: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outs, ins, dY if several else (dY,), materialize_grads=True)

    return tuple(y.detach() for y in Y) if several else Y.detach(), back


class Local:
    """A layer of plain PyTorch: Y = fn(*X, *parameters). It keeps what autograd saves of fn, or, with `keep_inputs`, X
    alone, and calls fn again in backward. With `placed`, fn takes `at` first. Copies of parameters that
    were gathered are kept: they are small."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *parameters: nn.Parameter,
        keep_inputs: bool = False,
        placed: bool = False,
        takes: str = "",
        gives: str = "",
    ) -> None:
        self.fn, self.parameters, self.keep_inputs, self.placed = fn, parameters, keep_inputs, placed
        self.takes, self.gives = takes, gives

    def __call__(self, X: Any, w: Any, at: Any) -> Steps:
        fn = partial(self.fn, at) if self.placed else self.fn
        several = isinstance(X, tuple)
        xs = X if several else (X,)
        if not at.train:
            return fn(*xs, *(w[p] for p in self.parameters)), None
        if self.keep_inputs:
            Y = fn(*xs, *(w[p] for p in self.parameters))
            return Y, Back(partial(self._again, fn, [xs], several))
        Y, back = vjp(fn, *xs, *(w.lasting(p) for p in self.parameters))
        return Y, Back(partial(self._run, back, several))
        yield

    def _again(self, fn: Callable[..., Any], saved: list[Any], several: bool, dY: Any, w: Any, before: Ahead) -> Steps:
        _, back = vjp(fn, *saved.pop(), *(w[p] for p in self.parameters))
        return self._run(back, several, dY, w, before)

    def _run(self, back: Callable[[Any], Any], several: bool, dY: Any, w: Any, before: Ahead) -> Steps:
        found = back(dY)
        count = len(found) - len(self.parameters)
        for parameter, gradient in zip(self.parameters, found[count:], strict=True):
            w.add(parameter, gradient)
        return found[:count] if several else found[0]
        yield


def local(fn: Callable[..., Any], *parameters: nn.Parameter) -> Local:
    """A layer of plain PyTorch, fn(*X, *parameters) -> Y, applied to a rank's part of X."""
    return Local(fn, *parameters)


class Diagonal:
    """A layer that multiplies each element by a number of its own, which makes it its own transpose: Y = fn(at, X) and
    dX = fn(at, dY). Nothing is saved."""

    takes = gives = ""

    def __init__(self, fn: Callable[[Any, Tensor], Tensor]) -> None:
        self.fn = fn

    def __call__(self, X: Tensor, w: Any, at: Any) -> Steps:
        def run(dY: Tensor, w: Any, before: Ahead) -> Steps:
            return self.fn(at, dY)
            yield

        return self.fn(at, X), Back(run) if at.train else None
        yield


class Moved:
    """A collective; backward's is its transpose. `width` is the number of elements that a token of X has: sizes of
    pauses are the same on all ranks even where X is not."""

    takes = gives = ""

    def __init__(self, kind: Kind, axis: Axis, width: float = 0.0) -> None:
        self.kind, self.axis, self.width = kind, axis, width

    def __call__(self, X: Tensor, w: Any, at: Any) -> Steps:
        tokens = len(at.place.positions) * len(at.place.samples)
        pause = Pause(sent=tokens * self.width * X.element_size() * (1 - 1 / self.axis.size))
        Y = yield from self._move(self.kind, X, pause)
        if not at.train:
            return Y, None
        return Y, Back(lambda dY, w, before: self._move(TRANSPOSE[self.kind], dY, pause))

    def _move(self, kind: Kind, x: Tensor, pause: Pause) -> Steps:
        flight = COLLECTIVES[kind](x, self.axis)
        del x
        if self.axis.size > 1:
            yield pause
        return flight.wait()


# Combinators


def _ahead(backs: Sequence[Back]) -> Ahead | None:
    return next((back.ahead for back in reversed(backs) if back.ahead is not None), None)


def _back_through(backs: list[Back]) -> Back:
    """Of operations that ran in this order."""

    def run(dY: Any, w: Any, before: Ahead) -> Steps:
        while backs:
            steps = backs.pop().run(dY, w, _ahead(backs) or before)
            del dY  # the operation's alone, to release when it likes
            dY = yield from steps
        return dY

    return Back(run, _ahead(backs))


def fit(names: Sequence[str], layers: Sequence[Layer]) -> tuple[str, str]:
    """The layouts a sequence of layers takes and gives. Raises where one does not take what the one before gives."""
    takes = now = ""
    for i, layer in enumerate(layers):
        if now and layer.takes and layer.takes != now:
            raise ValueError(
                f"{names[i]} takes the layout {layer.takes!r}, but {names[i - 1]} before it gives {now!r}; "
                f"put a layer that takes {now!r} and gives {layer.takes!r} between them"
            )
        takes, now = takes or (layer.takes if not now else ""), layer.gives or now or layer.takes
    return takes, now


class Chain:
    """One layer after another."""

    def __init__(self, *layers: Layer) -> None:
        self.layers = layers
        self.takes, self.gives = fit([type(layer).__name__ for layer in layers], layers)

    def __call__(self, X: Any, w: Any, at: Any) -> Steps:
        backs: list[Back] = []
        for layer in self.layers:
            steps = layer(X, w, at)
            del X
            X, back = yield from steps
            if back is not None:
                backs.append(back)
        return X, _back_through(backs) if at.train else None


def chain(*layers: Layer) -> Layer:
    """layers[-1](… layers[0](X))"""
    return layers[0] if len(layers) == 1 else Chain(*layers)


class Residual:
    """X + inner(X)"""

    def __init__(self, inner: Layer) -> None:
        self.inner, self.takes, self.gives = inner, inner.takes, inner.gives
        if inner.takes != inner.gives:
            raise ValueError(
                f"a residual branch takes the layout {inner.takes!r} and gives {inner.gives!r}; it must return to the "
                "layout it began with, to be added"
            )

    def __call__(self, X: Tensor, w: Any, at: Any) -> Steps:
        Y, back = yield from self.inner(X, w, at)
        if not at.train:
            return X + Y, None
        return X + Y, Back(lambda dY, w, before: self._run(back, dY, w, before), back.ahead)

    def _run(self, back: Back, dY: Tensor, w: Any, before: Ahead) -> Steps:
        dX = yield from back.run(dY, w, before)
        return dX + dY


def residual(*layers: Layer) -> Layer:
    """X + layers[-1](… layers[0](X))"""
    return Residual(chain(*layers))


class Fork:
    """X -> (a(X), b(X), …)"""

    gives = ""

    def __init__(self, *branches: Layer) -> None:
        self.branches, self.takes = branches, next((b.takes for b in branches if b.takes), "")

    def __call__(self, X: Tensor, w: Any, at: Any) -> Steps:
        Ys, backs = [], []
        for branch in self.branches:
            Y, back = yield from branch(X, w, at)
            Ys.append(Y)
            backs.append(back)
        return tuple(Ys), Back(lambda dYs, w, before: self._run(backs, dYs, w, before)) if at.train else None

    def _run(self, backs: list[Back], dYs: tuple[Tensor, ...], w: Any, before: Ahead) -> Steps:
        total, gradients = None, list(dYs)
        del dYs
        while backs:
            dX = yield from backs.pop().run(gradients.pop(), w, nothing if backs else before)
            total = dX if total is None else total + dX
        return total


def fork(*branches: Layer) -> Layer:
    """X -> (branches[0](X), branches[1](X), …), to be joined by a `local` layer."""
    return Fork(*branches)


class Some:
    """Some elements of a tuple through a layer, the others as they are."""

    takes = gives = ""

    def __init__(self, which: Sequence[int], inner: Layer) -> None:
        self.which, self.inner = which, inner

    def __call__(self, X: tuple[Tensor, ...], w: Any, at: Any) -> Steps:
        others, mine = self._apart(X)
        steps = self.inner(mine, w, at)
        del X, mine
        Y, back = yield from steps
        return self._together(others, Y), Back(partial(self._run, back)) if at.train else None

    def _run(self, back: Back, dY: tuple[Tensor, ...], w: Any, before: Ahead) -> Steps:
        others, mine = self._apart(dY)
        steps = back.run(mine, w, before)
        del dY, mine
        dX = yield from steps
        return self._together(others, dX)

    def _apart(self, X: tuple[Tensor, ...]) -> tuple[dict[int, Tensor], tuple[Tensor, ...]]:
        return {i: x for i, x in enumerate(X) if i not in self.which}, tuple(X[i] for i in self.which)

    def _together(self, others: dict[int, Tensor], mine: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        found = others | dict(zip(self.which, mine, strict=True))
        return tuple(found[i] for i in range(len(found)))


class Recomputed:
    """Keeps X alone, and runs the layer again in backward."""

    def __init__(self, inner: Layer) -> None:
        self.inner, self.takes, self.gives = inner, inner.takes, inner.gives

    def __call__(self, X: Any, w: Any, at: Any) -> Steps:
        Y, _ = yield from self.inner(X, w, at.without_backward())
        return Y, Back(lambda dY, w, before: self._run([X], dY, w, at, before)) if at.train else None

    def _run(self, saved: list[Any], dY: Any, w: Any, at: Any, before: Ahead) -> Steps:
        steps = self.inner(saved.pop(), w, at)
        back = (yield from steps)[1]  # nobody needs Y: it must not live as long as backward runs
        steps = back.run(dY, w, before)
        del dY, back
        dX = yield from steps
        return dX


def recomputed(*layers: Layer) -> Layer:
    """The same layers, whose activations are computed again in backward rather than kept."""
    return Recomputed(chain(*layers))
