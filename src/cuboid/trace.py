"""What a rank did when: its collectives by axis, and the time it waited for them, as a trace and as a picture.

The trace is Chrome's format, which Perfetto and chrome://tracing open: a process for each rank, in it a lane for
compute (whatever is not waiting) and one for each axis.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from cuboid.ledger import Span
from cuboid.mesh import AXES

LANES = ("compute", *AXES, "world")
COLOURS = {"compute": "#444444", "x": "#2e8540", "y": "#1f5fa8", "z": "#d1700f", "data": "#8a4f9e", "world": "#999999"}


@dataclass(frozen=True)
class Phase:
    """A part of a step: forward, backward, optimizer."""

    name: str
    start: float
    stop: float


@dataclass(frozen=True)
class Trace:
    """Of one rank."""

    rank: int
    spans: Sequence[Span]
    phases: Sequence[Phase]

    def computing(self) -> list[tuple[float, float]]:
        """The times between waits."""
        found = []
        for phase in self.phases:
            start = phase.start
            for span in sorted((s for s in self.spans if s.resumed), key=lambda s: s.waited):
                if phase.start <= span.waited < phase.stop:
                    found.append((start, span.waited))
                    start = span.resumed
            found.append((start, phase.stop))
        return [(start, stop) for start, stop in found if stop > start]

    def exposed(self) -> float:
        """Seconds of waiting, as the picture shows them: the phases less what is computed in them."""
        return sum(p.stop - p.start for p in self.phases) - sum(stop - start for start, stop in self.computing())


def events(traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """For Chrome's `traceEvents`, in microseconds from the first phase on."""
    zero = min(phase.start for trace in traces for phase in trace.phases)
    found: list[dict[str, Any]] = []

    def lane(rank: int, name: str, label: str, start: float, stop: float, args: Mapping[str, Any]) -> None:
        times = {"ts": 1e6 * (start - zero), "dur": 1e6 * (stop - start)}
        found.append({"name": label, "ph": "X", "pid": rank, "tid": LANES.index(name), **times, "args": dict(args)})

    for trace in traces:
        title = {"name": f"rank {trace.rank}"}
        found.append({"name": "process_name", "ph": "M", "pid": trace.rank, "args": title})
        for i, name in enumerate(LANES):
            found.append({"name": "thread_name", "ph": "M", "pid": trace.rank, "tid": i, "args": {"name": name}})
        for phase in trace.phases:
            lane(trace.rank, "compute", phase.name, phase.start, phase.stop, {})
        for start, stop in trace.computing():
            lane(trace.rank, "compute", "computing", start, stop, {})
        for span in trace.spans:
            if span.landed:
                args = {"bytes": span.bytes, "waited_us": round(1e6 * (span.resumed - span.waited))}
                lane(trace.rank, span.axis, span.kind, span.launched, span.landed, args)
    return found


def save(traces: Sequence[Trace], path: Path) -> None:
    path.write_text(json.dumps({"traceEvents": events(traces), "displayTimeUnit": "ms"}) + "\n", "utf-8")


def draw(panels: Mapping[str, Trace], path: Path) -> None:
    """One panel a trace, over one scale of time: compute above, the axes' collectives below."""
    figure = Figure(figsize=(12, 2.4 * len(panels)), layout="constrained")
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, trace) in zip(rows, panels.items(), strict=True):
        zero = trace.phases[0].start
        used = ["compute", *(name for name in LANES[1:] if any(span.axis == name for span in trace.spans))]
        bars = {"compute": trace.computing()}
        for span in trace.spans:
            if span.landed:
                bars.setdefault(span.axis, []).append((span.launched, span.landed))
        for i, name in enumerate(used):
            lengths = [(1e3 * (start - zero), 1e3 * (stop - start)) for start, stop in bars.get(name, [])]
            axes.broken_barh(lengths, (i - 0.35, 0.7), color=COLOURS[name], edgecolor="white", linewidth=0.3)
        for phase in trace.phases[1:]:
            axes.axvline(1e3 * (phase.start - zero), color="black", linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(used)), used)
        axes.invert_yaxis()
        total = sum(phase.stop - phase.start for phase in trace.phases)
        axes.set_title(f"{title}: {1e3 * total:.0f} ms, waiting {trace.exposed() / total:.0%}", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    later = [phase.name for phase in next(iter(panels.values())).phases[1:]]
    rows[-1].set_xlabel(f"ms; dotted: {', '.join(later)} begin")
    figure.savefig(path, dpi=130)
