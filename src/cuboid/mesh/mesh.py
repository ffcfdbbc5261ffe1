"""The axes of a cuboid as one rank sees them, with live process groups."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from cuboid.comm.axis import Axis
from cuboid.comm.journal import Watcher
from cuboid.comm.ledger import Ledger
from cuboid.comm.transport import transport_over
from cuboid.comm.transport.base import NewGroup
from cuboid.comm.transport.sharing import Sharing
from cuboid.device import current, of_world
from cuboid.mesh.cuboid import AXES, Cuboid
from cuboid.mesh.device_mesh import BlockMesh


class Lanes(NamedTuple):
    """A rank's lanes to and from its neighbours on a pipe; None without that neighbour. A lane joins two ranks and
    carries one kind of message in one direction, so that both know the order."""

    to_next: Axis | None
    from_previous: Axis | None
    to_previous: Axis | None
    from_next: Axis | None


class Mesh:
    """The axes of a cuboid as one rank sees them, with a process group for each axis longer than one.

    Every rank of the world must make the same meshes in the same order, because making a group is collective.

    Args:
        cuboid: The block of devices; as many ranks as the world has.
        rank: This rank's number.
        device: Where this rank computes; None: the device of the process group.
        alone: Make a mesh of this rank only, of cuboid (1,1,1), without communication.
        overlap: False, for comparison: await every collective where it is launched.
        groups: Existing process groups, one for each axis longer than one; they are used and never closed.
        watch: The watchdog, which ends a rank that waits too long.
        per_host: Ranks per host, in order; None: all are on one host.
        by_host: False: gloo's own broadcast and reduce, which ignore hosts.
        share_device: Whether gloo's groups share one thread, for many ranks per core.

    Raises:
        ValueError: If the world has another number of ranks.
    """

    #: The order of nested splits: y or z first, then x inside the block. DTensor reads it the same way.
    NESTING = ("pipe", "replicas", "y", "z", "x")

    def __init__(
        self,
        cuboid: Cuboid,
        rank: int = 0,
        device: torch.device | str | None = None,
        alone: bool = False,
        overlap: bool = True,
        groups: Mapping[str, dist.ProcessGroup] | None = None,
        watch: Watcher | None = None,
        per_host: int | None = None,
        by_host: bool = True,
        share_device: bool = False,
    ) -> None:
        world = dist.get_world_size() if dist.is_initialized() and not alone else 1
        if world != cuboid.ranks:
            raise ValueError(
                f"cuboid {cuboid} needs x·y·z·replicas·pipe = {cuboid.ranks} ranks but {world} were started; "
                f"start {cuboid.ranks} ranks or choose sizes whose product is {world}"
            )
        self.cuboid, self.rank, self.overlap = cuboid, rank, overlap
        self.device = of_world() if device is None else torch.device(device)
        self.ledger, self.watch, self._per_host, self._by_host = Ledger(), watch, per_host or world, by_host
        self.coordinates = cuboid.coordinates(rank)
        self._groups: list[dist.ProcessGroup] = []
        self._sharing = Sharing(share_device)
        self._device_meshes: dict[str, BlockMesh] = {}
        for name, size in cuboid.sizes.items():
            given = groups[name] if groups is not None and size > 1 else None
            at = self.coordinates[name]
            setattr(self, name, self._along(name) if given is None else self._axis(name, size, at, given))
        self.world = self._axis("world", world, rank, dist.group.WORLD if world > 1 else None)
        self._neighbours_on_x: dict[int, Axis] = {}
        self._lanes: dict[tuple[int, int], tuple[Axis | None, Axis | None]] = {}
        if self.sharded:
            self.device_mesh(self.device.type)  # now: the model may be made where tensors have no values

    pipe: Axis
    replicas: Axis
    x: Axis
    y: Axis
    z: Axis

    def __deepcopy__(self, memo: dict[int, Any]) -> "Mesh":
        return self  # a copy of a model runs on the same ranks

    @classmethod
    def over(cls, device_mesh: DeviceMesh) -> "Mesh":
        """A mesh over `device_mesh`, made by `init_device_mesh`, whose dims are named after axes; a missing axis has
        size 1.

        Raises:
            ValueError: If a dim has another name, or the mesh is not of all ranks in order.
        """
        names = device_mesh.mesh_dim_names or ()
        if len(set(names)) != device_mesh.ndim or not set(names) <= set(AXES):
            raise ValueError(
                f"the device mesh has dims named {names}; name each after one of {', '.join(AXES)}, such as "
                'init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("x", "y", "z"))'
            )
        sizes = dict(zip(names, device_mesh.shape, strict=True))
        cuboid = Cuboid(**sizes, order=(*(axis for axis in AXES if axis not in names), *names))
        if device_mesh.mesh.flatten().tolist() != list(range(cuboid.ranks)):
            raise ValueError(f"the device mesh has ranks {device_mesh.mesh.tolist()}; give one of all ranks in order")
        device = current(device_mesh.device_type)
        groups = {name: device_mesh.get_group(name) for name in names}
        return cls(cuboid, device_mesh.get_rank(), device, groups=groups)

    def _along(self, name: str, segments: int = 1) -> Axis:
        """An axis, or this rank's of its `segments`, with new groups. None for a size of 1: a group keeps threads
        awake, used or not."""
        size = self.cuboid.sizes[name] // segments
        if size == 1:
            return self._axis(name, 1, 0, None)
        others = tuple(axis for axis in self.NESTING if axis != name)
        lines = self.cuboid.array((*others, name)).reshape(-1, size)
        between_hosts = bool(np.ptp(lines // self._per_host, axis=1).any())
        new_group = partial(self._group, lines)
        return self._axis(name, size, self.coordinates[name] % size, new_group(), new_group if between_hosts else None)

    def _axis(
        self,
        name: str,
        size: int,
        index: int,
        group: dist.ProcessGroup | None,
        new_group: NewGroup | None = None,
        lane: str = "",
    ) -> Axis:
        """An axis with its group's transport and journal. A `lane` is named in the journal: several may have the same
        ranks. Norms send small messages over z."""
        if group is None:
            return Axis(name, size, index, None, self.ledger, self.overlap)
        on_host = Counter(rank // self._per_host for rank in dist.get_process_group_ranks(group))
        hosts, per_host = len(on_host), size // len(on_host) if len(set(on_host.values())) == 1 else 0
        layout = hosts, per_host if self._by_host else 0, new_group, name == "z"
        transport = transport_over(group, *layout, self.device)
        journal = self.watch.journal(f"{name}{lane}", group) if self.watch is not None else None
        return Axis(name, size, index, group, self.ledger, self.overlap, journal, hosts, per_host, transport)

    def _group(self, lines: NDArray[np.int64]) -> Any:
        """Makes a group for each line of ranks, [lines, ranks of a line]; returns this rank's, None if it is in no
        line. A backend that can split its world's group does so once, others make one line after another."""
        world: Any = dist.group.WORLD
        backend, timeout = world._get_backend(self.device), self._timeout()
        if getattr(backend, "supports_splitting", False) and world.bound_device_id is not None:
            group: Any = dist.split_group(split_ranks=[sorted(line) for line in lines.tolist()], timeout=timeout)
        else:
            options = self._sharing.options(backend, lines.shape[1], timeout)
            group, _ = dist.new_subgroups_by_enumeration(lines.tolist(), **options)
        if group is not None:
            self._groups.append(group)
        return group

    def _timeout(self) -> timedelta | None:
        """The world's timeout. By default other groups would wait for half an hour."""
        assert dist.group.WORLD is not None
        options = getattr(dist.group.WORLD._get_backend(self.device), "options", None)
        return getattr(options, "_timeout", None)

    def lanes(self, wrap: bool) -> Lanes:
        """This rank's lanes; with `wrap` the first rank is also next to the last. All ranks call it; made once."""
        return Lanes(*self._lanes_along(1, wrap), *self._lanes_along(-1, wrap))

    def _lanes_along(self, way: int, wrap: bool) -> tuple[Axis | None, Axis | None]:
        """(out, in): this rank's lanes of messages that go `way` along the pipe."""
        size, mine = self.pipe.size, self.pipe.index
        if size == 1:
            return None, None
        grid = self.cuboid.array(self.NESTING).reshape(size, -1)
        edges = [[i for i in range(size - 1) if i % 2 == odd] for odd in (0, 1)] + [[size - 1]] * wrap
        found: list[Axis | None] = [None, None]
        name = " forward" if way > 0 else " backward"
        for each, those in enumerate(edges):
            if not those:
                continue
            if (way, each) not in self._lanes:
                pairs = [(i, (i + 1) % size)[::way] for i in those]
                lines = np.concatenate([grid[list(pair)].T for pair in pairs])
                group = self._group(lines)
                ends: list[Axis | None] = [None, None]
                for sender, receiver in pairs:
                    if mine in (sender, receiver):
                        index, lane = dist.get_group_rank(group, self.rank), name + " around" * (each == 2)
                        ends[mine == receiver] = replace(self._axis("pipe", 2, index, group, None, lane), overlap=True)
                self._lanes[way, each] = ends[0], ends[1]
            found = [old or new for old, new in zip(found, self._lanes[way, each], strict=True)]
        return found[0], found[1]

    def count_lanes_in(self, ledger: Ledger) -> None:
        """Have the lanes of a copied mesh count in its own `ledger`."""
        self._lanes = {
            key: tuple(lane and replace(lane, ledger=ledger) for lane in ends)  # type: ignore[misc]
            for key, ends in self._lanes.items()
        }

    @property
    def sharded(self) -> bool:
        """Whether several ranks share a model: its parameters are DTensors."""
        return self.cuboid.ranks > 1

    @property
    def dims(self) -> tuple[str, ...]:
        """The dims of `device_mesh`: axes longer than one, or x. It has the ranks of one place of the pipe."""
        return tuple(axis for axis in self.NESTING if self.cuboid.sizes[axis] > 1) or ("x",)

    def device_mesh(self, device_type: str) -> BlockMesh:
        """The mesh for DTensors on devices of `device_type` and `torch.distributed.checkpoint`. It has our groups; the
        one for host copies of GPU tensors has none and cannot communicate."""
        if device_type not in self._device_meshes:
            axes = [getattr(self, name) for name in self.dims]
            sizes = [1 if axis is self.pipe else axis.size for axis in axes]
            ranks = torch.from_numpy(self.cuboid.array(self.NESTING)[self.pipe.index]).reshape(sizes)
            sends = device_type == self.device.type and self.sharded
            everyone = self.pipe, self.world, sends
            self._device_meshes[device_type] = BlockMesh(device_type, ranks, axes, self.rank, *everyone)
        return self._device_meshes[device_type]

    def neighbours_on_x(self, size: int) -> Axis:
        """The `size` neighbours on x that share this rank's samples when x splits both batch and sequence."""
        if size == self.x.size:
            return self.x
        if size not in self._neighbours_on_x:
            self._neighbours_on_x[size] = self._along("x", self.x.size // size)
        return self._neighbours_on_x[size]

    def close(self) -> None:
        """Destroy the groups. Each keeps threads awake, so a process that makes many meshes must close them."""
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups.clear()
        self._sharing.close()
