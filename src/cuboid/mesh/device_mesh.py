"""The block of devices as DTensor and `torch.distributed.checkpoint` know it."""

import logging
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate


class BlockMesh(DeviceMesh):
    """A device mesh over existing groups; without groups it cannot communicate.

    No two are equal: DTensor caches results by mesh, and would return those of one whose groups are closed. A copy of a
    DTensor stays on its mesh. Pickling raises: it would save one rank's shard as if it were the tensor.
    """

    def __init__(
        self, device_type: str, ranks: Tensor, names: tuple[str, ...], rank: int, groups: Sequence[dist.ProcessGroup]
    ) -> None:
        super().__init__(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)
        if groups:
            self._dim_group_names = [group.group_name for group in groups]
            self._pg_registry = {group.group_name: group for group in groups}
        logging.getLogger("torch.distributed.tensor._redistribute").addFilter(_not_about_flattening)
        DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = _number

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


def _number(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
    """Implements `item()` and `float()`. DTensor's own would return this rank's share of a sum or a norm."""
    (x,) = args
    return op_call(x.redistribute(placements=[Replicate()] * x.device_mesh.ndim).to_local())


def _not_about_flattening(record: logging.LogRecord) -> bool:
    """Drops DTensor's advice, on every rank, to make one group of several axes: it would keep threads awake."""
    return "sequential %s" not in str(record.msg)
