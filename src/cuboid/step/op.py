"""Operations with an explicit backward, and the combinators that make blocks of them.

    layer(X, w, at)            Steps -> (Y, back)   yields before it waits for a collective
    back.run(dY, w, before)    Steps -> dX          hands the gradients of its weights to w, now or later
    back.ahead()               launches what `run` will wait for besides dY, while the previous backward still computes

`w` are the unsharded weights of the stage (`Gathered`); `run` gets those of backward. `at` says which tokens X has
(`At`). `before()` is the `ahead` of the next operation in backward. X and Y are tensors or tuples of tensors. If
`at.train` is False, nothing is saved and `back` is None.

Three layers also wait without a pause: the head for each chunk of logits, an own loss for its sum, and SUMMA of the
baselines, which overlaps its broadcasts itself.

A layer names the layouts it `takes` and `gives`, "" for any. Combinators check that their layers fit. A fork gives the
layout of its branches; if they differ, the `local` layer that joins them names what it gives. Layers are plain objects,
so that `copy.deepcopy` of a model copies them with their parameters.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from cuboid.comm.axis import Axis
from cuboid.comm.collectives import COLLECTIVES, TRANSPOSE, Kind
from cuboid.comm.flight import Pause, Steps

Ahead = Callable[[], float]  # returns the bytes that it launched


class Back(NamedTuple):
    """The backward of one call of a layer. It runs once, and releases what was saved as it runs."""

    run: Callable[[Any, Any, Ahead], Steps]
    ahead: Ahead | None = None


class Layer(Protocol):
    @property
    def takes(self) -> str: ...

    @property
    def gives(self) -> str: ...

    def __call__(self, X: Any, w: Any, at: Any, /) -> Steps: ...


def nothing() -> float:
    return 0.0


def parts_of(layer: Any) -> Iterator[Any]:
    """A layer, what is in its attributes, and the parts of the layers that it is made of."""
    yield layer
    if isinstance(layer, nn.Module):
        yield from parts_of(getattr(layer, "layer", None))
    elif isinstance(layer, list | tuple):
        for each in layer:
            yield from parts_of(each)
    elif hasattr(layer, "takes"):
        yield from parts_of([*vars(layer).values()])


def parameters_of(layer: Any) -> Iterator[nn.Parameter]:
    """The parameters in the attributes of a layer, and of the layers that it is made of."""
    return (part for part in parts_of(layer) if isinstance(part, nn.Parameter))


# Local mathematics, which autograd differentiates


class _Enter(torch.autograd.Function):
    """The inputs of a graph. Leaves would live as long as the graph; these live only if an operation saves them."""

    @staticmethod
    def forward(ctx: Any, begin: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.detach() for x in xs)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("gradients are taken before backward reaches this node")


def vjp(fn: Callable[..., Any], *xs: Tensor) -> tuple[Any, Callable[[Any], tuple[Tensor, ...]]]:
    """fn(*xs), and a function from dY to the gradients of all xs, which can be called once.

    >>> y, back = vjp(lambda a, b: a * b, torch.tensor(2.0), torch.tensor(3.0))
    >>> y, back(torch.tensor(1.0))
    (tensor(6.), (tensor(3.), tensor(2.)))
    """
    with torch.enable_grad():
        entered = _Enter.apply(torch.empty(0, requires_grad=True), *xs)
        Y = fn(*entered)
    several = isinstance(Y, tuple)
    ins, outs = _edges(entered), _edges(Y if several else (Y,))
    zeros = [partial(torch.zeros, x.shape, dtype=x.dtype, device=x.device) for x in xs]

    def back(dY: Any) -> tuple[Tensor, ...]:
        dYs = [each for i, each in enumerate(dY if several else (dY,)) if i in outs]
        gradients = torch.autograd.grad([*outs.values()], [*ins.values()], dYs, allow_unused=True) if outs else ()
        found = dict(zip(ins, gradients, strict=False))
        return tuple(zero() if (dX := found.get(i)) is None else dX for i, zero in enumerate(zeros))

    return tuple(y.detach() for y in Y) if several else Y.detach(), back


def _edges(xs: Sequence[Tensor]) -> dict[int, Any]:
    """By number, the gradient edges of those that have a gradient: indices and masks have none."""
    return {i: get_gradient_edge(x) for i, x in enumerate(xs) if x.requires_grad}


def scaled(X: Tensor, factor: Tensor) -> Tensor:
    """X times a number on the device. On a GPU the number would be rounded to a dtype of X below fp32."""
    return (X.to(torch.promote_types(X.dtype, torch.float32)) * factor).to(X.dtype)


def _unshared(gradients: Sequence[Tensor], others: Sequence[Tensor]) -> Iterator[Tensor]:
    """Each in memory of its own: of a sum, autograd gives all terms one tensor, and of a number an expanded one."""
    holders = Counter(each.untyped_storage()._cdata for each in (*gradients, *others))
    for each in gradients:
        alone = holders[each.untyped_storage()._cdata] == 1 and 0 not in each.stride()
        yield each if alone else each.clone(memory_format=torch.contiguous_format)


class Local:
    """A layer of plain PyTorch on a rank's shard of X: Y = fn(*X, *parameters). It keeps what autograd saves for fn,
    and copies of gathered parameters, which are small. With `placed`, fn takes `at` first."""

    def __init__(
        self, fn: Callable[..., Any], *parameters: nn.Parameter, placed: bool = False, takes: str = "", gives: str = ""
    ) -> None:
        if isinstance(fn, nn.Module) and next(fn.parameters(), None) is not None:
            raise ValueError(
                f"local(…) got a {type(fn).__name__}, whose parameters no step would shard or train; declare them in a "
                "LayerModule, and pass them to local after a function of X and them"
            )
        self.fn, self.parameters, self.placed, self.takes, self.gives = fn, parameters, placed, takes, gives

    def __call__(self, X: Any, w: Any, at: Any) -> Steps:
        fn = partial(self.fn, at) if self.placed else self.fn
        several = isinstance(X, tuple)
        xs = X if several else (X,)
        if not at.train:
            return fn(*xs, *(w[p] for p in self.parameters)), None
        trained = [p for p in self.parameters if p.requires_grad]
        rest = {p: w.lasting(p) for p in self.parameters if not p.requires_grad}
        count = len(xs)

        def of_trained(*entered: Tensor) -> Any:
            weights = rest | dict(zip(trained, entered[count:], strict=True))
            return fn(*entered[:count], *(weights[p] for p in self.parameters))

        Y, back = vjp(of_trained, *xs, *(w.lasting(p) for p in trained))

        def run(dY: Any, w: Any, before: Ahead) -> Steps:
            found = back(dY)
            others = *found[:count], *(dY if isinstance(dY, tuple) else (dY,))
            for parameter, gradient in zip(trained, _unshared(found[count:], others), strict=True):
                w.add(parameter, gradient)
            return found[:count] if several else found[0]
            yield

        return Y, Back(run)
        yield


# Linear maps with a known transpose, which save nothing


class Transposable:
    """Y = forward(at, X) and dX = transpose(at, dY), both `Steps`."""

    def __init__(
        self, forward: Callable[[Any, Tensor], Steps], transpose: Callable[[Any, Tensor], Steps], layout: str = ""
    ) -> None:
        self.forward, self.transpose, self.takes, self.gives = forward, transpose, layout, layout

    def __call__(self, X: Tensor, w: Any, at: Any) -> Steps:
        steps = self.forward(at, X)
        del X
        Y = yield from steps
        return Y, Back(lambda dY, w, before: self.transpose(at, dY)) if at.train else None


def diagonal(fn: Callable[[Any, Tensor], Tensor], layout: str = "") -> Layer:
    """An elementwise scaling fn(at, X). It is its own transpose."""

    def apply(at: Any, X: Tensor) -> Steps:
        return fn(at, X)
        yield

    return Transposable(apply, apply, layout)


def collective(kind: Kind, axis: Axis, width: float) -> Layer:
    """A layer that is one collective. `width` is the number of elements per token of X, so that sizes of pauses are the
    same on all ranks even if X is not."""
    return Transposable(partial(_collective, kind, axis, width), partial(_collective, TRANSPOSE[kind], axis, width))


def _collective(kind: Kind, axis: Axis, width: float, at: Any, X: Tensor) -> Steps:
    flight, tokens = COLLECTIVES[kind](X, axis), len(at.place.positions) * len(at.place.samples)
    sent = tokens * width * X.element_size() * (1 - 1 / axis.size)
    del X
    if axis.size > 1:
        yield Pause(sent)
    return flight.wait()


# Combinators


def _ahead(backs: Sequence[Back]) -> Ahead | None:
    return next((back.ahead for back in reversed(backs) if back.ahead is not None), None)


AND = " and "  # between the layouts of a fork's branches, if they differ


def check_layer(layer: Any) -> None:
    """Raise ValueError if it names no layouts, as functions and plain modules do not."""
    if not hasattr(layer, "takes"):
        raise ValueError(
            f"{getattr(layer, '__name__', type(layer).__name__)} is no layer; use local(fn, *parameters) for plain "
            "PyTorch, parallel.into or parallel.out_of for a Linear, and set self.layer in a LayerModule"
        )


def fit(names: Sequence[str], layers: Sequence[Layer]) -> tuple[str, str]:
    """The layouts that a sequence of layers takes and gives. Raises if one does not take what the one before gives."""
    takes = now = ""
    for i, layer in enumerate(layers):
        check_layer(layer)
        if now and layer.takes and layer.takes != now:
            remedy = f"put a layer that takes {now!r} and gives {layer.takes!r} between them"
            if AND in now:
                remedy = f"join the branches of the fork by local(fn, gives={layer.takes!r})"
            raise ValueError(
                f"{names[i]} takes the layout {layer.takes!r}, but {names[i - 1]} before it gives {now!r}; {remedy}"
            )
        takes, now = takes or (layer.takes if not now else ""), layer.gives or now or layer.takes
    return takes, now


class Chain:
    """Runs one layer after another."""

    def __init__(self, *layers: Layer) -> None:
        self.layers = layers
        self.takes, self.gives = fit([type(layer).__name__ for layer in layers], layers)

    def __call__(self, X: Any, w: Any, at: Any) -> Steps:
        backs: list[Back] = []
        for layer in self.layers:
            steps = layer(X, w, at)
            del X
            X, back = yield from steps
            backs.append(back)

        def run(dY: Any, w: Any, before: Ahead) -> Steps:
            while backs:
                steps = backs.pop().run(dY, w, _ahead(backs) or before)
                del dY  # leaves the only reference to the operation, which may release it early
                dY = yield from steps
            return dY

        return X, Back(run, _ahead(backs)) if at.train else None


def chain(*layers: Layer) -> Layer:
    """One layer after another: `Y = last(… second(first(X)))`.

    Args:
        layers: Each takes the layout that the one before it gives.

    Raises:
        ValueError: If one does not.
    """
    return layers[0] if len(layers) == 1 else Chain(*layers)


class Residual:
    """X + layers[-1](… layers[0](X))"""

    def __init__(self, *layers: Layer) -> None:
        inner = self.inner = chain(*layers)
        self.takes, self.gives = inner.takes, inner.gives
        if inner.takes != inner.gives:
            raise ValueError(
                f"a residual branch takes the layout {inner.takes!r} and gives {inner.gives!r}; it must return to the "
                "layout it began with, to be added"
            )

    def __call__(self, X: Tensor, w: Any, at: Any) -> Steps:
        Y, back = yield from self.inner(X, w, at)

        def run(dY: Tensor, w: Any, before: Ahead) -> Steps:
            return (yield from back.run(dY, w, before)) + dY

        return X + Y, Back(run, back.ahead) if at.train else None


class Fork:
    """X -> (branches[0](X), branches[1](X), …), for a `local` layer to join."""

    def __init__(self, *branches: Layer) -> None:
        for each in branches:
            check_layer(each)
        taken = list(dict.fromkeys(each.takes for each in branches if each.takes))
        if len(taken) > 1:
            raise ValueError(
                f"the branches of a fork take the layouts {AND.join(map(repr, taken))}, but all get the same input; "
                "begin them with layers that take one layout"
            )
        self.branches, self.takes = branches, taken[0] if taken else ""
        given = list(dict.fromkeys(each.gives or self.takes for each in branches))
        self.gives = given[0] if len(given) == 1 else AND.join(each or "any" for each in given)

    def __call__(self, X: Tensor, w: Any, at: Any) -> Steps:
        Ys, backs = [], []
        for branch in self.branches:
            Y, back = yield from branch(X, w, at)
            Ys.append(Y)
            backs.append(back)

        def run(dYs: tuple[Tensor, ...], w: Any, before: Ahead) -> Steps:
            total, gradients = None, list(dYs)
            del dYs
            while backs:
                dX = yield from backs.pop().run(gradients.pop(), w, nothing if backs else before)
                total = dX if total is None else total + dX
            return total

        return tuple(Ys), Back(run) if at.train else None


class OnItems:
    """Applies a layer to X[first] … X[last] of a tuple, and passes the others on."""

    takes = gives = ""

    def __init__(self, first: int, last: int, inner: Layer) -> None:
        self.first, self.stop, self.inner = first, last + 1, inner

    def __call__(self, X: tuple[Tensor, ...], w: Any, at: Any) -> Steps:
        first, stop = self.first, self.stop
        left, right = X[:first], X[stop:]
        steps = self.inner(X[first:stop], w, at)
        del X
        Y, back = yield from steps

        def run(dY: tuple[Tensor, ...], w: Any, before: Ahead) -> Steps:
            left, right = dY[:first], dY[stop:]
            steps = back.run(dY[first:stop], w, before)
            del dY
            dX = yield from steps
            return *left, *dX, *right

        return (*left, *Y, *right), Back(run) if at.train else None


class Recomputed:
    """A chain that saves only X, and recomputes its layers in backward."""

    def __init__(self, *layers: Layer) -> None:
        inner = self.inner = chain(*layers)
        self.takes, self.gives = inner.takes, inner.gives
        if any(getattr(part, "early", False) for part in parts_of(inner)):
            raise ValueError(
                "recomputed(…) got a head, which computes its gradients in forward and saves no logits; leave it out "
                "of recomputed"
            )

    def __call__(self, X: Any, w: Any, at: Any) -> Steps:
        Y, _ = yield from self.inner(X, w, at.without_backward())
        return Y, Back(partial(self._run, [X], at)) if at.train else None

    def _run(self, saved: list[Any], at: Any, dY: Any, w: Any, before: Ahead) -> Steps:
        back = (yield from self.inner(saved.pop(), w, at))[1]  # drops Y, which must not live while backward runs
        steps = back.run(dY, w, before)
        del dY, back
        return (yield from steps)


# What models are written with


def local(
    fn: Callable[..., Any], *parameters: nn.Parameter, placed: bool = False, takes: str = "", gives: str = ""
) -> Layer:
    """A layer of plain PyTorch on a rank's shard, differentiated by autograd: `Y = fn(*X, *parameters)`.

    Args:
        fn: Takes the local tensor X, or the tensors of a tuple, then the parameters. It must not communicate.
        parameters: Unsharded when `fn` gets them; small ones, since they are kept for backward.
        placed: Whether `fn` takes the `At` of its tokens first.
        takes: The layout of X; empty: any, and Y has the same.
        gives: The layout of Y.

    Raises:
        ValueError: If `fn` is a module with parameters.
    """
    return Local(fn, *parameters, placed=placed, takes=takes, gives=gives)


def residual(*layers: Layer) -> Layer:
    """`Y = X + chain(*layers)(X)`.

    Args:
        layers: Together they take and give the same layout.

    Raises:
        ValueError: If they do not.
    """
    return Residual(*layers)


def fork(*branches: Layer) -> Layer:
    """`X -> (branches[0](X), branches[1](X), …)`, for a `local` layer to join.

    It gives the layout that its branches give. If they give different ones, the layer that joins them names what it
    gives: `local(fn, gives="residual")`.

    Args:
        branches: Layers that take the same layout.

    Raises:
        ValueError: If they take different ones.
    """
    return Fork(*branches)


def recomputed(*layers: Layer) -> Layer:
    """As `chain`, but only X is saved, and the layers are recomputed in backward.

    Args:
        layers: Each takes the layout that the one before it gives.

    Raises:
        ValueError: If one does not, or is a head that gives the loss.
    """
    return Recomputed(*layers)
