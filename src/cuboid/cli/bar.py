"""The progress of a long command."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def bar(console: Console, what: str, total: int, size: bool = True) -> Iterator[Callable[[int], object]]:
    """A progress bar on a terminal, one line elsewhere. Call what it yields with the bytes (or items) done since."""
    if not console.is_terminal:
        console.print(what)
        yield lambda done: None
        return
    of_bytes: tuple[ProgressColumn, ...] = (DownloadColumn(), TransferSpeedColumn())
    columns = of_bytes if size else (MofNCompleteColumn(),)
    with Progress(TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn(), console=console) as p:
        task = p.add_task(what, total=total)
        yield lambda done: p.advance(task, done)
