"""`cuboid verify` says so when something is wrong."""

import json

import pytest
from typer.testing import CliRunner

import cuboid.model.cuboid as parallel
from cuboid.cli import app
from cuboid.mesh.cuboid import Cuboid
from cuboid.model.config import ModelConfig
from cuboid.run.launch import World
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


def test_verify_cli_exit_code_matches_report(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = Report({"loss": 0.0}, 1e-9), Report({"loss": 1.0}, 1e-9)
    for report, code in ((good, 0), (bad, 1)):
        monkeypatch.setattr("cuboid.run.launch.launch", lambda *_, report=report: [report])
        result = CliRunner().invoke(app, ["verify", "--cuboid", "1,1,1", "--json"])
        assert result.exit_code == code
        assert json.loads(result.stdout)["ok"] is (code == 0)
