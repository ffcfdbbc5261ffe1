"""Ranks that die start again, all of them, and what they run goes on from what it has saved."""

from collections.abc import Callable, Sequence
from typing import Any

from cuboid.run.launch import Pool, RankDied
from cuboid.run.stop import Stop

OUT_OF_MEMORY = (
    "before the first step, most likely by the kernel for want of memory, so ranks are not started again; use fewer "
    'ranks, memory.recompute = "full", more data.micro_batches or a smaller model'
)


def keep_running(
    fn: Callable[..., Any],
    ranks: int,
    args: Sequence[Any],
    stop: Stop,
    timeout: float,
    most: int,
    saved: Callable[[], int],
    tell: Callable[[str], None],
) -> list[Any]:
    """As `launch` on this machine. When a rank dies all ranks are started again, with `World.attempt` one more: at most
    `most` times in a row without a change of `saved()`, the step that the run would go on from. What a rank raises
    would be raised again, and ends it; so would a rank be killed again that the kernel kills before the first step."""
    attempt = row = 0
    last = saved()
    while True:
        try:
            with Pool(ranks, stop=stop, attempt=attempt, timeout=timeout) as pool:
                return pool.run(fn, *args)
        except RankDied as death:
            if death.killed and not stop.begun and not stop.asked:
                raise RankDied(f"{death} {OUT_OF_MEMORY}") from None
            step = saved()
            row, last = (row + 1 if step == last else 1), step
            if stop.asked or row > most:
                tried = f" after {row - 1} restarts without a new checkpoint" if row > 1 else ""
                raise RankDied(f"{death}{tried}") from None
            attempt += 1
            tell(f"{death}; all ranks start again, {f'after step {step}' if step else 'from the beginning'}")
