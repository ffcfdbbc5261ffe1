"""The rule by which tensors are cut: which slice of a whole a rank holds, and the whole from the slices.

Who cuts elsewhere takes its bounds from here: tokens (`mesh/place.py`), a bucket's shards as they are sent
(`step/weights.py`), activations in products and the head (`layers/`), a file's rows (`model/hf/load.py`).

A dim is cut by axes one after the other, each cutting the block the one before it left. A cut into p parts gives every
part ceil(n/p) rows except the last ones, which may be short or empty: DTensor's rule, so that a checkpoint written here
reads there. Nothing is padded at rest, and no padding ever enters a global shape.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from cuboid.mesh.cuboid import AXES, Cuboid
from cuboid.mesh.mesh import Mesh

Range = tuple[int, int]


def ceil_div(n: int, parts: int) -> int:
    return -(-n // parts)


def round_up(n: int, multiple: int) -> int:
    return ceil_div(n, multiple) * multiple


def cut(n: int, parts: int, index: int) -> Range:
    """Where part `index` of `parts` begins and ends.

    >>> [cut(10, 4, i) for i in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    size = ceil_div(n, parts)
    return min(index * size, n), min((index + 1) * size, n)


@dataclass(frozen=True)
class Spec:
    """How a tensor is sharded over a cuboid.

    Args:
        shape: The global shape.
        cuts: For each dim the axes that split it, first split first; over the others the tensor is replicated.
        sums: The axes over which a rank's gradient is still a partial sum once it was reduced along the cuts.
        pipe: The places of a pipeline that hold the tensor.
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[str, ...], ...]
    sums: tuple[str, ...] = ()
    pipe: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        axes = [axis for dim in self.cuts for axis in dim]
        assert len(self.cuts) == len(self.shape), f"{self.cuts} does not name the cuts of each dim of {self.shape}"
        assert len(set(axes)) == len(axes), f"an axis cuts a tensor once: {self.cuts}"

    @cached_property
    def cut_by(self) -> tuple[str, ...]:
        return tuple(axis for dim in self.cuts for axis in dim)

    def holders(self, cuboid: Cuboid) -> NDArray[np.int64]:
        """The ranks that hold each piece, [pieces, copies]."""
        replicated = [axis for axis in AXES if axis not in ("pipe", *self.cut_by)]
        ranks = cuboid.array(("pipe", *self.cut_by, *replicated))[list(self.pipe)]
        pieces = prod(cuboid.sizes[axis] for axis in self.cut_by)
        return ranks.reshape(len(self.pipe), pieces, -1).swapaxes(0, 1).reshape(pieces, -1)

    def copies(self, cuboid: Cuboid) -> int:
        """How many ranks hold each element."""
        return prod(cuboid.sizes[axis] for axis in AXES[1:] if axis not in self.cut_by) * len(self.pipe)

    def ranges(self, cuboid: Cuboid, coordinates: Mapping[str, int], gathered: Iterable[str] = ()) -> tuple[Range, ...]:
        """The index range a rank holds in each dim, were the axes in `gathered` not cutting."""
        if coordinates["pipe"] not in self.pipe:
            return ((0, 0),) * len(self.shape)
        found = []
        for n, axes in zip(self.shape, self.cuts, strict=True):
            start, stop = 0, n
            for axis in axes:
                if axis not in gathered:
                    low, high = cut(stop - start, cuboid.sizes[axis], coordinates[axis])
                    start, stop = start + low, start + high
            found.append((start, stop))
        return tuple(found)

    def local_shape(
        self, cuboid: Cuboid, coordinates: Mapping[str, int], gathered: Iterable[str] = ()
    ) -> tuple[int, ...]:
        """The shape of the shard at these coordinates, gathered over the axes in `gathered`."""
        return tuple(stop - start for start, stop in self.ranges(cuboid, coordinates, gathered))

    def take(self, whole: Tensor, cuboid: Cuboid, coordinates: Mapping[str, int]) -> Tensor:
        """The slice of `whole` that a rank holds."""
        assert tuple(whole.shape) == self.shape, f"{tuple(whole.shape)} is not {self.shape}"
        return whole[tuple(slice(*r) for r in self.ranges(cuboid, coordinates))]

    def join(self, pieces: Sequence[Tensor], cuboid: Cuboid) -> Tensor:
        """The whole, from every rank's piece in rank order. Raises if copies of one element differ."""
        whole = pieces[0].new_full(self.shape, float("nan"))
        for rank, piece in enumerate(pieces):
            place = whole[tuple(slice(*r) for r in self.ranges(cuboid, cuboid.coordinates(rank)))]
            if not (place.isnan() | (place == piece)).all():
                raise ValueError(f"rank {rank} disagrees with another rank about a tensor they both hold")
            place.copy_(piece)
        return whole

    def placements(self, mesh: Mesh) -> tuple[Placement, ...]:
        """The same, as DTensor says it, over `mesh.device_mesh`."""
        found: list[Placement] = []
        for axis in mesh.dims:
            dims = [dim for dim, axes in enumerate(self.cuts) if axis in axes]
            found.append(Shard(dims[0]) if dims else Replicate())
        return tuple(found)

    def dtensor(self, shard: Tensor, mesh: Mesh) -> DTensor:
        """A rank's shard as a DTensor of the global shape, in the same memory."""
        return DTensor.from_local(
            shard,
            mesh.device_mesh(shard.device.type),
            self.placements(mesh),
            shape=torch.Size(self.shape),
            stride=torch.empty(self.shape, device="meta").stride(),
        )

    def parameter(self, shard: Tensor, mesh: Mesh) -> nn.Parameter:
        """A DTensor or, where one device holds all of it, a plain one."""
        return nn.Parameter(self.dtensor(shard, mesh) if mesh.sharded else shard)


# The shards of parameters, in the memory they lie in: what a step works on, without DTensor's dispatch


def shard_of(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter or a gradient; of a plain one all. Autograd does not see it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def whole_of(tensor: Tensor) -> Tensor:
    """The unsharded values of a parameter or a gradient, on every rank: all ranks call it."""
    found = tensor.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found


def sharded_as(parameter: nn.Parameter, shard: Tensor) -> Tensor:
    """A rank's shard, of a gradient say, as the parameter is."""
    return DTensor(shard, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else shard


def data_of(parameter: nn.Parameter) -> int:
    """What setting `data` of a DTensor changes, and nothing else: its values stay where they are."""
    return parameter.untyped_storage()._cdata if isinstance(parameter, DTensor) else 0


def lay(parameter: nn.Parameter, shard: Tensor) -> None:
    """Have the parameter's values where `shard` is."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = shard
    else:
        parameter.data = shard
