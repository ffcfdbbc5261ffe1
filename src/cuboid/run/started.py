"""How this process was started: by torchrun, as one of several ranks, or directly."""

import os


def under_torchrun() -> bool:
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def local_ranks(ranks: int) -> int:
    """The number of ranks on this host: all `ranks`, unless torchrun started them."""
    return place_on_host(int(os.environ["RANK"]), ranks)[1] if under_torchrun() else ranks


def place_on_host(rank: int, size: int) -> tuple[int, int]:
    """This rank's number on its host, and how many ranks are there: all, unless the environment says otherwise."""
    from cuboid.device import any_gpu

    missing = [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name not in os.environ]
    if missing and size > 1 and any_gpu():
        raise ValueError(
            f"rank {rank} of {size} sees GPUs, but the launcher did not set {' and '.join(missing)}; set LOCAL_RANK to "
            "the rank's number on its host and LOCAL_WORLD_SIZE to the number of ranks there: with srun "
            "$SLURM_LOCALID and $SLURM_NTASKS_PER_NODE, with mpirun $OMPI_COMM_WORLD_LOCAL_RANK and _LOCAL_SIZE"
        )
    return int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))


def is_first() -> bool:
    """Whether this process prints for all: rank 0, or the one that will start the ranks."""
    return os.environ.get("RANK", "0") == "0"


def is_first_of_host() -> bool:
    """Whether this process prints for its host, on which alone a file may be missing, for example."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
