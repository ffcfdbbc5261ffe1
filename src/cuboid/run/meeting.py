"""Rendezvous of torchrun's ranks.

Its agent keeps one store through all restarts of its ranks, with the entries of earlier ones: a rank that starts a
little late would find the others connecting to dead ones. So every start has a new store, opened by rank 0.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

from cuboid.run.errors import RankError


def store_is_old() -> bool:
    """Whether ranks of an earlier start may have used the store that the environment names."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def unreachable(error: Exception) -> RankError:
    """Ranks that torchrun has started do not meet, in one sentence: PyTorch appends a C++ stack trace to its own."""
    what = str(error).partition("\n")[0].rstrip(".")
    e = os.environ
    return RankError(
        f"rank {e['RANK']} of {e['WORLD_SIZE']} could not join the others at {e['MASTER_ADDR']}:{e['MASTER_PORT']}: "
        f"{what}; check that every host was started with this address, and that the port is free and open to all hosts"
    )


@contextmanager
def quietly(seconds: float = 0.0) -> Iterator[None]:
    """Drop what PyTorch's C++ code writes to stderr while ranks meet: a stack trace per failed attempt, which the
    exception repeats. After `seconds`, if given, the process ends with one sentence: PyTorch waits endlessly for the
    answer of a server that is no store."""
    shown = os.dup(2)

    def give_up() -> None:
        error = unreachable(TimeoutError(f"no answer within {seconds:g} s"))
        os.write(shown, f"error: {error}\n".encode())
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    if seconds:
        timer.start()
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:  # exceptions are shown
        os.dup2(shown, 2)
        timer.cancel()
        os.close(shown)


def meet(rank: int, size: int, timeout: float, late: float) -> dist.Store:
    """The store that the environment names, or a new one if ranks of an earlier start may have used it; there a rank
    may be `late` by so many seconds, for imports."""
    if store_is_old():
        with quietly(2 * late):
            return fresh_store(rank, size, late)
    wait = timedelta(seconds=timeout)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with quietly(2 * timeout):
        return dist.TCPStore(address, port, size, is_master=rank == 0, timeout=wait, multi_tenant=True)


def fresh_store(rank: int, size: int, timeout: float) -> dist.Store:
    """Opens a new store on rank 0. The others ask for its address, with a unique word, and rank 0 answers each."""
    wait = timedelta(seconds=timeout)
    old = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=wait, wait_for_workers=False
    )
    if rank:
        word = uuid4().hex
        old.set(f"cuboid/question/{rank}", word)
        address, _, port = old.get(f"cuboid/answer/{word}").decode().rpartition(":")
        new = dist.TCPStore(address, int(port), is_master=False, timeout=wait, wait_for_workers=False)
        new.add("here", 1)
        return new
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    address = "127.0.0.1" if one_host else os.environ["MASTER_ADDR"]
    door = socket.create_server(("127.0.0.1" if one_host else "", 0))
    port, listen = door.getsockname()[1], door.detach()
    new = dist.TCPStore(address, port, is_master=True, timeout=wait, wait_for_workers=False, master_listen_fd=listen)
    answer, deadline = f"{address}:{port}", time.monotonic() + timeout
    while new.add("here", 0) < size - 1:
        for asking in range(1, size):
            if old.check([f"cuboid/question/{asking}"]):
                old.set(f"cuboid/answer/{old.get(f'cuboid/question/{asking}').decode()}", answer)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{size - 1 - new.add('here', 0)} of {size} ranks did not arrive within {timeout:g} s")
        time.sleep(0.05)
    return new
