"""Benchmarks of pipelines: idle time against its formula, and the best pipeline against the best cuboid."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cuboid.bench.groups import Gain, planned
from cuboid.bench.layouts import Layout
from cuboid.bench.pipeline import Idle, PlayedStep, by_kind, play
from cuboid.bench.planned import planned_seconds, predicted
from cuboid.bench.plot import Bubble, draw, draw_bubbles, draw_planned
from cuboid.bench.problem import Problem
from cuboid.bench.result import Result, Row, Spread
from cuboid.bench.turn import count
from cuboid.cli import app
from cuboid.emulate.slow_motion import parse
from cuboid.mesh.cuboid import Cuboid
from cuboid.model.config import ModelConfig
from cuboid.plan.layer import Choice, Work
from cuboid.plan.search import rank
from cuboid.run.launch import Pool
from cuboid.step.pipeline import orders, simulate
from cuboid.step.schedule import PIPELINES, Move, Schedule

Pools = Callable[[int], Pool]
MODEL = ModelConfig("gpt2", layers=2, hidden=64, heads=4, vocab=32, context=16, tied=False)
PROBLEM = Problem(MODEL, 8, 16)


def scheduled(name: str) -> Schedule:
    return Schedule(pipeline=name, stages=2 if name == "interleaved" else 1)


@pytest.mark.parametrize("pipe", [2, 4])
@pytest.mark.parametrize("name", PIPELINES)
def test_idle_of_equal_stages_is_formula_and_textbook(name: str, pipe: int) -> None:
    times = {"F": 1.0, "B": 1.0, "W": 1.0} if name == "zero-bubble" else {"F": 1.0, "B": 2.0}

    def seconds(move: Move) -> float:
        return times[move.kind]

    schedule, m, steps = scheduled(name), 2 * pipe, list[PlayedStep]()
    places = orders(schedule, pipe, m)
    end = max(stop for _, stop in simulate(places, seconds).values())
    for order in places:
        marks, busy = list[tuple[str, float]](), 0.0
        for moves in order:
            marks.append(("+".join(move.kind for move in moves), busy))
            busy += sum(map(seconds, moves))
        steps.append(PlayedStep(end, busy, by_kind([*marks, ("", busy)]), cpu=0.5))
    row = Idle(name, pipe, m, schedule.stages, [steps, steps], True)
    assert row.formula == pytest.approx(row.textbook)
    assert row.measured == pytest.approx(row.formula)
    assert row.spread.low == row.spread.high
    assert Idle(name, pipe, m, schedule.stages, [[replace(each, busy=0.0) for each in steps]], True).measured == 1.0


def test_by_kind_gives_a_backward_two_thirds_of_what_runs_beside_a_forward() -> None:
    assert by_kind([("F", 0.0), ("F+B", 1.0), ("B", 4.0), ("", 6.0)]) == pytest.approx({"F": 2.0, "B": 4.0})


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
def test_play_on_emulated_devices_times_moves_and_counts_bytes(name: str, pool: Pools) -> None:
    layout = Layout("pipe", Cuboid(pipe=2), choice=Choice(schedule=scheduled(name)), micro_batches=2)
    slow = parse("fp32=1e10,stream=1e12")
    for steps, as_predicted in pool(2).run(play, layout, PROBLEM, 2, slow):
        assert as_predicted
        assert [set(step.moves) for step in steps] == [set("FBW" if name == "zero-bubble" else "FB")] * 2
        assert all(sum(step.moves.values()) == pytest.approx(step.busy) for step in steps)
        assert all(0 < step.busy <= step.seconds for step in steps)


@pytest.mark.parametrize("shape", [Cuboid(1, 2, 1, pipe=2), Cuboid(2, 1, 1, replicas=2)], ids=str)
def test_count_of_planned_layout_matches_cost_formula(shape: Cuboid, pool: Pools) -> None:
    """As chosen, in as many micro-batches."""
    choice = Choice("full", schedule=Schedule(sub_batches=2) if shape.pipe == 1 else scheduled("1f1b"))
    layout = Layout("pipe" if shape.pipe > 1 else "cuboid", shape, choice=choice, micro_batches=2)
    counts = pool(4).run(count, layout, PROBLEM)
    assert all(each.traffic == each.predicted for each in counts)
    assert layout.name.startswith("cuboid 1,2,1 pipe=2, 1f1b, 2 micro" if shape.pipe > 1 else "cuboid 2,1,1 replicas=2")
    one = replace(layout, micro_batches=1)
    assert counts[0].traffic != one.cost(PROBLEM, 0).counts()
    assert counts[0].predicted == layout.cost(PROBLEM, 0).counts()


def test_groups_layouts_are_the_shapes_planned_fastest() -> None:
    slow, small = parse("v100-edr/1000,node=1,group=2,uplink=1mbit"), replace(PROBLEM, batch=2)
    found = planned(slow, small, 4, 2)
    assert [each.way for each in found] == ["cuboid", "cuboid", "pipe", "pipe"]
    for each in found:
        assert predicted(slow.hardware, each, small).fits
    first = planned_seconds(slow.hardware, found[0], small)
    for other in (1, 2):
        work = Work(small.config, small.batch // other, small.seq, "fp32", other)
        flat = [plan.seconds for plan in rank(slow.hardware, work, 4).plans if plan.cuboid.pipe == 1]
        assert first <= min(flat) * (1 + 1e-9)


def row(way: str, plan: float, steps: list[float]) -> Row:
    layout = Layout(way, Cuboid(y=int(plan)), choice=Choice())  # type: ignore[arg-type]
    found = Row(layout, PROBLEM, 8, "", 0.0, [], samples=[{"step": step} for step in steps])
    found.__dict__["planned"] = plan
    return found


@pytest.mark.parametrize(
    ("pipe", "good"), [([2.0, 2.0, 2.5], True), ([3.0, 3.0, 3.0], False), ([1.0, 1.0, 1.0], False)]
)
def test_gain_compares_fastest_as_measured_with_fastest_as_planned(pipe: list[float], good: bool) -> None:
    rows = [row("cuboid", 3.0, [3.5, 3.5, 3.5]), row("cuboid", 4.0, [3.0, 3.0, 3.0]), row("pipe", 2.0, pipe)]
    gain = Gain.of(rows)
    assert (gain.planned, gain.measured) == (1.5, 3.0 / pipe[0])
    assert gain.cuboid is rows[1]
    assert gain.good == good
    assert gain.spread == Spread.of([3.0 / step for step in pipe])
    assert f"{gain.measured:.2f} × as fast" in str(gain)


def test_bench_pictures_name_schedules_and_layouts(tmp_path: Path) -> None:
    bubbles = [Bubble("2 ranks", "gpipe", Spread(0.12, 0.11, 0.13), 0.11, 0.11, None)]
    png, svg = draw_bubbles("idle", bubbles, tmp_path / "pipeline")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert all(f"<!-- {word}" in svg.read_text() for word in ("gpipe", "2 ranks", "textbook"))
    _, svg = draw_planned(
        "steps", ["cuboid 2,2,1", "cuboid 1,2,1 pipe=2, 1f1b"], [Spread(2, 1, 3)] * 2, [2, 1], tmp_path / "g"
    )
    assert all(f"<!-- {word}" in svg.read_text() for word in ("cuboid 2,2,1", "cuboid 1,2,1 pipe=2", "planned"))


@pytest.mark.parametrize("counts", [True, False])
def test_bench_pictures_hatch_rows_that_do_not_count(
    counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("sent", 1_000_000), ("peak", 2_000_000), ("counts_as", "" if counts else "not counted")):
        monkeypatch.setattr(Row, name, value)
    rows = [row("cuboid", 3.0, [3.5, 3.5, 3.5]), row("cuboid", 3.0, [2.0, 2.0, 2.5])]
    rows[0].ranks = 4
    _, svg = draw(Result("strong", {}, rows=rows), tmp_path)
    assert ("<!-- hatched, hollow: not counted" in svg.read_text()) == (not counts)
    assert "<!-- seconds per step, logarithmic" in svg.read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["pipeline", "--cores", "--ranks", "4"], "--cores has two ranks that compute; leave out --ranks"),
        (["pipeline", "--only", "2f2b"], "start of none of gpipe"),
        (["groups", "--emulate", "v100-edr/1000"], "no two groups of hosts for 8 ranks; give node=2,group=2,uplink="),
        (["groups", "--ranks", "4"], "no two groups of hosts for 4 ranks"),
    ],
)
def test_bench_cli_pipelines_reject_bad_options_before_work(words: list[str], says: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", *words, "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, ValueError)
    assert says in str(done.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [["pipeline", "--cores"], ["groups"]], ids=" ".join)
def test_bench_cli_pipelines_reject_missing_hosts(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    done = CliRunner().invoke(app, ["bench", *words, "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, ValueError)
    assert "iproute2" in str(done.exception)
    assert not (tmp_path / "out").exists()
