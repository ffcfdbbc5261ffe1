"""Count the collectives that torch launches by itself, as our ledger counts ours."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from cuboid.comm.ledger import Ledger

#: FSDP's ops (c10d) and DTensor's (_c10d_functional): the kind, the whole tensor and the group of a call.
_OPS: dict[str, tuple[str, Callable[[Any, Any], tuple[Tensor, Any]]]] = {
    "c10d::_allgather_base_": ("all_gather", lambda args, _: (args[0], args[2])),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", lambda args, _: (args[1], args[2])),
    "c10d::alltoall_base_": ("all_to_all", lambda args, _: (args[1], args[2])),
    "c10d::allreduce_": ("all_reduce", lambda args, _: (args[0][0], args[1])),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", lambda args, out: (out, args[2])),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", lambda args, _: (args[0], args[3])),
    "_c10d_functional::all_to_all_single": ("all_to_all", lambda args, _: (args[0], args[3])),
    "_c10d_functional::all_reduce": ("all_reduce", lambda args, _: (args[0], args[2])),
}
_MOVES_NOTHING = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd", "c10d::barrier"}


class Tally(TorchDispatchMode):
    """Enter it around forward and backward; the ledger then has calls and bytes per axis and kind.

    `groups` are the axes' process groups. Bytes are the least that a collective of its kind can move, whatever the
    backend does: see `wire_bytes`. Enter it after other modes: one that comes first runs a DTensor's operation as a
    whole, and hides what is in it.
    """

    def __init__(self, ledger: Ledger, groups: Mapping[str, dist.ProcessGroup]) -> None:
        super().__init__()
        self.ledger = ledger
        self._axes = {str(group.group_name): (axis, group.size()) for axis, group in groups.items() if group.size() > 1}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it then runs, and what it runs comes by here
        out = func(*args, **(kwargs or {}))
        name = func.name().split(".")[0]
        if name in _OPS:
            kind, operands = _OPS[name]
            self._record(kind, *operands(args, out), all_of_it=name == "c10d::alltoall_base_" and bool(args[4]))
        else:
            assert "c10d" not in name or name in _MOVES_NOTHING, f"{name} would go uncounted"
        return out

    def _record(self, kind: str, whole: Tensor, group: Any, all_of_it: bool) -> None:
        """`all_of_it` is sent where a rank's own part is left out to begin with."""
        if not isinstance(group, str | dist.ProcessGroup):
            group = dist.ProcessGroup.unbox(group)
        axis, p = self._axes[str(group if isinstance(group, str) else group.group_name)]
        sent = whole.numel() * whole.element_size()
        if not all_of_it:
            sent = sent * (p - 1) * (2 if kind == "all_reduce" else 1) // p
        self.ledger.launched(axis, kind, sent)


def wire_bytes(counts: Mapping[str, Mapping[str, tuple[int, int]]]) -> dict[str, int]:
    """Bytes per axis that gloo really sends for what a ledger or a formula counted: its reduce-scatter is an
    all-reduce inside, and moves twice what it need."""
    return {
        axis: sum(sent * (2 if kind == "reduce_scatter" else 1) for kind, (_, sent) in kinds.items())
        for axis, kinds in counts.items()
    }
