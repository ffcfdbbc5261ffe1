"""Counts the collectives that torch launches, as our ledger counts ours."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode

from cuboid.comm.ledger import Ledger, Span

#: FSDP's ops (c10d) and DTensor's (_c10d_functional): the kind, the unsharded tensor and the group of a call.
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
#: DDP's broadcast sends the order of its buckets, once: a few numbers.
_MOVES_NOTHING = {"_c10d_functional::_wrap_tensor_autograd", "c10d::barrier", "c10d::broadcast_"}


class Tally(TorchDispatchMode):
    """Enter it around forward and backward; the ledger then has calls and bytes per axis and kind.

    `groups` are the axes' process groups. Bytes are the least that a collective of its kind can move, whatever the
    backend does: see `wire_bytes`. Enter it after other modes: an earlier one would run a DTensor's operation as one,
    and hide its collectives.
    """

    def __init__(self, ledger: Ledger, groups: Mapping[str, dist.ProcessGroup]) -> None:
        super().__init__()
        self.ledger = ledger
        self._under_way: dict[
            int, tuple[Any, Span]
        ] = {}  # by id of what is awaited, which is held so that no other gets its id
        self._waits = {kind: kind.wait for kind in (dist.Work, FakeWork)}
        self._axes = {str(group.group_name): (axis, group.size()) for axis, group in groups.items() if group.size() > 1}

    def __enter__(self) -> Self:
        for kind, wait in self._waits.items():

            def wait_and_note(work: dist.Work, *args: Any, _wait: Any = wait, **options: Any) -> Any:
                start = time.perf_counter()
                done = _wait(work, *args, **options)
                self._note(work, start)
                return done

            kind.wait = wait_and_note  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        for kind, wait in self._waits.items():
            kind.wait = wait  # type: ignore[method-assign]
        self._under_way.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper such as DTensor, which will call again with the tensors inside
        start = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        name = func.name().split(".")[0]
        if name in _OPS:
            kind, operands = _OPS[name]
            span = self._record(kind, *operands(args, out), all_of_it=name == "c10d::alltoall_base_" and bool(args[4]))
            awaited = _awaited(out)
            self._under_way[id(awaited)] = awaited, span
        elif name == "_c10d_functional::wait_tensor":
            self._note(args[0].untyped_storage(), start)
        else:
            assert "c10d" not in name or name in _MOVES_NOTHING, f"{name} would go uncounted"
        return out

    def _note(self, awaited: Any, start: float) -> None:
        _, span = self._under_way.pop(id(awaited), (None, None))
        if span is not None:
            self.ledger.waited(span, start, time.perf_counter())

    def _record(self, kind: str, whole: Tensor, group: Any, all_of_it: bool) -> Span:
        """`all_of_it`: the rank's own shard is not part of `whole`, so all of it is sent."""
        if not isinstance(group, str | dist.ProcessGroup):
            group = dist.ProcessGroup.unbox(group)
        axis, p = self._axes[str(group if isinstance(group, str) else group.group_name)]
        sent = whole.numel() * whole.element_size()
        if not all_of_it:
            sent = sent * (p - 1) * (2 if kind == "all_reduce" else 1) // p
        return self.ledger.launched(axis, kind, sent)


def _awaited(out: Any) -> Any:
    """What will be awaited, from what a collective returned: its work, or the memory of its result."""
    if isinstance(out, Tensor):
        return out.untyped_storage()
    return dist.Work.unbox(out[-1] if isinstance(out, tuple) else out)


def wire_bytes(counts: Mapping[str, Mapping[str, tuple[int, int]]]) -> dict[str, int]:
    """Bytes per axis that gloo sends for what a ledger or a formula counted: its reduce-scatter is an all-reduce inside
    and sends twice the least."""
    return {
        axis: sum(sent * (2 if kind == "reduce_scatter" else 1) for kind, (_, sent) in kinds.items())
        for axis, kinds in counts.items()
    }
