"""How this process was started: by torchrun, as one of several ranks, or directly."""

import os


def under_torchrun() -> bool:
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def local_ranks(ranks: int) -> int:
    """The number of ranks on this host: all `ranks`, unless torchrun started them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if under_torchrun() else ranks


def is_first() -> bool:
    """Whether this process prints for all: rank 0, or the one that will start the ranks."""
    return os.environ.get("RANK", "0") == "0"


def is_first_of_host() -> bool:
    """Whether this process prints for its host, on which alone a file may be missing, for example."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
