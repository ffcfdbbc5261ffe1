"""Checkpoints as a person meets them: a damaged one, a full disk, and `cuboid checkpoint`."""

import errno
import json
import math
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import Cuboid, on, sets, settings, tiny, write_text

from cuboid.run.launch import launch
from cuboid.train.listing import complete, step_of
from cuboid.train.loop import train
from cuboid.train.run import RunFolder


def words(text: Path, run: Path, cuboid: str, *more: str) -> list[str]:
    changes = ["schedule.steps=4", "checkpoint.every=1", "checkpoint.keep=0", f"logging.folder={run}", *more]
    return ["train", *sets(settings(text, *on(cuboid), *changes))]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps(run: Path) -> list[int]:
    return [step_of(path) for path in complete(run / "checkpoints")]


def test_train_cli_resumes_from_newest_good_checkpoint(cuboid: Cuboid, tmp_path: Path) -> None:
    run = tmp_path / "a run"
    assert cuboid(*words(write_text(tmp_path), run, "1,2,2")).code == 0
    before, folder = losses(run), run / "checkpoints"
    flip(folder / "step-00000004" / "rank-00003.safetensors")
    (folder / "step-00000003" / "tensors.json").unlink()
    sampled = cuboid("sample", run, "--prompt", "ab", "--tokens", 3)
    assert sampled.code == 0, sampled.err
    assert "step-00000004 is damaged: rank-00003.safetensors" in sampled.err
    assert sampled.out == cuboid("sample", folder / "step-00000002", "--prompt", "ab", "--tokens", 3).out
    refused = cuboid("train", "--resume", folder / "step-00000004")
    assert refused.code == 2
    assert "step-00000004 is damaged: rank-00003.safetensors missing or changed" in refused.err
    said = cuboid("train", "--resume", run)
    assert said.code == 0, said.err
    assert "resumed after step 2" in said.out
    for text in ("step-00000004 is damaged: rank-00003.safetensors", "step-00000003 is damaged: tensors.json"):
        assert said.err.count(text) == 1
    assert said.err.count("step-00000002 is used instead") == 2
    assert losses(run) == before
    assert steps(run) == [1, 2, 3, 4]  # the damaged ones have been replaced
    assert cuboid("checkpoint", "verify", run).code == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid():
        pytest.skip("only root can mount a small disk")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("noticed", ["before", "while"])
