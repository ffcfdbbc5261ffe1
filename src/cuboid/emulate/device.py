"""An emulated device: local work is timed instead of done, and every message is real.

Inside its context an operation on floating-point tensors gives tensors of the right shapes and unknown values, and the
device is busy for as long as its FLOPs and bytes take by the planner's formulas. It runs behind its host, as a GPU
does, and starts an operation at the later of two moments of this process's clock:

    free   the device is done with what it was given before
    host   the host has launched it, at `Device.host` seconds a launch

A message leaves when the device is done with what was launched before it: the process sleeps until then. What waits for
a message starts when that has arrived; the time from `free` until then is exposed. Views, allocations and integers are
real and take no time. The mode works below any library, so all are slowed down alike.
"""

import random
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from cuboid.plan.hardware import Hardware
from cuboid.plan.time import product_seconds

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp32"}
UNLIMITED = 1e30  # bytes of memory
BLOCKED = 5e-5  # seconds: whoever waits for longer has waited for a message
aten = torch.ops.aten


@dataclass(frozen=True)
class Device:
    """What a rank's device can do: a machine's figures, and how this one differs from the others."""

    figures: Hardware
    host: float = 0.0  # seconds the host takes to launch an operation
    latency: float = 0.0  # seconds that a message takes besides what its links take
    slower: float = 0.0  # of its speed that it lacks: 0.1 takes 1.1 times as long
    jitter: float = 0.0  # of an operation's time, as a standard deviation


class Outcome(NamedTuple):
    """What an operation on tensors of given shapes costs and makes."""

    seconds: float
    make: Callable[[Any, Any], Any] | None  # from its arguments; None: it is done after all


class Emulated(TorchDispatchMode):
    """The device of this process, while its context is open. `busy` and `exposed` are seconds, `late` those by which
    messages left later than on the device: this process was not done launching what came before them."""

    def __init__(self, device: Device, seed: int = 0) -> None:
        super().__init__()
        self.device, self._hw = device, device.figures
        self._dice = random.Random(seed)
        self._known: dict[Hashable, Outcome] = {}
        self._held: dict[int, int] = {}  # bytes of each storage that is alive
        self._used = 0
        self._wait = dist.Work.wait
        self.reset()

    def reset(self) -> None:
        """Begin to count anew. The device has nothing to do."""
        self.free = self.host = time.perf_counter()
        self.busy = self.exposed = self.late = 0.0

    def __enter__(self) -> Self:
        emulated, wait = self, self._wait

        def wait_and_note(work: dist.Work, *args: Any, **options: Any) -> Any:
            return emulated._await(lambda: wait(work, *args, **options), work.is_completed())

        dist.Work.wait = wait_and_note  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        dist.Work.wait = self._wait  # type: ignore[method-assign]

    def synchronize(self) -> None:
        """The host waits for the device."""
        self._sleep_until(self.free)
        self.host = max(self.host, self.free)

    # time

    def _operate(self, seconds: float) -> None:
        slow = (1 + self.device.slower) * max(1 + self.device.jitter * self._dice.gauss(), 0.0)
        self.host += self.device.host
        self.free = max(self.free, self.host) + seconds * slow
        self.busy += seconds * slow

    def _sleep_until(self, moment: float) -> None:
        left = moment - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def _launch(self, launch: Callable[[], Any]) -> Any:
        self.host += self.device.host
        ready = max(self.free, self.host)
        self._sleep_until(ready)
        self.late += max(time.perf_counter() - ready, 0.0)
        return launch()

    def _await(self, wait: Callable[[], Any], done: bool) -> Any:
        before = time.perf_counter()
        result = wait()
        landed = time.perf_counter()
        if not done and landed - before > BLOCKED:
            landed += self.device.latency
            self.exposed += max(landed - self.free, 0.0)
            self.free = max(self.free, landed)
        return result

    # operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # a wrapper such as DTensor: it comes again with the tensors inside
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2]
            if name == "wait_tensor":
                return self._await(lambda: func(*args, **kwargs), done=False)
            return self._launch(lambda: func(*args, **kwargs))
        if func is aten._local_scalar_dense.default:
            self.synchronize()
            return 1.0 if args[0].is_floating_point() else func(*args)
        if func.is_view or func.namespace != "aten":
            return func(*args, **kwargs)
        key = (func, _signature(args), _signature(kwargs))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._outcome(func, args, kwargs)
        if found.seconds:
            self._operate(found.seconds)
        made = func(*args, **kwargs) if found.make is None else found.make(args, kwargs)
        if self._hw.memory < UNLIMITED:
            self._hold(made)
        return made

    def _outcome(self, func: Any, args: Any, kwargs: Any) -> Outcome:
        if func in ALLOCATIONS:
            return Outcome(0.0, None)
        make, made = _maker(func, args, kwargs)
        if make is None or not _has_floats((args, kwargs, made)):
            return Outcome(0.0, None)
        return Outcome(self._seconds(func, args, kwargs, made), make)

    def _seconds(self, func: Any, args: Any, kwargs: Any, made: Any) -> float:
        shapes = PRODUCTS.get(func.overloadpacket)
        if shapes is not None:
            times, m, n, k, dtype = shapes(*args)
            rows, columns, depth = (np.array([float(side)]) for side in (m, n, k))
            one = product_seconds(self._hw, PRECISIONS[dtype], rows, columns, depth, dtype.itemsize)
            return times * float(one[0])
        attention = ATTENTION.get(func.overloadpacket)
        if attention is not None:
            flops, backward, dtype = attention(*args, **kwargs)
            return float(flops / self._hw.rate[PRECISIONS[dtype]] / self._hw.attention[backward] + self._hw.launch)
        moved = sum(x.numel() * x.element_size() for x in tree_leaves((args, kwargs, made)) if isinstance(x, Tensor))
        return moved / self._hw.stream + self._hw.launch

    # memory

    def _hold(self, made: Any) -> None:
        for each in tree_leaves(made):
            storage = each.untyped_storage() if isinstance(each, Tensor) else None
            if storage is None or not storage.nbytes() or storage._cdata in self._held:
                continue
            size = storage.nbytes()
            if self._used + size > self._hw.memory:
                raise torch.OutOfMemoryError(
                    f"the emulated device has {self._hw.memory:,.0f} bytes, of which {self._used:,} are taken; "
                    f"{size:,} more do not fit"
                )
            self._used += size
            self._held[storage._cdata] = size
            weakref.finalize(storage, self._release, storage._cdata)

    def _release(self, which: int) -> None:
        self._used -= self._held.pop(which)


