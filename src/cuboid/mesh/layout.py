"""The rule of sharding: which slice of a tensor a rank holds, and the unsharded tensor from the slices.

All code that splits takes its bounds from here: tokens (`mesh/place.py`), a bucket's shards as they are sent
(`step/weights.py`), activations of linears and the head (`layers/`), a file's rows (`model/hf/load.py`).

Axes split a dim one after another, each the block that the one before it left. Over p ranks every shard has ceil(n/p)
rows except the last ones, which may be short or empty. This is DTensor's rule, so that checkpoints are compatible.
Nothing is padded at rest, and no padding enters a global shape.
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


def ceil_div(n: int, divisor: int) -> int:
    return -(-n // divisor)


def round_up(n: int, multiple: int) -> int:
    return ceil_div(n, multiple) * multiple


def shard_range(n: int, count: int, index: int) -> Range:
    """Start and end of shard `index` of `count` shards of n rows.

    >>> [shard_range(10, 4, i) for i in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    size = ceil_div(n, count)
    return min(index * size, n), min((index + 1) * size, n)


@dataclass(frozen=True)
class Spec:
    """How a tensor is sharded over a cuboid.

    Args:
        shape: The global shape.
        splits: For each dim the axes that split it, first split first; over the others the tensor is replicated.
        sums: The axes over which a rank's gradient is still a partial sum after it was reduced over the split axes.
        pipe: The places of a pipeline that hold the tensor.
    """

    shape: tuple[int, ...]
    splits: tuple[tuple[str, ...], ...]
    sums: tuple[str, ...] = ()
    pipe: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        axes = [axis for dim in self.splits for axis in dim]
        assert len(self.splits) == len(self.shape), f"{self.splits} does not name the axes of each dim of {self.shape}"
        assert len(set(axes)) == len(axes), f"an axis splits a tensor once: {self.splits}"

    @cached_property
    def split_axes(self) -> tuple[str, ...]:
        return tuple(axis for dim in self.splits for axis in dim)

    def holders(self, cuboid: Cuboid) -> NDArray[np.int64]:
        """The ranks of `cuboid` that hold each shard, [shards, copies]."""
        replicated = [axis for axis in AXES if axis not in ("pipe", *self.split_axes)]
        ranks = cuboid.array(("pipe", *self.split_axes, *replicated))[list(self.pipe)]
        shards = prod(cuboid.sizes[axis] for axis in self.split_axes)
        return ranks.reshape(len(self.pipe), shards, -1).swapaxes(0, 1).reshape(shards, -1)

    def copies(self, cuboid: Cuboid) -> int:
        """The number of ranks of `cuboid` that hold each element."""
        return prod(cuboid.sizes[axis] for axis in AXES[1:] if axis not in self.split_axes) * len(self.pipe)

    def ranges(self, cuboid: Cuboid, coordinates: Mapping[str, int], gathered: Iterable[str] = ()) -> tuple[Range, ...]:
        """The index range that the rank at `coordinates` of `cuboid` holds in each dim once it is gathered over the
        axes in `gathered`."""
        if coordinates["pipe"] not in self.pipe:
            return ((0, 0),) * len(self.shape)
        found = []
        for n, axes in zip(self.shape, self.splits, strict=True):
            start, stop = 0, n
            for axis in axes:
                if axis not in gathered:
                    low, high = shard_range(stop - start, cuboid.sizes[axis], coordinates[axis])
                    start, stop = start + low, start + high
            found.append((start, stop))
        return tuple(found)

    def local_shape(
        self, cuboid: Cuboid, coordinates: Mapping[str, int], gathered: Iterable[str] = ()
    ) -> tuple[int, ...]:
        """The shape of the shard at `coordinates` of `cuboid`, gathered over the axes in `gathered`."""
        return tuple(stop - start for start, stop in self.ranges(cuboid, coordinates, gathered))

    def take(self, whole: Tensor, cuboid: Cuboid, coordinates: Mapping[str, int]) -> Tensor:
        """The slice of the unsharded tensor `whole` that the rank at `coordinates` of `cuboid` holds."""
        assert tuple(whole.shape) == self.shape, f"{tuple(whole.shape)} is not {self.shape}"
        return whole[tuple(slice(*r) for r in self.ranges(cuboid, coordinates))]

    def join(self, shards: Sequence[Tensor], cuboid: Cuboid) -> Tensor:
        """The unsharded tensor, from the `shards` of all ranks of `cuboid` in rank order. Raises ValueError if copies
        of an element differ."""
        whole = shards[0].new_full(self.shape, float("nan"))
        for rank, shard in enumerate(shards):
            place = whole[tuple(slice(*r) for r in self.ranges(cuboid, cuboid.coordinates(rank)))]
            if not (place.isnan() | (place == shard)).all():
                raise ValueError(f"rank {rank} disagrees with another rank about a tensor they both hold")
            place.copy_(shard)
        return whole

    def placements(self, mesh: Mesh) -> tuple[Placement, ...]:
        """The same as DTensor's placements over the `device_mesh` of `mesh`. Along its pipe, of size 1, a tensor of
        one place is sharded, one that several places hold replicated."""
        found: list[Placement] = []
        for axis in mesh.dims:
            dims = [dim for dim, axes in enumerate(self.splits) if axis in axes]
            dims += [0] * (axis == "pipe" and len(self.pipe) == 1)
            found.append(Shard(dims[0]) if dims else Replicate())
        return tuple(found)

    def dtensor(self, shard: Tensor, mesh: Mesh) -> DTensor:
        """A rank's `shard` as a DTensor of the global shape over `mesh`, in the same memory."""
        return DTensor.from_local(
            shard,
            mesh.device_mesh(shard.device.type),
            self.placements(mesh),
            shape=torch.Size(self.shape),
            stride=torch.empty(self.shape, device="meta").stride(),
        )

    def parameter(self, shard: Tensor, mesh: Mesh) -> nn.Parameter:
        """A rank's `shard` as a parameter: a DTensor over `mesh` or, on one device, a plain tensor."""
        return nn.Parameter(self.dtensor(shard, mesh) if mesh.sharded else shard)


# The shards of parameters in their own memory: what a step works on, without DTensor's dispatch


def shard_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a parameter or a gradient; all of a plain tensor. Autograd does not see it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def whole_of(tensor: Tensor) -> Tensor:
    """Returns the unsharded parameter or gradient, on every rank. All ranks call it."""
    found = tensor.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found


def sharded_as(parameter: nn.Parameter, shard: Tensor) -> Tensor:
    """Wraps a rank's shard, for example of a gradient, as the parameter is."""
    return DTensor(shard, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else shard


def convert(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """`parameter.to(dtype)` in place, without DTensor's dispatch: that takes milliseconds for each new shape."""
    if parameter.dtype == dtype:
        return
    new = shard_of(parameter).to(dtype)
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        new = DTensor.from_local(new, mesh, placements, shape=parameter.shape, stride=parameter.stride())
    torch.utils.swap_tensors(parameter, nn.Parameter(new, parameter.requires_grad))


def data_of(parameter: nn.Parameter) -> int:
    """An id of a DTensor's storage, which only setting its `data` changes."""
    return parameter.untyped_storage()._cdata if isinstance(parameter, DTensor) else 0


def set_shard(parameter: nn.Parameter, shard: Tensor) -> None:
    """Move the parameter to the memory of `shard`."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = shard
    else:
        parameter.data = shard
