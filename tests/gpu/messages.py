"""NCCL between pretended devices: torch.distributed's "nccl", whose messages gloo sends.

As NCCL's, collectives take tensors of the group's own device alone, may be launched together, and groups are split from
their world's. Sums of a reduce-scatter are made first to last, as the package's own over gloo are. Import it before
ranks start.
"""

import pretend  # noqa: I001  before torch

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

AT = torch.ops.pretend
#: Called when a collective has been launched, with what it reads and what it writes.
launched: list[Callable[["Message"], None]] = []
#: Called when the device's stream has come to wait for it.
awaited: list[Callable[["Message"], None]] = []


class Message(dist.Work):
    """What was launched at once: until it is awaited it holds on to what it reads and writes."""

    def __init__(self, kind: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        super().__init__()
        self.kind, self.reads, self.writes = kind, list(reads), list(writes)
        self.at = pretend.where()
        self._works: list[Any] = []
        self._ends: list[Callable[[], object]] = []

    def send(self, work: Any, end: Callable[[], object] = lambda: None) -> None:
        self._works.append(work)
        self._ends.append(end)

    def wait(self, timeout: Any = None) -> bool:
        for work, end in zip(self._works, self._ends, strict=True):
            work.wait()
            end()
        self._works, self._ends = [], []
        if self.reads or self.writes:
            for tell in awaited:
                tell(self)
            self.reads, self.writes = [], []
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream, self._timeout = is_high_priority_stream, timedelta(minutes=10)
        self.global_ranks_in_group: Sequence[int] = ()
        self.group_name = ""


class ProcessGroupNCCL(dist.ProcessGroup):
    """In place of the one that a CPU build of torch lacks."""

    Options = Options
    supports_splitting = True

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        super().__init__(rank, size)
        self.options, self._store, self._together, self._splits = options, store, None, 0
        gloo = dist.PrefixStore("gloo", store)
        self._gloo = dist.ProcessGroupGloo(gloo, rank, size, options._timeout)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.bound_device_id = self.device
        self._register_backend(self.device, dist.ProcessGroup.BackendType.NCCL, self._gloo)

    def _get_backend(self, device: torch.device) -> "ProcessGroupNCCL":
        if device.type != "cuda":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    def name(self) -> str:
        return "nccl"

    def get_group_store(self) -> Any:
        return self._store

    def split_group(self, ranks: Sequence[int], timeout: Any, opts: Options, group_name: str, **_: Any) -> Any:
        self._splits += 1
        if self.rank() not in ranks:
            return None
        opts._timeout = timeout or opts._timeout
        store = dist.PrefixStore(
            f"{self._splits} {group_name}/", self._store
        )  # names are reused when groups are closed
        made = ProcessGroupNCCL(store, list(ranks).index(self.rank()), len(ranks), opts)
        made._set_group_name(group_name)
        return made

    def nothing(self, *_: Any) -> None:
        pass

    shutdown = perform_nocolor_split = eager_connect_single_device = _set_default_timeout = (
        _set_sequence_number_for_group
    ) = nothing

    # Launching

    def _message(self, kind: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Message:
        for x in (*reads, *writes):
            if x.device != self.device or not x.is_contiguous():
                raise RuntimeError(f"{kind}: a tensor on {x.device} of shape {tuple(x.shape)}, strides {x.stride()}")
        if self._together is None:
            return Message(kind, reads, writes)
        self._together.reads += reads
        self._together.writes += writes
        return self._together

    def _launched(self, message: Message) -> Message:
        if message is not self._together:
            for tell in launched:
                tell(message)
        return message

    def _start_coalescing(self, device: torch.device) -> None:
        self._together = Message("together", [], [])

    def _end_coalescing(self, device: torch.device) -> Message:
        message, self._together = self._together, None
        return self._launched(message)

    def allreduce(self, xs: Sequence[Tensor], opts: Any) -> Message:
        message = self._message("all_reduce", (), xs)
        message.send(self._gloo.allreduce(seen(xs), opts))
        return self._launched(message)

    def broadcast(self, xs: Sequence[Tensor], opts: Any) -> Message:
        mine = opts.rootRank == self.rank()
        message = self._message("broadcast", xs if mine else (), () if mine else xs)
        message.send(self._gloo.broadcast(seen(xs), opts))
        return self._launched(message)

    def reduce(self, xs: Sequence[Tensor], opts: Any) -> Message:
        message = self._message("reduce", (), xs)
        message.send(self._gloo.reduce(seen(xs), opts))
        return self._launched(message)

    def allgather(self, outs: Sequence[Sequence[Tensor]], xs: Sequence[Tensor], opts: Any) -> Message:
        message = self._message("all_gather", xs, outs[0])
        message.send(self._gloo.allgather([seen(outs[0])], seen(xs), opts))
        return self._launched(message)

    def gather(self, outs: Sequence[Sequence[Tensor]], xs: Sequence[Tensor], opts: Any) -> Message:
        message = self._message("gather", xs, [x for each in outs for x in each])
        message.send(self._gloo.gather([seen(each) for each in outs], seen(xs), opts))
        return self._launched(message)

    def scatter(self, outs: Sequence[Tensor], xs: Sequence[Sequence[Tensor]], opts: Any) -> Message:
        message = self._message("scatter", [x for each in xs for x in each], outs)
        message.send(self._gloo.scatter(seen(outs), [seen(each) for each in xs], opts))
        return self._launched(message)

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Message:
        message = self._message("all_gather", [x], [out])
        (x, out), rows = seen([x, out]), None
        rows = list(out.view(self.size(), -1).unbind())
        message.send(self._gloo.allgather([rows], [x.view(-1)]))
        return self._launched(message)

    def all_gather_single_coalesced(self, outs: Sequence[Tensor], xs: Sequence[Tensor], opts: Any) -> Message:
        self._start_coalescing(self.device)
        for out, x in zip(outs, xs, strict=True):
            self.all_gather_single(out, x)
        return self._end_coalescing(self.device)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Message:
        message = self._message("reduce_scatter", [x], [out])
        out, x = seen([out, x])
        received = torch.empty_like(x)

        def add() -> None:
            first, *rest = received.view(self.size(), -1).unbind()
            total = first.clone()
            for each in rest:
                total += each
            out.view(-1).copy_(total)

        message.send(self._gloo.alltoall_base(received, x, [], []), add)
        return self._launched(message)

    def reduce_scatter_single_coalesced(self, outs: Sequence[Tensor], xs: Sequence[Tensor], opts: Any) -> Message:
        self._start_coalescing(self.device)
        for out, x in zip(outs, xs, strict=True):
            self.reduce_scatter_single(out, x)
        return self._end_coalescing(self.device)

    def all_to_all_single(self, out: Tensor, x: Tensor, outs: Any, ins: Any, opts: Any = None) -> Message:
        message = self._message("all_to_all", [x], [out])
        out, x = seen([out, x])
        message.send(self._gloo.alltoall_base(out, x, outs, ins))
        return self._launched(message)

    alltoall_base = all_to_all_single

    def alltoall(self, outs: Sequence[Tensor], xs: Sequence[Tensor], opts: Any = None) -> Message:
        message = self._message("all_to_all", xs, outs)
        outs, xs = seen(outs), seen(xs)
        sent, sizes = torch.cat([x.view(-1) for x in xs]), [out.numel() for out in outs]
        received = sent.new_empty(sum(sizes))

        def hand_out() -> None:
            for out, part in zip(outs, received.split(sizes), strict=True):
                out.view(-1).copy_(part)

        message.send(self._gloo.alltoall_base(received, sent, sizes, [x.numel() for x in xs]), hand_out)
        return self._launched(message)

    def barrier(self, opts: Any = None) -> Message:
        message = Message("barrier", (), ())
        message.send(self._gloo.barrier())
        return message


def seen(xs: Sequence[Tensor]) -> list[Tensor]:
    return [AT.on_host(x) for x in xs]


dist.ProcessGroupNCCL = c10d.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined]
c10d._NCCL_AVAILABLE = True
