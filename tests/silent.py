"""A rank of a world in which nothing is sent: what a step calls, computes and allocates, the same on any machine.

Values are of no use there. Messages are held until they are awaited, and let go then, not when a thread of the backend
comes to it.
"""

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from cuboid.comm.transport.fake import join_silent_world
from cuboid.run.launch import World


def silently(ranks: list[int], size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """`fn(world, *args)` as some ranks of a world of this size, each in a process of its own."""
    fork = get_context("fork")
    found = []
    for rank in ranks:
        ours, theirs = fork.Pipe(duplex=False)
        child = fork.Process(target=_run, args=(theirs, rank, size, fn, args))
        child.start()
        theirs.close()
        try:
            found.append(ours.recv())
        except EOFError:
            raise RuntimeError(f"rank {rank} of {size} has failed: see above") from None
        finally:
            child.join()
    return found


def _run(pipe: Connection, rank: int, size: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    join_silent_world(rank, size)
    pipe.send(fn(World(rank, size, torch.device("cpu"), size), *args))


def ends(size: int) -> list[int]:
    """The first rank and the last: of what is cut unevenly these hold most and least."""
    return sorted({0, size - 1})
