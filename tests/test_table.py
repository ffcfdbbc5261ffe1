"""A benchmark's tables: readable on a terminal of 80 columns, and honest about what counts."""

import os
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from cuboid.bench.layouts import Layout, every, on_pipes, possible, scaling
from cuboid.bench.problem import Problem
from cuboid.bench.result import Result, Row
from cuboid.bench.table import show
from cuboid.bench.turn import Count
from cuboid.emulate.slow_motion import SlowMotion, parse
from cuboid.mesh.cuboid import Cuboid
from cuboid.model.config import ModelConfig

PAPER = parse("paper")
PROBLEM = Problem(ModelConfig("gpt2", layers=1, hidden=256, heads=64, vocab=512, context=64, tied=False), 64, 64)


def row(
    layout: Layout, slow: SlowMotion | None = PAPER, cpu: float = 0.1, quick: bool = False, rate: str = "8mbit"
) -> Row:
    """Of steps of 0.1234 and 0.1266 s of which the ranks' own work takes so much of the cores' time."""
    sample = {
        "step": 0.1234,
        "forward": 0.0412,
        "backward": 0.0821,
        "optimizer": 0.00123,
        "exposed": 0.123,
        "busy": 0.1,
    }
    sample |= {"crossed": 123_456_789, "inside": 123_456_789, "network": 0.987, "late": 0.0}
    sample["cpu"] = cpu * (os.cpu_count() or 1) * sample["step"]
    found = Row(layout, PROBLEM, layout.shape.ranks, rate, 8e6, [], slow, quick)
    found.counts = [Count(None, {"x": {"all_gather": (1, 123_456_789)}}, {}, 10**12, 123_456_789, 123_456_789)]
    found.samples = [sample, {**sample, "step": 0.1266}]
    found.__dict__["planned"] = 0.12345  # rather than to work it out
    return found


def shown(rows: list[Row]) -> str:
    out = StringIO()
    show(Result("strong", {}, rows=rows), Console(file=out, width=80))
    return out.getvalue()


def test_tables_of_pytorchs_own_alone_fit_too() -> None:
    text = shown([row(Layout("native ideal", Cuboid(64, 1, 1))), row(Layout("native", Cuboid(1, 64, 1)))])
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


@pytest.mark.parametrize("slow", [PAPER, None], ids=["emulated", "real"])
def test_tables_of_64_ranks_fit_into_80_columns(slow: SlowMotion | None) -> None:
    layouts, _ = possible([*every(PROBLEM, 64, slow is not None), *scaling(PROBLEM, 64, 4)], PROBLEM)
    layouts += on_pipes(replace(PROBLEM, config=PROBLEM.config.replace(layers=2)), 64, 2, "1f1b", 4)
    layouts.append(Layout("cuboid", Cuboid(16, 2, 2, order=("replicas", "z", "x", "y"))))
    text = shown([row(layout, slow) for layout in layouts])
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for layout in layouts:
        assert text.count(f"{layout.name} ") >= 2, layout.name  # in each table
    headers = "step quartiles fwd bwd opt sent crossed " + ("planned busy inside CPU counts" if slow else "waited peak")
    for header in headers.split():
        assert f" {header} " in text or f" {header}\n" in text, header
    for cell in ("0.124–0.126", "123M"):
        assert cell in text


@pytest.mark.parametrize(
    ("share", "quick", "mark"),
    [
        (0.14, False, ""),
        (0.16, False, "not counted"),
        (0.31, False, "not counted"),
        (0.14, True, ""),
        (0.16, True, "rough"),
        (0.29, True, "rough"),
        (0.31, True, "not counted"),
    ],
)
def test_row_counts_by_the_share_of_the_ranks_own_work(share: float, quick: bool, mark: str) -> None:
    found = row(Layout("1-D", Cuboid(1, 64, 1)), cpu=share, quick=quick)
    found.samples.pop()
    assert found.counts_as == mark
    text = shown([found])
    last = next(line for line in reversed(text.splitlines()) if line.startswith("1-D"))
    assert last.split()[-1] == {"": "yes", "rough": "rough", "not counted": "no"}[mark]
    assert ("larger factor" in text) == bool(mark)
