"""Layers and models, written against a `Parallel`. Modules hold a rank's shards under the names of the whole model's
parameters, and are layers themselves (step/op.py). To write a model of your own: docs/your-own-model.md.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cuboid.comm.collectives import all_reduce, from_all
from cuboid.comm.flight import Steps
from cuboid.layers.activation import gelu, swiglu
from cuboid.layers.product import Affine
from cuboid.layers.randomness import key_of, normal
from cuboid.mesh.layout import Spec
from cuboid.mesh.mesh import Mesh
from cuboid.mesh.place import Place
from cuboid.model.parallel import Parallel, Role
from cuboid.step.op import Layer, Local, chain, fit, recomputed, residual
from cuboid.step.pipeline import Split, orders
from cuboid.step.play import Player
from cuboid.step.post import border
from cuboid.step.runner import At, Runner, Stage
from cuboid.step.schedule import Order
from cuboid.step.weights import Bucket, Gathered


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

    def declare(
        self, name: str, role: Role, *shape: int, std: float = 0.0, mean: float = 0.0, pipe: Sequence[int] = ()
    ) -> nn.Parameter:
        """A parameter of this rank's place on the pipe or, if it is in several stages, of the places given."""
        mesh = self.parallel.mesh
        spec = replace(self.parallel.spec(role, shape), pipe=tuple(pipe) or (mesh.pipe.index,))
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


class LayerModule(Module):
    """A module that is a layer: `self.layer` does what it does."""

    layer: Layer

    @property
    def takes(self) -> str:
        return self.layer.takes

    @property
    def gives(self) -> str:
        return self.layer.gives

    def forward(self, X: Any, w: Gathered, at: At) -> Steps:
        return self.layer(X, w, at)


class Linear(Module):
    """A weight [n, k] and perhaps a bias [n], for `into` or `out_of` the residual stream."""

    def __init__(self, parallel: Parallel, way: str, n: int, k: int, bias: bool, std: float) -> None:
        super().__init__(parallel)
        if way not in ("into", "out_of"):
            raise ValueError(f"a Linear goes {way!r}; say into (it leaves the residual stream) or out_of (it returns)")
        weight: Role = "into.weight" if way == "into" else "out_of.weight"
        self.weight = self.declare("weight", weight, n, k, std=std)
        self.bias = self.declare("bias", "into.bias" if way == "into" else "out_of.bias", n) if bias else None

    @property
    def affine(self) -> Affine:
        n, k = self.declared["weight"].spec.shape
        return Affine(self.weight, self.bias, (n, k))


class Table(Module):
    """Rows to look up, split like the head's weight, which it can be as well."""

    def __init__(self, parallel: Parallel, rows: int, d: int, std: float, pipe: Sequence[int] = ()) -> None:
        super().__init__(parallel)
        self.rows, self.weight = rows, self.declare("weight", "table", rows, d, std=std, pipe=pipe)

    def lookup(self, positions: "Table | None" = None) -> Layer:
        """ids -> residual: the tokens' rows, plus those of their positions."""
        tables = [self] if positions is None else [self, positions]
        return self.parallel.embed([table.weight for table in tables], [table.rows for table in tables])

    def logits(self) -> Layer:
        """residual -> the product with every row."""
        return self.parallel.logits(self.weight, self.rows)

    def head_loss(self) -> Layer:
        """residual -> loss: cross entropy of the logits, which are never whole."""
        return self.parallel.head_loss(self.weight, self.rows)


class Norm(LayerModule):
    """residual -> residual: LayerNorm with a bias, RMSNorm without."""

    def __init__(self, parallel: Parallel, d: int, bias: bool) -> None:
        super().__init__(parallel)
        self.weight = self.declare("weight", "norm", d, mean=1.0)
        self.bias = self.declare("bias", "norm", d) if bias else None
        self.layer = parallel.norm(self.weight, self.bias)


class HeadNorm(Module):
    """RMSNorm of each head's features, of queries or of keys."""

    def __init__(self, parallel: Parallel) -> None:
        super().__init__(parallel)
        self.weight = self.declare("weight", "head_norm", parallel.config.head_dim, mean=1.0)


class Attention(LayerModule):
    """residual -> residual: of each token to those before it, or, not `causal`, to all."""

    def __init__(self, parallel: Parallel, recompute: bool = False, causal: bool = True) -> None:
        super().__init__(parallel)
        c = parallel.config
        self.q = Linear(parallel, "into", c.q_dim, c.hidden, c.qkv_biased, c.init_std)
        self.k = Linear(parallel, "into", c.kv_dim, c.hidden, c.qkv_biased, c.init_std)
        self.v = Linear(parallel, "into", c.kv_dim, c.hidden, c.qkv_biased, c.init_std)
        self.norm_q = HeadNorm(parallel) if c.qk_norm else None
        self.norm_k = HeadNorm(parallel) if c.qk_norm else None
        self.out = Linear(parallel, "out_of", c.hidden, c.q_dim, bool(c.bias), c.init_std / (2 * c.layers) ** 0.5)
        qkv = parallel.into([each.affine for each in (self.q, self.k, self.v)], (c.heads, c.kv_heads, c.kv_heads))
        attend = parallel.attend([n.weight for n in (self.norm_q, self.norm_k) if n is not None], causal)
        out = parallel.out_of(self.out.affine, heads=True)
        self.layer = chain(qkv, recomputed(attend) if recompute else attend, out)


