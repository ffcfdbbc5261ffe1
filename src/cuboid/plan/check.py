"""Compares results of `cuboid bench layouts` with predictions: the error of each step, and of the plan's choice."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cuboid.mesh.cuboid import Cuboid
from cuboid.model.config import ModelConfig, RopeScaling
from cuboid.model.cuboid import Policy
from cuboid.plan.hardware import Hardware, Link
from cuboid.plan.layer import Choice, Work
from cuboid.plan.search import predict
from cuboid.run.cluster import bits_per_second
from cuboid.step.schedule import Schedule

MOST_ERROR, MOST_REGRET = 0.15, 0.05


@dataclass(frozen=True)
class CheckedStep:
    """One cuboid's step, in seconds."""

    cuboid: str
    measured: float
    low: float
    high: float
    predicted: float

    @property
    def absolute_error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Check:
    """The check of one file and network. Errors are of the ratio to a reference that took turns with all others."""

    path: str
    rate: str
    reference: str
    steps: list[CheckedStep]

    def error(self, step: CheckedStep) -> float:
        base = next(each for each in self.steps if each.cuboid == self.reference)
        return (step.predicted / base.predicted) / (step.measured / base.measured) - 1

    @property
    def mean_error(self) -> float:
        """The mean over all but the reference, which has none."""
        others = [abs(self.error(step)) for step in self.steps if step.cuboid != self.reference]
        return sum(others) / max(len(others), 1)

    @property
    def choice(self) -> CheckedStep:
        return min(self.steps, key=lambda step: step.predicted)

    @property
    def fastest(self) -> CheckedStep:
        return min(self.steps, key=lambda step: step.measured)

    @property
    def regret(self) -> float:
        return self.choice.measured / self.fastest.measured - 1

    @property
    def spread(self) -> float:
        """The larger interquartile range of the fastest and of the choice, relative to its time."""
        return max((step.high - step.low) / step.measured for step in (self.choice, self.fastest))

    @property
    def ok(self) -> bool:
        return self.mean_error <= MOST_ERROR and self.regret <= max(MOST_REGRET, self.spread)

    def export(self) -> dict[str, Any]:
        names = ("mean_error", "regret", "spread", "ok")
        return asdict(self) | {name: getattr(self, name) for name in names} | {"choice": self.choice.cuboid}


def check(path: Path, hw: Hardware) -> list[Check]:
    """Returns a check for every network in the file."""
    try:
        found = json.loads(path.read_text("utf-8"))
        rows = [row for row in found["rows"] if row["way"] in ("cuboid", "pipe") and row["spread"]]
        per_host = found["settings"].get("per_host", 1)
        rates = list(dict.fromkeys(row["rate"] for row in rows))
        return [_check(path, hw, [row for row in rows if row["rate"] == rate], rate, per_host) for rate in rates]
    except KeyError as error:
        raise ValueError(f"{path} is not a result of cuboid bench layouts: it has no {error}") from None
    except (OSError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a result of cuboid bench layouts: {error}") from None


def _check(path: Path, hw: Hardware, rows: Sequence[dict[str, Any]], rate: str, per_host: int) -> Check:
    if rate:
        hw = shaped(hw, bits_per_second(rate), per_host)
    steps = [_step(hw, row) for row in rows]
    even = min(rows, key=lambda row: max(row["shape"].values()))
    return Check(str(path), rate, _name(even), steps)


def _name(row: dict[str, Any]) -> str:
    return str(Cuboid.stored(row["shape"]))


def _step(hw: Hardware, row: dict[str, Any]) -> CheckedStep:
    problem = row["problem"]
    cuboid = Cuboid.stored(row["shape"], row["order"])
    known = {each.name for each in fields(ModelConfig)}
    sizes = {key: value for key, value in problem["config"].items() if key in known}
    if sizes.get("rope_scaling"):
        sizes["rope_scaling"] = RopeScaling(**sizes["rope_scaling"])
    config, batch, seq, schedule = (
        ModelConfig(**sizes),
        problem["batch"],
        problem["seq"],
        Schedule.stored(row["schedule"]),
    )
    policy = Policy(**{each.name: problem["policy"][each.name] for each in fields(Policy)})
    count = row.get("micro_batches", 1)
    work = Work(config, batch // count, seq, "fp32", count)
    predicted = predict(hw, work, cuboid, Choice(row.get("recompute", "none"), policy, schedule))
    step = row["spread"]["step"]
    return CheckedStep(_name(row), step["median"], step["low"], step["high"], predicted.seconds)


def shaped(hw: Hardware, bits: float, node: int) -> Hardware:
    """The same ranks on hosts of `node` each, whose links have `bits` per second. A byte takes time on the wire and in
    the processor. Ranks that share cores do both at once; else compute is slowed by the processor's share."""
    wire, share = bits / 8, 0.0
    name = f"{hw.name}, {bits / 1e6:g} Mbit/s"
    if hw.cores:
        across = {kind: replace(link, bandwidth=link.bandwidth * node) for kind, link in hw.across.items()}
        return replace(hw, name=name, node=node, across=across, wire=wire)
    across = {}
    for kind, link in hw.inside.items():
        bandwidth = 1 / (1 / (link.bandwidth * node) + 1 / wire)
        across[kind] = Link(link.base, link.hop, bandwidth)
        share = max(share, bandwidth / (link.bandwidth * node))
    slowdown = hw.slowdown if node > 1 else hw.slowdown * share
    return replace(hw, name=name, node=node, across=across, slowdown=slowdown)


def show(checks: Sequence[Sequence[Check]], console: Console, as_json: bool) -> None:
    flat = [each for of_file in checks for each in of_file]
    if as_json:
        print(json.dumps([each.export() for each in flat], indent=1))
        return
    for each in flat:
        title = f"{each.path}, {each.rate or 'unshaped'}; relative to {each.reference}"
        table = Table(
            "cuboid", "measured", "predicted", "off by", "relative, off by", title=title, title_justify="left"
        )
        for step in sorted(each.steps, key=lambda step: step.measured):
            cells = f"{step.measured:.3g} s", f"{step.predicted:.3g} s", f"{step.absolute_error:+.0%}"
            table.add_row(step.cuboid, *cells, f"{each.error(step):+.0%}")
        console.print(table)
        console.print(
            f"Mean error {each.mean_error:.0%} (at most {MOST_ERROR:.0%}); the plan takes {each.choice.cuboid}, "
            f"{each.regret:.0%} slower than the fastest, {each.fastest.cuboid} "
            f"(at most {max(MOST_REGRET, each.spread):.0%}): "
            f"{'good' if each.ok else 'MISSES'}.",
            highlight=False,
        )
