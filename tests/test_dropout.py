"""Dropout in training mode: by global index and the number of the forward, the same on every cuboid; none in eval."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from sharded import against
from steps import EXACT, GPT2, LLAMA, batches_on, loss_of, model_on

from cuboid.baselines.serial import Serial
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import CuboidParallel
from cuboid.model.generate import generate
from cuboid.model.nn import evaluating
from cuboid.model.parallel import Parallel
from cuboid.model.transformer import Transformer
from cuboid.run.launch import Pool, World
from cuboid.step.schedule import Schedule

Pools = Callable[[int], Pool]
DROPPING = GPT2.replace(dropout=0.3)


def trained(parallel: Parallel, recompute: str = "none") -> tuple[Transformer, list[float]]:
    """After two forwards at once, whose backwards run in another order, and two micro-batches in `play`."""
    model = model_on(parallel, recompute)  # type: ignore[arg-type]
    (one,), two = batches_on(parallel, 1), batches_on(parallel, 2)
    first, second = loss_of(model, one), loss_of(model, one)
    (first * 2).backward()
    second.backward()
    with evaluating(model):
        still = loss_of(model, one)
    return model, [loss.item() for loss in (first, second, still, *model.play(two))]


def differences(world: World, config: ModelConfig, shape: Cuboid, recompute: str) -> dict[str, float]:
    mesh = Mesh(shape, world.rank)
    model, losses = trained(CuboidParallel(config, mesh, schedule=Schedule(sub_batches=2)), recompute)
    whole, wanted = trained(Serial(config))
    mesh.close()
    return {
        "losses": max(abs(a / b - 1) for a, b in zip(losses, wanted, strict=True)),
        "gradients": against(model, whole),
        "forwards": abs(int(model.dropout_state[1]) - 4),
    }


@pytest.mark.parametrize(
    ("config", "shape", "recompute"),
    [
        (DROPPING, Cuboid(2, 2, 1), "none"),
        (DROPPING, Cuboid(1, 2, 2), "full"),
        (LLAMA.replace(dropout=0.2), Cuboid(2, 1, 2), "selective"),
        pytest.param(
            DROPPING.replace(heads=6, kv_heads=6, hidden=12, head_dim=2),
            Cuboid(2, 3, 2),
            "none",
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_dropout_of_training_mode_is_serials(config: ModelConfig, shape: Cuboid, recompute: str, pool: Pools) -> None:
    for found in pool(shape.ranks).run(differences, config, shape, recompute):
        assert {what: error for what, error in found.items() if not error <= EXACT} == {}


def test_dropout_changes_with_every_forward_and_eval_has_none() -> None:
    _, (first, second, still, third, fourth) = trained(Serial(DROPPING))
    assert len({first, second, still, third, fourth}) == 5
    plain = model_on(Serial(GPT2))
    assert still == loss_of(plain, batches_on(plain.parallel, 1)[0]).item()


def test_dropout_seed_begins_anew() -> None:
    model = model_on(Serial(DROPPING))
    (batch,) = batches_on(model.parallel, 1)
    assert model.dropout_seed == 1  # that of its first values
    first = loss_of(model, batch).item()
    assert loss_of(model, batch).item() != first
    model.dropout_seed = 1
    assert loss_of(model, batch).item() == first
    model.dropout_seed = 2
    assert loss_of(model, batch).item() != first


def test_dropout_goes_on_in_a_copy_and_after_resuming() -> None:
    model = model_on(Serial(DROPPING))
    (batch,) = batches_on(model.parallel, 1)
    loss_of(model, batch)
    copy, other = deepcopy(model), Transformer(Serial(DROPPING), None, torch.float64)
    other.load_state_dict(model.state_dict())
    wanted = [loss_of(model, batch).item() for _ in range(2)]
    assert [loss_of(copy, batch).item() for _ in range(2)] == wanted
    assert [loss_of(other, batch).item() for _ in range(2)] == wanted


def test_model_without_dropout_has_no_state_of_it() -> None:
    assert "dropout_state" not in model_on(Serial(GPT2)).state_dict()


def test_logits_in_training_mode_with_dropout_are_rejected() -> None:
    model = model_on(Serial(DROPPING))
    with pytest.raises(ValueError, match=r"dropout=0\.3; call model\.eval\(\) first"):
        next(generate(model, [1, 2], 1))
    model.eval()
    assert len(list(generate(model, [1, 2], 1))) == 1
