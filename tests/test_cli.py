"""The command line as a person uses it: a run from beginning to end, one that is interrupted, and bad input."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import started
from tiny import Cuboid, Said, on, sets, settings, write_text

from cuboid.cli.train import started_as
from cuboid.run.launch import World
from cuboid.train.kills import last_step

CUBOID = str(Path(sys.executable).with_name("cuboid"))


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def contents(run: Path) -> dict[Path, tuple[int, int]]:
    """Sizes and times of change; reading changes the time of access alone."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in run.rglob("*")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Said]:
    """A run of four steps on two ranks, started elsewhere, without a terminal."""
    folder = tmp_path_factory.mktemp("runs")
    run = folder / "a run [b]" / "with spaces"
    text = write_text(folder)
    changes = [*on("2,1,1"), "schedule.steps=4", "checkpoint.every=2", "logging.tensorboard=true"]
    changes += ["logging.sample_prompt=ab cd"]
    words = [CUBOID, "train", *sets(settings(text, *changes, f"logging.folder={run.relative_to(folder)}"))]
    done = subprocess.run(
        words, cwd=folder, env={**os.environ, "NO_COLOR": "1"}, capture_output=True, text=True, timeout=600
    )
    return run, Said(done.returncode, done.stdout, done.stderr)


def test_train_cli_writes_run_folder_and_summary(finished: tuple[Path, Said]) -> None:
    run, said = finished
    assert said.code == 0, said.err
    assert said.err == ""
    assert "\x1b" not in said.out
    for words in ("step 4/4  loss", "a sample", "Validation loss", shlex.quote(str(run))):
        assert words in said.out
    assert said.out.endswith(f"More text: cuboid sample {shlex.quote(str(run))} --prompt 'ab cd'\n")
    for what in ("run     ", "  checkpoint "):
        assert f"\n{what}{run}" in said.out
    assert {path.name for path in run.iterdir()} == {
        "config.toml",
        "metrics.jsonl",
        "plot.png",
        "tensorboard",
        "checkpoints",
    }
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step-00000002", "step-00000004"]
    assert steps_of(run) == [1, 2, 3, 4]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert "val_loss" in rows[-1]
    assert [row["tokens"] for row in rows] == [128, 256, 384, 512]  # 8 × 16 a step
    times = [row["wall_time"] for row in rows]
    assert times == sorted(times)
    assert run.stat().st_ctime - 600 < times[0] <= times[-1] <= time.time()


def test_train_cli_resumes_moved_run_in_place(finished: tuple[Path, Said], cuboid: Cuboid, tmp_path: Path) -> None:
    run = tmp_path / "moved"
    shutil.copytree(finished[0], run)
    start = run / "checkpoints" / "step-00000002"  # not the newest: steps 3 and 4 are repeated
    said = cuboid("train", "--resume", start, *sets(["schedule.steps=6", *on("1,2,1")]))
    assert said.code == 0, said.err
    assert "resumed after step 2" in said.out
    assert steps_of(run) == [1, 2, 3, 4, 5, 6]
    assert steps_of(finished[0]) == [1, 2, 3, 4]
    again = cuboid("train", "--resume", run)
    assert again.code == 0, again.err
    assert "resumed after step 6" in again.out  # the newest: nothing is left to do
    assert steps_of(run) == [1, 2, 3, 4, 5, 6]


def test_sample_cli_prints_same_text_on_any_cuboid(finished: tuple[Path, Said], cuboid: Cuboid) -> None:
    words = ("sample", finished[0], "--prompt", "ab", "--tokens", 6, "--seed", 5)
    said = cuboid(*words)
    assert said.code == 0, said.err
    assert said.out.startswith("ab")
    assert cuboid(*words, "--cuboid", "1,2,1").out == said.out


BAD = [
    (["--set", "model.hiden=3"], ["model.hiden", "did you mean model.hidden?"]),
    (["--set", "model.hidden=wide"], ["model.hidden", "must be a whole number"]),
    (["--set", "cuboid.y=3"], ["heads=8 cannot be split into y·z=3"]),
    (["--set", "data.paths=nowhere.txt"], ["nowhere.txt does not exist"]),
    (["--set", "data.paths=short.txt"], ["20 tokens", "seq=128"]),
    (["nowhere.toml"], ["nowhere.toml does not exist"]),
    (["--preset", "gpt5"], ["gpt5", "is not known"]),
    (["--resume", "nowhere"], ["nowhere has no complete checkpoint"]),
]


