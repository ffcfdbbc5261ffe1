"""Where torchrun's ranks meet.

Its agent keeps one store through all restarts of its ranks, with what the earlier ones have written: a rank that starts
a little late finds the others connecting to the dead. So every start meets in a store of its own, opened by rank 0.
"""

import os
import socket
import time
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist


def store_is_old() -> bool:
    """Whether the store that the environment names may have been used before."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def fresh_store(rank: int, size: int, timeout: float) -> dist.Store:
    """Every rank but 0 asks where to go, with a word that nobody has used before, and rank 0 answers all who ask."""
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
            raise TimeoutError(f"{size - 1 - new.add('here', 0)} of {size} ranks have not come within {timeout:g} s")
        time.sleep(0.05)
    return new
