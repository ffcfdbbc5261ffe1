"""Layers and models, written against a `Parallel`. Modules (module.py) are layers themselves (step/op.py). How to write
your own model: docs/your-own-model.md.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from cuboid.comm.collectives import all_reduce, from_all
from cuboid.comm.flight import Steps
from cuboid.layers.activation import gelu, swiglu
from cuboid.layers.product import Affine
from cuboid.layers.randomness import Keys, key_of
from cuboid.mesh.layout import Spec, convert, shard_of
from cuboid.mesh.place import Place
from cuboid.model.freeze import matching
from cuboid.model.module import Module, declared, initialise
from cuboid.model.parallel import Parallel, Role
from cuboid.step.op import Layer, Local, chain, fit, parameters_of, recomputed, residual
from cuboid.step.pipeline import Split, orders
from cuboid.step.play import Player
from cuboid.step.post import border
from cuboid.step.runner import At, Runner, Stage
from cuboid.step.schedule import PIPELINES, Order, check_order, parse
from cuboid.step.weights import Bucket, Gathered


class LayerModule(Module):
    """A module that is a layer. A subclass creates its modules, then sets `self.layer`.

    Args:
        parallel: How the model is spread.
    """

    layer: Layer

    @property
    def takes(self) -> str:
        """The layout of the input."""
        return self.layer.takes

    @property
    def gives(self) -> str:
        """The layout of the output."""
        return self.layer.gives

    def forward(self, X: Any, w: Gathered, at: At) -> Steps:
        """Run the layer; see `step/op.py`."""
        return self.layer(X, w, at)


class Linear(Module):
    """A weight `[n, k]` and an optional bias `[n]`, for `parallel.into` or `parallel.out_of`.

    Args:
        parallel: How the model is spread.
        way: "into": it leaves the residual stream (qkv, up, gate); "out_of": it returns to it.
        n: Out-features.
        k: In-features.
        bias: Whether it has a bias.
        std: Standard deviation of the initial weight.

    Raises:
        ValueError: If `way` is neither.
    """

    def __init__(self, parallel: Parallel, way: str, n: int, k: int, bias: bool, std: float) -> None:
        super().__init__(parallel)
        if way not in ("into", "out_of"):
            raise ValueError(
                f"a Linear has way={way!r}; use into (it leaves the residual stream) or out_of (it returns)"
            )
        weight: Role = "into.weight" if way == "into" else "out_of.weight"
        self.weight = self.declare("weight", weight, n, k, std=std)
        self.bias = self.declare("bias", "into.bias" if way == "into" else "out_of.bias", n) if bias else None
        #: As `parallel.into` and `parallel.out_of` take it.
        self.affine = Affine(self.weight, self.bias, (n, k), way)


class Embedding(Module):
    """An embedding `[rows, d]`, which can also be the head's weight.

    Args:
        parallel: How the model is spread.
        rows: The size of the vocabulary, or the number of positions.
        d: The hidden size.
        std: Standard deviation of the initial weights.
        pipe: The places of a pipeline that hold it, if several do.
    """

    def __init__(self, parallel: Parallel, rows: int, d: int, std: float, pipe: Sequence[int] = ()) -> None:
        super().__init__(parallel)
        self.rows, self.weight = rows, self.declare("weight", "table", rows, d, std=std, pipe=pipe)

    def lookup(self, positions: "Embedding | None" = None) -> Layer:
        """ids -> residual: the tokens' rows, plus those of their positions."""
        both = [self] if positions is None else [self, positions]
        return self.parallel.embed([each.weight for each in both], [each.rows for each in both])

    def logits(self) -> Layer:
        """residual -> logits, the matmul with all rows."""
        return self.parallel.logits(self.weight, self.rows)

    def head_loss(self) -> Layer:
        """residual -> loss: cross entropy of the logits, which are never unsharded."""
        return self.parallel.head_loss(self.weight, self.rows)


