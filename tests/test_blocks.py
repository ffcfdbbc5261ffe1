"""Layers for a model of one's own: the encoder of examples/, and what torch does with it from outside."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded import EXACT, relative
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from cuboid import Cuboid, CuboidParallel, Mesh, Pool, Serial, World
from cuboid.mesh.layout import shard_of, whole_of
from cuboid.model.module import declared
from cuboid.model.parallel import Parallel

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import encoder

Pools = Callable[[int], Pool]
SMALL = encoder.CONFIG.replace(layers=1)


def batch(samples: int, seq: int) -> tuple[Tensor, Tensor]:
    tokens, targets = encoder.masked(0)
    return tokens[:samples, :seq], targets[:samples, :seq]


def step(parallel: Parallel, samples: int, seq: int) -> tuple[encoder.Encoder, Tensor]:
    """The encoder with no parameter at zero or one, after a backward."""
    model, place = encoder.Encoder(parallel, dtype=torch.float64), parallel.place(samples, seq)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter, d in declared(model):
            noise = 0.2 * torch.randn(d.spec.shape, generator=generator, dtype=torch.float64)
            shard_of(parameter).add_(d.spec.take(noise, parallel.mesh.cuboid, parallel.mesh.coordinates))
    tokens, targets = batch(samples, seq)
    loss = model(place.take(tokens, 0), place.take(targets, -100), place)
    loss.backward()
    return model, loss


def gradients(world: World, cuboid: Cuboid, samples: int, seq: int) -> dict[str, float]:
    """Errors against the encoder on one device, on rank 0."""
    mesh = Mesh(cuboid, world.rank)
    model, loss = step(CuboidParallel(encoder.CONFIG, mesh), samples, seq)
    mine = {name: shard_of(parameter.grad) for name, parameter, _ in declared(model)}
    norm = model.gradient_norm().item()
    mesh.close()
    ranks: list[Any] = [None] * world.size
    dist.gather_object(mine, ranks if world.rank == 0 else None)
    if world.rank:
        return {}
    whole, wanted = step(Serial(encoder.CONFIG), samples, seq)
    errors = {"loss": abs(loss.item() / wanted.item() - 1), "norm": abs(norm / whole.gradient_norm().item() - 1)}
    for name, _, d in declared(model):
        wanted_gradient = whole.get_parameter(name).grad
        assert wanted_gradient is not None
        errors[name] = relative(d.spec.join([r[name] for r in ranks], cuboid), wanted_gradient, 1e-3 * norm)
    return errors


@pytest.mark.parametrize(
    ("cuboid", "samples", "seq"),
    [
        (Cuboid(2, 2, 2), 4, 13),  # padded to 14: no query may attend to the padding
        (Cuboid(1, 4, 2), 3, 24),
        (Cuboid(4, 1, 2), 2, 13),  # x cuts the sequence
        (Cuboid(1, 2, 1, replicas=2), 2, 7),
    ],
    ids=str,
)
def test_encoder_loss_and_gradients_match_serial(cuboid: Cuboid, samples: int, seq: int, pool: Pools) -> None:
    errors = pool(cuboid.ranks).run(gradients, cuboid, samples, seq)[0]
    assert {name: error for name, error in errors.items() if not error <= EXACT} == {}


def test_attention_non_causal_sees_past_and_future(pool: Pools) -> None:
    assert pool(1).run(looks)[0] == [True, True]


def looks(world: World) -> list[bool]:
    """Whether a token's loss depends on what comes before it, and after."""
    parallel, found = Serial(encoder.CONFIG), []
    model, place = encoder.Encoder(parallel, dtype=torch.float64), parallel.place(1, 8)
    targets = torch.full((1, 8), -100)
    targets[0, 4] = 5
    tokens = torch.arange(8)[None]
    for other in (0, 7):
        changed = tokens.clone()
        changed[0, other] = 30
        a, b = (model(place.take(each, 0), place.take(targets, -100), place).item() for each in (tokens, changed))
        found.append(a != b)
    return found


def test_encoder_example_learns_alike_on_any_cuboid() -> None:
    with Pool(4) as pool:
        first = pool.run(encoder.train, (2, 1, 2), 10)
    assert all(losses == first[0] for losses in first)
    assert first[0][-1] < 0.9 * first[0][0]
    with Pool(1) as pool:
        assert pool.run(encoder.train, (1, 1, 1), 10)[0] == pytest.approx(first[0], rel=1e-3)


