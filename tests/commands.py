"""The command line in a separate process that can be signalled; forked, because importing torch takes seconds."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from tiny import Said

from cuboid.cli import main

HUNG = 600.0  # seconds after which something that must come is not waited for any longer


class Command:
    def __init__(self, pid: int, out: IO[bytes], err: IO[bytes]) -> None:
        self.pid, self._out, self._err = pid, out, err
        self.code: int | None = None

    def ended(self, wait: bool = False) -> bool:
        if self.code is None:
            found, status = os.waitpid(self.pid, 0 if wait else os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if found else None
        return self.code is not None

    def said(self) -> Said:
        """Once it has ended."""
        self.ended(wait=True)
        texts = []
        for file in (self._out, self._err):
            file.seek(0)
            texts.append(file.read().decode())
        assert self.code is not None
        return Said(self.code, *texts)

    def wait_for(self, what: Callable[[], object]) -> None:
        """Something that happens while it runs."""
        wait_for(what, lambda: self.said() if self.ended() else None)


def wait_for(what: Callable[[], object], ended: Callable[[], object]) -> None:
    """`ended` returns what became of the process that should do it, if it has ended."""
    deadline = time.monotonic() + HUNG
    while not what():
        end = ended()
        assert end is None, end
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.02)


@contextmanager
def started(*words: object, folder: Path) -> Iterator[Command]:
    """`cuboid` with these arguments, in this folder and in its own session, as a terminal would start it."""
    with TemporaryFile() as out, TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            _run([str(word) for word in words], folder, out.fileno(), err.fileno())
        command = Command(pid, out, err)
        try:
            yield command
        finally:
            if not command.ended():
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                command.ended(wait=True)


def _run(words: list[str], folder: Path, out: int, err: int) -> None:
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(folder)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        sys.argv = ["cuboid", *words]
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