def test_train_cli_full_disk_ends_run_and_keeps_checkpoints(
    noticed: str, cuboid: Cuboid, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noticed before anything is written; or, where the file system does not say how full it is, while it is."""
    if noticed == "while":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 0))  # type: ignore[attr-defined]
    run = small_disk / "run"
    limits = ["schedule.steps=1000", "schedule.warmup=1", "checkpoint.attempts=2", "checkpoint.pause=0.1"]
    said = cuboid(*words(write_text(tmp_path), run, "2,1,1", *limits))
    assert said.code == 1
    assert "Traceback" not in said.err
    retry, end = said.err.strip().splitlines()
    written = steps(run)
    index = json.loads((complete(run / "checkpoints")[0] / "tensors.json").read_text())
    needed = sum(4 * math.prod(tensor["shape"]) for tensor in index.values())
    assert len(written) >= 2
    for line in (retry, end):
        assert f"step-{written[-1] + 1:08d} could not be written: {os.strerror(errno.ENOSPC)}" in line
        assert str(run) in line
        assert f"at least {needed:,} bytes are needed and" in line
    assert retry.startswith("warning: ")
    assert "trying again in 0.1 s" in retry
    assert end.startswith("error: ")
    assert cuboid("checkpoint", "verify", run).code == 0
    assert {path.name for path in (run / "checkpoints").iterdir()} == {f"step-{step:08d}" for step in written}
    shutil.rmtree(run / "checkpoints" / "step-00000001")
    shutil.rmtree(run / "checkpoints" / "step-00000002", ignore_errors=len(written) == 2)
    if noticed == "before":  # there is room again
        again = cuboid("train", "--resume", run, "--set", f"schedule.steps={written[-1] + 1}")
        assert again.code == 0, again.err
        assert steps(run)[-1] == written[-1] + 1


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    changes = [*on("1,2,1"), "schedule.steps=4", "checkpoint.every=1", "checkpoint.keep=0"]
    launch(train, 2, [tiny(write_text(folder), *changes), folder / "a run", None])
    return folder / "a run"


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """With four checkpoints, of which the second and the last are damaged, and what a killed run has left."""
    path = shutil.copytree(made, tmp_path / "a run")
    flip(path / "checkpoints" / "step-00000002" / "rank-00001.safetensors")
    (path / "checkpoints" / "step-00000004" / "state.json").unlink()
    (path / "checkpoints" / "step-00000005.aside").mkdir()
    return path


def test_checkpoint_cli_list_shows_steps_and_damage(run: Path, cuboid: Cuboid) -> None:
    said = cuboid("checkpoint", "list", run)
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert len(lines) == 5
    assert [line.split()[0] for line in lines[1:]] == [f"step-{step:08d}" for step in (1, 2, 3, 4)]
    assert "1,2,1" in lines[1]
    assert "looks intact" in lines[2]  # its sizes are right
    assert "damaged: state.json" in lines[4]
    rows = json.loads(cuboid("checkpoint", "list", run, "--json").out)
    assert [bool(row["damage"]) for row in rows] == [False, False, False, True]
    assert rows[0]["cuboid"] == {"pipe": 1, "replicas": 1, "x": 1, "y": 2, "z": 1}
    assert rows[0]["bytes"] > 100_000


def test_checkpoint_cli_verify_names_damaged_files(run: Path, cuboid: Cuboid) -> None:
    said = cuboid("checkpoint", "verify", run)
    assert said.code == 1
    found = {line.split(": ")[0][-1]: line.partition(": ")[2] for line in said.out.splitlines() if ": " in line}
    assert found == {"1": "good", "2": "damaged: rank-00001.safetensors", "3": "good", "4": "damaged: state.json"}
    report = json.loads(cuboid("checkpoint", "verify", run, "--json").out)
    assert list(report.values()) == [[], ["rank-00001.safetensors"], [], ["state.json"]]
    assert cuboid("checkpoint", "verify", run / "checkpoints" / "step-00000003").code == 0
    assert cuboid("checkpoint", "verify", run / "nothing").code == 2


def test_checkpoint_cli_prune_keeps_newest_good(run: Path, cuboid: Cuboid) -> None:
    folder = run / "checkpoints"
    before = {path.name for path in folder.iterdir()}
    said = cuboid("checkpoint", "prune", run, "--keep", 1, "--dry-run")
    assert said.code == 0, said.err
    assert {line.split("/")[-1] for line in said.out.splitlines() if "would remove" in line} == before - {
        "step-00000003"
    }
    assert {path.name for path in folder.iterdir()} == before
    assert cuboid("checkpoint", "prune", folder / "step-00000003").code == 2
    assert {path.name for path in folder.iterdir()} == before
    assert cuboid("checkpoint", "prune", run, "--keep", 2).code == 0
    assert {path.name for path in folder.iterdir()} == {"step-00000001", "step-00000003"}
    for step in (1, 3):
        flip(folder / f"step-{step:08d}" / "rank-00000.safetensors")
    said = cuboid("checkpoint", "prune", run, "--keep", 1)
    assert said.code == 2
    assert "none is removed" in said.err
    assert steps(run) == [1, 3]


@pytest.mark.parametrize("given", [".", "checkpoints"])
def test_checkpoint_cli_prune_rejects_run_in_use(given: str, run: Path, cuboid: Cuboid) -> None:
    """What it has aside is no leftover: it is being written."""
    before = {path.name for path in (run / "checkpoints").iterdir()}
    with RunFolder.open(run) as alive:
        alive.lock()
        said = cuboid("checkpoint", "prune", run / given, "--keep", 1)
        assert said.code == 2
        assert f"run folder {run} is in use by a run; wait until it ends" in said.err
        assert {path.name for path in (run / "checkpoints").iterdir()} == before
    assert cuboid("checkpoint", "prune", run / given, "--keep", 1).code == 0
