"""The device a rank computes on: the one file that asks what kind there is. (Emulated ones: emulate/device.py.)"""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import torch


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def any_gpu() -> bool:
    return torch.cuda.is_available()


def gpu_names() -> list[str]:
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def gpu_at_hand() -> tuple[str, int] | None:
    """Name and bytes of the current GPU, if there is one."""
    if not any_gpu():
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return found.name, found.total_memory


def take(local: int) -> torch.device:
    """The device of the host's rank number `local`, from now on the current one: a GPU if there are any."""
    if not any_gpu():
        return torch.device("cpu")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def current(kind: str) -> torch.device:
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def backend_for(device: torch.device) -> str:
    return "nccl" if is_gpu(device) else "gloo"


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
    that are read later."""

    def __init__(self) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        self._events[0].record()

    def awaited(self) -> None:
        self._events[1].record()

    def there(self) -> None:
        self._events[2].record()

    def seconds(self) -> tuple[float, float]:
        """From launch until it was awaited, and until it was there."""
        launched, awaited, there = self._events
        there.synchronize()
        return launched.elapsed_time(awaited) / 1e3, launched.elapsed_time(there) / 1e3
