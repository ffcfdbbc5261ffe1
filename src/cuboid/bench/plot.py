"""Plots of a benchmark: step time, speed-up, bytes against the lower bound, memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, NullLocator

from cuboid.bench.bound import step_bytes
from cuboid.bench.result import MOST_CPU, MOST_CPU_ROUGH, Result, Row, Spread
from cuboid.run.cluster import bits_per_second
from cuboid.train.progress import quantity

COLOURS = {
    "1-D": "#777777",
    "1-D+SP": "#b0a080",
    "2-D": "#d1700f",
    "2-D ideal": "#e9b07a",
    "2.5-D": "#c9a227",
    "FSDP×TP": "#2e8540",
    "cube": "#6aa0d8",
    "cuboid": "#1f5fa8",
    "pipe": "#a83279",
    "native": "#8a4f9e",
    "native ideal": "#c79bd4",
    "DDP": "#5b2a6e",
}


HATCH = "///"  # of bars that do not count
ASIDE = 1.02  # how far apart kinds of layout are drawn, as a factor of ranks or rates


def draw(result: Result, folder: Path) -> list[Path]:
    """One figure, as PNG and as SVG."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    panels = figure.subplots(2, 2)
    rates = list(dict.fromkeys(row.rate for row in result.rows))
    sizes = sorted({row.ranks for row in result.rows})
    last = [row for row in result.rows if row.ranks == sizes[-1] and row.rate == rates[0]]
    first, last = last[0], sorted(last, key=_seconds)
    if len(rates) > 1:
        _against_rate(panels[0, 0], [row for row in result.rows if row.ranks == sizes[-1]])
    elif len(sizes) > 1:
        _against_ranks(panels[0, 0], result.rows, sizes)
    else:
        _parts(panels[0, 0], last)
    _speed_up(panels[0, 1], last, first)
    _bytes(panels[1, 0], last)
    _memory(panels[1, 1], last)
    for axes in panels.flat:
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    where = f"{rate_of(rates[0])} per host" if rates[0] else "unshaped links"
    slow = result.rows[0].slow
    where += f", {slow.devices}" if slow is not None else ""
    title = f"cuboid bench {result.bench}: {sizes[-1]} ranks, {where}"
    if slow is not None and slow.shrink > 1:
        hidden, tokens = first.problem.config.hidden, first.problem.tokens
        title += f"\nhidden {hidden:,} and {tokens:,} tokens stand for {hidden * slow.shrink:,.0f} and "
        title += f"{tokens * slow.shrink:,.0f}; a step takes {slow.times:,.0f} × as long, sends 1/{slow.shrink**2:,.0f}"
    figure.suptitle(title, x=0.01, ha="left")
    if any(row.counts_as for row in last):
        figure.legend(handles=[_uncounted(last)], loc="outside lower right", frameon=False)
    return _save(figure, folder / result.bench)


