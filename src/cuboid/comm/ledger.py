"""The ledger: what every collective of a rank cost, per axis and kind.

Bytes are the least that a rank must send: over p ranks (p-1)/p of the unsharded tensor for an all-gather, a
reduce-scatter or an all-to-all, twice that for an all-reduce; the mean over the ranks, (p-1)/p of the block, for a
broadcast or a reduce. `exposed` is the time in which the rank only waited.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from cuboid.device import DeviceClock


@dataclass
class Entry:
    calls: int = 0
    bytes: int = 0
    exposed: float = 0.0


@dataclass
class Span:
    """One collective over time, in seconds of `time.perf_counter`; 0: not yet."""

    axis: str
    kind: str
    bytes: int
    launched: float
    entry: Entry  # of its own: a late span must not reappear in a ledger that was reset meanwhile
    landed: float = 0.0  # only known if spans are listed
    waited: float = 0.0  # when the rank began to wait for it
    resumed: float = 0.0  # when it stopped waiting


class Ledger:
    """Counts collectives. `spans` lists every collective since it was set to a list; with None only sums are kept. If a
    device times collectives, the `clock`, if there is one, reads their times as it reads those of computation."""

    def __init__(self) -> None:
        self.entries: defaultdict[tuple[str, str], Entry] = defaultdict(Entry)
        self.spans: list[Span] | None = None
        self.clock: DeviceClock | None = None
        self._late: list[Callable[[], None]] = []

    def launched(self, axis: str, kind: str, bytes_sent: int) -> Span:
        entry = self.entries[axis, kind]
        entry.calls += 1
        entry.bytes += bytes_sent
        span = Span(axis, kind, bytes_sent, time.perf_counter(), entry)
        if self.spans is not None:
            self.spans.append(span)
        return span

    def waited(self, span: Span, start: float, stop: float, weight: int = 1) -> None:
        """Adds the wait for a timed collective, which stands for `weight` collectives."""
        span.waited, span.resumed = start, stop
        span.entry.exposed += weight * (stop - start)

    def later(self, settle: Callable[[], None]) -> None:
        """Call `settle` before the next reading: a device's clock can be read only when the device has caught up."""
        self._late.append(settle)

    def settle(self) -> None:
        late, self._late = self._late, []
        for settle in late:
            settle()

    def reset(self) -> None:
        self.settle()
        self.entries.clear()

    def bytes(self) -> dict[str, int]:
        """Bytes sent per axis."""
        total: defaultdict[str, int] = defaultdict(int)
        for (axis, _), entry in self.entries.items():
            total[axis] += entry.bytes
        return dict(total)

    def exposed(self) -> float:
        """Seconds spent waiting, over all axes."""
        self.settle()
        return sum(entry.exposed for entry in self.entries.values())

    def counts(self) -> dict[str, dict[str, tuple[int, int]]]:
        """(calls, bytes) per axis and kind, which formulas predict."""
        table: defaultdict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
        for (axis, kind), entry in sorted(self.entries.items()):
            table[axis][kind] = (entry.calls, entry.bytes)
        return dict(table)
