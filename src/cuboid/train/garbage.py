"""Python's garbage collector, run by hand: left alone, each rank pauses at a moment of its own and all others wait."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY = 50  # steps; a step leaves nothing that only the collector would find


@contextmanager
def collected_by_hand() -> Iterator[Callable[[int], None]]:
    """Within it nothing is collected but by the function given, which is told of every step: all ranks in the same."""
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
