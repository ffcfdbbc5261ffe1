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

import os
import random
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from cuboid.emulate.price import seconds
from cuboid.emulate.result import ALLOCATIONS, VIEWS, has_floats, maker, signature
from cuboid.plan.hardware import Hardware
from cuboid.plan.measure import tensors

UNLIMITED = 1e30  # bytes of memory
FIRST = -20  # niceness: highest priority
BLOCKED = 5e-5  # seconds: a longer wait was for a message
aten = torch.ops.aten


@dataclass(frozen=True)
class Device:
    """A rank's device: a machine's figures, and how this one differs from the others."""

    figures: Hardware
    host: float = 0.0  # seconds of the host per launch
    latency: float = 0.0  # seconds of a message besides the time on its links
    slower: float = 0.0  # 0.1: operations take 1.1 times as long
    jitter: float = 0.0  # standard deviation, relative to an operation's time
    sends: bool = False  # a core that sends its own messages: they take as much of its time as of this process


class Effect(NamedTuple):
    """The cost and the results of an operation on tensors of given shapes."""

    seconds: float
    make: Callable[[Any, Any], Any] | None  # from its arguments; None: it is done after all


class Emulated(TorchDispatchMode):
    """The device of this process, while its context is open. `busy` and `exposed` are seconds; `late` are seconds by
    which messages left later than on the device, because this process was still launching earlier work."""

    def __init__(self, device: Device, seed: int = 0) -> None:
        super().__init__()
        self.device, self._hw = device, device.figures
        self._dice = random.Random(seed)
        self._handlers: dict[Any, Callable[..., Any]] = {}
        self._known: dict[Hashable, Effect] = {}
        self._used, self._held = 0, list[weakref.ref[torch.UntypedStorage]]()  # an upper bound of what is alive
        self._wait, self._niceness = dist.Work.wait, os.getpriority(os.PRIO_PROCESS, 0)
        self._rehearsing = False
        self.record: list[tuple[float, float]] | None = None  # when each operation was launched, and its seconds
        self.reset()

    def reset(self) -> None:
        """Reset the counts. The device is idle."""
        self.free = self.host = time.perf_counter()
        self.busy = self.exposed = self.late = 0.0
        self._sending = self._senders()

    def __enter__(self) -> Self:
        emulated, wait = self, self._wait

        def wait_and_note(work: dist.Work, *args: Any, **options: Any) -> Any:
            return emulated._await(lambda: wait(work, *args, **options), work.is_completed())

        dist.Work.wait = wait_and_note  # type: ignore[method-assign, assignment]
        hurry(FIRST)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        dist.Work.wait = self._wait  # type: ignore[method-assign]
        hurry(self._niceness)

    def synchronize(self) -> None:
        """The host waits for the device."""
        self._sleep_until(self.free)
        self.host = max(self.host, self.free)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """A context without messages and sleeps, to find out costs and results of operations once, beforehand."""
        self._rehearsing = True
        try:
            yield
        finally:
            self._rehearsing = False
            self.reset()

    # time

    def _operate(self, seconds: float) -> None:
        device = self.device
        seconds *= 1 + device.slower
        if device.jitter:
            seconds *= max(1 + device.jitter * self._dice.gauss(), 0.0)
        self.host += device.host
        self.free = max(self.free, self.host) + seconds
        self.busy += seconds
        if self.record is not None:
            self.record.append((time.perf_counter(), seconds))

    def _sleep_until(self, moment: float) -> None:
        left = moment - time.perf_counter()
        if left > 0 and not self._rehearsing:
            time.sleep(left)

    def _launch(self, launch: Callable[[], Any]) -> Any:
        self.host += self.device.host
        self._charge()
        ready = max(self.free, self.host)
        self._sleep_until(ready)
        self.late += max(time.perf_counter() - ready, 0.0)
        began = time.thread_time()
        work = launch()
        if self.device.sends:
            self.free = ready + time.thread_time() - began
        return work

    def _senders(self) -> float:
        """Processor seconds of this process's other threads, which send and receive."""
        return time.process_time() - time.thread_time() if self.device.sends else 0.0

    def _charge(self) -> None:
        """Processor seconds since the last call, during which the device was at work."""
        now = self._senders()
        self.free += now - self._sending
        self._sending = now

    def _await(self, wait: Callable[[], Any], done: bool) -> Any:
        self._charge()
        before = time.perf_counter()
        result = wait()
        landed = time.perf_counter()
        if landed < self.free:
            self._charge()
        self._sending = self._senders()
        if not done and landed - before > BLOCKED:
            landed += self.device.latency
            self.exposed += max(landed - self.free, 0.0)
            self.free = max(self.free, landed)
        return result

    # operations

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; the default takes a third of an operation's time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in types:
            if issubclass(each, FakeTensor):
                return func(*args, **(kwargs or {}))  # DTensor's, of whole sizes, to find out a result's shape
            if hasattr(each, "__tensor_flatten__"):
                return NotImplemented  # a wrapper such as DTensor, which calls again with the tensors inside
        handle = self._handlers.get(func)
        if handle is None:
            handle = self._handlers[func] = self._handler(func)
        return handle(func, args, kwargs or {})

    def _handler(self, func: Any) -> Callable[..., Any]:
        if func._schema.name == "_c10d_functional::_wrap_tensor_autograd":
            return lambda func, args, kwargs: func(*args, **kwargs)  # it sends nothing
        if func.namespace in ("c10d", "_c10d_functional"):
            if func._schema.name.endswith("::wait_tensor"):
                return lambda func, args, kwargs: self._await(lambda: func(*args, **kwargs), done=False)
            return self._send
        if func is aten._local_scalar_dense.default:
            return self._read
        if func.is_view or func.namespace != "aten" or func in VIEWS:
            return lambda func, args, kwargs: func(*args, **kwargs)
        if func in ALLOCATIONS:
            return lambda func, args, kwargs: self._hold(func(*args, **kwargs))
        return self._compute

    def _send(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not self._rehearsing:
            return self._launch(lambda: func(*args, **kwargs))
        if func.namespace == "_c10d_functional":
            make, _ = maker(func, args, kwargs)
            assert make is not None
            return make(args, kwargs)
        work = FakeWork().boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.synchronize()
        return 1.0 if args[0].is_floating_point() else func(*args)

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        key = (func, signature(args), signature(kwargs) if kwargs else ())
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._outcome(func, args, kwargs)
        if found.seconds:
            self._operate(found.seconds)
        if found.make is None:
            return self._hold(func(*args, **kwargs))
        made = found.make(args, kwargs)
        return made if func._schema.is_mutable else self._hold(made)

    def _outcome(self, func: Any, args: Any, kwargs: Any) -> Effect:
        make, made = maker(func, args, kwargs)
        if make is None or not has_floats((args, kwargs, made)):
            return Effect(0.0, None)
        return Effect(seconds(self._hw, func, args, kwargs, made), make)

    # memory

    def _hold(self, made: Any) -> Any:
        """Count allocations. Released ones are looked for only if memory would not suffice otherwise."""
        if self._hw.memory >= UNLIMITED:
            return made
        for each in (made,) if isinstance(made, Tensor) else tensors(made):
            storage = each.untyped_storage()
            size = storage.nbytes() if storage.device.type != "meta" else 0
            if self._used + size > self._hw.memory:
                self._count_held(size)
            self._used += size
            self._held.append(weakref.ref(storage))
        return made

    def _count_held(self, more: int) -> None:
        alive = {storage._cdata: storage for ref in self._held if (storage := ref()) is not None}
        self._held = [weakref.ref(storage) for storage in alive.values()]
        self._used = sum(storage.nbytes() for storage in alive.values())
        if self._used + more > self._hw.memory:
            raise torch.OutOfMemoryError(
                f"the emulated device has {self._hw.memory:,.0f} bytes, of which {self._used:,} are taken; "
                f"{more:,} more do not fit"
            )


def hurry(niceness: int) -> None:
    """Raise the priority of all threads of this process, if permitted. It mostly sleeps, but must wake up in time,
    whatever else the machine does."""
    with suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), niceness)
