"""Python's garbage collector, run by hand: otherwise each rank pauses at another time, and all others wait."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY = 50  # steps; a step leaves nothing that only the collector would find


@contextmanager
def collected_by_hand() -> Iterator[Callable[[int], None]]:
    """Inside, only the yielded function collects. It is called after every step, and all ranks collect in the same."""
    enabled = gc.isenabled()
    gc.disable()

    def after(step: int) -> None:
        if step % EVERY == 0:
            gc.collect(1)  # the oldest objects are libraries', and many

    try:
        yield after
    finally:
        if enabled:
            gc.enable()
