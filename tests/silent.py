"""A rank of a world in which nothing is sent: what a step calls, computes and allocates, the same on any machine.

Values are of no use there. Messages are held until they are awaited, and let go then, not when a thread of the backend
comes to it.
"""

from collections.abc import Callable
from typing import Any

from cuboid.run.silent import silently as silently_one


def silently(ranks: list[int], size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """`fn(world, *args)` as some ranks of a world of this size, each in a separate process."""
    return [silently_one(fn, rank, size, *args) for rank in ranks]


def ends(size: int) -> list[int]:
    """The first rank and the last: these hold the most and the least of what is split unevenly."""
    return sorted({0, size - 1})
