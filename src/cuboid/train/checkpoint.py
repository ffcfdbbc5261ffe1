"""Checkpoints that load on any cuboid: parameters and optimizer state as DTensors under the model's parameter names.

A checkpoint is a folder step-00000100 with the tensors' files (`storage.py`), state.json (what is not a tensor) and
manifest.json (size and checksum of every file). It is renamed to that name when it is complete, and renamed again
before it is removed. So if a folder of that name lacks a file, the file was lost.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from cuboid.comm.collectives import from_all, from_first
from cuboid.mesh.layout import Spec, shard_of
from cuboid.mesh.mesh import Mesh
from cuboid.model.freeze import matching
from cuboid.model.module import declared
from cuboid.model.transformer import Transformer
from cuboid.train import manifest
from cuboid.train.listing import State, candidates, inspect, none_good
from cuboid.train.listing import newest as newest
from cuboid.train.manifest import Damaged, Sum
from cuboid.train.storage import PieceReader

MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW keeps of each parameter


def tensors(
    model: Transformer,
    optimizer: torch.optim.Optimizer | None,
    copied: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda shards: shards,
) -> dict[str, DTensor]:
    """Every tensor of a checkpoint by name, or what `copied` makes of them. Frozen parameters have no moments."""
    specs, shards = dict[str, Spec](), dict[str, Tensor]()

    def put(name: str, tensor: Tensor, spec: Spec) -> None:
        specs[name], shards[name] = spec, shard_of(tensor)

    for name, parameter, d in declared(model):
        put(f"model.{name}", parameter, d.spec)
        if optimizer is not None and parameter in optimizer.state:
            for moment in MOMENTS:
                put(f"optimizer.{moment}.{name}", optimizer.state[parameter][moment], d.spec)
    return {name: specs[name].dtensor(shard, model.parallel.mesh) for name, shard in copied(shards).items()}


def check_model(path: Path, state: State, ours: Mapping[str, Any]) -> None:
    """Raise ValueError if the checkpoint's model is another; dropout may differ, and a context without weights."""
    theirs = state["model"]
    different = sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
    free = {"dropout", "init_std"} | ({"context"} if ours["family"] == "llama" else set())
    different = [key for key in different if key not in free]
    if different:
        listed = ", ".join(f"model.{key}={theirs.get(key)!r} (here {ours.get(key)!r})" for key in different)
        raise ValueError(f"{path} is a checkpoint of another model: {listed}; train the same model or another folder")


# Its tensors


def load(
    given: Path,
    model: Transformer,
    optimizer: torch.optim.Optimizer | None = None,
    check: Callable[[Path, State], None] = lambda path, state: None,
) -> State:
    """Load the model (and the optimizer) from the newest good checkpoint of a run, or from the given one, written on
    any cuboid. Returns its state. Every rank calls it, and all raise alike; `check` may reject a checkpoint. Parameters
    that were frozen start with moments of zero: the state's `fresh` has, for each of them, the updates before that."""
    path, state = choose(given, model.parallel.mesh, check)
    frozen = matching(state.get("freeze", ""), model.names())
    absent = {f"optimizer.{moment}.{name}" for moment in MOMENTS for name in frozen}
    wanted = {name: each for name, each in tensors(model, optimizer).items() if name not in absent}
    try:
        dcp.load(wanted, storage_reader=PieceReader(path))
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise ValueError(f"checkpoint {path} cannot be loaded: {cause}; use another") from error
    if optimizer is None:
        return state
    done, fresh = state["updates"], dict(state.get("fresh", {}))
    for name in model.names():  # of other stages too: the first rank writes the state
        if name in model.frozen:
            fresh.pop(name, None)
        elif name in frozen:
            fresh[name] = done
    for name, parameter, _ in declared(model):
        if parameter in optimizer.state:
            optimizer.state[parameter]["step"].fill_(done - fresh.get(name, 0))
    return {**state, "fresh": fresh}


def choose(given: Path, mesh: Mesh, check: Callable[[Path, State], None]) -> tuple[Path, State]:
    """The newest candidate whose every file is as it was written, and its state. The first rank lists them and reads
    manifests, so that all ranks see the same; each rank verifies its share of the files. Damage is logged to stderr."""
    damage: list[Damaged] = []
    for path in _from_first(lambda: candidates(given), mesh):
        try:
            sums, state = _from_first(lambda path=path: inspect(path), mesh)  # type: ignore[misc]
            check(path, state)
            verify(path, sums, mesh)
        except Damaged as error:
            damage.append(error)
            continue
        if mesh.rank == 0:
            for each in damage:
                print(f"warning: {each}; {path.name} is used instead", file=sys.stderr, flush=True)
        return path, state
    raise none_good(given, damage)


def verify(path: Path, sums: Mapping[str, Sum], mesh: Mesh) -> None:
    """Compare every file with the manifest, each rank its share of them. All ranks raise Damaged if one differs."""
    mine = sorted(sums)[mesh.rank :: mesh.world.size]
    wrong = [name for name in mine if not manifest.same(path, name, sums[name])]
    found = [name for of_rank in from_all(wrong, mesh.world) for name in of_rank]
    if found:
        raise Damaged(path, sorted(found))


def _from_first(find: Callable[[], Any], mesh: Mesh) -> Any:
    """Runs `find` on the first rank; all ranks return, or raise, what it did."""
    found: Any = None
    if mesh.rank == 0:
        try:
            found = find()
        except ValueError as error:
            found = error
    found = from_first(found, mesh.world)
    if isinstance(found, ValueError):
        raise found
    return found
