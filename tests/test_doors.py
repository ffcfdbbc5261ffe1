"""Closed doors: no pickle is opened, no path in a file leads out of its folder, what a run writes is its owner's."""

import ast
import json
import os
import pickle
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_imports import SOURCES
from tiny import Cuboid, on, tiny, write_text

from cuboid.model.hf.save import Provenance
from cuboid.run.launch import launch
from cuboid.train import manifest
from cuboid.train.listing import candidates, inspect
from cuboid.train.loop import train
from cuboid.train.storage import INDEX, PieceReader

READER = "torch.distributed.checkpoint.FileSystemReader"
#: What can run a program while it reads a file, or as it reads a text.
OPENERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "torch.load"}
OPENERS |= {"torch.jit.load", "torch.package", "torch.export.load", "torch.hub", "FileSystemReader"}
OPENERS |= {READER, "eval", "exec"}


def opened(tree: ast.Module) -> set[str]:
    """What of these a module uses: names it imports, attributes of modules, and built-in functions it calls."""
    found, names = set(), dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found |= {node.func.id} & {"eval", "exec"}
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            found.add(f"{names.get(first, first)}.{rest}")
    for whole in names.values():
        found |= {whole, whole.split(".")[0], whole.rpartition(".")[2]}
    allow = [node for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "allow_pickle"]
    return (found & OPENERS) | ({"allow_pickle"} if allow else set())


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_package_uses_no_pickle_or_eval(module: str) -> None:
    assert opened(SOURCES[module]) == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch.load(x)", {"torch.load"}),
        ("import torch as t\nt.load(x)", {"torch.load"}),
        ("from torch import load", {"torch.load"}),
        ("import pickle", {"pickle"}),
        ("from pickle import loads", {"pickle"}),
        ("import torch.distributed.checkpoint as c\nc.FileSystemReader(x)", {READER}),
        ("import numpy\nnumpy.load(x, allow_pickle=True)", {"allow_pickle"}),
        ("eval(x)", {"eval"}),
        ("import json\njson.load(x)", set()),
    ],
)
def test_package_scan_detects_pickle_and_eval(source: str, found: set[str]) -> None:
    assert opened(ast.parse(source)) == found


# A run of two checkpoints


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    before = os.umask(0)
    try:
        changes = [*on("1,1,1"), "schedule.steps=2", "schedule.warmup=1", "checkpoint.every=1"]
        launch(train, 1, [tiny(write_text(folder), *changes), folder / "a run", None])
    finally:
        os.umask(before)
    return folder / "a run"


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "a run")


def test_run_folder_is_private_to_owner(made: Path) -> None:
    folders = [made, *(path for path in made.rglob("*") if path.is_dir())]
    assert len(folders) == 4
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}


class Trap:
    """A pickle that makes a folder when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_checkpoint_pickle_of_older_version_is_not_opened(run: Path, cuboid: Cuboid, tmp_path: Path) -> None:
    path = candidates(run)[0]
    (path / ".metadata").write_bytes(pickle.dumps(Trap(tmp_path / "caught")))
    (path / manifest.FILE).write_text(json.dumps({".metadata": [1, "0" * 32], "state.json": [1, "0" * 32]}))
    for words in (("train", "--resume", run), ("sample", run), ("export", path, tmp_path / "out")):
        said = cuboid(*words)
        assert said.code == 2
        assert "written by an earlier version, with a pickle" in said.err
    assert not (tmp_path / "caught").exists()
    pickle.loads((path / ".metadata").read_bytes())
    assert (tmp_path / "caught").exists()  # the trap works


def resign(path: Path, **more: manifest.Sum) -> None:
    """A manifest that fits what is there: as one who means harm would write it."""
    sums = manifest.read(path) | more
    for name in sums.keys() - more.keys():
        (path / manifest.FILE).unlink(missing_ok=True)
        sums[name] = sum_of(path / name)
    manifest.write(path, sums)


def sum_of(file: Path) -> manifest.Sum:
    copy = file.with_name(f"copy of {file.name}")
    with manifest.durable(copy) as summing:
        summing.write(file.read_bytes())
    copy.unlink()
    return summing.sum


@pytest.mark.parametrize("name", ["../../config.toml", "/etc/hostname", "..", "a\x00b", "", ".hidden", "a/b", "a\\b"])
def test_manifest_rejects_names_outside_its_folder(name: str, run: Path) -> None:
    path = candidates(run)[0]
    resign(path, **{name: manifest.Sum(3, "0" * 32)})
    with pytest.raises(manifest.Damaged, match="which names"):
        inspect(path)


def test_piece_reader_rejects_files_not_in_manifest(run: Path) -> None:
    path = candidates(run)[0]
    index: dict[str, Any] = json.loads((path / INDEX).read_text())
    shutil.copy(path / "rank-00000.safetensors", run / "outside.safetensors")
    next(iter(index.values()))["pieces"][0][0] = "../../outside.safetensors"
    (path / INDEX).write_text(json.dumps(index))
    resign(path)
    with pytest.raises(manifest.Damaged, match=r"which names '\.\./\.\./outside\.safetensors'"):
        PieceReader(path)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
@pytest.mark.parametrize("name", ["rank-00000.safetensors", "state.json", manifest.FILE])
def test_checkpoint_inspect_rejects_non_regular_files(kind: str, name: str, run: Path, tmp_path: Path) -> None:
    file = candidates(run)[0] / name
    file.rename(tmp_path / "elsewhere")
    make = {"link": lambda: file.symlink_to(tmp_path / "elsewhere"), "pipe": lambda: os.mkfifo(file)}
    make.get(kind, file.mkdir)()
    with pytest.raises(manifest.Damaged, match=name):
        inspect(file.parent)


# What a run keeps of a Hugging Face folder


def kept(run: Path, where: object) -> Path:
    place = run / "huggingface"
    place.mkdir()
    (place / "tensors.json").write_text(json.dumps(where))
    return place


@pytest.mark.parametrize(
    "where",
    [
        {"a": ["../../a.safetensors", "F32"]},
        {"a": ["/a.safetensors", "F32"]},
        {"a": ["a.bin", "F32"]},
        {"a": ["a.safetensors", "I8"]},
        {"a": 3},
        [],
    ],
)
def test_provenance_rejects_bad_tensor_index(where: object, tmp_path: Path) -> None:
    kept(tmp_path, where)
    with pytest.raises(ValueError, match=r"tensors\.json"):
        Provenance.of(tmp_path)


def test_provenance_rejects_symlinks(tmp_path: Path) -> None:
    place = kept(tmp_path, {"a": ["a.safetensors", "F32"]})
    assert Provenance.of(tmp_path) is not None
    (place / "config.json").symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match="is a link"):
        Provenance.of(tmp_path)