def draw_pairs(names: Sequence[str], real: Sequence[Spread], emulated: Sequence[Spread], folder: Path) -> list[Path]:
    """Steps on cores and on emulated devices side by side, medians with quartiles, as PNG and as SVG."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for i, (label, spreads, colour) in enumerate((("cores", real, "#777777"), ("emulated", emulated, "#1f5fa8"))):
        middle = [spread.median for spread in spreads]
        places = [place + 0.4 * i - 0.2 for place in range(len(names))]
        axes.bar(places, middle, 0.38, yerr=_error_bars(spreads), capsize=3, label=label, color=colour)
    for place, (one, other) in enumerate(zip(real, emulated, strict=True)):
        axes.annotate(f"{other.median / one.median - 1:+.1%}", (place, max(one.high, other.high)), (0, 6), **_ABOVE)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("seconds per step: median and quartiles")
    axes.margins(y=0.15)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside upper right", ncols=2)
    figure.suptitle("cuboid bench emulation: cores against emulated devices", x=0.01, ha="left")
    return _save(figure, folder / "emulation")


def rate_of(text: str) -> str:
    """
    >>> rate_of("5.867mbit")
    '5.87 Mbit/s'
    """
    shown = quantity(bits_per_second(text))
    number = shown.rstrip("kMGT")
    return f"{number} {shown[len(number) :]}bit/s"


class Bubble(NamedTuple):
    """The share of a step in which the ranks of a pipeline are idle: as measured, and as said beforehand."""

    panel: str
    schedule: str
    measured: Spread
    formula: float
    textbook: float
    planned: float | None


def draw_bubbles(title: str, bubbles: Sequence[Bubble], stem: Path) -> list[Path]:
    """A panel for each number of ranks, a bar for each schedule with its quartiles, as PNG and as SVG."""
    names = list(dict.fromkeys(bubble.panel for bubble in bubbles))
    figure = Figure(figsize=(4 + 3 * len(names), 4.5), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    marks = (("formula", "_", 900, "black"), ("textbook", "D", 30, "#d1700f"), ("planned", "x", 45, "#2e8540"))
    for axes, name in zip(panels, names, strict=True):
        here = [bubble for bubble in bubbles if bubble.panel == name]
        places, spreads = range(len(here)), [bubble.measured for bubble in here]
        heights, errors = [100 * s.median for s in spreads], 100 * np.array(_error_bars(spreads))
        axes.bar(places, heights, 0.6, yerr=errors, capsize=3, color="#6aa0d8", label="measured, quartiles")
        for what, marker, size, colour in marks:
            known = [(i, getattr(each, what)) for i, each in enumerate(here) if getattr(each, what) is not None]
            values = [100 * value for _, value in known]
            if known:
                axes.scatter([i for i, _ in known], values, size, colour, marker=marker, label=what, zorder=3)
        axes.set_xticks(places, [bubble.schedule for bubble in here], rotation=30, ha="right")
        axes.set_title(name, fontsize="medium")
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("% of a step in which ranks are idle")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=4)
    figure.suptitle(title, x=0.01, ha="left", fontsize="medium")
    return _save(figure, stem)


def draw_planned(
    title: str, names: Sequence[str], steps: Sequence[Spread], planned: Sequence[float], stem: Path
) -> list[Path]:
    """Steps as measured, with their quartiles, and as planned, as PNG and as SVG."""
    figure = Figure(figsize=(9, 1.5 + 0.6 * len(names)), layout="constrained")
    axes, places = figure.subplots(), range(len(names))
    colours = [COLOURS["pipe" if "pipe=" in name else name.partition(" ")[0]] for name in names]
    axes.barh(places, [step.median for step in steps], 0.6, xerr=_error_bars(steps), capsize=3, color=colours)
    axes.scatter(planned, places, 400, "black", marker="|", label="planned", zorder=3)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlabel("seconds per step: median and quartiles")
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside upper right")
    figure.suptitle(title, x=0.01, ha="left", fontsize="medium")
    return _save(figure, stem)


_ABOVE: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": "small"}


def _error_bars(spreads: Sequence[Spread]) -> list[list[float]]:
    """Distances from the median to the first and the third quartile."""
    return [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]


def _save(figure: Figure, stem: Path) -> list[Path]:
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=130)
    return paths


def _ways(rows: Sequence[Row]) -> dict[str, list[Row]]:
    ways: dict[str, list[Row]] = {}
    for row in rows:
        ways.setdefault(row.layout.way, []).append(row)
    return ways


def _uncounted(rows: Sequence[Row]) -> Patch:
    """The legend's entry for hatched bars."""
    kinds = " or ".join(dict.fromkeys(row.counts_as for row in rows if row.counts_as))
    most = MOST_CPU_ROUGH if kinds == "not counted" and rows[0].quick else MOST_CPU
    text = f"hatched, hollow: {kinds}, the ranks' own Python took more than {most:.0%} of the cores' time"
    return Patch(facecolor="white", edgecolor="#444444", hatch=HATCH, label=text)


def _hatch(bars: BarContainer, rows: Sequence[Row]) -> None:
    """Hatches the bars of rows that do not count."""
    for bar, row in zip(bars, rows, strict=True):
        if row.counts_as:
            bar.set(hatch=HATCH, edgecolor="white", linewidth=0)


