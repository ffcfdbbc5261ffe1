"""How lean a step is: the CPU seconds of all ranks, against one device's and what its collectives cost by themselves.

Links are not shaped, so that nobody waits for more than cores. A step that did nothing but one device's work, spread
over the ranks, and its collectives would take exactly the sum.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cuboid.bench.bare import bare
from cuboid.bench.contestant import Contestant, begin_with
from cuboid.bench.network import feasible
from cuboid.bench.problem import Problem
from cuboid.bench.result import Spread, machine
from cuboid.bench.turn import turn
from cuboid.config import ModelConfig
from cuboid.launch import Pool
from cuboid.mesh import Cuboid

STEPS = 5  # a turn: the first ones still make the memory that the others use again


@dataclass(frozen=True)
class Lean:
    """CPU seconds a step, of all ranks together."""

    name: str
    step: Spread
    serial: float
    bytes: int  # sent by all ranks
    nanoseconds: float  # of CPU, a byte of the step's collectives by themselves

    @property
    def least(self) -> float:
        return self.serial + 1e-9 * self.nanoseconds * self.bytes

    @property
    def ratio(self) -> float:
        return self.step.median / self.least

    def export(self) -> dict[str, Any]:
        return asdict(self) | {"least": self.least, "ratio": self.ratio}


def cpu(
    ranks: int, rounds: int, out: Path, console: Console, only: Sequence[str] = ("",), hidden: int = 1024
) -> list[Lean]:
    """The cuboids of so many ranks whose names begin with one of `only`."""
    model = ModelConfig("gpt2", layers=2, hidden=hidden, heads=16, vocab=512, context=256, tied=False)
    problem = Problem(model, 16, 256, apart=False)
    one = Contestant("serial", Cuboid())
    able = {each.name: each for each in (Contestant("cuboid", shape) for shape in feasible(problem, ranks))}
    many = [able[name] for name in begin_with(only, list(able))]
    seconds: dict[Contestant, list[float]] = {each: [] for each in (one, *many)}
    with Pool(1) as alone, Pool(ranks) as together:
        costs = {each: together.run(bare, each, problem) for each in many}
        for i in range(rounds):
            console.print(f"round {i + 1} of {rounds}", highlight=False)
            for each in (one, *many) if i % 2 == 0 else (*reversed(many), one):
                times = (alone if each is one else together).run(turn, each, problem, STEPS, False)
                seconds[each] += [sum(rank.cpu for rank in step) for step in zip(*times, strict=True)]
    serial, found = Spread.of(seconds[one]).median, []
    for each in many:
        sent = sum(rank.bytes for rank in costs[each])
        per_byte = 1e9 * sum(rank.cpu for rank in costs[each]) / sent
        found.append(Lean(each.name, Spread.of(seconds[each]), serial, sent, per_byte))
    out.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine(), "problem": problem.export(), "rows": [each.export() for each in found]}
    (out / "cpu.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    columns = ("layout", "CPU s a step", "one device", "sent, MB", "ns a byte", "least", "step / least")
    table = Table(*columns, title="CPU seconds a step, all ranks together, links unshaped", title_justify="left")
    for row in found:
        numbers = (row.step.median, row.serial, 1e-6 * row.bytes, row.nanoseconds, row.least, row.ratio)
        table.add_row(row.name, *(f"{number:.2f}" for number in numbers))
    console.print(table)
    return found
