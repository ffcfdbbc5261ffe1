"""The shape of a block of devices, and the order of its axes over ranks."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations, product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

AXES = ("pipe", "replicas", "x", "y", "z")
#: Names of axes in files of earlier versions.
EARLIER = {"data": "replicas"}


@dataclass(frozen=True)
class Cuboid:
    """The shape of a block of devices: x · y · z · replicas · pipe ranks.

    Examples:
        >>> Cuboid(2, 3, 2).coordinates(5)
        {'pipe': 0, 'replicas': 0, 'x': 0, 'y': 2, 'z': 1}
        >>> str(Cuboid(2, 2, 2, replicas=2, pipe=4))
        '2,2,2 replicas=2 pipe=4'

    Args:
        x: Splits the batch and, at rest, every weight; like FSDP.
        y: Splits attention heads, the MLP's inner width and the vocabulary; like tensor + sequence parallelism.
        z: Splits the hidden width and heads.
        replicas: Data-parallel replicas of the block.
        order: Axes from the slowest over ranks to the fastest; `pipe` is first unless it is named.
        pipe: Stages of a pipeline, each on its own blocks.

    Raises:
        ValueError: If a size is below 1, or `order` does not name every axis once.
    """

    x: int = 1
    y: int = 1
    z: int = 1
    replicas: int = 1
    order: tuple[str, ...] = AXES
    pipe: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"cuboid axis {axis}={size!r}: every size is a whole number of at least 1")
        order = self.order if "pipe" in self.order else ("pipe", *self.order)
        if sorted(order) != sorted(AXES):
            raise ValueError(
                f"cuboid order {','.join(self.order)!r} must name each of {', '.join(AXES)} once, slowest first"
            )
        object.__setattr__(self, "order", order)

    @classmethod
    def parse(
        cls, text: str, replicas: int | None = None, order: str = ",".join(AXES), pipe: int | None = None
    ) -> "Cuboid":
        """Parses what a person types: `"2,2,2"` or, as `str` writes it, `"2,2,2 replicas=2 pipe=4"`.

        Args:
            text: The sizes.
            replicas: Its size; None: as the text says, else 1.
            order: The axes, slowest first, separated by commas.
            pipe: Its size; None: as the text says, else 1.

        Raises:
            ValueError: If the text is not of this form, a size is not allowed, or one is given twice and differs.
        """
        sizes, *more = re.sub(r"\s*([,x×=])\s*", r"\1", text).split() or [""]
        parts, named = re.split("[,x×]", sizes.strip("()")), {"replicas": replicas, "pipe": pipe}
        given = [word.partition("=")[::2] for word in more]
        if len(parts) != 3 or not all(part.isdigit() for part in (*parts, *(size for _, size in given))):
            raise ValueError(
                f"cuboid {text!r} is not three sizes; write x,y,z such as 2,2,2 or '2,2,2 replicas=2 pipe=2'"
            )
        for name, size in given:
            if name not in named:
                raise ValueError(f"cuboid {text!r}: after x,y,z come replicas= and pipe=, not {name}=")
            if named[name] not in (None, int(size)):
                raise ValueError(
                    f"cuboid {text!r} has {name}={size}, and {name}={named[name]} is given too; leave one of them out"
                )
            named[name] = int(size)
        x, y, z = (int(part) for part in parts)
        axes = tuple(name.strip() for name in order.split(","))
        return cls(x, y, z, order=axes, **{name: 1 if size is None else size for name, size in named.items()})

    @classmethod
    def stored(cls, sizes: Mapping[str, int], order: Sequence[str] = AXES) -> "Cuboid":
        """Reads `sizes` by axis, and the `order` of the axes, from a file, which may be of an earlier version."""
        by_axis = {EARLIER.get(axis, axis): size for axis, size in sizes.items()}
        return cls(**by_axis, order=tuple(EARLIER.get(axis, axis) for axis in order))

    def __str__(self) -> str:
        more = [f" {axis}={getattr(self, axis)}" for axis in ("replicas", "pipe") if getattr(self, axis) > 1]
        return f"{self.x},{self.y},{self.z}" + "".join(more)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every axis."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def block(self) -> int:
        """Devices that share one replica of the model, or of a stage of it."""
        return self.x * self.y * self.z

    @property
    def ranks(self) -> int:
        """All devices: x · y · z · replicas · pipe."""
        return self.block * self.replicas * self.pipe

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank`, a number from 0, is on each axis."""
        found = {}
        for axis in reversed(self.order):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return {axis: found[axis] for axis in AXES}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these `coordinates`, one for each axis."""
        rank = 0
        for axis in self.order:
            rank = rank * getattr(self, axis) + coordinates[axis]
        return rank

    def array(self, axes: tuple[str, ...]) -> "NDArray[np.int64]":
        """The ranks as an array whose dims are `axes`."""
        import numpy as np  # here: the command line does not need it

        grid = np.arange(self.ranks).reshape([getattr(self, axis) for axis in self.order])
        return np.ascontiguousarray(grid.transpose([self.order.index(axis) for axis in axes]))


def factorisations(ranks: int) -> Iterator[Cuboid]:
    """All cuboids of this many ranks, without replicas and pipeline.

    Args:
        ranks: x · y · z.
    """
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for x, y, z in product(sizes, repeat=3):
        if x * y * z == ranks:
            yield Cuboid(x, y, z)


def orders(cuboid: Cuboid) -> Iterator[Cuboid]:
    """The same cuboid with every order of axes over ranks; axes of size 1 do not count."""
    long = [axis for axis in AXES if cuboid.sizes[axis] > 1]
    short = [axis for axis in AXES if axis not in long]
    for order in permutations(long):
        yield replace(cuboid, order=(*short, *order))