def _lines(axes: Axes, rows: Sequence[Row], xs: dict[int, float]) -> None:
    """The fastest of each kind of layout at each place, with quartiles. Kinds are drawn a little beside each other, and
    rows that do not count hollow."""
    ways = _ways(rows)
    for i, (way, of_way) in enumerate(ways.items()):
        aside = ASIDE ** (i - (len(ways) - 1) / 2)
        fastest: dict[float, Row] = {}
        for row in of_way:
            x = xs[id(row)]
            if x not in fastest or _seconds(row) < _seconds(fastest[x]):
                fastest[x] = row
        places = sorted(fastest)
        spreads = [fastest[x].spread("step") for x in places]
        middle, where = [spread.median for spread in spreads], [x * aside for x in places]
        colour = COLOURS[way]
        axes.errorbar(where, middle, yerr=_error_bars(spreads), marker="o", capsize=3, label=way, color=colour)
        hollow = [(x, y) for x, y, place in zip(where, middle, places, strict=True) if fastest[place].counts_as]
        if hollow:
            axes.plot(*zip(*hollow, strict=True), "o", markerfacecolor="white", markeredgecolor=colour, zorder=4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="y", which="minor", labelsize="small")
    axes.set_ylabel("seconds per step, logarithmic")
    axes.legend(frameon=False, fontsize="small", ncols=2)


def _against_ranks(axes: Axes, rows: Sequence[Row], sizes: Sequence[int]) -> None:
    _lines(axes, rows, {id(row): row.ranks for row in rows})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("ranks")


def _against_rate(axes: Axes, rows: Sequence[Row]) -> None:
    rated = [row for row in rows if row.rate]
    _lines(axes, rated, {id(row): bits_per_second(row.rate) for row in rated})
    axes.xaxis.set_major_formatter(EngFormatter("bit/s"))
    axes.set_xlabel("a host's link")


def _parts(axes: Axes, rows: Sequence[Row]) -> None:
    left = [0.0] * len(rows)
    for part, shade in (("forward", 1.0), ("backward", 0.6), ("optimizer", 0.3)):
        lengths = [row.spread(part).median for row in rows]
        colours = [_lighter(COLOURS[row.layout.way], shade) for row in rows]
        _hatch(axes.barh(_names(rows), lengths, left=left, color=colours), rows)
        left = [a + b for a, b in zip(left, lengths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds per step: forward, backward, optimizer (dark to light)")


def _lighter(colour: str, shade: float) -> tuple[float, float, float]:
    """Mixed with white, where a transparent bar would show the grid."""
    red, green, blue = (1 - shade * (1 - part) for part in to_rgb(colour))
    return red, green, blue


def _speed_up(axes: Axes, rows: Sequence[Row], first: Row) -> None:
    _bars(axes, rows, [_seconds(first) / _seconds(row) for row in rows], "{:.2f}")
    axes.set_xlabel(f"speed, as a multiple of {first.layout.name}")


def _bytes(axes: Axes, rows: Sequence[Row]) -> None:
    _bars(axes, rows, [row.sent / 1e6 for row in rows], "{:.1f}")
    least = step_bytes(rows[0].problem, rows[0].ranks) / 1e6
    label = "sum of each matmul's lower bound (Al Daas et al.);\nmatmuls that share a gathered operand can send less"
    axes.axvline(least, color="black", linestyle="--", linewidth=1, label=label)
    axes.legend(frameon=False, fontsize="small", loc="lower left", bbox_to_anchor=(0, 1))
    axes.set_xlabel("sent by a rank per step (MB)")


def _memory(axes: Axes, rows: Sequence[Row]) -> None:
    _bars(axes, rows, [row.peak / 1e6 for row in rows], "{:.1f}")
    axes.set_xlabel("peak memory of a rank in a step (MB)")


def _bars(axes: Axes, rows: Sequence[Row], values: Sequence[float], form: str) -> None:
    bars = axes.barh(_names(rows), values, color=[COLOURS[row.layout.way] for row in rows])
    _hatch(bars, rows)
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # so that no line runs through a number
    axes.bar_label(bars, [form.format(value) for value in values], padding=4, fontsize="small", bbox=behind)
    axes.invert_yaxis()
    axes.margins(x=0.12)


def _seconds(row: Row) -> float:
    return row.spread("step").median


def _names(rows: Sequence[Row]) -> list[str]:
    return [row.layout.name for row in rows]
