"""Results of a benchmark, ready for JSON: every sample, median and quartiles, the settings and the machine."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch

from cuboid import __version__
from cuboid.bench.bound import step_bytes
from cuboid.bench.layouts import Layout
from cuboid.bench.planned import planned_seconds
from cuboid.bench.problem import Problem
from cuboid.bench.turn import Count, Times, slowest
from cuboid.device import gpu_names
from cuboid.emulate.slow_motion import SlowMotion

MOST_CPU, MOST_CPU_ROUGH = (
    0.15,
    0.3,
)  # most of the cores' time that ranks may take beside emulated devices; with --quick


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of several samples."""

    median: float
    low: float  # the first quartile
    high: float  # the third

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass
class Row:
    """One layout on `ranks` ranks over links of one rate ("" is unshaped)."""

    layout: Layout
    problem: Problem
    ranks: int
    rate: str
    bits: float  # per second, of a host's link; 0 if unshaped
    counts: list[Count]  # of every rank
    slow: SlowMotion | None = None  # on emulated devices
    quick: bool = False  # rough figures suffice
    samples: list[dict[str, float]] = field(default_factory=list)  # of every timed step

    def add(self, ranks: Sequence[Sequence[Times]]) -> None:
        """Adds a turn's steps, as every rank timed them. A step takes as long as on its slowest rank."""
        for last, step in zip(slowest(ranks), zip(*ranks, strict=True), strict=True):
            crossed = max(times.crossed for times in step)
            hosts = [step[i : i + self._per_host] for i in range(0, len(step), self._per_host)]
            inside = max(sum(times.left for times in host) - host[0].crossed for host in hosts)
            self.samples.append(
                {
                    "step": last.step,
                    "forward": last.forward,
                    "backward": last.backward,
                    "optimizer": last.optimizer,
                    "exposed": sum(times.exposed for times in step) / len(step),
                    "crossed": crossed,
                    "inside": max(inside, 0),
                    "network": 8 * crossed / self.bits / last.step if self.bits else 0.0,
                    "cpu": sum(times.cpu for times in step),
                    "busy": max(times.busy for times in step),
                    "late": max(times.late for times in step),
                }
            )

    @property
    def _per_host(self) -> int:
        return self.slow.hardware.node if self.slow is not None else self.ranks

    @property
    def counts_as(self) -> str:
        """How reliable figures of emulated devices are; "" if ranks had CPU time to spare, and for real ones."""
        if self.slow is None or not self.samples:
            return ""
        share = self.cpu_share
        return "" if share <= MOST_CPU else "rough" if self.quick and share <= MOST_CPU_ROUGH else "not counted"

    @property
    def cpu_share(self) -> float:
        """Share of the cores' time that ranks used. On emulated devices it should be small."""
        return self.spread("cpu").median / (os.cpu_count() or 1) / self.spread("step").median

    @cached_property
    def planned(self) -> float | None:
        """Seconds per step by the planner, for the emulated figures; None if they lack links."""
        if self.slow is None or self.slow.hardware.lacks(self.ranks):
            return None
        return planned_seconds(self.slow.hardware, self.layout, self.problem)

    def spread(self, name: str) -> Spread:
        return Spread.of([sample[name] for sample in self.samples])

    @property
    def sent(self) -> int:
        """Bytes that the busiest rank sends in a step, by the ledger's count."""
        return max(sum(sent for kinds in c.traffic.values() for _, sent in kinds.values()) for c in self.counts)

    @property
    def peak(self) -> int:
        return max(count.peak for count in self.counts)

    @property
    def as_predicted(self) -> bool:
        """Whether every rank's calls and bytes equal the formula's."""
        return all(count.traffic == count.predicted for count in self.counts)

    def export(self) -> dict[str, Any]:
        first = self.counts[0]
        return {
            "layout": self.layout.name,
            "way": self.layout.way,
            "shape": self.layout.shape.sizes,
            "order": self.layout.shape.order,
            "ranks": self.ranks,
            "rate": self.rate,
            "problem": self.problem.export(),
            "schedule": asdict(self.layout.schedule(self.problem)),
            "micro_batches": self.layout.count(self.problem),
            "recompute": self.layout.chosen(self.problem).recompute,
            "policy": asdict(self.layout.chosen(self.problem).policy),
            "loss": first.loss,
            "flops": max(count.flops for count in self.counts),
            "bytes_sent": self.sent,
            "bytes_equal_formula": self.as_predicted,
            "lower_bound_bytes": step_bytes(self.problem, self.ranks),
            "traffic_rank_0": first.traffic,
            "peak_bytes": self.peak,
            "parameter_bytes": max(count.parameters for count in self.counts),
            "emulated": str(self.slow) if self.slow is not None else None,
            "planned_seconds": self.planned,
            "cpu_share": self.cpu_share if self.samples else None,
            "counts_as": self.counts_as,
            "spread": {name: asdict(self.spread(name)) for name in self.samples[0]} if self.samples else {},
            "samples": self.samples,
        }


@dataclass
class BenchReport:
    """The head of every benchmark's JSON. Create it before measuring, because it records the machine's load."""

    bench: str
    settings: dict[str, Any]
    began: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    machine: dict[str, Any] = field(default_factory=lambda: machine())
    clock: float = field(default_factory=time.monotonic)

    def write(self, path: Path, found: dict[str, Any]) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        first = {
            "bench": self.bench,
            "command": " ".join(["cuboid", *sys.argv[1:]]),
            "commit": commit(),
            "began": self.began,
            "seconds": round(time.monotonic() - self.clock, 1),
            "settings": self.settings,
            "machine": self.machine | {"load_at_end": os.getloadavg()},
        }
        path.write_text(json.dumps(first | found, indent=1) + "\n", "utf-8")
        return path


@dataclass
class Result(BenchReport):
    rows: list[Row] = field(default_factory=list)

    def save(self, folder: Path) -> Path:
        return self.write(folder / f"{self.bench}.json", {"rows": [row.export() for row in self.rows]})


def commit() -> str:
    """The commit of the sources that ran, with "+" if they have changes; "" if they are not a clone."""
    where = Path(__file__).parent
    git = ["git", "-C", str(where)]
    try:
        found = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", str(where.parent)], capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found + "+" * bool(changed.stdout)


def machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "gpus": gpu_names(),
        "versions": {"cuboid": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "load_at_start": os.getloadavg(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()
