"""The device a rank computes on: the one file that asks what kind there is. (Emulated ones: emulate/device.py.)"""

import os
import resource
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def gpu_count() -> int:
    """Asked without CUDA: a process that has used it forks ranks that cannot."""
    return torch.cuda.device_count()


def any_gpu() -> bool:
    return gpu_count() > 0


def gpu_names() -> list[str]:
    return [name for name, _ in _in_child(_properties)] if any_gpu() else []


def gpu_at_hand() -> tuple[str, int] | None:
    """Name and bytes of the first GPU, if there is one."""
    return _in_child(_properties)[0] if any_gpu() else None


def _properties() -> list[tuple[str, int]]:
    found = [torch.cuda.get_device_properties(i) for i in range(gpu_count())]
    return [(each.name, each.total_memory) for each in found]


def _in_child(ask: Callable[[], Any]) -> Any:
    """The answer of a process that may use CUDA, as this one, which may fork ranks, must not."""
    with get_context("fork").Pool(1) as child:
        return child.apply(ask)


def take(local: int, ranks: int) -> torch.device:
    """The device of rank number `local` of a host's `ranks`, from now on the current one: a GPU if each has one."""
    if gpu_count() < ranks:
        return torch.device("cpu")
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # sizes vary: no holes are lost
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def of_world() -> torch.device:
    """What the ranks of the process group compute on: the current GPU if NCCL connects them."""
    if not any_gpu() or dist.group.WORLD is None:
        return torch.device("cpu")
    return current("cuda") if backend_of(dist.group.WORLD, torch.device("cuda")) == "nccl" else torch.device("cpu")


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """By which a group sends what lies on the device; "" if by none."""
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


def group_options(device: torch.device) -> Any:
    """Of process groups: NCCL's kernels go before those that compute, which would else hold up what others wait for."""
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if is_gpu(device) else None


def synchronize() -> None:
    """Wait until what was launched is done. A CPU does it as it is called."""
    if any_gpu():
        torch.cuda.synchronize()


def peak_memory(device: torch.device) -> int:
    """The most this rank has held: allocated on its GPU, resident on a CPU."""
    if is_gpu(device):
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def usable_memory(device: torch.device, sharers: int) -> float:
    """Bytes a rank may use: most of its GPU's, or its part of the machine's, which all `sharers` have together."""
    if is_gpu(device):
        return 0.95 * torch.cuda.mem_get_info(device)[1]
    return 0.9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / sharers


def free_memory(device: torch.device | None = None) -> float:
    """Bytes that are free: of a GPU, or of this host for processes to come, swap included, within the limits of the
    control groups that this process is in."""
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
    """Of each control group with a limit, version 1 or 2: what it leaves, given that cached files make room."""
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


class Stamps:
    """Of a collective on a GPU, which only tells its stream to wait: when it was launched, awaited and there, as events
    that are read later. It stands for `weight` collectives; for 0 it is not timed."""

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(3 if weight else 0)]
        self._record(0)

    def awaited(self) -> None:
        self._record(1)

    def there(self) -> None:
        self._record(2)

    def _record(self, which: int) -> None:
        if self._events:
            self._events[which].record()

    def seconds(self) -> tuple[float, float]:
        """From launch until it was awaited, and until it was there."""
        launched, awaited, there = self._events
        there.synchronize()
        return launched.elapsed_time(awaited) / 1e3, launched.elapsed_time(there) / 1e3
