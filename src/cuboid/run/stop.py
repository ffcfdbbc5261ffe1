"""Requests to stop: by Ctrl-C, or by a scheduler that wants the machine back.

The first signal is a request: a run finishes its step, saves and exits. A second one ends the process at once.
"""

import mmap
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
PREEMPTED = 75  # exit code of a run that was preempted: all is saved, restart it (EX_TEMPFAIL)
ONE = 1.0  # seconds within which signals count as one: a scheduler signals torchrun and its ranks, torchrun them too


class Stop:
    """A request to stop, shared with ranks that are forked from here. They leave signals to their parent."""

    def __init__(self) -> None:
        # time of the request, its signal, whether it was obeyed; whether the run had begun
        self._shared = memoryview(mmap.mmap(-1, 32)).cast("d")

    @property
    def begun(self) -> bool:
        """Whether a first step has been taken: then memory was sufficient."""
        return self._shared[3] > 0

    def begin(self) -> None:
        self._shared[3] = 1.0

    @property
    def asked(self) -> bool:
        return self._shared[0] > 0

    @property
    def obeyed(self) -> bool:
        """Whether a run has stopped early, and all is saved."""
        return self._shared[2] > 0

    def obey(self) -> None:
        """Called on every rank, wherever the signal arrived."""
        self._shared[2] = 1.0

    @property
    def code(self) -> int:
        """The exit code after that."""
        return 0 if self._shared[1] == signal.SIGINT else PREEMPTED

    @contextmanager
    def listening(self) -> Iterator[None]:
        before = {each: signal.signal(each, self._hear) for each in SIGNALS}
        try:
            yield
        finally:  # torchrun signals exiting ranks again once another has exited
            for each, handler in before.items():
                signal.signal(each, signal.SIG_IGN if self.obeyed else handler)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.asked:
            self._shared[0], self._shared[1] = now, signum
        elif now - self._shared[0] > ONE and not self.obeyed:
            if sys.stdout.isatty():
                os.write(1, b"\x1b[?25h\n")  # a progress line hides the cursor
            os._exit(128 + signum)


def leave_signals_to_parent() -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
