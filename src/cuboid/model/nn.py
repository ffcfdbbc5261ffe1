"""Layers, written against a `Parallel`. Each holds its rank's shards under the names of the whole model's parameters.

A layer's `forward` is `Steps`; `W` are the gathered weights of the bucket its parameters travel in. A `Model` makes the
buckets, one for each of its parts, and gathers them. To write one of your own: docs/your-own-model.md.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from cuboid.comm.collectives import all_reduce
from cuboid.comm.flight import Pause, Steps, run
from cuboid.layers.activation import gelu, swiglu
from cuboid.layers.attention import Cache
from cuboid.layers.product import Linear as Weighted
from cuboid.layers.randomness import key_of, normal
from cuboid.mesh.layout import Spec
from cuboid.mesh.mesh import Mesh
from cuboid.mesh.place import Place
from cuboid.model.parallel import Attend, Parallel, Role


class Declared(NamedTuple):
    """A parameter as the whole model has it: how it is cut, and its first value, `mean` + normal(`std`)."""

    spec: Spec
    std: float
    mean: float


class Module(nn.Module):
    """A module that declares its parameters by their global shapes and holds this rank's shards."""

    def __init__(self, parallel: Parallel) -> None:
        super().__init__()
        self.parallel = parallel
        self.declared: dict[str, Declared] = {}

    def declare(self, name: str, role: Role, *shape: int, std: float = 0.0, mean: float = 0.0) -> nn.Parameter:
        spec, mesh = self.parallel.spec(role, shape), self.parallel.mesh
        shard = torch.empty(spec.local_shape(mesh.cuboid, mesh.coordinates), device=mesh.device)
        self.declared[name] = Declared(spec, std, mean)
        parameter = nn.Parameter(shard)
        self.register_parameter(name, parameter)
        return parameter


def declared(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Declared]]:
    """Every parameter below `module` with its name and declaration."""
    for path, child in module.named_modules():
        if isinstance(child, Module):
            for name, declaration in child.declared.items():
                yield f"{path}.{name}".lstrip("."), child.get_parameter(name), declaration


@torch.no_grad()
def initialise(module: nn.Module, seed: int) -> None:
    """First values by seed, name and global index: the same model on every cuboid. A rank makes its shards alone."""
    for name, parameter, (spec, std, mean) in declared(module):
        parameter.fill_(mean)
        if std:
            mesh = next(m for m in module.modules() if isinstance(m, Module)).parallel.mesh
            ranges = spec.ranges(mesh.cuboid, mesh.coordinates)
            parameter.add_(normal(key_of(seed, name), spec.shape, ranges, std).to(parameter))


class Linear(Module):
    """A weight [n, k] and perhaps a bias [n], for `into` or `out_of` the residual stream."""

    def __init__(self, parallel: Parallel, way: str, n: int, k: int, bias: bool, std: float) -> None:
        super().__init__(parallel)
        assert way in ("into", "out_of")
        weight: Role = "into.weight" if way == "into" else "out_of.weight"
        self.weight = self.declare("weight", weight, n, k, std=std)
        self.bias = self.declare("bias", "into.bias" if way == "into" else "out_of.bias", n) if bias else None

    @property
    def weighted(self) -> Weighted:
        return Weighted(self.weight, self.bias)


class Table(Module):
    """Rows to look up, cut like the head's weight."""

    def __init__(self, parallel: Parallel, rows: int, d: int, std: float) -> None:
        super().__init__(parallel)
        self.weight = self.declare("weight", "table", rows, d, std=std)


class Norm(Module):
    """LayerNorm with a bias, RMSNorm without."""

    def __init__(self, parallel: Parallel, d: int, bias: bool) -> None:
        super().__init__(parallel)
        self.weight = self.declare("weight", "norm", d, mean=1.0)
        self.bias = self.declare("bias", "norm", d) if bias else None

    def forward(self, X: Tensor, W: Any) -> Steps:
        Y = yield from self.parallel.norm(X, W, self.weight, self.bias)
        return Y


