"""The demo: one model on one device and on two cuboids, its text, and what it counts."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cuboid.cli import app, demo
from cuboid.demo.run import TOLERANCE, DemoSize, run_demo
from cuboid.demo.text import valid_lines
from cuboid.mesh.cuboid import Cuboid

SMALL = DemoSize(
    4, 1, 16, 4, vocab=300, text_bytes=120_000, sample_tokens=8, first=Cuboid(2, 1, 1), second=Cuboid(1, 1, 2)
)


def test_demo_is_exact_across_cuboids_and_leaves_a_run(tmp_path: Path) -> None:
    folder, told = tmp_path / "demo", []
    found = run_demo(folder, SMALL, told.append)
    assert found.difference < TOLERANCE
    assert [(each.first, each.last) for each in found.stretches] == [(1, 2), (3, 4)]
    assert [each.parameters < found.alone.parameters for each in found.stretches] == [True, True]
    assert [each.at_rest < found.alone.at_rest for each in found.stretches] == [True, True]
    assert found.alone.sent == 0 < min(each.sent for each in found.stretches)
    assert list(found.bits_per_byte) == [1, 2, 3, 4]
    assert found.facts.held_out_files > 0
    assert len(told) == 4
    assert json.loads((folder / "demo.json").read_text())["difference"] == found.difference
    assert (folder / "curves.png").stat().st_size > 0
    resumed = ["train", "--resume", str(folder), "--cuboid", "1,1,1", "--set", "schedule.steps=5"]
    done = CliRunner().invoke(app, [*resumed, "--set", "logging.sample_tokens=0"])
    assert done.exit_code == 0, (done.exception, done.output)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]


def test_valid_lines_counts_complete_lines_only() -> None:
    assert valid_lines(["a = (1)\n\n\tb = (2\nc = '\nlast", "d\n"]) == (2, 4)


@pytest.mark.slow
def test_demo_learns_python(tmp_path: Path) -> None:
    """At its full size: validation falls at every evaluation, beats a 3-gram, and most lines are Python's."""
    found = run_demo(tmp_path / "demo", DemoSize(), lambda _: None)
    bits = list(found.bits_per_byte.values())
    assert found.difference < TOLERANCE
    assert all(after < before for before, after in pairwise(bits))
    assert bits[-1] < found.facts.trigram_bits
    good, lines = found.valid_lines
    assert good >= 0.8 * lines > 0


def test_demo_says_how_to_find_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo.sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setattr(demo.shutil, "which", lambda name: None)
    assert demo.activation() == ""  # not started from a virtual environment
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    assert demo.activation() == ", after `. .venv/bin/activate`"
    monkeypatch.setattr(demo.shutil, "which", lambda name: f"/bin/{name}")
    assert demo.activation() == ""
