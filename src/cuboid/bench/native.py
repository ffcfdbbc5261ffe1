"""The PyTorch baseline: torch's own tensor and sequence parallelism times its own FSDP.

The plan is torchtitan's for Llama, used for GPT-2 too. Weight gathers are prefetched, and asynchronous on a CPU as
well. What torch does not overlap is not overlapped here: activations over tp and, as shipped, reduce-scatters on a CPU.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from cuboid.bench.count import Tally
from cuboid.bench.native_model import NativeTransformer, first_values, fuse, unfuse
from cuboid.comm.axis import Axis
from cuboid.comm.collectives import all_reduce, gather_pieces, reduce_scatter
from cuboid.comm.flight import Flight
from cuboid.comm.ledger import Ledger
from cuboid.layers.randomness import key_of, normal
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import Spec, shard_of
from cuboid.model.config import ModelConfig
from cuboid.plan.cost.native import check_batch, check_model
from cuboid.run.launch import World


class Native:
    """A rank's model, ready to train; tp varies fastest over ranks.

    `reshard` regathers a block's weights in backward; otherwise they are kept from forward. `sp` also splits the
    residual stream over tp. `ddp` replicates the model over fsdp instead of sharding it. `ideal` replaces gloo's
    reduce-scatters, which are all-reduces, by the least traffic, and overlaps FSDP's with backward as on a GPU:
    gradients must then be None when a step begins. There is no dropout.
    """

    def __init__(
        self,
        config: ModelConfig,
        world: World,
        fsdp: int,
        tp: int,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        ideal: bool = False,
        reshard: bool = True,
        sp: bool = True,
        ddp: bool = False,
    ) -> None:
        if ddp and (tp > 1 or ideal):
            raise ValueError(f"ddp=True replicates the model as it is; use tp=1 and ideal=False, not tp={tp}")
        if fsdp * tp != world.size:
            raise ValueError(
                f"fsdp={fsdp} × tp={tp} needs {fsdp * tp} ranks but {world.size} were started; "
                f"choose sizes whose product is {world.size}"
            )
        check_model(config, tp)
        # DTensor would warn, on every rank in every step, that the gradients' norm takes two small all-reduces
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        self.config, self.ideal = config, ideal
        self.cuboid = Cuboid(fsdp, tp)  # the same splits and the same order of ranks
        self.coordinates = self.cuboid.coordinates(world.rank)
        # DTensor treats equal placements on equal meshes as the same, and an `_IdealShard` equals a `Shard`
        self._tp = "tp ideal" if ideal else "tp"
        self.mesh = init_device_mesh(world.device.type, (fsdp, tp), mesh_dim_names=("fsdp", self._tp))
        self.fsdp = Axis("fsdp", fsdp, self.coordinates["x"], self.mesh.get_group("fsdp"))
        self.world = Axis("world", world.size, world.rank, dist.group.WORLD)
        with torch.device("meta"):
            self.model = NativeTransformer(config).to(dtype)
        if tp > 1:
            parallelize_module(self.model, self.mesh[self._tp], plan(config, _IdealShard if ideal else Shard, sp))
        self.specs = {name: _spec(parameter, ddp) for name, parameter in self.model.named_parameters()}
        if fsdp > 1 and not ddp:
            shard(self.model, self.mesh["fsdp"], reshard, _IdealReduceScatter(self.fsdp) if ideal else None)
        self.model.to_empty(device=world.device)
        self._initialise(seed)
        self._run: nn.Module = self.model
        if ddp and fsdp > 1:
            group = self.mesh.get_group("fsdp")
            self._run = DistributedDataParallel(self.model, process_group=group, gradient_as_bucket_view=True)
        if fsdp == 1 and tp > 1:  # otherwise FSDP does it
            for parameter in self.model.parameters():
                parameter.register_post_accumulate_grad_hook(_like_parameter)

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """Like `nn.initialise`: a rank makes only its shards."""
        for name, parameter in self.model.named_parameters():
            mean, std = first_values(self.config, name)
            shard, spec = shard_of(parameter), self.specs[name]
            shard.fill_(mean)
            if std and ".qkv." in name:  # ours are three, each with its own random numbers
                shard.add_(spec.take(self._first_qkv(seed, name, std), self.cuboid, self.coordinates).to(shard))
            elif std:
                ranges = spec.ranges(self.cuboid, self.coordinates)
                shard.add_(normal(key_of(seed, name), spec.shape, ranges, std).to(shard))

    def _first_qkv(self, seed: int, name: str, std: float) -> Tensor:
        c, parts = self.config, dict[str, Tensor]()
        for each, rows in (("q", c.q_dim), ("k", c.kv_dim), ("v", c.kv_dim)):
            ours = name.replace(".qkv.", f".{each}.")
            parts[ours] = normal(key_of(seed, ours), (rows, c.hidden), ((0, rows), (0, c.hidden)), std)
        return fuse(c, parts)[name]

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of the batch, [b, s], of which every rank is given all and takes its slice."""
        fsdp = self.fsdp
        check_batch(self.config, fsdp.size, self.cuboid.y, *tokens.shape)
        if targets.shape != tokens.shape:
            raise ValueError(f"targets {tuple(targets.shape)} must be shaped as tokens, {tuple(tokens.shape)}")
        if self.ideal and any(parameter.grad is not None for parameter in self.parameters()):
            raise ValueError("ideal=True cannot add to gradients; clear them with zero_grad() before each step")
        tokens, targets = (whole.chunk(fsdp.size)[fsdp.index] for whole in (tokens, targets))
        with warnings.catch_warnings():
            # an embedding's rows split over tp are a view; nothing here writes to it
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
            logits = self._run(tokens).flatten(0, 1)
        if isinstance(logits, DTensor):
            mine = _ParallelLoss.apply(logits, targets.flatten())
        else:
            mine = F.cross_entropy(logits, targets.flatten())
        mean = all_reduce(mine.detach(), fsdp).wait() / fsdp.size
        if self.ideal:
            mine = mine / fsdp.size  # gradients are summed; as shipped, averaged
        return mine + (mean - mine).detach()  # the value of all, the gradient of its own

    def gradients(self) -> dict[str, Tensor]:
        """All gradients, unsharded, on every rank. For tests."""
        return self._whole({name: cast(Tensor, each.grad) for name, each in self.model.named_parameters()})

    def values(self) -> dict[str, Tensor]:
        """All parameters, unsharded, on every rank. For tests."""
        return self._whole(dict(self.model.named_parameters()))

    def _whole(self, tensors: dict[str, Any]) -> dict[str, Tensor]:
        whole = {
            name: self.specs[name].join(gather_pieces(shard_of(tensor), self.world), self.cuboid)
            for name, tensor in tensors.items()
        }
        return unfuse(self.config, whole)

    def tally(self, ledger: Ledger) -> Tally:
        """A context within which the ledger counts what is sent over "fsdp" and "tp"."""
        return Tally(ledger, {"fsdp": self.mesh.get_group("fsdp"), "tp": self.mesh.get_group(self._tp)})

    def close(self) -> None:
        """Destroy the groups, and DTensor's cache, which would take the next equal mesh for this one."""
        for group in self.mesh.get_all_groups():
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        _clear_sharding_prop_cache()


