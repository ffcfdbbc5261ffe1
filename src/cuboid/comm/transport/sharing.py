"""gloo's groups on a shared device. A device of gloo is a thread that looks for messages a hundred times per second,
used or not, and torch makes one per group. Where many ranks share a core, the groups of a mesh share one device.
Elsewhere that costs: on eight hosts a step took 3% longer. A shared device connects all ranks of a group at once,
others connect ranks on demand; so large groups have their own device.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

SHARED = "shared_gloo"
PR_SET_TIMERSLACK, PR_GET_TIMERSLACK = 29, 30
SLACK = 40_000_000  # nanoseconds
MOST = 16  # most ranks of a group that shares: connections grow with the square


class Sharing:
    """The device that groups of this process share, if `share`; made for the first of them."""

    def __init__(self, share: bool) -> None:
        self._share, self._devices = share, list[Any]()

    def options(self, world: Any, size: int, timeout: timedelta | None) -> dict[str, Any]:
        """Options for `torch.distributed` to make groups of `size` ranks, given the world's backend."""
        gloo = dist.is_gloo_available() and isinstance(world, dist.ProcessGroupGloo)
        if not gloo or not self._share or size > MOST:
            return {"timeout": timeout}
        if SHARED.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(SHARED, _make, extended_api=True, devices="cpu")
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        with late_timers():
            self._devices = self._devices or _devices()
        options._devices, options._threads = self._devices, 2
        if timeout is not None:
            options._timeout = timeout
        return {"timeout": timeout, "backend": SHARED, "pg_options": options}

    def close(self) -> None:
        self._devices.clear()


def _devices() -> list[Any]:
    """Devices of the interfaces that gloo is told to use, or of its default."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not interfaces:
        return [dist.ProcessGroupGloo.create_default_device(lazy_init=False)]
    return [dist.ProcessGroupGloo.create_device(interface=name, lazy_init=False) for name in interfaces.split(",")]


@contextmanager
def late_timers() -> Iterator[None]:
    """Threads that start inside wake up to `SLACK` later than they ask for. gloo's ask every 10 ms, but a message wakes
    them at once."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it
    if prctl is None:
        yield
        return
    before = prctl(PR_GET_TIMERSLACK)
    prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(SLACK))
    try:
        yield
    finally:
        prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(before))


def _make(asked: Any, options: Any) -> Any:
    return dist.ProcessGroupGloo(asked.store, asked.group_rank, asked.group_size, options)