class Norm(LayerModule):
    """residual -> residual: LayerNorm with a bias, RMSNorm without.

    Args:
        parallel: How the model is spread.
        d: The hidden size.
        bias: Whether it has a bias.
    """

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
    """residual -> residual: attention with the heads of `parallel.config`.

    Args:
        parallel: How the model is spread.
        recompute: Whether backward recomputes attention instead of saving its activations.
        causal: Whether each token attends only to those before it.
    """

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
    """residual -> residual: two linears with GELU between, or three, gated with SiLU, as `parallel.config` says.

    Args:
        parallel: How the model is spread.
    """

    def __init__(self, parallel: Parallel) -> None:
        super().__init__(parallel)
        c, bias, fuse = parallel.config, bool(parallel.config.bias), parallel.schedule.fuse(parallel.mesh.device)
        self.gate = Linear(parallel, "into", c.ffn, c.hidden, bias, c.init_std) if c.gated else None
        self.up = Linear(parallel, "into", c.ffn, c.hidden, bias, c.init_std)
        self.down = Linear(parallel, "out_of", c.hidden, c.ffn, bias, c.init_std / (2 * c.layers) ** 0.5)
        into = parallel.into([each.affine for each in (self.gate, self.up) if each is not None])
        activation = Local(gelu) if self.gate is None else recomputed(Local(fuse(swiglu)))
        self.layer = chain(into, activation, parallel.out_of(self.down.affine))


