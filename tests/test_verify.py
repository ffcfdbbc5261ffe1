"""`cuboid verify` says so when something is wrong."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import cuboid.model.cuboid as parallel
from cuboid.cli import app
from cuboid.cli.verify import shared, training
from cuboid.mesh.cuboid import Cuboid
from cuboid.model.config import ModelConfig
from cuboid.run.launch import World
from cuboid.step.schedule import PIPELINES, Schedule
from cuboid.verify import Case, Report, verify

CASE = Case(ModelConfig("gpt2", layers=1, hidden=24, heads=4, vocab=30, context=8), Cuboid(2, 2, 1), 4, 8)


def forgetful(world: World, case: Case) -> Report | None:
    """Norm gradients are not summed over y."""
    cuts, sums = parallel.SPECS["norm"]
    parallel.SPECS["norm"] = cuts, ()
    try:
        return verify(world, case)
    finally:
        parallel.SPECS["norm"] = cuts, sums


def test_verify_reports_missing_gradient_sum(pool) -> None:
    assert pool(4).run(verify, CASE)[0].ok
    report = pool(4).run(forgetful, CASE)[0]
    assert not report.ok
    assert {name for name, error in report.errors.items() if error > report.tolerance} >= {
        "d norm.weight",
        "d norm.bias",
    }


@pytest.mark.parametrize("name", PIPELINES)
def test_verify_compares_every_schedule_of_a_pipe(name: str, pool) -> None:
    config = ModelConfig("gpt2", layers=4, hidden=24, heads=4, vocab=30, context=8, dropout=0.1)
    schedule = Schedule(pipeline=name, stages=2 if name == "interleaved" else 1, split=(3, 1) if name == "1f1b" else ())
    freeze = r"blocks\.3|embed" if name == "gpipe" else ""
    case = Case(config, Cuboid(1, 1, 2, pipe=2), 8, 8, schedule=schedule, freeze=freeze, micro_batches=4)
    report = pool(4).run(verify, case)[0]
    assert report.ok, report
    assert len(report.errors) > 20
    assert report.traffic["pipe send"]["calls"] == (13 if name == "interleaved" else 5 - bool(freeze))


def test_verify_compares_micro_batches_without_a_pipe(pool) -> None:
    one, four = (pool(4).run(verify, replace(CASE, batch=8, micro_batches=m))[0] for m in (1, 4))
    assert one.ok
    assert four.ok
    assert four.traffic["y all_gather"]["calls"] == 4 * one.traffic["y all_gather"]["calls"]
    assert four.balance["saved activations"].mean < one.balance["saved activations"].mean


def played(monkeypatch: pytest.MonkeyPatch, *words: str) -> Case:
    """The case that a command line compares."""
    found = []
    monkeypatch.setattr("cuboid.run.launch.launch", lambda *words: found.append(words[2][0]) or [None])
    result = CliRunner().invoke(app, ["verify", "--layers", "4", *words])
    assert result.exit_code == 0, result
    (case,) = found
    return case


def test_verify_cli_passes_schedule_micro_batches_and_split_on(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--cuboid", "1,2,1", "--pipe", "2", "--micro-batches", "4")
    case = played(monkeypatch, *words, "--pipeline", "interleaved")
    assert (case.micro_batches, case.schedule.pipeline, case.schedule.stages) == (4, "interleaved", 2)
    case = played(monkeypatch, *words, "--split", "3,1")
    assert (case.schedule.pipeline, case.schedule.split) == ("1f1b", (3, 1))
    config = training(case, 50)
    assert (config.data.micro_batches, config.overlap.split) == (4, (3, 1))
    config.check()
    assert played(monkeypatch, "--pipe", "3").cuboid.ranks == 24
    assert played(monkeypatch, "--replicas", "2", "--pipe", "2").cuboid == Cuboid(2, 2, 2, 2, pipe=2)


def test_verify_says_what_is_not_even_on_a_pipe() -> None:
    assert shared(CASE).endswith("; everything else is 1/P.")
    piped = replace(CASE, config=CASE.config.replace(layers=2), cuboid=Cuboid(pipe=2))
    assert "embedding is at both ends" in shared(piped)
    assert "embedding" not in shared(replace(piped, config=piped.config.replace(tied=False)))


def test_verify_cli_exit_code_matches_report(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = Report({"loss": 0.0}, 1e-9), Report({"loss": 1.0}, 1e-9)
    for report, code in ((good, 0), (bad, 1)):
        monkeypatch.setattr("cuboid.run.launch.launch", lambda *_, report=report: [report])
        result = CliRunner().invoke(app, ["verify", "--cuboid", "1,1,1", "--json"])
        assert result.exit_code == code
        assert json.loads(result.stdout)["ok"] is (code == 0)