def recomputed(function: Callable[..., Any], *args: Any) -> Any:
    """Call it, save its tensor arguments alone, and call it again in backward. Our random numbers have no state."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, early_stop=False)


class HeadNorm(Module):
    """RMSNorm of each head's features, of queries or of keys."""

    def __init__(self, parallel: Parallel) -> None:
        super().__init__(parallel)
        self.weight = self.declare("weight", "head_norm", parallel.config.head_dim, mean=1.0)


class Attention(nn.Module):
    """Of each token to those before it, or, not `causal`, to all."""

    def __init__(self, parallel: Parallel, recompute: bool = False, causal: bool = True) -> None:
        super().__init__()
        c = parallel.config
        self.recompute, self.causal = recompute, causal
        self.parallel, self.heads = parallel, (c.heads, c.kv_heads, c.kv_heads)
        self.q = Linear(parallel, "into", c.q_dim, c.hidden, c.qkv_biased, c.init_std)
        self.k = Linear(parallel, "into", c.kv_dim, c.hidden, c.qkv_biased, c.init_std)
        self.v = Linear(parallel, "into", c.kv_dim, c.hidden, c.qkv_biased, c.init_std)
        self.norm_q = HeadNorm(parallel) if c.qk_norm else None
        self.norm_k = HeadNorm(parallel) if c.qk_norm else None
        self.out = Linear(parallel, "out_of", c.hidden, c.q_dim, bool(c.bias), c.init_std / (2 * c.layers) ** 0.5)

    def forward(self, X: Tensor, W: Any, place: Place, cache: Cache | None = None) -> Steps:
        qkv = [self.q.weighted, self.k.weighted, self.v.weighted]
        q, k, v = yield from self.parallel.into(X, W, qkv, heads=self.heads)
        norms = None if self.norm_q is None or self.norm_k is None else (W[self.norm_q.weight], W[self.norm_k.weight])
        how = Attend(self.causal, cache, norms)
        if self.recompute and torch.is_grad_enabled():
            A = recomputed(lambda q, k, v: run(self.parallel.attend(q, k, v, place, how)), q, k, v)
        else:
            yield Pause(work=4 * len(q) * q.numel())
            A = yield from self.parallel.attend(q, k, v, place, how)
        Y = yield from self.parallel.out_of(A, W, self.out.weighted, heads=self.heads[0])
        return Y


class MLP(nn.Module):
    def __init__(self, parallel: Parallel) -> None:
        super().__init__()
        c = parallel.config
        self.parallel, bias = parallel, bool(c.bias)
        self.gate = Linear(parallel, "into", c.ffn, c.hidden, bias, c.init_std) if c.gated else None
        self.up = Linear(parallel, "into", c.ffn, c.hidden, bias, c.init_std)
        self.down = Linear(parallel, "out_of", c.hidden, c.ffn, bias, c.init_std / (2 * c.layers) ** 0.5)

    def forward(self, X: Tensor, W: Any) -> Steps:
        if self.gate is None:
            (u,) = yield from self.parallel.into(X, W, [self.up.weighted])
            H = gelu(u)
        else:
            g, u = yield from self.parallel.into(X, W, [self.gate.weighted, self.up.weighted])
            H = swiglu(g, u, self.parallel.schedule.fuse)
        Y = yield from self.parallel.out_of(H, W, self.down.weighted)
        return Y


class Block(nn.Module):
    """X + attention(norm(X)), then X + mlp(norm(X))."""

    def __init__(self, parallel: Parallel, name: str, recompute_attention: bool = False) -> None:
        super().__init__()
        c = parallel.config
        self.parallel, self.name = parallel, name
        self.norm1 = Norm(parallel, c.hidden, c.norm_bias)
        self.attention = Attention(parallel, recompute_attention)
        self.norm2 = Norm(parallel, c.hidden, c.norm_bias)
        self.mlp = MLP(parallel)

    def forward(self, X: Tensor, W: Any, place: Place, seed: int | None = None, cache: Cache | None = None) -> Steps:
        H = yield from self.norm1(X, W)
        A = yield from self.attention(H, W, place, cache)
        X = X + self._dropout(A, place, seed, "attention")
        H = yield from self.norm2(X, W)
        M = yield from self.mlp(H, W)
        return X + self._dropout(M, place, seed, "mlp")

    def _dropout(self, X: Tensor, place: Place, seed: int | None, site: str) -> Tensor:
        return X if seed is None else self.parallel.dropout(X, key_of(seed, f"{self.name}.{site}"), place)


