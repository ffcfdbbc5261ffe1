"""How collectives are sent, one file for each backend."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from cuboid.comm.transport.base import NewGroup, Transport
from cuboid.comm.transport.fake import FAKES
from cuboid.comm.transport.gloo import Gloo
from cuboid.comm.transport.nccl import Nccl
from cuboid.comm.transport.sharing import SHARED
from cuboid.device import backend_of

TRANSPORTS: dict[str, Callable[..., Transport]] = {"gloo": Gloo, SHARED: Gloo, "nccl": Nccl, **FAKES}


def transport_over(
    group: dist.ProcessGroup,
    hosts: int = 1,
    per_host: int = 0,
    new_group: NewGroup | None = None,
    small: bool = False,
    device: torch.device | None = None,
) -> Transport:
    """The transport of the group's backend for the device (default: the CPU); for a backend that is not listed, its own
    collectives.

    The group is spread over `hosts`, with `per_host` ranks on each (0: different numbers). `new_group` makes another
    group of the same ranks; given if lines of such ranks go between hosts. `small`: many small messages will be sent.
    INVARIANT: `new_group` and `small` are the same on all ranks, because making a group is collective.
    """
    return TRANSPORTS.get(backend_of(group, device or torch.device("cpu")), Transport)(
        group, hosts, per_host, new_group, small
    )
