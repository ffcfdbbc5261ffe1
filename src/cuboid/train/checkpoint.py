"""Checkpoints that load on any cuboid: parameters and optimizer state as DTensors under the whole model's names.

A checkpoint is a folder step-00000100 with torch.distributed.checkpoint's files, state.json (what is not a tensor) and
manifest.json (size and checksum of every other file). It is written aside, made durable, and renamed into place, so
that a folder of that name is complete whatever happened. A thread writes, over a process group of its own.
"""

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from cuboid.comm import all_reduce
from cuboid.config import ModelConfig, RopeScaling
from cuboid.model import Transformer
from cuboid.nn import declared

MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW keeps of each parameter
_NAME = re.compile(r"step-(\d{8,})")


def tensors(model: Transformer, optimizer: torch.optim.Optimizer | None, copy: bool = False) -> dict[str, DTensor]:
    """Every tensor of a checkpoint by its name; as they are, or copied to the host."""
    mesh, found = model.parallel.mesh, {}

    def put(name: str, local: Tensor, spec: Any) -> None:
        found[name] = spec.dtensor(local.detach().to("cpu", copy=True) if copy else local.detach(), mesh)

    for name, parameter, d in declared(model):
        put(f"model.{name}", parameter, d.spec)
        if optimizer is not None:
            for moment in MOMENTS:
                put(f"optimizer.{moment}.{name}", optimizer.state[parameter][moment], d.spec)
    return found


class Writer:
    """Writes checkpoints into `folder`, keeping the newest `keep` (0: all). Every rank makes one."""

    def __init__(self, folder: Path, model: Transformer, keep: int, background: bool) -> None:
        self.folder, self.model, self.keep, self.background = folder, model, keep, background
        self.group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, optimizer: torch.optim.Optimizer | None, state: Mapping[str, Any]) -> None:
        """Copy everything now and write it, perhaps while the next steps run. A model that was never trained has no
        optimizer."""
        self.wait()
        copies = tensors(self.model, optimizer, copy=True)
        self._thread = threading.Thread(target=self._write, args=(step, copies, {"step": step, **state}))
        self._thread.start()
        if not self.background:
            self.wait()

    def wait(self) -> None:
        """Until the last checkpoint is in place; raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise RuntimeError(f"a checkpoint could not be written to {self.folder}: {error}") from error

    def _write(self, step: int, copies: dict[str, DTensor], state: dict[str, Any]) -> None:
        try:
            final = self.folder / f"step-{step:08d}"
            aside, rank = final.with_suffix(".aside"), self.model.parallel.mesh.rank
            if rank == 0:
                for left in self.folder.glob("step-*.aside"):  # by a run that was killed
                    shutil.rmtree(left)
                aside.mkdir(mode=0o700, parents=True)
            dist.barrier(self.group)
            dcp.save(copies, storage_writer=dcp.FileSystemWriter(aside, thread_count=1), process_group=self.group)
            mine = sorted(aside.glob(f"__{rank}_*.distcp"))
            _write_json(aside / f"checksums-{rank}.json", {file.name: _checksum(file) for file in mine})
            dist.barrier(self.group)
            if rank == 0:
                self._publish(aside, final, state)
            dist.barrier(self.group)
        except BaseException as error:  # handed to the next `wait`
            self._error = error

    def _publish(self, aside: Path, final: Path, state: dict[str, Any]) -> None:
        manifest: dict[str, Any] = {}
        for part in sorted(aside.glob("checksums-*.json")):
            manifest |= json.loads(part.read_text())
            part.unlink()
        _write_json(aside / "state.json", state)
        for name in (".metadata", "state.json"):
            manifest[name] = _checksum(aside / name)
        _write_json(aside / "manifest.json", manifest)
        _sync(aside)
        forget(self.folder, step_of(final) - 1)
        aside.rename(final)
        _sync(self.folder)
        if self.keep:
            for old in complete(self.folder)[: -self.keep]:
                _remove(old)


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path / "manifest.json").is_file()]
    return sorted(found, key=step_of)


def last_step(folder: Path) -> int:
    """Of the newest complete checkpoint; 0 if there is none."""
    return max(map(step_of, complete(folder)), default=0)


def forget(folder: Path, after: int) -> None:
    """Remove the checkpoints of steps that a resumed run takes anew."""
    for path in complete(folder):
        if step_of(path) > after:
            _remove(path)


def step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def newest(folder: Path) -> Path:
    """`folder` itself if it is a checkpoint, else the newest in it or in its `checkpoints`; absolute."""
    folder = folder.resolve()
    if (folder / "manifest.json").is_file():
        return folder
    found = complete(folder / "checkpoints") or complete(folder)
    if not found:
        raise ValueError(f"{folder} has no complete checkpoint; give a run folder with one, or a checkpoint itself")
    return found[-1]


def state_of(path: Path) -> dict[str, Any]:
    """What the checkpoint says of itself, before its tensors are read."""
    if not _fits(path / "state.json", manifest_of(path)):
        raise damaged(path, ["state.json"])
    state: dict[str, Any] = json.loads((path / "state.json").read_text())
    return state


def manifest_of(path: Path) -> dict[str, list[int | str]]:
    try:
        manifest: dict[str, list[int | str]] = json.loads((path / "manifest.json").read_text())
    except (OSError, ValueError):
        raise damaged(path, ["manifest.json"]) from None
    return manifest


def damaged(path: Path, names: Sequence[str]) -> ValueError:
    listed = ", ".join(names)
    return ValueError(f"checkpoint {path} is damaged: {listed} missing or changed since it was written; use another")


def model_config(path: Path) -> ModelConfig:
    """The model a checkpoint is of."""
    values = dict(state_of(path)["model"])
    scaling = values.pop("rope_scaling")
    return ModelConfig(**values, rope_scaling=RopeScaling(**scaling) if scaling else None)


def check_model(path: Path, ours: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint's state, if it is of a model like ours; dropout may differ."""
    state = state_of(path)
    theirs = state["model"]
    different = sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
    different = [key for key in different if key not in ("dropout", "init_std")]
    if different:
        listed = ", ".join(f"model.{key}={theirs.get(key)!r} (here {ours.get(key)!r})" for key in different)
        raise ValueError(f"{path} is a checkpoint of another model: {listed}; train the same model or another folder")
    return state