class MLP(LayerModule):
    """residual -> residual: GELU, or gated with SiLU."""

    def __init__(self, parallel: Parallel) -> None:
        super().__init__(parallel)
        c, bias, fuse = parallel.config, bool(parallel.config.bias), parallel.schedule.fuse
        self.gate = Linear(parallel, "into", c.ffn, c.hidden, bias, c.init_std) if c.gated else None
        self.up = Linear(parallel, "into", c.ffn, c.hidden, bias, c.init_std)
        self.down = Linear(parallel, "out_of", c.hidden, c.ffn, bias, c.init_std / (2 * c.layers) ** 0.5)
        into = parallel.into([each.affine for each in (self.gate, self.up) if each is not None])
        bend = Local(gelu) if self.gate is None else recomputed(Local(fuse(swiglu)))
        self.layer = chain(into, bend, parallel.out_of(self.down.affine))


class Block(LayerModule):
    """X + attention(norm(X)), then X + mlp(norm(X))."""

    def __init__(self, parallel: Parallel, name: str, recompute_attention: bool = False) -> None:
        super().__init__(parallel)
        c = parallel.config
        self.norm1 = Norm(parallel, c.hidden, c.norm_bias)
        self.attention = Attention(parallel, recompute_attention)
        self.norm2 = Norm(parallel, c.hidden, c.norm_bias)
        self.mlp = MLP(parallel)
        drop1, drop2 = ([parallel.dropout(f"{name}.{of}")] if c.dropout else [] for of in ("attention", "mlp"))
        self.layer = chain(
            residual(self.norm1, self.attention, *drop1),
            residual(self.norm2, self.mlp, *drop2),
        )


