"""A ranking as a picture: steps and what they consist of, memory, and the best cuboid over devices × batch."""

from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cuboid.plan.search import Plan, Ranking, rank

MOST_BARS = 10
COLOURS = ("#1f5fa8", "#6aa0d8", "#2e8540", "#c9a227", "#d1700f", "#8a4f9e", "#c79bd4", "#777777", "#b0a080", "#444444")
DEVICES, BATCHES = (0.25, 0.5, 1, 2, 4), (0.25, 1, 4)  # of the map, times those of the ranking


def draw(ranking: Ranking, folder: Path) -> list[Path]:
    """Two figures, as PNG and as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    bars = list(ranking.plans[:MOST_BARS])
    bars += [plan for plan in ranking.corners.values() if plan and plan not in bars]
    _stack(left, bars, [plan.compute | _waits(plan) for plan in bars], "seconds a step")
    _stack(right, bars, [{kind: size / 1e9 for kind, size in plan.memory.items()} for plan in bars], "GB a device")
    right.axvline(ranking.hardware.memory / 1e9, color="#b00020", linewidth=1)
    left.set_yticks(range(len(bars)), [_label(ranking, plan) for plan in bars])
    left.invert_yaxis()
    figure.suptitle(f"{ranking.devices} devices of {ranking.hardware.name}", x=0.01, ha="left")
    over = Figure(figsize=(8, 5), layout="constrained")
    _map(over.subplots(), ranking)
    paths = []
    for name, each in (("plan", figure), ("plan-map", over)):
        for kind in ("png", "svg"):
            paths.append(folder / f"{name}.{kind}")
            each.savefig(paths[-1], dpi=130)
    return paths


def _waits(plan: Plan) -> dict[str, float]:
    return {f"waiting for {axis}": seconds for axis, seconds in plan.exposed.items() if seconds}


def _label(ranking: Ranking, plan: Plan) -> str:
    names = [name for name, corner in ranking.corners.items() if corner is plan]
    return f"{plan.cuboid} {', '.join(names)}".rstrip()


def _stack(axes: Axes, plans: list[Plan], parts: list[dict[str, float]], label: str) -> None:
    names = list(dict.fromkeys(name for part in parts for name in part))
    start = [0.0] * len(plans)
    for i, name in enumerate(names):
        widths = [part.get(name, 0.0) for part in parts]
        axes.barh(range(len(plans)), widths, left=start, label=name, color=COLOURS[i % len(COLOURS)])
        start = [a + b for a, b in zip(start, widths, strict=True)]
    axes.set_xlabel(label)
    axes.legend(fontsize="x-small")
    axes.spines[["top", "right"]].set_visible(False)


def _map(axes: Axes, ranking: Ranking) -> None:
    """The best cuboid and its MFU for fewer and more devices and sequences."""
    devices = [n for f in DEVICES if (n := round(ranking.devices * f)) >= 1]
    batches = [n for f in BATCHES if (n := round(ranking.work.batch * f)) >= 1]
    shares = []
    for row, batch in enumerate(batches):
        shares.append([float("nan")] * len(devices))
        for column, count in enumerate(devices):
            found = rank(ranking.hardware, replace(ranking.work, batch=batch), count)
            text = "does not fit"
            if found.plans:
                best = found.plans[0]
                shares[row][column] = found.mfu(best)
                text = f"{best.cuboid}\n{found.mfu(best):.0%}".replace(" × data=", "·")
            axes.text(column, row, text, ha="center", va="center", fontsize="x-small")
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(devices)), [str(n) for n in devices])
    axes.set_yticks(range(len(batches)), [str(n * ranking.work.micro_batches) for n in batches])
    axes.set_xlabel("devices")
    axes.set_ylabel("sequences a step")
    axes.set_title("The best cuboid and its MFU", loc="left")