def load(path: Path, model: Transformer, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Fill the model (and the optimizer) from a checkpoint of any cuboid. Every rank calls it."""
    verify_files(path, model)
    state = tensors(model, optimizer)
    dcp.load(state, storage_reader=dcp.FileSystemReader(path))
    if optimizer is not None:
        done = torch.tensor(float(state_of(path)["updates"]))
        for parameter in model.parameters():
            optimizer.state[parameter]["step"].copy_(done)


def verify_files(path: Path, model: Transformer) -> None:
    """Hold every file against the manifest, each rank its share of them; all ranks raise if one does not fit."""
    mesh, manifest = model.parallel.mesh, manifest_of(path)
    names = sorted(manifest)
    wrong = torch.zeros(len(names), device=mesh.device)
    for i in range(mesh.rank, len(names), mesh.world.size):
        wrong[i] = not _fits(path / names[i], manifest)
    found = all_reduce(wrong, mesh.world).wait().tolist()
    if any(found):
        raise damaged(path, [name for name, bad in zip(names, found, strict=True) if bad])


def _fits(file: Path, manifest: Mapping[str, Any]) -> bool:
    return file.is_file() and _checksum(file) == manifest.get(file.name)


def _checksum(file: Path) -> list[int | str]:
    with file.open("rb") as f:
        return [file.stat().st_size, hashlib.file_digest(f, hashlib.blake2b).hexdigest()[:32]]


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    """Its manifest first: half removed, it must not count as complete."""
    (path / "manifest.json").unlink()
    shutil.rmtree(path)


def _sync(folder: Path) -> None:
    """Make the folder's own entries durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
