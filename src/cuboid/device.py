"""The device of a rank. Only this file asks what kind it is. (Emulated devices: emulate/device.py.)"""

import os
import resource
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from multiprocessing import get_context, parent_process
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def gpu_count() -> int:
    """The number of GPUs, found without CUDA: a process that has used CUDA forks ranks that cannot. Where the driver's
    library does not tell, as of MIG devices, a child is asked, which may use CUDA."""
    forks = parent_process() is None and torch.cuda._is_compiled() and not torch.cuda.is_initialized()
    if forks and has_gpu_driver() and torch.cuda._device_count_nvml() < 0:
        return int(_in_child(_count))
    return torch.cuda.device_count()


def hide_gpus() -> None:
    """Have this process, which has not used CUDA, see no GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def any_gpu() -> bool:
    return gpu_count() > 0


def gpus_for(ranks: int) -> bool:
    """Whether this host's `ranks` get a GPU each; otherwise they compute on its CPU."""
    return gpu_count() >= ranks


def gpu_names() -> list[str]:
    return [name for name, _ in _in_child(_properties)] if any_gpu() else []


def gpu_software() -> dict[str, str]:
    """Versions of the software for GPUs, if there are any."""
    if not any_gpu():
        return {}
    return {"CUDA": torch.version.cuda or "none", "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}


def has_gpu_driver() -> bool:
    """Whether the host has a GPU driver, whatever PyTorch was built for."""
    return Path("/proc/driver/nvidia/version").exists()


def computes_bf16(device: torch.device) -> bool:
    """Whether matmuls in bf16 are faster than in fp32: on GPUs since Ampere."""
    return is_gpu(device) and torch.cuda.get_device_properties(device).major >= 8


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if is_gpu(device) else "CPU"


def gpu_at_hand(ranks: int) -> tuple[str, int] | None:
    """Name and bytes of the first GPU, if this host's `ranks` will compute on GPUs."""
    return _in_child(_properties)[0] if gpus_for(ranks) else None


def _count() -> int:
    return torch.cuda.device_count()


def _properties() -> list[tuple[str, int]]:
    found = [torch.cuda.get_device_properties(i) for i in range(gpu_count())]
    return [(each.name, each.total_memory) for each in found]


def _in_child(ask: Callable[[], Any]) -> Any:
    """Returns `ask()` from a child process, which may use CUDA; this process, which may fork ranks, must not."""
    with get_context("fork").Pool(1) as child:
        return child.apply(ask)


def take(local: int) -> torch.device:
    """The GPU of rank number `local` of its host, from now on the current one."""
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # sizes vary: no holes are lost
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def of_world() -> torch.device:
    """The device of the process group's ranks: the current GPU if NCCL connects them."""
    if not any_gpu() or dist.group.WORLD is None:
        return torch.device("cpu")
    return current("cuda") if backend_of(dist.group.WORLD, torch.device("cuda")) == "nccl" else torch.device("cpu")


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend by which a group sends tensors of the device; "" if it has none."""
    name = str(dist.get_backend(group))
    if name != "undefined" and ":" not in name:
        return name
    try:
        return str(group._get_backend(device).name())
    except RuntimeError:
        return ""


def current(kind: str) -> torch.device:
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def backend_for(device: torch.device) -> str:
    return "nccl" if is_gpu(device) else "gloo"


def group_options(device: torch.device, timeout: timedelta) -> Any:
    """Options of process groups: NCCL's kernels have priority over compute, so that other ranks do not wait longer.
    PyTorch warns if the options do not have the group's timeout."""
    if not is_gpu(device):
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


def prepare_deterministic() -> None:
    """Set the environment of ranks that will `be_deterministic`, before they start: cuBLAS gets its own workspaces, and
    NCCL does not let switches add, whose order varies. NCCL matches full names of algorithms."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "^NVLS,NVLSTree,CollNetDirect,CollNetChain")


def be_deterministic(device: torch.device) -> None:
    """Make this process compute the same bits from the same values. A CPU always does; a GPU gets slower: rows of an
    embedding's gradient are sorted before they are added, attention's backward adds in one order, and matmuls do not
    add in low precision. Operations without a deterministic version raise."""
    if not is_gpu(device):
        return
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def synchronize() -> None:
    """Wait until all launched work is done. On a CPU it always is, and a rank there leaves its host's GPUs alone."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def upload(x: Tensor, out: Tensor) -> Tensor:
    """Copy a host tensor to one of a device without waiting: a GPU reads it from page-locked memory, which PyTorch does
    not reuse before that."""
    return out.copy_(page_locked(x).copy_(x) if is_gpu(out.device) else x, non_blocking=True)


def page_locked(like: Tensor) -> Tensor:
    """Page-locked host memory, which a GPU reads and writes directly."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


class HostCopies:
    """Copies of a device's tensors in host memory. A GPU copies in a separate stream while it computes, into
    page-locked memory that is reused each time. On a CPU there are copies only in the `background`, when computation
    continues."""

    def __init__(self, device: torch.device, background: bool = True) -> None:
        self._stream, self._background = torch.cuda.Stream(device) if is_gpu(device) else None, background
        self._buffers: dict[str, Tensor] = {}
        self._event: Any = None

    def launch(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the current values. Copies may be read after `land`, the tensors changed after `hold`."""
        if self._stream is None:
            return {name: x.to("cpu", copy=self._background) for name, x in tensors.items()}
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for name, x in tensors.items():
                if name not in self._buffers:
                    self._buffers[name] = page_locked(x)
                self._buffers[name].copy_(x, non_blocking=True)
            self._event = self._stream.record_event()
        return {name: self._buffers[name] for name in tensors}

    def hold(self) -> None:
        """Make later work of the device wait for the copies."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def land(self) -> None:
        """Make the host wait for the copies."""
        if self._event is not None:
            self._event.synchronize()


def peak_memory(device: torch.device) -> int:
    """Peak memory of this rank: allocated on its GPU, resident on a CPU."""
    if is_gpu(device):
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def usable_memory(device: torch.device, sharers: int) -> float:
    """Bytes that a rank may use: most of its GPU's, or its share of the machine's among `sharers`."""
    if is_gpu(device):
        return 0.95 * torch.cuda.mem_get_info(device)[1]
    return 0.9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / sharers


def free_memory(device: torch.device | None = None) -> float:
    """Free bytes of a GPU, or of this host for new processes, with swap, within the limits of this process's control
    groups."""
    if device is not None and is_gpu(device):
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    sizes = {name: 1024 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    host = sizes["MemAvailable"] + sizes["SwapFree"]
    return float(min([host, *_left_by_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))]))


def _left_by_groups(mine: Path, root: Path) -> Iterator[int]:
    """Free bytes under each control group with a limit, version 1 or 2; cached files count as free."""
    try:
        groups = [line.split(":", 2) for line in mine.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in groups:
        if controllers not in ("", "memory"):
            continue
        top = root / controllers
        files = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        inner = top / path.lstrip("/")
        for group in [inner, *inner.parents]:
            try:
                limit, used = ((group / name).read_text().strip() for name in files)
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # the root has none, or the group is not visible from here
                limit, used, stat = "max", "0", {}
            prefix = "total_" if controllers else ""  # with those of groups inside
            cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
            if limit != "max":
                yield max(int(limit) - int(used) + cached, 0)
            if group == top:
                break


class DeviceClock:
    """Marks times of a rank's work, in seconds of `time.perf_counter`: on a CPU at once, on a GPU when its stream
    reaches the mark, which may be much later. Create it when the device is idle."""

    def __init__(self, device: torch.device) -> None:
        self._zero = self._event() if is_gpu(device) else None
        if self._zero is not None:
            self._zero.synchronize()
        self._began = perf_counter()

    def mark(self) -> Any:
        """Mark this time, to be read later."""
        return perf_counter() if self._zero is None else self._event()

    def read(self, moment: Any) -> float:
        if self._zero is None:
            return float(moment)
        moment.synchronize()
        return self._began + float(self._zero.elapsed_time(moment)) / 1e3

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Stamps:
    """Times of a collective on a GPU, whose wait does not block the host: when it was launched, awaited and complete,
    as events that are read later. It stands for `weight` collectives; for 0 it is not timed."""

    def __init__(self, weight: int = 1) -> None:
        self.weight = weight
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(3 if weight else 0)]
        self._record(0)

    @property
    def launched(self) -> Any:
        """The event of the launch, for a `DeviceClock`."""
        return self._events[0]

    def awaited(self) -> None:
        self._record(1)

    def there(self) -> None:
        self._record(2)

    def _record(self, which: int) -> None:
        if self._events:
            self._events[which].record()

    def seconds(self) -> tuple[float, float]:
        """Seconds from the launch until it was awaited, and until it was complete."""
        launched, awaited, there = self._events
        there.synchronize()
        return launched.elapsed_time(awaited) / 1e3, launched.elapsed_time(there) / 1e3