class Model(nn.Module):
    """A model of parts: the weights of one part travel together, and are whole while it runs.

    A subclass makes its parts and calls `finish`. Its forward begins with `open`, and runs each part inside `weights`.
    """

    def __init__(self, parallel: Parallel) -> None:
        super().__init__()
        self.parallel = parallel
        self._buckets: dict[nn.Module, Any] = {}
        self._held_by: dict[int, list[nn.Parameter]] = {}  # so many ranks

    def finish(
        self, parts: Sequence[nn.Module], seed: int | None, dtype: torch.dtype, order: Sequence[nn.Module] = ()
    ) -> None:
        """Every parameter in one of `parts`; first values by `seed`, or none yet. Of the parts in `order`, the order in
        which forward runs them, backward gathers the next one's weights while one computes."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        following = dict(zip(order[1:], order, strict=False))
        for part in parts:  # before there are values: buckets move the shards, and what is empty takes no memory
            before = self._buckets[following[part]] if part in following else None
            self._buckets[part] = self.parallel.bucket([(p, d.spec) for _, p, d in declared(part)], before)
        if seed is not None:
            initialise(self, seed)
        for _, parameter, d in declared(self):
            self._held_by.setdefault(d.spec.copies(self.parallel.mesh.cuboid), []).append(parameter)

    def open(self, last: bool = True) -> dict[nn.Module, Any]:
        """Begin a micro-batch. Those that are not the `last` of a step leave their gradients to it: until its backward
        has run they are sums over a part of the ranks."""
        return dict(zip(self._buckets, self.parallel.open(list(self._buckets.values()), last), strict=True))

    @contextmanager
    def weights(self, opened: dict[nn.Module, Any], part: nn.Module) -> Iterator[Any]:
        """The whole weights of a part, for its layers' `W`."""
        try:
            yield self.parallel.gather(self._buckets[part], opened[part])
        finally:
            self.parallel.release(self._buckets[part])

    @torch.no_grad()
    def gradient_square(self) -> Tensor:
        """This rank's share of the squared norm of the whole gradient: what several ranks hold, each counts in part.
        Rows are summed in fp32 or better, their sums in fp64: within 1e-8 of fp64 throughout, ten times as fast."""
        total = torch.zeros((), dtype=torch.float64, device=self.parallel.mesh.device)
        for copies, parameters in self._held_by.items():
            rows = [_row_norms(parameter.grad) for parameter in parameters if parameter.grad is not None]
            if rows:
                total += torch.cat(rows).double().square().sum() / copies
        return total

    def gradient_norm(self) -> Tensor:
        """The norm of the whole model's gradient, exact on every rank: one small all-reduce over all ranks."""
        return all_reduce(self.gradient_square(), self.parallel.mesh.world).wait().sqrt()

    def state(self) -> dict[str, DTensor]:
        """The parameters under the whole model's names, as DTensors in the same memory: what is loaded into them, by
        `torch.distributed.checkpoint` say, is the model's."""
        mesh = self.parallel.mesh
        return {name: d.spec.dtensor(parameter.detach(), mesh) for name, parameter, d in declared(self)}

    def dtensors(self) -> dict[str, nn.Parameter]:
        """The parameters as DTensors that any torch optimizer and `clip_grad_norm_` take as they take whole tensors:
        they share the shards' memory, and backward leaves its gradients on them. Call it once."""
        found = {}
        for name, parameter, d in declared(self):
            found[name] = nn.Parameter(d.spec.dtensor(parameter.detach(), self.parallel.mesh))
            parameter.register_post_accumulate_grad_hook(_handing_to(found[name], d.spec, self.parallel.mesh))
        return found


def _row_norms(x: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, dtype=wide).view(-1)


def _handing_to(whole: nn.Parameter, spec: Spec, mesh: Mesh) -> Callable[[Tensor], None]:
    def hand(shard: Tensor) -> None:
        assert shard.grad is not None
        gradient, shard.grad = spec.dtensor(shard.grad, mesh), None
        whole.grad = gradient if whole.grad is None else whole.grad + gradient

    return hand