class Block(LayerModule):
    """residual -> residual: X + attention(norm(X)), then X + mlp(norm(X)).

    Args:
        parallel: How the model is spread.
        name: Distinguishes the dropout of this block from others'.
        recompute_attention: Whether backward recomputes attention.
    """

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
    """A model of stages. A subclass creates its modules, lists its stages in `stages`, and calls `finish`.

    The last stage gives the sum of losses and how many count; the model's loss is their quotient over all ranks. A
    subclass that supports a pipeline creates only the modules of its rank, and lists them in `segments`. Parameters and
    gradients are DTensors, on one device plain tensors.

    Args:
        parallel: How the model is spread.
    """

    def __init__(self, parallel: Parallel) -> None:
        super().__init__()
        self.parallel = parallel
        self.dropout_state: Tensor
        self._buckets: dict[nn.Module, Bucket] = {}
        self._known: list[tuple[str, dict[str, Any], str, nn.Parameter]] = []  # where modules have their parameters
        self._replicated: dict[int, list[nn.Parameter]] = {}  # parameters by the number of ranks that hold each
        self.lowest = 0  # stage of a pipe: nothing below it is trained
        # [seed, forwards so far]: saved with the weights, so that a resumed loop continues the sequence
        self.register_buffer("dropout_state", torch.zeros(2, dtype=torch.int64), bool(parallel.config.dropout))

    def stages(self) -> Sequence[Stage]:
        """The stages, in the order of forward."""
        raise NotImplementedError("a Model lists its stages")

    def segments(self) -> Mapping[int, Sequence[Stage]]:
        """The pipeline stages of this rank: their numbers, each with the model's stages in it.

        Raises:
            ValueError: If the mesh has a pipeline and the model does not override this.
        """
        if self.parallel.mesh.pipe.size > 1:
            raise ValueError(
                f"{type(self).__name__} is not written as a pipeline, and the mesh has pipe="
                f"{self.parallel.mesh.pipe.size}; use pipe=1, or override `segments` as Transformer does"
            )
        return {0: self.stages()}

    def finish(self, seed: int | None = 0, dtype: torch.dtype = torch.float32, wraps: bool = False) -> None:
        """Check the stages and initialise the parameters. The last thing that a subclass's `__init__` calls.

        Args:
            seed: Of the initial values, the same on every cuboid; None: values will be loaded.
            dtype: Of weights at rest.
            wraps: On a pipe: whether the first place and the last share parameters.

        Raises:
            ValueError: If a parameter is undeclared or in no stage, a stage does not name the modules that it uses, a
                layer does not take what the previous one gives, the last stage gives no loss, or ranks of a pipe split
                the blocks in different ways.
        """
        segments, mesh = self.segments(), self.parallel.mesh
        self._check_split()
        self._check([stage for each in segments.values() for stage in each], ends=self.split.last in segments)
        for _, parameter, d in declared(self):
            self._replicated.setdefault(d.spec.copies(mesh.cuboid), []).append(parameter)
        for path, module in self.named_modules():
            found = module._parameters
            self._known += [(f"{path}.{name}", found, name, p) for name, p in found.items() if p is not None]
        for parameter in self.parameters():
            convert(parameter, dtype)
        self.lanes = mesh.lanes(wraps or self.split.last >= mesh.pipe.size)
        self._run(segments)  # before values exist: buckets move the shards, and empty memory costs nothing
        if seed is not None:
            initialise(self, seed)
            self.dropout_seed = seed

    def _run(self, segments: Mapping[int, Sequence[Stage]]) -> None:
        """Create the buckets and the player for the parameters as they are now."""
        mesh, dtype = self.parallel.mesh, self.parallel.dtype
        stages = [stage for each in segments.values() for stage in each]
        for module in dict.fromkeys(module for stage in stages for module in stage.needs):
            self._buckets[module] = Bucket({p: d.spec for _, p, d in declared(module)}, mesh, dtype)
        self.player = self.player_of(segments)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Model":
        """Called by `to`, `double` and the like. Raises ValueError if they would change the device."""
        device = self.parallel.mesh.device
        found = fn(torch.empty(0, device=device)).device
        if found.type != device.type:
            raise ValueError(f"the model's mesh is of {device}, not {found}; make the model on Mesh(…, device={found})")
        super()._apply(fn, recurse)
        self._run(self.segments())
        return self

    @cached_property
    def split(self) -> Split:
        """How the model's blocks are split over the stages of a pipeline."""
        return Split.of(self.parallel.config.layers, self.parallel.mesh.pipe.size, self.parallel.schedule)

    def freeze(self, pattern: str) -> None:
        """Freeze the parameters whose names match, like `requires_grad_(False)`.

        Args:
            pattern: A regular expression that is searched in the names: "embed|blocks.0".

        Raises:
            ValueError: If no name matches.
        """
        parameters = {name: parameter for name, parameter, _ in declared(self)}
        for name in matching(pattern, self.names()) & parameters.keys():
            parameters[name].requires_grad_(False)

    def names(self) -> list[str]:
        """The names of all parameters, also of other ranks' stages. All ranks of a pipe call it."""
        mine = [name for name, _, _ in declared(self)]
        return list(dict.fromkeys(name for each in from_all(mine, self.parallel.mesh.pipe) for name in each))

    def _check_split(self) -> None:
        """Every rank splits the blocks by itself, and would run one twice or never if another had a different split."""
        mesh = self.parallel.mesh
        if mesh.pipe.size == 1:
            return
        splits = from_all(self.split.blocks, mesh.world)
        other = next((rank for rank, split in enumerate(splits) if split != splits[0]), None)
        if other is not None:
            raise ValueError(
                f"rank {other} has stages of {list(splits[other])} blocks, rank 0 of {list(splits[0])}; give all ranks "
                f"the same overlap.split or Schedule(split=…), such as {list(splits[0])}"
            )

    def _check(self, stages: Sequence[Stage], ends: bool = True) -> None:
        if not stages:
            raise ValueError(f"{type(self).__name__} lists no stages; a model has at least one, which gives the loss")
        fit([stage.name for stage in stages], [stage.layer for stage in stages])
        if ends and stages[-1].layer.gives != "loss":
            raise ValueError(f"the last stage, {stages[-1].name}, gives no loss; end with head_loss or own_loss")
        self._check_parameters(stages)

    def _check_parameters(self, stages: Sequence[Stage]) -> None:
        names, in_stages = {p: name for name, p, _ in declared(self)}, dict[nn.Parameter, tuple[Stage, Any]]()
        undeclared = [name for name, parameter in self.named_parameters() if parameter not in names]
        if undeclared:
            raise ValueError(
                f"{listed(undeclared)}: not declared, so no step would shard or train them; make them by `declare` in "
                "a LayerModule, and use them in a local layer"
            )
        for stage in stages:
            gathered = [(parameter, module) for module in stage.needs for _, parameter, _ in declared(module)]
            for parameter, module in gathered:
                if parameter not in names:
                    raise ValueError(
                        f"stage {stage.name} names a {type(module).__name__} that is no attribute of the model, so no "
                        "optimizer would have it; keep modules in attributes or in a torch.nn.ModuleList"
                    )
                other, owner = in_stages.setdefault(parameter, (stage, module))
                if owner is not module:
                    raise ValueError(
                        f"{names[parameter]} is in two modules that stages {other.name} and {stage.name} name; name "
                        "the outer module in both"
                    )
            mine, used = dict(gathered), dict.fromkeys(parameters_of(stage.layer))
            lacking = [names.get(each, f"a parameter {list(each.shape)}") for each in used if each not in mine]
            if lacking:
                raise ValueError(
                    f"stage {stage.name} uses {listed(lacking)}, but names no module with them; name all that it needs"
                    f": Stage({stage.name!r}, layer, [module, …])"
                )
        missing = [name for parameter, name in names.items() if parameter not in in_stages]
        if missing:
            raise ValueError(
                f"{listed(missing)}: in no stage, so no step would train them; name their module in a stage"
            )

    def player_of(self, segments: Mapping[int, Sequence[Stage]]) -> Player:
        """A player of this rank's pipeline stages, with the messages between stages."""
        parallel, mesh, last, runners = self.parallel, self.parallel.mesh, self.split.last, {}
        sums_over = [getattr(mesh, name) for name in parallel.sums_over]
        arrive, depart = border(next(iter(self._buckets.values())).dtype.itemsize)
        for number, stages in segments.items():
            before, after = [Stage("arrive", arrive)] * (number > 0), [Stage("depart", depart)] * (number < last)
            options = parallel.schedule, sums_over, parallel.retain_weights, mesh.pipe.size == 1
            runners[number] = Runner([*before, *stages, *after], self._buckets, *options)
        shared = [p for _, p, d in declared(self) if len(d.spec.pipe) > 1]
        return Player(runners, self.split, mesh.pipe, self.lanes, shared)

    @torch.compiler.disable  # the schedule compiles what pays (Schedule.compile)
    def forward(
        self, inputs: Tensor, targets: Tensor, place: Place, loss: Any = None, dropout: int | None = None
    ) -> Tensor:
        """The loss of a batch: the mean over all ranks.

        Args:
            inputs: This rank's token ids `[s, b]` (`place.take`) or features `[s, b, d]` (`place.take_features`).
            targets: This rank's targets, `[s, b]`, from `place.take` too.
            place: Which slice of the batch they are.
            loss: Options of the loss, `Loss` for cross entropy.
            dropout: The seed of dropout; None: that of the next forward. `eval()` turns dropout off.

        Raises:
            ValueError: If shapes do not match the place; under autocast; with gradients on a pipe, where `play`
                trains.
        """
        self._check_call(inputs, targets, place)
        at = At(place, targets, loss, self._dropout(dropout))
        trained = inputs.requires_grad or any(p.requires_grad for p in self.player.parameters)
        if not (trained and torch.is_grad_enabled()):
            return self.player.forward(inputs, at)
        if self.parallel.mesh.pipe.size > 1:
            raise ValueError(
                f"a backward over pipe={self.parallel.mesh.pipe.size} goes through other ranks, and autograd knows "
                "this one alone; train with `model.play([(inputs, At(place, targets))])`, or use torch.no_grad()"
            )
        return self.player.runners[0](inputs, at)

    @property
    def dropout_seed(self) -> int:
        """The seed of dropout, with the number of the forward: that of the initial values unless set. Setting it resets
        the number of forwards."""
        return int(self.dropout_state[0])

    @dropout_seed.setter
    def dropout_seed(self, seed: int) -> None:
        self.dropout_state.copy_(torch.tensor([seed, 0]))

    def _dropout(self, seed: int | Mapping[str, Tensor] | None) -> Mapping[str, Tensor] | None:
        """The keys of one forward's dropout, the same on every cuboid; None: no dropout."""
        if not self.training or not self.parallel.config.dropout:
            return None
        if seed is None:
            own, forwards = self.dropout_state.tolist()
            seed = key_of(own, f"dropout.{forwards}")
            self.dropout_state[1] += 1
        return Keys(seed, self.parallel.mesh.device) if isinstance(seed, int) else seed

    def play(
        self, batches: Sequence[tuple[Tensor, At]], order: str | Order | None = None, scale: float | Tensor = 1.0
    ) -> list[Tensor]:
        """Forward and backward of several micro-batches. The gradient of `scale` times the mean of their losses is
        added to the parameters', as `backward()` does, and summed over replicas once.

        Args:
            batches: This rank's inputs of each micro-batch, and their `At`.
            order: The order of their forwards F, backwards B and, if they are postponed, weight gradients W, those that
                run beside each other joined by +: "F0 F1+B0 B1". None: the schedule's.
            scale: A factor of the loss; a tensor is read on the device.

        Returns:
            The losses of the micro-batches.

        Raises:
            ValueError: If the order lacks or repeats something, or is given on a pipe; if inputs do not match their
                place.
        """
        pipe = self.parallel.mesh.pipe.size
        if order is not None and pipe > 1:
            raise ValueError(
                f"order={order!r} is that of one rank, but with pipe={pipe} each place has its own; choose one by "
                f"name: Schedule(pipeline=…), one of {', '.join(PIPELINES)}"
            )
        if isinstance(order, str):
            order = parse(order)
        elif order is not None:
            check_order(order)
        for inputs, at in batches:
            self._check_call(inputs, at.targets, at.place)
        batches = [(inputs, replace(at, seed=self._dropout(at.seed))) for inputs, at in batches]
        every = [order] if order is not None else orders(self.parallel.schedule, pipe, len(batches))
        return self.player.play(batches, every, scale, self.lowest)

    def _check_call(self, inputs: Tensor, targets: Tensor | None, place: Place) -> None:
        """Raise ValueError where a step would silently do something else than it seems to."""
        if not hasattr(self, "player"):
            raise ValueError(f"{type(self).__name__} is not finished; end its __init__ with self.finish(seed)")
        if torch.is_autocast_enabled(inputs.device.type):
            raise ValueError(
                "torch.autocast does not reach the model's matmuls; set their dtype when you create the model: "
                "CuboidParallel(config, mesh, dtype=torch.bfloat16)"
            )
        for name, found, key, parameter in self._known:
            if found.get(key) is not parameter:
                raise ValueError(
                    f"{name} was replaced, as functional_call, parametrizations, pruning and tying by assignment do; "
                    "layers use the parameters the model was made with: copy values into them under torch.no_grad()"
                )
        for bucket in self._buckets.values():
            bucket.check()
        if 0 in self.player.runners:  # the others take the residual stream of the stage before
            place.check(inputs, targets, features=self.player.runners[0].stages[0].layer.takes == "residual")

    @torch.no_grad()
    def gradient_square(self) -> Tensor:
        """This rank's share of the squared norm of the model's gradient; replicated tensors count a fraction on each
        rank. Rows are summed in fp32 or better, their sums in fp64: within 1e-8 of all-fp64, ten times as fast."""
        total = torch.zeros((), dtype=torch.float64, device=self.parallel.mesh.device)
        for copies, parameters in self._replicated.items():
            rows = [_row_norms(shard_of(parameter.grad)) for parameter in parameters if parameter.grad is not None]
            if rows:
                total += torch.cat(rows).double().square().sum() / copies
        return total

    def gradient_norm(self) -> Tensor:
        """The norm of the model's gradient, the same on all ranks. Needs one small all-reduce over all ranks."""
        return all_reduce(self.gradient_square(), self.parallel.mesh.world).wait().sqrt()

    def specs(self) -> dict[str, Spec]:
        """The specs of all parameters, those of other ranks' stages too, in the order of the stages. All ranks of a
        pipe call it."""
        names = {parameter: name for name, parameter, _ in declared(self)}
        mine = {
            names[parameter]: (number, d.spec)
            for number, stages in self.segments().items()
            for _, parameter, d in (each for stage in stages for module in stage.needs for each in declared(module))
        }
        found = [each for place in from_all(mine, self.parallel.mesh.pipe) for each in place.items()]
        return {name: spec for name, (_, spec) in sorted(found, key=lambda each: each[1][0])}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model into eval mode, and afterwards back into its earlier mode."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _row_norms(x: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, dtype=wide).view(-1)
