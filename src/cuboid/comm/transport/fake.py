"""The fake backend: collectives are called as on gloo or NCCL, but nothing is sent.

A message's memory is held until it is awaited, and released then, not when a thread of the backend lets go of it. So
what a step calls, computes and allocates is the same on any machine. Values are meaningless.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch.futures import Future
from torch.testing._internal.distributed.fake_pg import FakeStore, _create_fake_pg

from cuboid.comm.transport.base import Transport
from cuboid.comm.transport.gloo import Gloo
from cuboid.comm.transport.nccl import Nccl

LAUNCHES = (
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "reduce_scatter_single",
)


class _Held:
    """A collective that keeps its tensors until it is awaited."""

    def __init__(self, launch: Callable[..., dist.Work], *tensors: Any, **options: Any) -> None:
        self._work, self._tensors = launch(*tensors, **options), tensors

    def wait(self) -> None:
        self._tensors = ()
        self._work.wait()

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Future[None]:
        """A future that is done."""
        future = Future[None]()
        future.set_result(None)
        return future


class _FakeGloo(Gloo):
    def from_all(self, value: Any) -> list[Any]:
        """This rank's value, as if all had it."""
        return [value] * self.size


class _FakeNccl(Nccl):
    from_all = _FakeGloo.from_all

    def _launch_all(self, launch: Any, outs: Any, xs: Any, device: Any) -> Any:
        """Launch one after another: PyTorch's fake backend does not know the shapes of coalesced launches."""
        return SimpleNamespace(works=[launch(out, x) for out, x in zip(outs, xs, strict=True)])


WIRE = SimpleNamespace(**{name: partial(_Held, getattr(dist, name)) for name in LAUNCHES})
FAKES: dict[str, Callable[..., Transport]] = {
    "fake_gloo": partial(_FakeGloo, wire=WIRE),
    "fake_nccl": partial(_FakeNccl, wire=WIRE),
}


def join_silent_world(rank: int, size: int, backend: str = "gloo") -> None:
    """Make this process one rank of a world that calls collectives as on `backend`, gloo or nccl, but sends nothing.
    The process can join no other world."""
    name = f"fake_{backend}"
    assert name in FAKES, f"{backend} has no fake"
    dist.Backend.register_backend(name, _create_fake_pg, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group(name, rank=rank, world_size=size, store=FakeStore())