def _spec(parameter: Tensor, ddp: bool = False) -> Spec:
    """How a parameter is split: by tp (our y) as its placement says, then by fsdp (our x) along dim 0. DDP: not."""
    if ddp:
        return Spec(tuple(parameter.shape), ((),) * parameter.ndim)
    cuts: list[tuple[str, ...]] = [()] * parameter.ndim
    if isinstance(parameter, DTensor) and isinstance(placement := parameter.placements[0], Shard):
        cuts[placement.dim] = ("y",)
    return Spec(tuple(parameter.shape), ((*cuts[0], "x"), *cuts[1:]))


def _like_parameter(parameter: Tensor) -> None:
    """DTensor leaves the gradients of norms as partial sums and an embedding's full; make them fit the optimizer."""
    assert isinstance(parameter, DTensor)
    assert isinstance(parameter.grad, DTensor)
    if parameter.grad.placements != parameter.placements:
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


def plan(config: ModelConfig, shard: type[Shard], sp: bool) -> dict[str, ParallelStyle]:
    """Tensor parallelism with the residual stream [b, s/tp, d], without `sp` [b, s, d]. Gate and up share it."""
    whole = Replicate()
    s: Placement = shard(1) if sp else whole
    gather_x = PrepareModuleInput(input_layouts=(s,), desired_input_layouts=(whole,))
    gather_first = PrepareModuleInput(input_layouts=(s, None), desired_input_layouts=(whole, None))
    norm: ParallelStyle = SequenceParallel(use_local_output=True) if sp else _Replicated()
    out, into = RowwiseParallel(output_layouts=s), ["attention.qkv", "mlp.up"] + (["mlp.gate"] if config.gated else [])
    styles: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=s),
        "norm": norm,
        "head": gather_first if config.tied else ColwiseParallel(input_layouts=s, use_local_output=False),
        "blocks.*.norm1": norm,
        "blocks.*.norm2": norm,
        "blocks.*.attention": gather_first,
        "blocks.*.mlp": gather_x,
        **{f"blocks.*.{name}": ColwiseParallel() for name in into},
        "blocks.*.attention.out": out,
        "blocks.*.mlp.down": out,
    }
    if not config.rotary:
        styles["positions"] = RowwiseParallel(input_layouts=whole, output_layouts=shard(0) if sp else whole)
    return styles


