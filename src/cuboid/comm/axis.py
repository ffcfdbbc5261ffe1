"""One axis of a block of devices as one rank sees it. Collectives run over it."""

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from cuboid.comm.journal import Journal
from cuboid.comm.ledger import Ledger
from cuboid.comm.transport import transport_over
from cuboid.comm.transport.base import Transport


@dataclass(frozen=True)
class Axis:
    """A line of ranks. One of size 1 needs no group; no collective over it is launched."""

    name: str
    size: int
    index: int
    group: dist.ProcessGroup | None = None
    ledger: Ledger = field(default_factory=Ledger, compare=False)
    overlap: bool = True  # False: a collective is awaited where it is launched
    journal: Journal | None = field(default=None, compare=False)  # what was launched, for the watch
    hosts: int = 1  # over which the group is spread
    per_host: int = 0  # ranks of the group on each host; 0: they differ, or are not known
    transport: Transport = field(default=None, compare=False)  # type: ignore[assignment]  # the group's, unless given

    def __post_init__(self) -> None:
        if self.transport is None and self.group is not None:
            object.__setattr__(self, "transport", transport_over(self.group, self.hosts, self.per_host))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Axis":
        return self  # a copy of a model runs on the same ranks
