"""Plots of a run, drawn without a display."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter
from numpy.typing import NDArray

BLUE, ORANGE, GREEN, GREY = "#1f5fa8", "#d1700f", "#2e8540", "#777777"


def plot_run(metrics: Sequence[Mapping[str, float]], path: Path, unigram: float | None = None) -> None:
    """Loss, throughput and exposed communication over the steps, from the lines of `RunFolder.metrics`.

    `unigram` is the entropy of single tokens in nats: the loss of a model that knows only their frequencies.
    """
    figure = Figure(figsize=(8, 7), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1))
    steps, losses = _series(metrics, "loss")
    top.plot(steps, losses, color=BLUE, alpha=0.3, linewidth=1, label="train, each step")
    top.plot(steps, _smooth(losses), color=BLUE, linewidth=2, label="train, smoothed")
    held_out = _series(metrics, "val_loss")
    if held_out[0].size:
        top.plot(*held_out, "o-", color=ORANGE, markersize=5, linewidth=1, label="validation")
    if unigram is not None:
        top.axhline(unigram, color=GREY, linestyle="--", linewidth=1, label=f"token frequencies alone {unigram:.2f}")
    top.set_title(f"Run {path.absolute().parent.name}", loc="left")
    top.set_ylabel("loss (nats per token)")
    top.legend(frameon=False)
    _throughput(middle, *_series(metrics, "tokens_per_s"))
    bottom.plot(*_series(metrics, "exposed"), color=ORANGE, linewidth=1)
    bottom.set_ylim(0, 1)
    bottom.yaxis.set_major_formatter(PercentFormatter(1))
    bottom.set_ylabel("exposed\ncommunication")
    _finish(figure, (top, middle, bottom), path)


def plot_curves(curves: Mapping[str, Sequence[float]], path: Path, title: str) -> None:
    """Loss curves, and below them the difference of each from the first, relative to it."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    names = list(curves)
    first = np.asarray(curves[names[0]], float)
    for i, name in enumerate(names):
        curve = np.asarray(curves[name], float)
        steps = np.arange(1, len(curve) + 1)
        # Curves that agree cover each other: later ones are thinner, so that all can be seen.
        top.plot(steps, curve, color=f"C{i}", linewidth=max(5 - 1.5 * i, 1.2), label=name)
        if i == 0:
            continue
        both = min(len(first), len(curve))
        apart = np.abs(curve[:both] - first[:both]) / np.abs(first[:both])
        worst = np.max(apart, initial=0.0)
        same = int((apart == 0).sum())
        label = f"{name}: at most {worst:.1e}; 0 in {same} steps" if worst else f"{name}: 0 in every step"
        bottom.plot(steps[:both], np.where(apart > 0, apart, np.nan), ".-", color=f"C{i}", linewidth=1, label=label)
    top.set_title(title, loc="left")
    top.set_ylabel("loss (nats per token)")
    top.legend(frameon=False)
    bottom.set_yscale("log")
    bottom.set_ylabel(f"relative difference\nto {names[0]}\n(no point: it is 0)")
    if len(names) > 1:
        bottom.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize="small")
    _finish(figure, (top, bottom), path)


def _throughput(axes: Axes, steps: NDArray[np.float64], rates: NDArray[np.float64]) -> None:
    axes.plot(steps, rates, color=GREEN, linewidth=1)
    if np.isfinite(rates).any():
        axes.set_ylim(0, 1.15 * float(np.nanmax(rates)))
        middle = float(np.nanmedian(rates))
        axes.axhline(middle, color=GREY, linestyle=":", linewidth=1, label=f"median {middle:,.0f}")
        axes.legend(frameon=False, loc="lower right")
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylabel("tokens/s")


def _series(metrics: Sequence[Mapping[str, float]], name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rows = [(row["step"], row[name]) for row in metrics if name in row]
    steps, values = np.array(rows, float).reshape(-1, 2).T
    return steps, values


def _smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of each value's neighbours, weighted by nearness; values that are not finite are left out."""
    kernel = np.bartlett(2 * (len(values) // 40) + 3)[1:-1]
    finite = np.isfinite(values)
    weight = np.convolve(finite, kernel, "same") if len(values) else values
    total = np.convolve(np.where(finite, values, 0), kernel, "same") if len(values) else values
    return np.divide(total, weight, out=np.full_like(values, np.nan), where=weight > 0)


def _finish(figure: Figure, panels: Sequence[Axes], path: Path) -> None:
    for axes in panels:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    figure.align_ylabels()
    figure.savefig(path, dpi=130)
