"""`cuboid eval`: what it evaluates, by what it is given."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny import Cuboid, on, tiny, write_text

from cuboid.data import ByteTokenizer, build
from cuboid.run.launch import launch
from cuboid.train.config import resolved_toml
from cuboid.train.loop import corpus_of, train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    changes = [*on("1,1,1"), "schedule.steps=1", "schedule.warmup=0"]
    launch(train, 1, [tiny(write_text(folder), *changes), folder / "run", None])
    return folder / "run"


@pytest.fixture
def evaluated(cuboid: Cuboid) -> Any:
    def of(*words: object) -> dict[str, float]:
        said = cuboid("eval", *words, "--json")
        assert said.code == 0, said.err
        found: dict[str, float] = json.loads(said.out)
        return found

    return of


def test_eval_cli_run_alone_is_its_validation_part(run: Path, evaluated: Any, tmp_path: Path) -> None:
    text = run.parent / "text 0.txt"
    held_out = corpus_of(tiny(text)).val
    found = evaluated(run)
    assert found["tokens"] == len(held_out) - 1
    (tmp_path / "same.toml").write_text(resolved_toml(tiny(text)))
    assert evaluated(run, tmp_path / "same.toml") == found  # its data, not its characters
    assert evaluated(run / "checkpoints" / "step-00000001") == found


def test_eval_cli_takes_built_folder_or_one_of_its_files(run: Path, evaluated: Any, tmp_path: Path) -> None:
    built = build([run.parent / "text 0.txt"], tmp_path / "built", ByteTokenizer(), val_fraction=0.1)
    found = evaluated(run, tmp_path / "built")
    assert found["tokens"] == len(built.val) - 1
    assert evaluated(run, tmp_path / "built" / "val.bin") == found
    assert evaluated(run, tmp_path / "built" / "train.bin")["tokens"] == len(built.train) - 1


def test_eval_cli_rejects_what_it_cannot_evaluate(run: Path, cuboid: Cuboid, tmp_path: Path) -> None:
    text = write_text(tmp_path)
    none = tmp_path / "none.toml"
    none.write_text(resolved_toml(tiny(text, "data.val_fraction=0")))
    other = tmp_path / "other.toml"
    other.write_text("[tool]\nx = 1\n")
    for words, said in (
        ([none], "keeps no text for validation"),
        ([other], "tool: there is no such section"),
        ([none, text], "give it alone"),
    ):
        found = cuboid("eval", run, *words)
        assert found.code == 2
        assert said in found.err
    changed = shutil.copytree(run, tmp_path / "changed")
    config = (changed / "config.toml").read_text()
    (changed / "config.toml").write_text(config.replace(str(run.parent / "text 0.txt"), str(write_text(tmp_path, 1))))
    assert "has changed since the run" in cuboid("eval", changed).err
    (changed / "config.toml").unlink()
    assert "is no run with a configuration" in cuboid("eval", changed).err
