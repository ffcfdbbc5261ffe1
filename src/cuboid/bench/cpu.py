"""The overhead of a step: CPU seconds of all ranks, against those of one device plus those of the collectives alone.

Links are not shaped, so ranks only wait for cores. A step without overhead would take exactly the sum.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from cuboid.bench.bare import bare, messages
from cuboid.bench.layouts import Layout, begin_with
from cuboid.bench.network import feasible
from cuboid.bench.problem import Problem
from cuboid.bench.result import BenchReport, Spread
from cuboid.bench.turn import turn
from cuboid.mesh.cuboid import Cuboid
from cuboid.model.config import ModelConfig
from cuboid.run.launch import Pool

WARM = 5  # steps of a turn that do not count: they allocate the memory that later ones reuse
STEPS = 5  # steps of a turn that count


@dataclass(frozen=True)
class Lean:
    """CPU seconds, of all ranks together; every sample."""

    name: str
    steps: list[float]
    serial: list[float]  # one device's steps
    bare: list[float]  # the step's collectives alone
    bytes: int  # sent by all ranks

    @property
    def step(self) -> Spread:
        return Spread.of(self.steps)

    @property
    def least(self) -> float:
        return median(self.serial) + median(self.bare)

    @property
    def ratio(self) -> float:
        return self.step.median / self.least

    @property
    def nanoseconds(self) -> float:
        """Per byte of the bare collectives."""
        return 1e9 * median(self.bare) / self.bytes

    def export(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "step": asdict(self.step),
            "serial": median(self.serial),
            "bytes": self.bytes,
            "nanoseconds": self.nanoseconds,
            "least": self.least,
            "ratio": self.ratio,
            "samples": {"step": self.steps, "serial": self.serial, "bare": self.bare},
        }


def cpu(
    ranks: int, rounds: int, out: Path, console: Console, only: Sequence[str] = ("",), hidden: int = 1024
) -> list[Lean]:
    """Measures the cuboids of this many ranks whose names start with one of `only`."""
    model = ModelConfig("gpt2", layers=2, hidden=hidden, heads=16, vocab=512, context=256, tied=False)
    problem = Problem(model, 16, 256, apart=False)
    one = Layout("serial", Cuboid())
    able = {each.name: each for each in (Layout("cuboid", shape) for shape in feasible(problem, ranks))}
    many = [able[name] for name in begin_with(only, list(able))]
    report = BenchReport("cpu", {"ranks": ranks, "rounds": rounds, "warm": WARM, "steps": STEPS})
    steps: dict[Layout, list[float]] = {each: [] for each in (one, *many)}
    bares: dict[Layout, list[float]] = {each: [] for each in many}
    with Pool(1) as alone, Pool(ranks) as together:
        sent = {each: together.run(messages, each, problem) for each in many}
        for i in range(rounds):
            console.print(f"round {i + 1} of {rounds}", highlight=False)
            for each in (one, *many) if i % 2 == 0 else (*reversed(many), one):
                times = (alone if each is one else together).run(turn, each, problem, WARM + STEPS, False)
                steps[each] += [sum(rank.cpu for rank in step) for step in zip(*times, strict=True)][WARM:]
                if each is not one:
                    played = together.run(bare, each.shape, sent[each])
                    bares[each] += [sum(ranks) for ranks in zip(*played, strict=True)]
    found = []
    for each in many:
        bytes_sent = sum(message.bytes for rank in sent[each] for message in rank)
        found.append(Lean(each.name, steps[each], steps[one], bares[each], bytes_sent))
    report.write(out / "cpu.json", {"problem": problem.export(), "rows": [each.export() for each in found]})
    columns = ("layout", "CPU s per step", "one device", "sent, MB", "ns per byte", "least", "step / least")
    table = Table(*columns, title="CPU seconds per step, all ranks together, links unshaped", title_justify="left")
    for row in found:
        numbers = (row.step.median, median(row.serial), 1e-6 * row.bytes, row.nanoseconds, row.least, row.ratio)
        table.add_row(row.name, *(f"{number:.2f}" for number in numbers))
    console.print(table)
    return found
