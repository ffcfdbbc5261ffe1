"""Progress of a run: a live line on a terminal, otherwise a plain line every few seconds."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, as it is logged and shown. Steps are counted from 1."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    exposed: float  # share of the step spent waiting for communication
    memory_bytes: int  # peak of rank 0; other ranks' are the same
    skipped: bool = False  # the gradient was not applied
    spike: bool = False  # loss or gradient is far above the last steps'
    skips: int = 0  # of all steps so far
    tokens: int = 0  # seen so far, by all ranks, since the run's first step
    wall_time: float = 0.0  # seconds since 1970
    weights_bytes: int = 0  # of memory_bytes; these three do not change in a run
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    flops_per_s: float = 0.0  # of the model, per device
    mfu: float = 0.0  # share of the device's peak that they are; 0 where it is not known


class Progress:
    """A context manager for the rank that prints. `start` of the `total` steps were done before it resumed."""

    def __init__(
        self,
        total: int,
        start: int = 0,
        console: Console | None = None,
        seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._start = total, start
        self._console = console or Console()
        self._seconds = seconds  # between plain lines
        self._clock = clock
        self._began = self._shown = clock()
        self._last: StepReport | None = None
        self._pending = False  # the last report is not yet printed
        live = self._console.is_terminal and not self._console.is_dumb_terminal
        # Refreshed by hand: a thread would compete with the step, and steps are frequent enough.
        self._live = Live(get_renderable=self._line, console=self._console, auto_refresh=False) if live else None

    def __enter__(self) -> "Progress":
        self._began = self._shown = self._clock()
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._live.refresh()
            self._live.stop()
        elif self._pending:
            self._print()

    def update(self, report: StepReport) -> None:
        first, last = self._last is None, report.step >= self._total
        self._last, self._pending = report, True
        due = self._clock() - self._shown >= (0.1 if self._live else self._seconds)
        if not (first or last or due):
            return
        self._shown = self._clock()
        if self._live:
            self._live.refresh()
        else:
            self._print()

    def note(self, text: str) -> None:
        """Print a line above the live one."""
        self._console.print(Text(text), soft_wrap=True)

    def eta(self) -> float:
        """Remaining seconds at the average pace so far."""
        if self._last is None or self._last.step <= self._start:
            return float("nan")
        pace = (self._clock() - self._began) / (self._last.step - self._start)
        return pace * (self._total - self._last.step)

    def _print(self) -> None:
        assert self._last is not None
        self._pending = False
        self._console.print(Text("step " + "  ".join(self._parts(self._last).values())), soft_wrap=True)

    def _parts(self, report: StepReport) -> dict[str, str]:
        """By name, each as wide in every step, so that lines are columns, of 105 characters at most in most runs. What
        follows from the step (learning rate) or never changes (weights, gradients, optimizer state) is left out."""
        r = report
        parts = {
            "step": f"{r.step:>{len(str(self._total))}}/{self._total}",
            "loss": f"loss {r.loss:7.4f}",
            "grad": f"grad {_short(r.grad_norm, 6):>6}",
            "speed": f"{quantity(r.tokens_per_s):>5} tok/s",
            "MFU": f"MFU {r.mfu:5.1%}" if r.mfu else "",
            "exposed": f"exposed {r.exposed:4.0%}",
            "memory": f"peak {quantity(r.memory_bytes):>5}B",
            "ETA": f"ETA {duration(self.eta()):>7}",
        }
        if r.skipped:
            parts["skipped"] = "skipped: spike" if r.spike else "skipped: not finite"
        elif r.spike:
            parts["skipped"] = "spike"
        if r.skips:
            parts["skips"] = f"{r.skips} skipped"
        return {name: part for name, part in parts.items() if part}

    def _line(self) -> Table | Text:
        if self._last is None:
            return Text("starting …")
        parts, width = self._parts(self._last), self._console.width
        bar = 12 if width > 100 else 0
        for name in ("grad", "MFU", "memory", "exposed", "speed"):  # what a narrow terminal does without
            if len("  ".join(parts.values())) + bar > width:
                parts.pop(name, None)
        text = Text("  ".join(parts.values()))
        room = width - text.cell_len - 2
        if room < 8 or not bar:
            return text
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_row(ProgressBar(self._total, self._last.step, width=min(room, 30)), text)
        return line


def _short(value: float, width: int) -> str:
    """Three digits, or as many as fit.

    >>> [_short(x, 6) for x in (41.23, 0.75, 0.012345, 1.234e-5, 123456.7)]
    ['41.2', '0.75', '0.0123', '1e-05', '1e+05']
    """
    digits = (f"{value:.{count}g}" for count in (3, 2, 1))
    return next((text for text in digits if len(text) <= width), f"{value:.1g}")


def quantity(value: float) -> str:
    """Three digits and a unit.

    >>> [quantity(n) for n in (7, 950, 12_345, 4_800_000_000)]
    ['7', '950', '12.3k', '4.8G']
    """
    for unit in ("", "k", "M", "G"):
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"


def duration(seconds: float) -> str:
    """
    >>> [duration(s) for s in (7, 75, 7384, 200_000, float("nan"))]
    ['0:07', '1:15', '2:03:04', '2d 7h', '?']
    """
    if not 0 <= seconds < float("inf"):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
