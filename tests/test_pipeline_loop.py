"""A user's training loop on a pipe: clipping and fp16 scaling see all stages."""

from collections.abc import Callable

import pytest
import torch
from sharded import EXACT, against
from steps import GPT2, batches_on, model_on, reference
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import shard_of
from cuboid.mesh.mesh import Mesh
from cuboid.model.cuboid import CuboidParallel
from cuboid.model.transformer import Transformer
from cuboid.run.launch import Pool, World

Pools = Callable[[int], Pool]
ORDERS = (2.0, 1.0, 3.0, float("inf"))


def norms_of(model: Transformer) -> list[float]:
    """Of the gradient, then what it is clipped by, then of some parameters, which every place has."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    found = [get_total_norm(gradients, order, foreach=each).item() for order in ORDERS for each in (None, False)]
    matrices = [p for name, p in model.named_parameters() if "mlp" in name and p.dim() > 1]
    return [*found, clip_grad_norm_(model.parameters(), 0.1).item(), clip_grad_norm_(matrices, 0.01).item()]


def clipped(world: World, cuboid: Cuboid) -> tuple[list[float], float, Tensor]:
    """Norms, how far the clipped gradient is from one device's, and the tied embedding's gradient."""
    model, whole = model_on(CuboidParallel(GPT2, mesh := Mesh(cuboid, world.rank))), reference(GPT2)
    model.play(batches_on(model.parallel))
    norms, wanted = norms_of(model), norms_of(whole)
    far, table = against(model, whole), model.embed
    mesh.close()
    assert norms == pytest.approx(wanted, rel=EXACT)
    return norms, far, shard_of(table.weight.grad) if table is not None else torch.empty(0)


@pytest.mark.parametrize("cuboid", [Cuboid(1, 2, 1, pipe=2), Cuboid(pipe=2)], ids=str)
def test_clip_grad_norm_on_a_pipe_is_of_the_whole_model(cuboid: Cuboid, pool: Pools) -> None:
    """Equal to the last bit on all ranks, so that both ends of a tied embedding stay equal."""
    found = pool(cuboid.ranks).run(clipped, cuboid)
    assert all(norms == found[0][0] and far <= EXACT for norms, far, _ in found)
    assert torch.equal(found[0][2], found[cuboid.ranks // 2][2])


def scaled(world: World, cuboid: Cuboid, overflowing: int) -> bool:
    """Whether a rank takes the step when one shard of one rank overflows."""
    model = model_on(CuboidParallel(GPT2, mesh := Mesh(cuboid, world.rank))).float()
    model.freeze("embed|positions")  # what comes first then is a norm, replicated over y
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    before = [shard_of(p).clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    if world.rank == overflowing:
        shard_of(model.blocks[0].mlp.up.weight.grad).view(-1)[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    mesh.close()
    assert scaler.get_scale() == (2.0 if overflowing < 0 else 1.0)
    return any(not torch.equal(a, shard_of(b)) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("cuboid", [Cuboid(1, 2, 1, pipe=2), Cuboid(1, 2, 2)], ids=str)
def test_grad_scaler_skips_on_all_ranks_where_one_overflows(cuboid: Cuboid, pool: Pools) -> None:
    assert all(pool(4).run(scaled, cuboid, -1))
    assert not any(pool(4).run(scaled, cuboid, 1))