class Model(nn.Module):
    """A model of stages. A subclass makes its modules, lists its stages in `stages`, and calls `finish`.

    The last stage gives the sum of losses and how many count; the model's loss is their quotient over all ranks. A
    subclass that can be a pipeline makes the modules of its rank alone, and lists them in `segments`.
    """

    def __init__(self, parallel: Parallel) -> None:
        super().__init__()
        self.parallel = parallel
        self._buckets: dict[nn.Module, Bucket] = {}
        self._replicated: dict[int, list[nn.Parameter]] = {}  # parameters by the number of ranks that hold each

    def stages(self) -> Sequence[Stage]:
        """In the order of forward."""
        raise NotImplementedError("a Model lists its stages")

    def segments(self) -> Mapping[int, Sequence[Stage]]:
        """The stages of a pipeline that this rank has, by their numbers, each with the stages of the model in it."""
        if self.parallel.mesh.pipe.size > 1:
            raise ValueError(
                f"{type(self).__name__} is not written as a pipeline, and the mesh has pipe="
                f"{self.parallel.mesh.pipe.size}; use pipe=1, or override `segments` as Transformer does"
            )
        return {0: self.stages()}

    def finish(self, seed: int | None = 0, dtype: torch.dtype = torch.float32, wraps: bool = False) -> None:
        """Check the stages, and give every parameter its first value by `seed`, or none yet. `wraps`: on a pipe, the
        first place and the last share parameters."""
        segments, mesh = self.segments(), self.parallel.mesh
        stages = [stage for each in segments.values() for stage in each]
        self._check(stages, ends=self.split.last in segments)
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        for module in dict.fromkeys(module for stage in stages for module in stage.needs):
            # before there are values: buckets move the shards, and what is empty takes no memory
            self._buckets[module] = Bucket({p: d.spec for _, p, d in declared(module)}, mesh, self.parallel.dtype)
        if seed is not None:
            initialise(self, seed)
        for _, parameter, d in declared(self):
            self._replicated.setdefault(d.spec.copies(mesh.cuboid), []).append(parameter)
        self.lanes = mesh.lanes(wraps or self.split.last >= mesh.pipe.size)
        self.player = self.player_of(segments)

    @cached_property
    def split(self) -> Split:
        """Of the model's blocks over the stages of a pipeline."""
        return Split.of(self.parallel.config.layers, self.parallel.mesh.pipe.size, self.parallel.schedule)

    def _check(self, stages: Sequence[Stage], ends: bool = True) -> None:
        if not stages:
            raise ValueError(f"{type(self).__name__} lists no stages; a model has at least one, which gives the loss")
        fit([stage.name for stage in stages], [stage.layer for stage in stages])
        if ends and stages[-1].layer.gives != "loss":
            raise ValueError(f"the last stage, {stages[-1].name}, gives no loss; end with head_loss or own_loss")
        in_stages: dict[nn.Parameter, tuple[Stage, Any]] = {}
        for stage in stages:
            for module in stage.needs:
                for _, parameter, _ in declared(module):
                    other, owner = in_stages.setdefault(parameter, (stage, module))
                    if owner is not module:
                        name = next(name for name, each, _ in declared(self) if each is parameter)
                        raise ValueError(
                            f"{name} is in two modules that stages {other.name} and {stage.name} name; name the outer "
                            "module in both"
                        )
        missing = [name for name, parameter, _ in declared(self) if parameter not in in_stages]
        if missing:
            shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            raise ValueError(f"{shown}: in no stage, so no step would train them; name their module in a stage")

    def player_of(self, segments: Mapping[int, Sequence[Stage]]) -> Player:
        """Of this rank's stages of a pipeline; between them messages arrive and depart."""
        parallel, mesh, last, runners = self.parallel, self.parallel.mesh, self.split.last, {}
        sums_over = [getattr(mesh, name) for name in parallel.sums_over]
        arrive, depart = border(next(iter(self._buckets.values())).dtype.itemsize)
        for number, stages in segments.items():
            before, after = [Stage("arrive", arrive)] * (number > 0), [Stage("depart", depart)] * (number < last)
            options = parallel.schedule, sums_over, parallel.retain_weights, mesh.pipe.size == 1
            runners[number] = Runner([*before, *stages, *after], self._buckets, *options)
        shared = [p for _, p, d in declared(self) if len(d.spec.pipe) > 1]
        return Player(runners, self.split, mesh.pipe, self.lanes, shared)

    def forward(
        self, inputs: Tensor, targets: Tensor, place: Place, loss: Any = None, dropout: int | None = None
    ) -> Tensor:
        """The loss of a batch, the mean over all ranks. Inputs and targets are this rank's part of the batch, taken by
        `place.take` (token ids) or `place.take_features`. `loss` has options of the loss, `dropout` is the seed of this
        batch's dropout; None is none. On a pipe, `play` trains: there a backward needs messages."""
        at = At(place, targets, loss, dropout)
        if self.parallel.mesh.pipe.size == 1:
            return self.player.runners[0](inputs, at)
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            raise ValueError(
                f"a backward over pipe={self.parallel.mesh.pipe.size} goes through other ranks, and autograd knows "
                "this one alone; train with `model.play([(inputs, At(place, targets))])`, or use torch.no_grad()"
            )
        return self.player.forward(inputs, at)

    def play(
        self, batches: Sequence[tuple[Tensor, At]], order: Order | None = None, scale: float = 1.0
    ) -> list[Tensor]:
        """Forward and backward of several micro-batches, in an order (step/schedule.py) or as the schedule says; their
        losses. The gradient of `scale` times the mean of the losses is added to the parameters', as `backward()` does,
        and summed over replicas once. On a pipe the order is the schedule's."""
        pipe = self.parallel.mesh.pipe.size
        if order is not None and pipe > 1:
            raise ValueError(f"an order of your own is of one stage, but pipe={pipe}; choose a schedule by its name")
        return self.player.play(
            batches, [order] if order else orders(self.parallel.schedule, pipe, len(batches)), scale
        )

    @torch.no_grad()
    def gradient_square(self) -> Tensor:
        """This rank's share of the squared norm of the whole gradient: what several ranks hold, each counts in part.
        Rows are summed in fp32 or better, their sums in fp64: within 1e-8 of fp64 throughout, ten times as fast."""
        total = torch.zeros((), dtype=torch.float64, device=self.parallel.mesh.device)
        for copies, parameters in self._replicated.items():
            rows = [_row_norms(parameter.grad) for parameter in parameters if parameter.grad is not None]
            if rows:
                total += torch.cat(rows).double().square().sum() / copies
        return total

    def gradient_norm(self) -> Tensor:
        """The norm of the whole model's gradient, exact on every rank: one small all-reduce over all ranks."""
        return all_reduce(self.gradient_square(), self.parallel.mesh.world).wait().sqrt()

    def specs(self) -> dict[str, Spec]:
        """Of every parameter of the whole model, those of other ranks' stages too, in the order of the stages. All
        ranks of a pipe call it."""
        names = {parameter: name for name, parameter, _ in declared(self)}
        mine = {
            names[parameter]: (number, d.spec)
            for number, stages in self.segments().items()
            for _, parameter, d in (each for stage in stages for module in stage.needs for each in declared(module))
        }
        found = [each for place in from_all(mine, self.parallel.mesh.pipe) for each in place.items()]
        return {name: spec for name, (_, spec) in sorted(found, key=lambda each: each[1][0])}

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
