"""`state_dict()` and an optimizer's state, by torch's own means, from any cuboid to any other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from numpy.typing import NDArray
from steps import GPT2, batches_on, loss_of, model_on
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import shard_of, whole_of
from cuboid.mesh.mesh import Mesh
from cuboid.model.cuboid import CuboidParallel
from cuboid.model.transformer import Transformer
from cuboid.run.launch import Pool, World

SHAPES = (Cuboid(2, 2, 1), Cuboid(1, 2, 2), Cuboid(4, 1, 1), Cuboid())
Arrays = dict[str, NDArray[Any]]


def made(mesh: Mesh) -> tuple[Transformer, torch.optim.AdamW]:
    model = model_on(CuboidParallel(GPT2, mesh))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def arrays(model: Transformer, optimizer: torch.optim.AdamW) -> Arrays:
    """All tensors, unsharded."""
    found = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        found |= {f"{key} of {name}": value for key, value in optimizer.state[parameter].items()}
    return {name: whole_of(tensor).numpy() for name, tensor in found.items()}


def save(world: World, shape: Cuboid, folder: Path, rate: float) -> Arrays:
    """After two steps at its own learning rate, so that no two checkpoints are alike."""
    mesh = Mesh(shape, world.rank)
    model, optimizer = made(mesh)
    optimizer.param_groups[0]["lr"] = rate
    for batch in batches_on(model.parallel):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder)
    found = arrays(model, optimizer)
    mesh.close()
    return found


def load(world: World, shape: Cuboid, folders: list[Path]) -> list[Arrays]:
    """Each into a new model, on one mesh: DTensor plans each operation anew on a new one, which takes most of the
    time."""
    mesh, found = Mesh(shape, world.rank), []
    for folder in folders:
        model, optimizer = made(mesh)
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        found.append(arrays(model, optimizer))
    mesh.close()
    return found


def test_state_dicts_of_model_and_optimizer_are_bit_identical_on_any_cuboid(
    tmp_path: Path, pool: Callable[[int], Pool]
) -> None:
    folders = {shape: tmp_path / str(i) for i, shape in enumerate(SHAPES)}
    saved = {
        shape: pool(shape.ranks).run(save, shape, folder, 0.01 * (i + 1))[0]
        for i, (shape, folder) in enumerate(folders.items())
    }
    assert "exp_avg_sq of blocks.1.attention.q.weight" in saved[SHAPES[0]]
    for here in SHAPES:
        for loaded in pool(here.ranks).run(load, here, list(folders.values())):
            for there, found in zip(folders, loaded, strict=True):
                assert found.keys() == saved[there].keys()
                different = [name for name, value in saved[there].items() if not np.array_equal(found[name], value)]
                assert different == [], f"saved on {there}, loaded on {here}"


def refused(world: World, shape: Cuboid) -> list[str]:
    mesh, said = Mesh(shape, world.rank), []
    model = model_on(CuboidParallel(GPT2, mesh))
    other = {name: 2 * whole_of(tensor) for name, tensor in model.state_dict().items()}
    attempts: list[Callable[[], object]] = [
        lambda: model.load_state_dict({name: tensor.float() for name, tensor in other.items()}, assign=True),
        lambda: model.to("meta"),
    ]
    for attempt in attempts:
        try:
            attempt()
            said.append("")
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    mesh.close()
    return said


@pytest.mark.parametrize("shape", [Cuboid(), Cuboid(2, 2, 1)], ids=str)
def test_model_rejects_other_dtype_assigned_and_other_device(shape: Cuboid, pool: Callable[[int], Pool]) -> None:
    for assigned, moved in pool(shape.ranks).run(refused, shape):
        assert "is torch.float32 on cpu and cannot be assigned to a parameter that is torch.float64 on cpu" in assigned
        assert moved == "the model's mesh is of cpu, not meta; make the model on Mesh(…, device=meta)"


def twin(world: World, shape: Cuboid) -> bool:
    """Whether a state dict loads into a model on another mesh."""
    meshes = [Mesh(shape, world.rank) for _ in range(2)]
    one, other = (model_on(CuboidParallel(GPT2, mesh)) for mesh in meshes)
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.mul_(2)
    other.load_state_dict(one.state_dict())
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    same = all(torch.equal(shard_of(a), shard_of(b)) for a, b in pairs)
    for mesh in meshes:
        mesh.close()
    return same


def test_model_loads_state_dict_of_another_mesh(pool: Callable[[int], Pool]) -> None:
    assert all(pool(4).run(twin, Cuboid(1, 2, 2)))
