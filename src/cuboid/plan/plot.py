"""Plots of a ranking: steps and what they consist of, memory, and the best cuboid over devices × batch."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cuboid.plan.explain import gigabytes
from cuboid.plan.layer import Work
from cuboid.plan.search import Plan, Ranking, rankings, timeline

MOST_BARS = 10
OTHER = "copies and sums"
#: Work is blue and green, waits are warm, so that a glance tells one from the other.
COLOURS = {
    "matmuls": "#1f5fa8",
    "attention": "#6aa0d8",
    "elementwise": "#2e8540",
    "head": "#93c793",
    "optimizer": "#8c8c8c",
    OTHER: "#c4c4c4",
    "waiting for x": "#f2b134",
    "waiting for y": "#e07b1a",
    "waiting for z": "#c0392b",
    "waiting for replicas": "#8a4f9e",
    "waiting for pipe": "#5c3a21",
    "parameters": "#1f5fa8",
    "gradients": "#6aa0d8",
    "activations": "#e07b1a",
    "buffers": "#f2b134",
}
DEVICES, BATCHES = (0.25, 0.5, 1, 2, 4), (0.25, 1, 4)  # of the map, times those of the ranking


def draw(ranking: Ranking, folder: Path) -> list[Path]:
    """Two figures, as PNG and as SVG."""
    bars = list(ranking.plans[:MOST_BARS])
    for plan in ranking.corners.values():
        if plan is not None and plan not in bars:
            bars.append(plan)
    figure = Figure(figsize=(13, 2.2 + 0.34 * len(bars)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _stack(left, bars, [seconds(plan) for plan in bars], "seconds per step")
    _stack(right, bars, [{kind: size / 1e9 for kind, size in plan.memory.items()} for plan in bars], "GB per device")
    has = ranking.hardware.memory / 1e9
    if has < 2 * right.get_xlim()[1]:
        right.axvline(has, color="#b00020", linewidth=1.5, label="a device's memory")
        right.set_xlim(0, max(right.get_xlim()[1], 1.04 * has))
    else:
        right.set_xlabel(f"GB per device, which has {gigabytes(ranking.hardware.memory)}")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=4, frameon=False)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=3, frameon=False)
    left.set_yticks(range(len(bars)), [_label(ranking, plan) for plan in bars])
    left.invert_yaxis()
    what = "Fastest first" if len(bars) > 1 else str(bars[0].cuboid)
    figure.suptitle(
        f"{what}: step time and memory on {ranking.devices} × {ranking.hardware.name}, as planned", x=0.01, ha="left"
    )
    over = Figure(figsize=(9, 5), layout="constrained")
    _map(over.subplots(), ranking)
    paths, figures = [], {"plan": figure, "plan-map": over}
    if bars[0].places:
        figures["plan-pipeline"] = Figure(figsize=(13, 1.5 + 0.4 * len(bars[0].places)), layout="constrained")
        _timeline(figures["plan-pipeline"].subplots(), ranking.work, bars[0])
    for name, each in figures.items():
        for kind in ("png", "svg"):
            paths.append(folder / f"{name}.{kind}")
            each.savefig(paths[-1], dpi=130)
    return paths


def _timeline(axes: Axes, work: Work, plan: Plan) -> None:
    """A line for every place of a pipe: its moves, by micro-batch; those of every other of its stages are paler."""
    colours = {"F": "#6aa0d8", "B": "#2e8540", "W": "#f2b134"}
    names = {"F": "forward", "B": "backward", "W": "weight gradients"}
    drawn: set[str] = set()
    for each in timeline(work, plan):
        kind, width = each["move"], each["end"] - each["start"]
        label = None if kind in drawn else names[kind]
        drawn.add(kind)
        bar = axes.barh(each["place"], width, left=each["start"], height=0.8, label=label, color=colours[kind])
        bar[0].set(edgecolor="white", linewidth=0.5, alpha=0.65 if each["stage"] // len(plan.places) % 2 else 1.0)
        if len(plan.places) * work.micro_batches <= 256:
            axes.text(each["start"] + width / 2, each["place"], each["micro_batch"], ha="center", va="center", size=7)
    axes.set_yticks(range(len(plan.places)), [f"place {i}" for i in range(len(plan.places))])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(loc="upper right", ncols=3, frameon=False, bbox_to_anchor=(1, 1.15))
    axes.set_title(f"{plan.cuboid}, {plan.choice.schedule.pipeline}: {plan.bubble:.1%} idle", loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def seconds(plan: Plan) -> dict[str, float]:
    """Seconds of a step by kind: those with a colour, and the rest as one."""
    waits = {f"waiting for {axis}": value for axis, value in plan.exposed.items()}
    found = {name: (plan.compute | waits).get(name, 0.0) for name in COLOURS if name not in plan.memory}
    found["optimizer"] = plan.compute.get("optimizer", 0.0)
    found[OTHER] = plan.seconds - sum(value for name, value in found.items() if name != OTHER)
    return found


def _label(ranking: Ranking, plan: Plan) -> str:
    names = [name for name, corner in ranking.corners.items() if corner is plan]
    return f"{plan.cuboid} {', '.join(names)}".rstrip()


def _stack(axes: Axes, plans: list[Plan], parts: list[dict[str, float]], title: str) -> None:
    start = [0.0] * len(plans)
    longest = max(sum(part.values()) for part in parts)
    for name, colour in COLOURS.items():
        widths = [part.get(name, 0.0) for part in parts]
        if max(widths) > 0.002 * longest:  # else it would be invisible
            axes.barh(range(len(plans)), widths, left=start, label=name, color=colour)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    axes.set_xlabel(title)
    axes.set_xlim(0, 1.04 * axes.get_xlim()[1])
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _map(axes: Axes, ranking: Ranking) -> None:
    """The best cuboid and its MFU for fewer and more devices and sequences."""
    hw = ranking.hardware
    devices = [n for f in DEVICES if (n := round(ranking.devices * f)) >= 1 and not hw.lacks(n)]
    batches = [n for f in BATCHES if (n := round(ranking.work.batch * f)) >= 1]
    cells = [(count, batch) for batch in batches for count in devices]
    found = rankings(hw, ranking.work, cells, pipeline=ranking.pipeline)
    shares = [each.mfu(each.plans[0]) if each.plans else float("nan") for each in found]
    for i, each in enumerate(found):
        row, column = divmod(i, len(devices))
        text = "does not fit"
        if each.plans:
            text = f"{each.plans[0].cuboid}\n{shares[i]:.0%}".replace(" ", "\n")
        axes.text(column, row, text, ha="center", va="center", fontsize="small")
    axes.imshow(np.reshape(shares, (len(batches), -1)), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(devices)), [str(n) for n in devices])
    axes.set_yticks(range(len(batches)), [str(n * ranking.work.micro_batches) for n in batches])
    axes.set_xlabel("devices")
    axes.set_ylabel("sequences per step")
    axes.set_title(f"The best cuboid x,y,z with its replicas and pipe, and its MFU, {hw.name}", loc="left")
