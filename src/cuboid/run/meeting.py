"""Rendezvous of torchrun's ranks.

Its agent keeps one store through all restarts of its ranks, with the entries of earlier ones: a rank that starts a
little late would find the others connecting to dead ones. So every start has a new store, opened by rank 0.
"""

import os
import socket
import time
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