# From outside

#: Those whose operations DTensor has; in torch 2.13 it lacks some of Adafactor's.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
}


def trained(parallel: Parallel, optimizer: str) -> tuple[dict[str, Tensor], list[float]]:
    """Whole parameters after two clipped steps, and the gradient's norms."""
    model, place = encoder.Encoder(parallel, dtype=torch.float64), parallel.place(4, 8)
    rule, norms = OPTIMIZERS[optimizer](model.parameters()), []
    tokens, targets = batch(4, 8)
    for _ in range(2):
        for _ in range(2):  # gradients of two batches add up
            (model(place.take(tokens, 0), place.take(targets, -100), place) / 2).backward()
        norms.append(whole_of(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)).item())
        rule.step()
        rule.zero_grad()
    return {name: whole_of(parameter) for name, parameter in model.named_parameters()}, norms


def optimised(world: World, cuboid: Cuboid, optimizer: str) -> float:
    mesh = Mesh(cuboid, world.rank)
    found, norms = trained(CuboidParallel(SMALL, mesh), optimizer)
    mesh.close()
    wanted, reference = trained(Serial(SMALL), optimizer)
    assert found.keys() == wanted.keys()
    errors = [relative(found[name], wanted[name], 1e-3) for name in wanted]
    return max(*errors, *(abs(a / b - 1) for a, b in zip(norms, reference, strict=True)))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_model_parameters_train_as_serial_with_torch_optimizers(optimizer: str, pool: Pools) -> None:
    assert max(pool(4).run(optimised, Cuboid(2, 1, 2), optimizer)) <= 1e-7


def kept(world: World, cuboid: Cuboid, folder: Path, seed: int, save: bool) -> dict[str, Tensor]:
    mesh = Mesh(cuboid, world.rank)
    model = encoder.Encoder(CuboidParallel(encoder.CONFIG, mesh), seed)
    if save:
        dcp.save(model.state_dict(), checkpoint_id=folder)
    else:
        dcp.load(model.state_dict(), checkpoint_id=folder)
    found = {name: whole_of(tensor) for name, tensor in model.state_dict().items()}
    mesh.close()
    return found


def test_model_state_is_saved_and_loaded_by_torch_dcp(tmp_path: Path) -> None:
    with Pool(8) as ranks:
        saved = ranks.run(kept, Cuboid(2, 2, 2), tmp_path, 1, True)[0]
    assert "blocks.1.attention.q.weight" in saved
    assert saved["embed.weight"].shape == (62, 64)
    with Pool(4) as ranks:
        loaded = ranks.run(kept, Cuboid(1, 4, 1), tmp_path, 2, False)[0]
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def over(world: World, sizes: tuple[int, ...], names: tuple[str, ...]) -> tuple[str, float] | str:
    device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    try:
        mesh = Mesh.over(device_mesh)
    except ValueError as error:
        return str(error)
    _, loss = step(CuboidParallel(encoder.CONFIG, mesh), 4, 8)
    return f"{mesh.cuboid} {','.join(mesh.cuboid.order)}", loss.item()


def test_mesh_over_accepts_torch_device_mesh(pool: Pools) -> None:
    (name, loss), *_ = pool(8).run(over, (2, 4), ("z", "x"))
    assert name == "4,1,2 pipe,replicas,y,z,x"
    (name, same), *_ = pool(8).run(over, (2, 2, 1, 2), ("replicas", "y", "x", "z"))
    assert name == "1,2,2 replicas=2 pipe,replicas,y,x,z"
    assert loss == pytest.approx(same, rel=1e-12)
    assert "dims named ('x', 'tp')" in pool(8).run(over, (4, 2), ("x", "tp"))[0]


def test_gradient_norm_is_accurate_for_large_fp32_gradient() -> None:
    """Of millions of numbers in fp32, whose sum in fp32 alone would be off by a thousandth."""
    model = encoder.Encoder(Serial(encoder.CONFIG.replace(vocab=1 << 17)))
    parameters, generator = list(model.parameters()), torch.Generator().manual_seed(0)
    gradients = [torch.randn(parameter.shape, generator=generator) for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    wanted = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt()
    assert abs(model.gradient_norm() / wanted - 1) < 1e-8
