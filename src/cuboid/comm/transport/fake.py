"""The fake backend: collectives are called as on gloo or NCCL, and none sends anything.

As there, a message's memory is held until it is awaited, and let go then, not when a thread of the backend comes to it:
what a step calls, computes and allocates is the same on any machine. Values are of no use.
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
        """Of what takes no time."""
        future = Future[None]()
        future.set_result(None)
        return future


class _FakeNccl(Nccl):
    def _launch_all(self, launch: Any, outs: Any, xs: Any, device: Any) -> Any:
        """One after another: of what is launched together PyTorch does not know the shapes."""
        return SimpleNamespace(works=[launch(out, x) for out, x in zip(outs, xs, strict=True)])


WIRE = SimpleNamespace(**{name: partial(_Held, getattr(dist, name)) for name in LAUNCHES})
FAKES: dict[str, Callable[..., Transport]] = {
    "fake_gloo": partial(Gloo, wire=WIRE),
    "fake_nccl": partial(_FakeNccl, wire=WIRE),
}


def join_silent_world(rank: int, size: int, backend: str = "gloo") -> None:
    """Be one rank of a world in which collectives are called as on `backend`, gloo or nccl, and nothing is sent. For a
    process that does nothing else."""
    name = f"fake_{backend}"
    assert name in FAKES, f"{backend} has no fake"
    dist.Backend.register_backend(name, _create_fake_pg, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group(name, rank=rank, world_size=size, store=FakeStore())