@pytest.mark.parametrize(("words", "said"), BAD, ids=[words[-1] for words, _ in BAD])
def test_train_cli_rejects_bad_input_with_one_error(
    words: list[str], said: list[str], cuboid: Cuboid, tmp_path: Path
) -> None:
    (tmp_path / "short.txt").write_text("not enough to learn")
    found = cuboid("train", *sets(on("1,2,1")), *words)
    assert found.code == 2
    assert found.out == ""
    assert found.err.startswith("error: ")
    assert "Traceback" not in found.err
    for word in said:
        assert word in found.err
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]


def test_train_cli_rejected_resume_changes_no_file(finished: tuple[Path, Said], cuboid: Cuboid, tmp_path: Path) -> None:
    run = finished[0]
    before = contents(run)
    for change, said in (("model.hidden=64", "model.hidden=32 (here 64)"), ("data.seed=7", "data.seed = 0")):
        found = cuboid("train", "--resume", run, "--set", change)
        assert found.code == 2
        assert said in found.err
        assert found.out == ""
    fresh = cuboid("train", *sets(settings(write_text(tmp_path), *on("1,1,1"), f"logging.folder={run}")))
    assert fresh.code == 2
    assert "is not empty; resume the run in it or choose another folder. The run in it has data.paths = " in fresh.err
    assert "schedule.steps = 4 (here 12)" in fresh.err
    both = cuboid("train", *sets(settings(tmp_path / "nowhere", *on("1,1,1"), f"logging.folder={run}")))
    assert "nowhere does not exist" in both.err  # the configuration comes first
    other = tmp_path / "another run"
    other.mkdir()
    (other / "config.toml").write_text("seed = 7")
    found = cuboid("train", "--resume", run, "--set", f"logging.folder={other}")
    assert found.code == 2
    assert "is not empty; resume the run in it or choose another folder" in found.err
    assert contents(run) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--top-p", 2], "top_p=2.0 must be"),
        (["--cuboid", "3,1"], "write x,y,z such as 2,2,2"),
        (["--cuboid", "1,3,1"], "heads=8 cannot be split into y·z=3"),
        (["--prompt", ""], "the prompt has no tokens"),
        (["--prompt", "a" * 16], "16 tokens and the model's positions end at 16"),
    ],
)
def test_sample_cli_rejects_bad_options(
    words: list[object], said: str, finished: tuple[Path, Said], cuboid: Cuboid
) -> None:
    found = cuboid("sample", finished[0], *words)
    assert found.code == 2
    assert said in found.err


@pytest.mark.parametrize(
    ("hosts", "line"),
    [
        ("1", "torchrun --standalone --nproc-per-node 4 -m cuboid train --resume 'a run'"),
        ("2", "torchrun --nnodes 2 --nproc-per-node 4 … -m cuboid train --resume 'a run'"),
    ],
)
def test_train_cli_advice_under_torchrun_is_torchrun(hosts: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert started_as("train", "--resume", "a run") == "cuboid train --resume 'a run'"
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("GROUP_WORLD_SIZE", hosts)
    assert started_as("train", "--resume", "a run") == line


def break_one(world: World, *_: object) -> None:
    if world.rank == 1:
        raise ZeroDivisionError("by accident")


def test_train_cli_shows_traceback_of_failing_rank(cuboid: Cuboid, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuboid.train.loop.train", break_one)
    said = cuboid("train", *sets(on("1,2,1")))
    assert said.code == 1
    assert said.err.startswith("error: rank 1 failed\nTraceback")
    assert "in break_one" in said.err


def test_train_cli_ctrl_c_finishes_step_and_saves(tmp_path: Path, cuboid: Cuboid) -> None:
    run = tmp_path / "run"
    changes = [*on("2,1,1"), "schedule.steps=1000000", f"logging.folder={run}"]
    words = ["train", "--trace", 999998, *sets(settings(write_text(tmp_path), *changes))]
    with started(*words, folder=tmp_path) as command:
        command.wait_for(lambda: last_step(run) >= 4)
        os.killpg(command.pid, signal.SIGINT)  # as a terminal does: to all of them
        code, out, err = command.said()
    assert code == 0, err
    assert err == ""
    told = re.search(r"Stopped after step (\d+) of 1000000; all is saved. Resume with:\n  cuboid (.*)", out)
    assert told
    done = int(told[1])
    shown = json.loads((run / "trace.json").read_text())["traceEvents"]
    traced = sum(event["name"] == "optimizer" and event["pid"] == 0 for event in shown)
    assert traced == done - 2  # which warm up
    assert f"\n  timeline   {run / 'timeline.png'}\n" in out
    said = cuboid(*shlex.split(told[2]), "--set", f"schedule.steps={done + 2}")
    assert said.code == 0, said.err
    assert steps_of(run) == list(range(1, done + 3))
