"""The ledger: what every collective of a rank cost, per axis and kind.

Bytes are those a rank sends when the collective moves the least it can: (p-1)/p of the whole for an all-gather, a
reduce-scatter or an all-to-all over p ranks, twice that for an all-reduce; the mean over the ranks, (p-1)/p of the
block, for a broadcast or a reduce. `exposed` is the time in which the rank did nothing but wait.
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
    """One collective over time, in seconds of `time.perf_counter`; 0 where it has not come to that."""

    axis: str
    kind: str
    bytes: int
    launched: float
    entry: Entry  # a late one must not reappear in a ledger that was reset meanwhile
    landed: float = 0.0  # where spans are listed
    waited: float = 0.0  # the rank began to do nothing but wait for it
    resumed: float = 0.0  # and ended to


class Ledger:
    """`spans` lists every collective since it was set to a list; None keeps sums alone. Where collectives are timed by
    a device, they are listed as the `clock` reads them, if there is one: by the same clock as what computes."""

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
        """Of as many collectives as `weight`, of which this one was timed."""
        span.waited, span.resumed = start, stop
        span.entry.exposed += weight * (stop - start)

    def later(self, settle: Callable[[], None]) -> None:
        """Have `settle` called before the next reading: a device's clock is only read once it has caught up."""
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
        """(calls, bytes) per axis and kind: the part that a formula can predict."""
        table: defaultdict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
        for (axis, kind), entry in sorted(self.entries.items()):
            table[axis][kind] = (entry.calls, entry.bytes)
        return dict(table)
