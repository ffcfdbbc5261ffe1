"""Real numbers on pretended CUDA devices: tensors that say `cuda:3`, live in the host's memory, and refuse to meet the
host's. Import it before torch.

What a device would do, the CPU does as it is called, and what would be compiled runs as it is written. Where the host
would wait for the device is noted in `waits`.
"""

import emulated  # noqa: I001  before torch

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

torch.compile = lambda function, **_: function  # type: ignore[assignment]

AT = torch.ops.pretend
#: Operators whose result the host reads, or needs to know the size of the result.
READ = {"_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero", "unique_dim", "_unique2"}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
OURS = os.sep + "cuboid" + os.sep


@dataclass(frozen=True)
class Wait:
    """Of the host's, for its device."""

    what: str
    where: str  # the line of ours
    alone: bool  # in a thread that holds up no other


waits: list[Wait] = []
#: Called with each operator on a device, what it reads and what it writes, before it runs.
watchers: list[Callable[[str, list[Tensor], list[Tensor]], None]] = []
#: Streams beside the device's own, in which work is launched.
beside: list["Stream"] = []
#: Called when the device's own stream has come to wait for them.
held: list[Callable[[], None]] = []

launched = caught_up = 0  # events in the device's stream, and up to which the host has waited for it


def note(what: str) -> None:
    global caught_up
    caught_up = launched
    thread = threading.current_thread()  # autograd's are dummies
    ours = thread is threading.main_thread() or isinstance(thread, threading._DummyThread)
    waits.append(Wait(what, where(), not ours))


def where() -> str:
    """The innermost line of the package's own."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if OURS in frame.f_code.co_filename and not frame.f_code.co_filename.endswith("device.py"):
            return f"{frame.f_code.co_filename.rpartition(OURS)[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@dataclass(frozen=True)
class Plan:
    """Of an operator: which arguments it writes, and which of them it returns."""

    name: str
    writes: tuple[int | str, ...]  # by place, or by name where they come so
    returned: tuple[int | str | None, ...]
    views: bool  # it returns others and neither reads nor writes
    numbers: frozenset[int]  # arguments that may be numbers, which dispatch has made of tensors


@cache
def plan_of(op: Any) -> Plan:
    schema, written, places = op._schema, list[int | str](), dict[frozenset[str], int | str]()
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(argument.name if argument.kwarg_only else i)
            places[frozenset(argument.alias_info.before_set)] = written[-1]  # lists, which are not returned, have none
    returned = [
        places.get(frozenset(each.alias_info.before_set)) if each.alias_info is not None else None
        for each in schema.returns
    ]
    name = schema.name.partition("::")[2]
    views = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
    numbers = frozenset(i for i, argument in enumerate(schema.arguments) if str(argument.type) == "Tensor")
    return Plan(name, tuple(written), tuple(returned), views or name in UNREAD, numbers)


UNREAD = {f"{new}empty{how}" for new in ("", "new_") for how in ("", "_like", "_strided")} | {"is_same_size"}


def wide_mm(a: Tensor, b: Tensor, dtype: torch.dtype, out: Any = None) -> Tensor:
    return torch.mm(a.to(dtype), b.to(dtype), out=out)


def wide_addmm(x: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Any = None, **factors: Any) -> Tensor:
    return torch.addmm(x.to(dtype), a.to(dtype), b.to(dtype), out=out, **factors)


#: For what a CPU lacks.
INSTEAD: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.ops.aten.mm.dtype, torch.ops.aten.mm.dtype_out), wide_mm),
    **dict.fromkeys((torch.ops.aten.addmm.dtype, torch.ops.aten.addmm.dtype_out), wide_addmm),
}


class Inside:
    """Tensors of an operator's arguments as the host sees them."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []  # of a device, and as the host's
        self.hosts: list[Tensor] = []

    def of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.device.type != "cuda":
                self.hosts.append(value)
                return value
            self.pairs.append((value, AT.on_host(value)))
            return self.pairs[-1][1]
        if isinstance(value, list | tuple):
            return type(value)([self.of(each) for each in value])
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator of a device's tensors, as the CPU does it."""
    with torch._C._AutoDispatchBelowAutograd():
        plan, inside = plan_of(op), Inside()
        host_args = [inside.of(as_tensor(each) if i in plan.numbers else each) for i, each in enumerate(args)]
        host_kwargs = {name: inside.of(each) for name, each in kwargs.items()}
        index = one_device(plan, inside, args)
        asked = kwargs.get("device")
        if index is None or (asked is not None and asked.index is not None):
            assert asked is not None, plan.name
            index = torch.cuda.current_device() if asked.index is None else asked.index
        if plan.name in READ and inside.pairs:
            note(plan.name)
        if watchers and not plan.views:
            written = [x for each in plan.writes for x in tensors(given(each, args, kwargs))]
            read = [x for x, _ in inside.pairs if not any(x is each for each in written)]
            for watcher in watchers:
                watcher(plan.name, read, written)
        out = INSTEAD.get(op, op)(*host_args, **host_kwargs)
        for x, host in inside.pairs:
            if x.shape != host.shape:  # of `out=`, or resized
                AT.adopt(x, host)
        if not isinstance(out, tuple):
            return result(out, plan.returned[0] if plan.returned else None, args, kwargs, index)
        return tuple(result(each, place, args, kwargs, index) for each, place in zip(out, plan.returned, strict=True))


