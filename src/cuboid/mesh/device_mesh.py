"""The block of devices as DTensor and `torch.distributed.checkpoint` know it."""

import logging
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dispatch import found_inf_reduce_handler

from cuboid.comm.axis import Axis
from cuboid.comm.collectives import all_gather, all_reduce


class BlockMesh(DeviceMesh):
    """A device mesh over existing groups; without groups it cannot communicate.

    No two are equal: DTensor caches results by mesh, and would return those of one whose groups are closed. A copy of a
    DTensor stays on its mesh. Pickling raises: it would save one rank's shard as if it were the tensor.

    On a pipe it has the ranks of one place, and a dim `pipe` of size 1: tensors of one place are sharded along it,
    those that several places hold replicated. A stack of norms (`clip_grad_norm_`) is of all places.
    """

    def __init__(
        self, device_type: str, ranks: Tensor, axes: Sequence[Axis], rank: int, pipe: Axis, world: Axis, sends: bool
    ) -> None:
        names = tuple(axis.name for axis in axes)
        super().__init__(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)
        self.pipe, self.world = pipe, world
        if sends:
            named: list[Any] = ["" if axis.group is None else axis.group.group_name for axis in axes]
            self._dim_group_names = named
            self._pg_registry = {axis.group.group_name: axis.group for axis in axes if axis.group is not None}
        logging.getLogger("torch.distributed.tensor._redistribute").addFilter(_not_about_flattening)
        handlers = DTensor._op_dispatcher._custom_op_handlers
        handlers[torch.ops.aten._local_scalar_dense.default] = _number
        handlers[torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default] = _unscale
        handlers[torch.ops.aten.detach.default] = _detach
        if pipe.size > 1:
            handlers[torch.ops.aten.stack.default] = _stack

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __deepcopy__(self, memo: dict[int, Any]) -> "BlockMesh":
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ValueError(
            f"torch.save or pickle of a DTensor on {self} would write the shard of one rank alone; on every rank call "
            "torch.distributed.checkpoint.save, or gather first: get_model_state_dict(model, options=StateDictOptions("
            "full_state_dict=True, cpu_offload=True)) of torch.distributed.checkpoint.state_dict"
        )


def _detach(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> DTensor:
    """What autograd does to every gradient, and `nn.Parameter` to its tensor. DTensor's own takes milliseconds for each
    new shape on a mesh."""
    (x,) = args
    return DTensor(op_call(x._local_tensor), x._spec, requires_grad=False)


def _number(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
    """Implements `item()` and `float()`. DTensor's own would return this rank's share of a sum or a norm."""
    (x,) = args
    return op_call(x.redistribute(placements=[Replicate()] * x.device_mesh.ndim).to_local())


def _stack(op_call: Any, args: Any, kwargs: dict[str, object]) -> Any:
    """`torch.stack`. Of the norms of tensors on a pipe, as `clip_grad_norm_` makes them, it has one for each place, of
    its own tensors, and one of those that several places hold: the same on all ranks."""
    tensors, dim = args[0], (*args, 0)[1]
    first, mesh = tensors[0], tensors[0].device_mesh
    on_pipe = isinstance(mesh, BlockMesh) and mesh.pipe.size > 1 and not first.ndim
    order = _order_of_norm([x.placements[0] for x in tensors]) if on_pipe else None
    if order is None:
        return torch.cat([x.unsqueeze(dim) for x in tensors], dim)
    everywhere = [Replicate()] * mesh.ndim
    held: tuple[list[Tensor], list[Tensor]] = ([], [])
    for x in tensors:
        held[x.placements[0].is_replicate()].append(x.redistribute(placements=everywhere).to_local())
    zero = torch.zeros_like(first.to_local())
    mine = torch.stack([torch.linalg.vector_norm(torch.stack([zero, *each]), order) for each in held])
    places = all_gather(mine[None], mesh.pipe).wait()
    norms = torch.cat((places[:, 0], places[:, 1].max()[None]))
    return DTensor.from_local(norms, mesh, everywhere, run_check=False)


def _order_of_norm(placements: Sequence[Placement]) -> float | None:
    """The order of norms held as partial sums of powers, or as maxima; None: something else."""
    for each in placements:
        if each.is_partial():
            return float("inf") if each.is_partial("max") else getattr(each, "norm_type", None)
    return None


def _unscale(op_call: Any, args: Any, kwargs: dict[str, object]) -> None:
    """Unscale for `GradScaler`: all ranks learn whether gradients of any overflowed. DTensor's own uses the sharding of
    the first gradient, and leaves out the axes over which that one is replicated."""
    gradients, overflowed, scale = args
    mesh = gradients[0].device_mesh
    if not isinstance(mesh, BlockMesh):
        return found_inf_reduce_handler(op_call, args, kwargs)
    op_call([shard._local_tensor for shard in gradients], overflowed, scale)
    overflowed.copy_(all_reduce(overflowed, mesh.world).wait().clamp(max=1))
    return None


def _not_about_flattening(record: logging.LogRecord) -> bool:
    """Drops DTensor's advice, on every rank, to make one group of several axes: it would keep threads awake."""
    return "sequential %s" not in str(record.msg)
