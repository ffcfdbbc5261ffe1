"""The run folder, the progress line and the pictures."""

import errno
import io
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cuboid.train.plot import plot_curves, plot_run
from cuboid.train.progress import Progress, StepReport
from cuboid.train.run import RunFolder, fresh_path


def report(step: int, loss: float = 2.5, skipped: bool = False) -> StepReport:
    return StepReport(step, loss, 0.75, 1e-3, 4321.0, 0.25, 512_000_000, skipped)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create(tmp_path / "a run" / "with spaces", "seed = 1\n") as made:
        yield made


def events(folder: RunFolder, name: str) -> list[int]:
    accumulator = EventAccumulator(str(folder.events)).Reload()
    return [event.step for event in accumulator.Scalars(name)]


def test_run_folder_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = RunFolder.create(tmp_path / "runs" / "mine", "seed = 1\n")
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert folder.config.read_text() == "seed = 1\n"
    assert folder.checkpoints.is_dir()


def test_run_folder_rejects_overwrite_and_bad_paths(folder: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not empty; resume"):
        RunFolder.create(folder.path, "seed = 2\n")
    assert folder.config.read_text() == "seed = 1\n"
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be created"):
        RunFolder.create(tmp_path / "file", "")
    with pytest.raises(ValueError, match="is not a run folder"):
        RunFolder.open(tmp_path)


def test_fresh_path_is_unique(tmp_path: Path) -> None:
    seen = set()
    for _ in range(3):
        path = fresh_path(tmp_path / "runs")
        path.mkdir(parents=True)
        seen.add(path)
    assert len(seen) == 3


def test_run_folder_metrics_round_trip(folder: RunFolder) -> None:
    folder.log(asdict(report(1)))
    folder.log({"step": 1, "val_loss": 2.25})
    folder.log(asdict(report(2, math.nan, skipped=True)))
    rows = folder.metrics()  # while the run goes on
    assert rows[0] == asdict(report(1))
    assert rows[1] == {"step": 1, "val_loss": 2.25}
    assert math.isnan(rows[2]["loss"])
    assert rows[2]["skipped"] is True
    for line in folder.lines.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # NaN is not JSON
    folder.close()
    assert events(folder, "loss") == [1, 2]
    assert events(folder, "val_loss") == [1]


def test_run_folder_writes_no_tensorboard_if_disabled(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", "", tensorboard=False) as folder:
        folder.log(asdict(report(1)))
    assert not folder.events.exists()


class FullDisk(io.RawIOBase):
    """Takes so many bytes of a file, then none."""

    def __init__(self, path: Path, room: int) -> None:
        self.file, self.room = path.open("ab", buffering=0), room

    def write(self, content: bytes) -> int:  # type: ignore[override]
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self.file.write(content[: self.room])
        self.room -= taken
        return taken

    def close(self) -> None:
        self.file.close()
        super().close()


def test_run_folder_keeps_metrics_until_disk_has_room(folder: RunFolder) -> None:
    folder._lines = FullDisk(folder.lines, 100)
    for step in range(1, 6):
        folder.log({"step": step, "loss": 1 / step})
    assert folder.lines.stat().st_size == 100
    folder._lines.room = 1000
    folder.log({"step": 6, "loss": 1 / 6})
    assert [row["step"] for row in folder.metrics()] == [1, 2, 3, 4, 5, 6]


def test_run_folder_drops_torn_metrics_line(folder: RunFolder) -> None:
    assert folder.metrics() == []
    folder.log(asdict(report(1)))
    folder.close()
    with folder.lines.open("a") as file:
        file.write('{"step": 2, "lo')
    assert [row["step"] for row in folder.metrics()] == [1]
    with RunFolder.open(folder.path) as again:
        again.log(asdict(report(2)))
        assert [row["step"] for row in again.metrics()] == [1, 2]


def test_run_folder_rewind_drops_later_steps(folder: RunFolder) -> None:
    for step in range(1, 8):
        folder.log(asdict(report(step, loss=step)))
    folder.log({"step": 7, "val_loss": 1.0})
    folder.close()
    with RunFolder.open(folder.path) as again:
        again.rewind(4)
        assert [row["step"] for row in again.metrics()] == [1, 2, 3, 4]
        for step in (5, 6):
            again.log(asdict(report(step, loss=10.0 * step)))
    assert [row["loss"] for row in again.metrics()] == [1, 2, 3, 4, 50, 60]
    assert events(again, "loss") == [1, 2, 3, 4, 5, 6]
    assert {path.name for path in again.path.iterdir()} == {
        "config.toml",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
    }


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def shown(steps: range, total: int, start: int = 0, terminal: bool = False, width: int = 80) -> str:
    """What is printed when each step takes a second."""
    clock, out = Clock(), io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, no_color=True, legacy_windows=False)
    with Progress(total, start, console, seconds=5, clock=clock) as progress:
        for step in steps:
            clock.now += 1
            progress.update(report(step, skipped=step == 6))
            if step == 3:
                progress.note(
                    "saved [3] in /a folder/with a name so long that it is wider than the eighty columns of this"
                )
    return out.getvalue()


def test_progress_prints_plain_lines_without_terminal() -> None:
    lines = shown(range(1, 13), total=12).splitlines()
    assert [line.split("/")[0].split()[-1] for line in lines if line.startswith("step")] == ["1", "6", "11", "12"]
    assert "\x1b" not in "".join(lines)
    assert lines[0] == ("step  1/12  loss  2.5000  grad   0.75  4.32k tok/s  exposed  25%  peak  512MB  ETA    0:11")
    assert lines[1].startswith("saved [3] in /a folder")
    assert lines[1].endswith("of this")
    assert "skipped: not finite" in lines[2]
    assert "ETA    0:00" in lines[-1]


def test_progress_lines_are_as_wide_whatever_their_numbers() -> None:
    first = replace(report(1), weights_bytes=1000, gradients_bytes=1000, optimizer_bytes=2000, mfu=0.4)
    many = [first, replace(first, loss=12.34567, grad_norm=1.234e-5, tokens_per_s=7, exposed=0, memory_bytes=999_600)]
    many += [replace(many[1], lr=0.5, grad_norm=123456.7, exposed=1.0, memory_bytes=123_456_789_000, mfu=0.004)]
    out, clock = io.StringIO(), Clock()
    with Progress(9_000, 0, Console(file=out, width=80), seconds=0, clock=clock) as progress:
        for each in many:
            clock.now += 1
            progress.update(each)
    lines = out.getvalue().splitlines()
    assert {len(line) for line in lines} == {105}, lines
    assert "MFU 40.0%" in lines[0]


def test_progress_prints_last_step_before_later_notes() -> None:
    out = io.StringIO()
    with Progress(2, console=Console(file=out, width=80)) as progress:
        progress.update(report(1))
        progress.update(report(2))
        progress.note("validation")
    assert [line.split()[0] for line in out.getvalue().splitlines()] == ["step", "step", "validation"]


def test_progress_prints_last_step_of_interrupted_run() -> None:
    assert "step  4/12" in shown(range(1, 5), total=12)


def test_progress_eta_of_resumed_run_uses_own_pace() -> None:
    assert "ETA    1:29" in shown(range(11, 12), total=100, start=10)


@pytest.mark.parametrize("width", [80, 130])
def test_progress_shows_one_live_line_on_terminal(width: int) -> None:
    text = shown(range(1, 13), total=12, terminal=True, width=width)
    last = text.replace("\x1b[?25h", "").rstrip("\r\n").replace("\n", "\r").split("\r")[-1]
    for part in ("12/12", "loss  2.5000", "512MB", "ETA    0:00"):
        assert part in last
    assert ("━" in text) == (width == 130)
    assert "saved [3]" in text


def test_train_plot_draws_runs_and_curves(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = [asdict(report(step, loss=5 - step / 50)) for step in range(1, 101)]
    rows.insert(50, {"step": 50, "val_loss": 4.2})
    rows[10]["loss"] = math.nan
    curve = [row["loss"] for row in rows if "loss" in row]
    plot_run(rows, tmp_path / "a run.png", unigram=3.1)
    plot_run([], tmp_path / "empty.png")
    plot_run(rows[:1], tmp_path / "one.png")
    plot_curves(
        {"serial": curve, "2,2,2": [1.0001 * loss for loss in curve], "1,1,1": curve[:9]}, tmp_path / "c.png", "t"
    )
    plot_curves({"one device": curve, "1,1,1": curve[:9], "2,2,2": [4.0, *curve[1:9]]}, tmp_path / "c.svg", "t")
    labels = (tmp_path / "c.svg").read_text()
    assert "<!-- 1,1,1: 0 in every step" in labels
    assert re.search(r"<!-- 2,2,2: at most \S+; 0 in 8 steps", labels)
    for file in ("a run.png", "empty.png", "one.png", "c.png"):
        assert (tmp_path / file).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a run.png").stat().st_size > 1.5 * (tmp_path / "empty.png").stat().st_size
