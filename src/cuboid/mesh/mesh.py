"""The axes of a cuboid as one rank sees them, with live process groups."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from cuboid.mesh.cuboid import AXES, Cuboid
from cuboid.mesh.device import current
from cuboid.mesh.gloo import Sharing, is_gloo
from cuboid.mesh.journal import Journal, Watcher
from cuboid.mesh.ledger import Ledger


@dataclass(frozen=True)
class Axis:
    """One axis as one rank sees it. A size of 1 needs no group, and no collective over it is ever launched."""

    name: str
    size: int
    index: int
    group: dist.ProcessGroup | None = None
    ledger: Ledger = field(default_factory=Ledger, compare=False)
    overlap: bool = True  # False: a collective is awaited where it is launched
    journal: Journal | None = field(default=None, compare=False)  # what was launched, for the watch
    hosts: int = 1  # that this rank's group is spread over
    back: dist.ProcessGroup | None = None  # a second group, for what goes from higher ranks to lower
    aside: dist.ProcessGroup | None = None  # a third, for small messages, which would wait behind large ones
    mates: int = 1  # ranks of the group on each host, for broadcasts and sums that go by hosts
    backend: str = ""  # the group's


class Mesh:
    """The axes of a cuboid as `rank` sees them, with a process group for each axis longer than one.

    Every rank of the world must make the same meshes in the same order: making a group is itself collective. A rank
    that wants a mesh of its own asks for one `alone`. Without `overlap`, for comparison, nothing is hidden. `groups`
    that exist already, one for each axis longer than one, are used and never closed. A `watch` sees to it that no rank
    waits for ever. Hosts have `per_host` ranks each, in order; None: all are on one. Without `by_host` broadcasts and
    sums to one rank go as gloo sends them, whatever the hosts.
    """

    #: The order in which nested cuts are applied: y or z first, then x inside the block. DTensor reads it the same way.
    NESTING = ("data", "y", "z", "x")

    def __init__(
        self,
        cuboid: Cuboid,
        rank: int = 0,
        device: torch.device | str = "cpu",
        alone: bool = False,
        overlap: bool = True,
        groups: Mapping[str, dist.ProcessGroup] | None = None,
        watch: Watcher | None = None,
        per_host: int | None = None,
        by_host: bool = True,
    ) -> None:
        world = dist.get_world_size() if dist.is_initialized() and not alone else 1
        if world != cuboid.ranks:
            raise ValueError(
                f"cuboid {cuboid} needs x·y·z·data = {cuboid.ranks} ranks but {world} were started; "
                f"start {cuboid.ranks} ranks or choose sizes whose product is {world}"
            )
        self.cuboid, self.rank, self.device, self.overlap = cuboid, rank, torch.device(device), overlap
        self.ledger, self.watch, self._per_host, self._by_host = Ledger(), watch, per_host or world, by_host
        self.coordinates = cuboid.coordinates(rank)
        self._groups: list[dist.ProcessGroup] = []
        self._sharing = Sharing(hosts=self._per_host < world)
        self._device_meshes: dict[str, DeviceMesh] = {}
        for name, size in cuboid.sizes.items():
            group = back = aside = None
            if size > 1 and groups is not None:
                group = groups[name]
            elif size > 1:
                group, back, aside = self._ways(name, size)
            setattr(self, name, self._axis(name, size, self.coordinates[name], group, back, aside))
        self.world = self._axis("world", world, rank, dist.group.WORLD if world > 1 else None)
        self._parts_of_x: dict[int, Axis] = {}

    data: Axis
    x: Axis
    y: Axis
    z: Axis

    @classmethod
    def over(cls, device_mesh: DeviceMesh) -> "Mesh":
        """Over a mesh that `init_device_mesh` has made, its dims named x, y, z, data; a name left out is of size 1."""
        names = device_mesh.mesh_dim_names or ()
        if len(set(names)) != device_mesh.ndim or not set(names) <= set(AXES):
            raise ValueError(
                f"the device mesh has dims named {names}; name each after one of {', '.join(AXES)}, such as "
                'init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("x", "y", "z"))'
            )
        sizes = dict(zip(names, device_mesh.shape, strict=True))
        cuboid = Cuboid(**sizes, order=(*(axis for axis in AXES if axis not in names), *names))
        if device_mesh.mesh.flatten().tolist() != list(range(cuboid.ranks)):
            raise ValueError(f"the device mesh is made of {device_mesh.mesh.tolist()}; give one of all ranks in order")
        device = current(device_mesh.device_type)
        groups = {name: device_mesh.get_group(name) for name in names}
        return cls(cuboid, device_mesh.get_rank(), device, groups=groups)

    def _axis(
        self,
        name: str,
        size: int,
        index: int,
        group: dist.ProcessGroup | None,
        back: dist.ProcessGroup | None = None,
        aside: dist.ProcessGroup | None = None,
    ) -> Axis:
        journal = self.watch.journal(name, group) if self.watch is not None and group is not None else None
        ranks = dist.get_process_group_ranks(group) if group is not None else [0]
        hosts = Counter(rank // self._per_host for rank in ranks)
        by_host = self._by_host and len(set(hosts.values())) == 1 and back is not None
        mates = size // len(hosts) if by_host else 1
        backend = "" if group is None else "gloo" if is_gloo(group) else dist.get_backend(group)
        books = self.ledger, self.overlap, journal
        return Axis(name, size, index, group, *books, len(hosts), back, aside, mates, backend)

    def _ways(self, axis: str, size: int, parts: int = 1) -> tuple[dist.ProcessGroup | None, ...]:
        """This rank's of the groups along an axis, or along each of its `parts`; where gloo goes between hosts also one
        for the way back, and on z, over which norms send a few numbers a row, one for small messages. None are made
        for axes of size 1: a group keeps threads awake, used or not."""
        others = tuple(name for name in self.NESTING if name != axis)
        lines = self.cuboid.array((*others, axis)).reshape(-1, size // parts)
        group, far = self._group(lines), bool(np.ptp(lines // self._per_host, axis=1).any())
        if not far or not is_gloo(group):
            return group, None, None
        return group, self._group(lines), self._group(lines) if axis == "z" else None

    def _group(self, lines: NDArray[np.int64]) -> dist.ProcessGroup:
        world = dist.group.WORLD._get_backend(self.device)  # type: ignore[union-attr]
        options = self._sharing.options(world, lines.shape[1], self._timeout())
        group, _ = dist.new_subgroups_by_enumeration(lines.tolist(), **options)
        assert group is not None
        self._groups.append(group)
        return group

    def _timeout(self) -> timedelta | None:
        """The world's; left to itself, a group of some of its ranks would wait for half an hour."""
        assert dist.group.WORLD is not None
        options = getattr(dist.group.WORLD._get_backend(self.device), "options", None)
        return getattr(options, "_timeout", None)

    @property
    def dims(self) -> tuple[str, ...]:
        """Of a `device_mesh`: the axes longer than one, or one of them."""
        return tuple(axis for axis in self.NESTING if self.cuboid.sizes[axis] > 1) or ("x",)

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """For DTensors on such devices and `torch.distributed.checkpoint`. It has our groups; for copies of a GPU's
        tensors in its host's memory it has none, and nothing can be sent."""
        if device_type not in self._device_meshes:
            sizes, groups = [self.cuboid.sizes[axis] for axis in self.dims], [getattr(self, d).group for d in self.dims]
            ranks, names = torch.from_numpy(self.cuboid.array(self.NESTING)).reshape(sizes), self.dims
            if device_type == self.device.type and None not in groups:
                made = DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)
            else:
                made = DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=self.rank)
            self._device_meshes[device_type] = made
        return self._device_meshes[device_type]

    def part_of_x(self, size: int) -> Axis:
        """The `size` neighbours on x that share this rank's samples when x cuts the sequence as well as the batch."""
        if size == self.x.size:
            return self.x
        if size not in self._parts_of_x:
            group, back, _ = self._ways("x", self.x.size, self.x.size // size) if size > 1 else (None, None, None)
            self._parts_of_x[size] = self._axis("x", size, self.x.index % size, group, back)
        return self._parts_of_x[size]

    def close(self) -> None:
        """Give the groups back: each keeps threads awake, so a process that makes many meshes must."""
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups.clear()
        self._sharing.close()
