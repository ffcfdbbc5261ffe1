"""Runs one rank of a world in which nothing is sent, in its own process, which can join no other world."""

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from cuboid.comm.transport.fake import join_silent_world
from cuboid.run.errors import RankError
from cuboid.run.launch import World


def silently(fn: Callable[..., Any], rank: int, size: int, *args: Any, per_host: int = 0, backend: str = "gloo") -> Any:
    """Returns `fn(world, *args)` of rank `rank` of `size`, `per_host` on each host (0: all on one)."""
    world = World(rank, size, torch.device("cpu"), per_host or size)
    fork = get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    child = fork.Process(target=_play, args=(fn, world, backend, theirs, args))
    child.start()
    theirs.close()  # so that a child that dies ends the wait
    try:
        return ours.recv()
    except EOFError:
        raise RankError(f"rank {rank} of {size}, run alone, ended without an answer") from None
    finally:
        child.join()


def _play(fn: Callable[..., Any], world: World, backend: str, answer: Connection, args: tuple[Any, ...]) -> None:
    join_silent_world(world.rank, world.size, backend)
    answer.send(fn(world, *args))