class _Replicated(ParallelStyle):
    """A module that every rank of tp runs on the same input. Its parameters are DTensors as the others are, which an
    optimizer wants."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return DTensor.from_local(inputs[0], mesh, (Replicate(),), run_check=False)

        def leave(_: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
            return outputs.to_local()

        return distribute_module(module, device_mesh, None, enter, leave)


class ReduceScatter(Protocol):
    """What `FSDPModule.set_custom_reduce_scatter` takes."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor: ...

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None: ...


def shard(model: NativeTransformer, mesh: DeviceMesh, reshard: bool, custom: ReduceScatter | None) -> None:
    """A group a block. The head's weights and the last block's stay from forward to backward, which begins with them;
    the embedding's, unless the head's too, are not needed there."""
    groups: list[Any] = [*model.blocks]
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard and block is not groups[-1])
    if model.config.tied:
        groups.insert(0, model)
    else:
        tables: list[nn.Module] = [table for table in (model.embed, model.positions) if table is not None]
        fully_shard(tables, mesh=mesh, reshard_after_forward=True)
        fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
        cast(FSDPModule, model.embed).set_unshard_in_backward(False)
        groups = [model.embed, *groups, model.norm]
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for group, following in pairwise(groups):
        group.set_modules_to_forward_prefetch([following])  # backward prefetches by itself
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module._set_unshard_async_op(True)  # a CPU has no streams, and a gather would block
            if custom is not None:
                module.set_custom_reduce_scatter(cast(Any, custom))
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)


class _IdealReduceScatter:
    """The least bytes on gloo, and one in flight while backward goes on, as FSDP has it on a GPU. FSDP makes views of
    the output and leaves them alone: no gradients to add to, none to scale."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._under_way: tuple[Flight, Tensor] | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM, op
        self._land()
        self._under_way = reduce_scatter(input_tensor, self._axis), output_tensor
        Variable._execution_engine.queue_callback(self._land)  # at the end of backward

    def _land(self) -> None:
        if self._under_way is not None:
            flight, output = self._under_way
            output.copy_(flight.wait())
            self._under_way = None


class _IdealShard(Shard):
    """A `Shard` to which partial sums come with the least bytes on gloo."""

    def _reduce_shard_tensor(self, tensor: Tensor, mesh: DeviceMesh, reduce_op: str, mesh_dim: int) -> Tensor:
        assert reduce_op == "sum", reduce_op
        axis = Axis("tp", mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim), mesh.get_group(mesh_dim))
        parts = tensor.unflatten(self.dim, (axis.size, -1)).movedim(self.dim, 0)
        return reduce_scatter(parts, axis).wait()[0]


class _ParallelLoss(torch.autograd.Function):
    """Cross entropy of logits [r, v] split over v, a DTensor. Differentiated on the spot, because `loss_parallel` wants
    its backward within it; what is saved is as large."""

    @staticmethod
    def forward(ctx: Any, logits: DTensor, targets: Tensor) -> Tensor:
        with torch.enable_grad(), loss_parallel():
            logits = cast(DTensor, logits.detach().requires_grad_())
            value = F.cross_entropy(logits, targets)
            ctx.save_for_backward(*torch.autograd.grad(value, logits))
        return shard_of(value)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None]:
        (dlogits,) = ctx.saved_tensors
        return dlogits * dloss, None
