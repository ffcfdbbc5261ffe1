"""Compares emulated devices with the cores that they stand for.

One rank on each of two cores, on hosts of their own. Steps on the cores and on emulated devices with what `cuboid
calibrate` measured of these cores take turns, over links on which communication takes as long as compute, with the
schedule off and on.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from cuboid.bench.layouts import Layout, begin_with
from cuboid.bench.overlap import UNSHAPED, steps
from cuboid.bench.plot import draw_pairs
from cuboid.bench.problem import Problem
from cuboid.bench.result import BenchReport, Spread
from cuboid.bench.turn import Times, slowest
from cuboid.emulate.slow_motion import SlowMotion, parse
from cuboid.mesh.cuboid import Cuboid
from cuboid.model.config import ModelConfig
from cuboid.plan.calibrate import calibrate
from cuboid.plan.calibrate.timing import Settings
from cuboid.run.cluster import Cluster, try_hosts
from cuboid.run.launch import Pool

SHAPES = (Cuboid(2, 1, 1), Cuboid(1, 2, 1), Cuboid(1, 1, 2))
MOST_APART = 0.1  # largest difference, relative to the real step
SEQ = 128


@dataclass(frozen=True)
class Pair:
    """One shape, schedule off or on: steps of the slowest rank, on cores and on emulated devices."""

    shape: str
    schedule: str
    rate: str
    real: list[Times]
    emulated: list[Times]

    @property
    def apart(self) -> float:
        """The difference relative to the real step, in medians."""
        real, emulated = self.spreads()
        return emulated.median / real.median - 1

    def spreads(self) -> tuple[Spread, Spread]:
        """Steps on cores, and on emulated devices."""
        real, emulated = (Spread.of([times.step for times in each]) for each in (self.real, self.emulated))
        return real, emulated

    def cells(self) -> list[str]:
        found = []
        for each, step in zip((self.real, self.emulated), self.spreads(), strict=True):
            found += [f"{step.median:.3f}", f"{step.low:.3f}–{step.high:.3f}"]
            found += [f"{median(times.exposed for times in each):.3f}"]
        return [self.shape, self.schedule, self.rate, *found, f"{self.apart:+.1%}"]

    def export(self) -> dict[str, Any]:
        samples = {name: [asdict(times) for times in getattr(self, name)] for name in ("real", "emulated")}
        return {"shape": self.shape, "schedule": self.schedule, "rate": self.rate, "apart": self.apart} | samples


COLUMNS = ["cuboid", "schedule", "rate", "real", "quartiles", "waited", "emulated", "quartiles", "waited", "apart"]


def measure(shape: Cuboid, problem: Problem, rounds: int, slow: SlowMotion, console: Console) -> list[Pair]:
    off, on = (Layout("cuboid", shape, overlap) for overlap in (False, True))
    with Cluster(shape.ranks, UNSHAPED) as cluster, Pool(shape.ranks, cluster) as pool:
        (probe,) = slowest(pool.run(steps, off, problem, 1, slow))
    rate = f"{8e-6 * probe.crossed / probe.busy:.1f}mbit"
    pairs = [Pair(str(shape), name, rate, [], []) for name in ("off", "on")]
    with Cluster(shape.ranks, rate) as cluster, Pool(shape.ranks, cluster) as pool:
        for i in range(rounds):
            console.print(f"{shape}, {rate} per host: round {i + 1} of {rounds}", highlight=False)
            for pair, layout in zip(pairs, (off, on), strict=True):
                both = [(pair.real, None), (pair.emulated, slow)]
                for steps_so_far, device in both if i % 2 == 0 else reversed(both):
                    steps_so_far += slowest(pool.run(steps, layout, problem, 1, device))
    return pairs


def emulation(
    rounds: int, out: Path, console: Console, only: Sequence[str], layers: int, hidden: int, batch: int, figures: str
) -> bool:
    """Returns whether all emulated steps take as long as real ones. `figures`: a file of `cuboid calibrate` for two
    ranks; without it the cores are calibrated first."""
    model = ModelConfig("gpt2", layers, hidden, heads=16, vocab=512, context=SEQ, tied=False)
    problem = Problem(model, batch, SEQ)
    names = begin_with(only, [str(shape) for shape in SHAPES])
    try_hosts("bench emulation cannot do without hosts, which need root and iproute2")
    out.mkdir(parents=True, exist_ok=True)
    path = Path(figures) if figures else _calibrated(problem, out / "core.json", console)
    slow = parse(str(path))
    report = BenchReport("emulation", {"rounds": rounds, "figures": slow.hardware.export()})
    pairs = [pair for shape in SHAPES if str(shape) in names for pair in measure(shape, problem, rounds, slow, console)]
    good = _shown(pairs, slow, console)
    real, emulated = zip(*(pair.spreads() for pair in pairs), strict=True)
    pictures = draw_pairs([f"{pair.shape}\nschedule {pair.schedule}" for pair in pairs], real, emulated, out)
    found = {"problem": problem.export(), "rows": [pair.export() for pair in pairs]}
    for written in (report.write(out / "emulation.json", found), *pictures):
        console.print(str(written.absolute()), soft_wrap=True, highlight=False)
    return good


def _calibrated(problem: Problem, path: Path, console: Console) -> Path:
    """Write this machine's figures for two ranks."""
    console.print("Calibrating the cores", highlight=False)
    settings = Settings(problem.config.replace(layers=1), max(problem.tokens // 2, 64))
    with Pool(2) as pool:
        pool.run(calibrate, settings, "core")[0].hardware.save(path)
    return path


def _shown(pairs: Sequence[Pair], slow: SlowMotion, console: Console) -> bool:
    """Print all pairs. Returns whether all emulated steps take as long as real ones."""
    title = f"Seconds per step, on cores and emulated: {slow.without_links()}"
    table = Table(*COLUMNS, title=title, title_justify="left")
    for pair in pairs:
        table.add_row(*pair.cells())
    console.print(table)
    worst = max(pairs, key=lambda pair: abs(pair.apart))
    good = abs(worst.apart) <= MOST_APART
    verdict = "at most" if good else "emulated devices do not stand for these cores: more than"
    line = f"Medians differ by {abs(worst.apart):.1%} ({worst.shape}, {worst.schedule}), {verdict} {MOST_APART:.0%}."
    console.print(line, highlight=False)
    return good