def as_tensor(value: Any) -> Any:
    wide = torch.float64 if isinstance(value, float) else None
    return torch.tensor(value, dtype=wide) if isinstance(value, bool | int | float) else value


def result(out: Any, place: int | str | None, args: Any, kwargs: Any, index: int) -> Any:
    if place is not None:
        return given(place, args, kwargs)
    if isinstance(out, Tensor):
        return AT.on_device(out, index)
    return [result(each, None, (), {}, index) for each in out] if isinstance(out, list) else out


def given(place: int | str, args: Any, kwargs: Any) -> Any:
    return kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None


def tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [each for each in value or () if each is not None]


def one_device(plan: Plan, inside: Inside, args: Any) -> int | None:
    """Of all its tensors; the host's may be a number, or an index, which must be brought there first."""
    found = {x.device.index for x, _ in inside.pairs}
    strange = [x for x in inside.hosts if x.dim() or plan.name.startswith("_fused")]
    if plan.name in INDEXED and found:
        if strange or any(x.dtype == torch.bool for x, _ in inside.pairs[1:]):
            note(f"{plan.name} by a {'host' if strange else 'bool'} tensor")
        strange = []
    if len(found) > 1 or (found and strange):
        names = sorted({f"cuda:{i}" for i in found} | {"cpu" for _ in strange})
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {' and '.join(names)}! "
            f"({plan.name} at {where()})"
        )
    return found.pop() if found else None


def copy_(x: Tensor, other: Tensor, non_blocking: bool = False) -> Tensor:
    """Between a device and the host it waits, unless that memory is page-locked and it is told not to."""
    ends = [each.device.type for each in (x, other)]
    if ends[0] != ends[1]:
        host = x if ends[0] == "cpu" else other
        if not non_blocking or (host.numel() and not host.is_pinned()):
            note(f"copy from {'device to host' if ends[0] == 'cpu' else 'host to device'}")
    with torch._C._AutoDispatchBelowAutograd():
        for watcher in watchers:
            watcher("copy_", [other] if ends[1] == "cuda" else [], [x] if ends[0] == "cuda" else [])
        seen = [AT.on_host(each) if each.device.type == "cuda" else each for each in (x, other)]
        seen[0].copy_(seen[1])
    return x


fallback, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
fallback.fallback(run, "CUDA")
aten.impl("copy_", copy_, "CUDA")


def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, is_causal: bool = False, **options: Any
) -> Tensor:
    """By the kernel that the CPU would choose."""
    if q.device.type == "cpu":
        return emulated.host_attention(q, k, v, attn_mask, is_causal=is_causal, **options)
    if isinstance(attn_mask, torch.nn.attention.bias.CausalBias):
        attn_mask = q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, float("-inf"))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=attn_mask)[0]


F.scaled_dot_product_attention = attention


class Event(emulated.Event):
    """The device's clock is the host's. Nobody waits for what an earlier wait was for."""

    number, moment = 0, 0.0

    def record(self, stream: Any = None) -> None:
        global launched
        launched += 1
        self.number, self.moment = launched, perf_counter()

    def synchronize(self) -> None:
        if self.number > caught_up:
            note("event.synchronize")

    def elapsed_time(self, other: emulated.Event) -> float:
        assert isinstance(other, Event)
        return 1e3 * (other.moment - self.moment)


class Stream(emulated.Stream):
    def __enter__(self) -> "Stream":
        beside.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        beside.remove(self)

    def record_event(self, event: Any = None) -> Event:
        made = event or Event()
        made.record()
        return made

    def wait_event(self, event: Event) -> None:
        for tell in held:
            tell()

    def synchronize(self) -> None:
        note("stream.synchronize")


vars(torch.cuda.nccl).update(version=lambda: (2, 0, 0))
vars(torch.cuda).update(
    Event=Event,
    Stream=Stream,
    current_stream=lambda device=None: Stream(),
    synchronize=lambda device=None: note("synchronize"),
)
