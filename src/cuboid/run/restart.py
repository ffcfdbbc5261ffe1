"""Restarts all ranks when one dies. What they run resumes from what it has saved."""

from collections.abc import Callable, Sequence
from typing import Any

from cuboid.run.launch import Pool, RankDied
from cuboid.run.stop import Stop

OUT_OF_MEMORY = (
    "before the first step, most likely by the kernel because memory ran out, so ranks are not restarted; use fewer "
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
    names: Sequence[str] = (),
) -> list[Any]:
    """Like `launch` on this machine, but restarts all ranks when one dies, with `World.attempt` increased: at most
    `most` times in a row without a change of `saved()`, the step from which the run would resume. Exceptions of ranks
    are not retried, nor kills before the first step: both would happen again."""
    attempt = row = 0
    last = saved()
    while True:
        try:
            with Pool(ranks, stop=stop, attempt=attempt, timeout=timeout, names=names) as pool:
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
            tell(f"{death}; restarting all ranks {f'after step {step}' if step else 'from the beginning'}")