def _signature(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_signature, value))
    if isinstance(value, dict):
        return tuple((name, _signature(each)) for name, each in value.items())
    return type(value), value if isinstance(value, Hashable) else repr(value)


def _has_floats(values: Any) -> bool:
    return any(isinstance(each, Tensor) and each.is_floating_point() for each in tree_leaves(values))


def _maker(func: Any, args: Any, kwargs: Any) -> tuple[Callable[[Any, Any], Any] | None, Any]:
    """How to make what an operation returns without doing it, and one example of what it makes anew."""
    if func._schema.is_mutable:
        return _written(func._schema), None

    def on_meta(x: Any) -> Any:
        if isinstance(x, Tensor):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return torch.device("meta") if isinstance(x, torch.device) else x

    try:
        template = func(*tree_map(on_meta, args), **tree_map(on_meta, kwargs))
    except RuntimeError:  # NotImplementedError among them: shapes alone do not tell
        return None, None

    def fresh(x: Any) -> Any:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) if isinstance(x, Tensor) else x

    if isinstance(template, Tensor):
        shape, stride, dtype = template.shape, template.stride(), template.dtype
        return lambda args, kwargs: torch.empty_strided(shape, stride, dtype=dtype), template
    return lambda args, kwargs: tree_map(fresh, template), template


def _written(schema: Any) -> Callable[[Any, Any], Any]:
    """Of an operation that writes to its arguments: those that it returns."""
    names = [argument.name for argument in schema.arguments]
    aliases = {frozenset(a.alias_info.before_set): a.name for a in schema.arguments if a.alias_info is not None}
    wanted = [aliases[frozenset(r.alias_info.before_set)] for r in schema.returns if r.alias_info is not None]

    def take(args: Any, kwargs: Any) -> Any:
        found = [kwargs[name] if name in kwargs else args[names.index(name)] for name in wanted]
        return None if not found else found[0] if len(found) == 1 else tuple(found)

    return take


#: They touch no memory.
ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.detach.default,
    aten._unsafe_view.default,
    aten.lift_fresh.default,
    aten.is_same_size.default,
}


def _mm(a: Tensor, b: Tensor, *_: Any) -> tuple[int, int, int, int, torch.dtype]:
    return 1, a.shape[0], b.shape[1], a.shape[1], a.dtype


def _bmm(a: Tensor, b: Tensor, *_: Any) -> tuple[int, int, int, int, torch.dtype]:
    return a.shape[0], a.shape[1], b.shape[2], a.shape[2], a.dtype


#: How often a product is made, its sides m, n, k, and its precision.
PRODUCTS: dict[Any, Callable[..., tuple[int, int, int, int, torch.dtype]]] = {
    aten.mm: _mm,
    aten.bmm: _bmm,
    aten.addmm: lambda total, a, b, *_: _mm(a, b),
    aten.addmm_: lambda total, a, b, *_: _mm(a, b),
    aten.baddbmm: lambda total, a, b, *_: _bmm(a, b),
    aten.baddbmm_: lambda total, a, b, *_: _bmm(a, b),
}


def _attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, **_: Any
) -> tuple[float, bool, torch.dtype]:
    """FLOPs, masked scores left out as kernels do, whether it is backward, and the precision."""
    b, h, s, e = q.shape
    return 4.0 * b * h * s * k.shape[2] * e * (0.5 if causal else 1.0), False, q.dtype


def _attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dropout: float, causal: bool, **_: Any
) -> tuple[float, bool, torch.dtype]:
    flops, _backward, dtype = _attention(q, k, v, causal=causal)
    return 2.5 * flops, True, dtype


ATTENTION: dict[Any, Callable[..., tuple[float, bool, torch.dtype]]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
