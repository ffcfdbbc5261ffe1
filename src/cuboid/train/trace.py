"""A rank's collectives by axis, and the time it waited for them, as a trace and as a picture.

The trace has Chrome's format, which Perfetto and chrome://tracing open: a process per rank, with a lane for compute
(all time without waiting) and one per axis.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cuboid.comm.ledger import Span
from cuboid.mesh.cuboid import AXES

LANES = ("compute", *AXES, "world")
COLOURS = {
    "compute": "#444444",
    "x": "#2e8540",
    "y": "#1f5fa8",
    "z": "#d1700f",
    "replicas": "#8a4f9e",
    "pipe": "#b3262e",
    "world": "#999999",
}


@dataclass(frozen=True)
class Phase:
    """A phase of a step: forward, backward, optimizer."""

    name: str
    start: float
    stop: float

    @property
    def length(self) -> float:
        return self.stop - self.start


@dataclass(frozen=True)
class Trace:
    """What one rank did."""

    rank: int
    spans: Sequence[Span]
    phases: Sequence[Phase]
    moments: Sequence[float] = ()  # when a layer's input, output or their gradients were there

    def layer(self) -> "Trace":
        """Only the last forward of one layer, and its backward."""
        found = []
        for phase in self.phases:
            inside = [moment for moment in self.moments if phase.start <= moment < phase.stop]
            if inside:
                found.append(Phase(phase.name, min(inside), max(inside)))
        last = found[-2:]
        spans = [s for s in self.spans if any(s.launched < p.stop and max(s.landed, s.resumed) > p.start for p in last)]
        return Trace(self.rank, spans, last)

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
        """Seconds of waiting, as in the picture: the phases minus the computation in them."""
        return sum(phase.length for phase in self.phases) - sum(stop - start for start, stop in self.computing())


def events(traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """Chrome's `traceEvents`, in microseconds since the first phase began."""
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


def _lanes(traces: Iterable[Trace]) -> list[str]:
    """The lanes that any of the traces uses."""
    axes = {span.axis for trace in traces for span in trace.spans}
    return [name for name in LANES if name == "compute" or name in axes]


def _bars(axes: Axes, trace: Trace, lanes: Sequence[str], start: float, stop: float) -> None:
    """Draws what a rank did from `start` to `stop`, in ms since `start`."""
    bars = {"compute": trace.computing()}
    for span in trace.spans:
        if span.landed:
            bars.setdefault(span.axis, []).append((span.launched, span.landed))
    for i, name in enumerate(lanes):
        inside = [(max(a, start), min(b, stop)) for a, b in bars.get(name, []) if a < stop and b > start]
        lengths = [(1e3 * (a - start), 1e3 * (b - a)) for a, b in inside]
        narrow = 3 * (stop - start)  # ms: a white edge would hide the bar
        edges = ["white" if length > narrow else COLOURS[name] for _, length in lengths]
        axes.broken_barh(lengths, (i - 0.35, 0.7), facecolor=COLOURS[name], edgecolor=edges, linewidth=0.3)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)


def draw(panels: Mapping[str, Trace], title: str, path: Path) -> None:
    """One panel per trace, all over the same time axis: compute above, the axes' collectives below."""
    figure = Figure(figsize=(12, 2.4 * len(panels)), layout="constrained")
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, trace) in zip(rows, panels.items(), strict=True):
        zero = trace.phases[0].start
        _bars(axes, trace, _lanes([trace]), zero, trace.phases[-1].stop)
        for phase in trace.phases[1:]:
            axes.axvline(1e3 * (phase.start - zero), color="black", linewidth=0.8, linestyle=":")
        total = sum(phase.length for phase in trace.phases)
        axes.set_title(f"{name}: {1e3 * total:.0f} ms, waiting {trace.exposed() / total:.0%}", loc="left")
    later = [phase.name for phase in next(iter(panels.values())).phases[1:]]
    longest = max(trace.phases[-1].stop - trace.phases[0].start for trace in panels.values())
    rows[-1].set_xlim(0, 1e3 * longest)
    what = "compute lane: gaps are waiting; other lanes: an axis's collectives in flight"
    rows[-1].set_xlabel(f"ms; {what}; dotted lines: {', '.join(later)} begin")
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path, dpi=130)


def draw_layer(panels: Mapping[str, Trace], title: str, path: Path) -> None:
    """One layer: a row per trace, forward beside backward. All panels have the same scale of time."""
    clipped = {name: trace.layer() for name, trace in panels.items()}
    lengths = [max(trace.phases[i].length for trace in clipped.values()) for i in (0, 1)]
    lanes = _lanes(clipped.values())
    figure = Figure(figsize=(14, 1.2 + len(panels) * (1.1 + 0.4 * len(lanes))), layout="constrained")
    grid = figure.subplots(len(panels), 2, squeeze=False, sharex="col", width_ratios=lengths)
    for row, (name, trace) in zip(grid, clipped.items(), strict=True):
        row[0].set_ylabel(name, fontweight="bold")
        for axes, phase, length in zip(row, trace.phases, lengths, strict=True):
            one = Trace(trace.rank, trace.spans, [phase])
            _bars(axes, one, lanes, phase.start, phase.stop)
            axes.set_xlim(0, 1e3 * length)
            whole = next(p for p in panels[name].phases if p.start <= phase.start < p.stop)
            layer = f"{phase.name}: {1e3 * phase.length:.3g} ms, waiting {one.exposed() / phase.length:.0%}"
            axes.set_title(f"{layer}\n(the whole model's: {1e3 * whole.length:.3g} ms)", loc="left", fontsize=10)
    figure.suptitle(title)
    figure.supxlabel("ms; compute lane: gaps are waiting; other lanes: an axis's collectives in flight")
    figure.savefig(path, dpi=130)
