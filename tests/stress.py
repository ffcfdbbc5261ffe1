"""The suite on a busy machine: `python tests/stress.py [pytest's arguments]`.

Twice as many processes as there are cores spin beside it, and ranks are late at random before they call a collective.
It runs twice, with other delays.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any

SEED = "CUBOID_DELAYS"  # in the environment: of the delays, if there are to be any
RUNS, PER_CORE = 2, 2
LATE, LONGEST = 0.05, 5e-3  # how often, and seconds
LAUNCHES = ("all_gather_single", "all_reduce", "all_to_all_single", "broadcast", "barrier")
SPIN = [sys.executable, "-S", "-c", "while True: pass"]


def variables() -> str:
    """For a shell, before the command that repeats a test."""
    return f"{SEED}={os.environ[SEED]} " if SEED in os.environ else ""


def delay_ranks() -> None:
    """If asked to. Every process forked from this one is late at other times."""
    if SEED not in os.environ:
        return
    import torch.distributed as dist  # not where tests are only handed out

    @cache
    def dice(process: int) -> random.Random:
        return random.Random(f"{os.environ[SEED]} {os.environ.get('RANK')}")

    def late(launch: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            mine = dice(os.getpid())
            if mine.random() < LATE:
                time.sleep(mine.random() * LONGEST)
            return launch(*args, **options)

        return call

    for name in LAUNCHES:
        setattr(dist, name, late(getattr(dist, name)))


def main() -> int:
    spinners = [subprocess.Popen(SPIN) for _ in range(PER_CORE * (os.cpu_count() or 1))]
    try:
        for seed in range(1, RUNS + 1):
            print(f"run {seed} of {RUNS}, beside {len(spinners)} busy processes", flush=True)
            command = [sys.executable, "-m", "pytest", *sys.argv[1:]]
            done = subprocess.run(command, env={**os.environ, SEED: str(seed)})
            if done.returncode:
                return done.returncode
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
