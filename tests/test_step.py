"""A step as PyTorch's users know it: several forwards at a time, backwards in any order, hooks, optimizers."""

from collections.abc import Callable

import pytest
import torch
from sharded import Batches, against, plainly
from silent import silently
from steps import EXACT, GPT2, LLAMA, MICRO, SEQ, batches_on, loss_of, model_on, reference

from cuboid.baselines.serial import Serial
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import CuboidParallel, Policy
from cuboid.model.transformer import Recompute, Transformer
from cuboid.run.launch import Pool, World
from cuboid.step.runner import At
from cuboid.step.schedule import PREFETCH, Move, Order, Schedule, parse

Pools = Callable[[int], Pool]
MIXED = [Cuboid(2, 2, 1), Cuboid(1, 2, 2), Cuboid(2, 1, 2), Cuboid(1, 2, 1, replicas=2)]


# Several live forwards


def in_turn(model: Transformer, batches: Batches) -> None:
    plainly(model, batches)


def all_forwards_first(model: Transformer, batches: Batches) -> None:
    for loss in [loss_of(model, batch) / MICRO for batch in batches]:
        loss.backward()


def last_forward_first(model: Transformer, batches: Batches) -> None:
    for loss in reversed([loss_of(model, batch) / MICRO for batch in batches]):
        loss.backward()


def sum_of_losses(model: Transformer, batches: Batches) -> None:
    (sum(loss_of(model, batch) for batch in batches) / MICRO).backward()


def evaluation_between(model: Transformer, batches: Batches) -> None:
    for batch in batches:
        loss = loss_of(model, batch) / MICRO
        with torch.no_grad():
            again = loss_of(model, batch)
            model.logits(batch[0], batch[1].place)
        assert not again.requires_grad
        assert torch.equal(again / MICRO, loss.detach())
        loss.backward()


def scaled(model: Transformer, batches: Batches) -> None:
    for batch in batches:
        (loss_of(model, batch) * 1024).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= 1024 * MICRO


WAYS = (in_turn, all_forwards_first, last_forward_first, sum_of_losses, evaluation_between, scaled)


def errors_of_ways(world: World, shape: Cuboid, config: ModelConfig, schedule: Schedule) -> dict[str, float]:
    mesh, wanted, found = Mesh(shape, world.rank), reference(config), {}
    for way in WAYS:
        model = model_on(CuboidParallel(config, mesh, schedule=schedule))
        way(model, batches_on(model.parallel))
        found[way.__name__] = against(model, wanted)
    mesh.close()
    return found


@pytest.mark.parametrize(
    ("shape", "config", "schedule"),
    [
        (Cuboid(2, 2, 1), GPT2, PREFETCH),
        (Cuboid(1, 2, 2), LLAMA, Schedule(sub_batches=2)),
        (Cuboid(2, 1, 2), LLAMA, Schedule(prefetch=False)),
        (Cuboid(1, 2, 1, replicas=2), GPT2, Schedule(sub_batches=2, chunks=2)),
    ],
    ids=lambda value: str(value) if isinstance(value, Cuboid) else "",
)
def test_model_backward_of_micro_batches_equals_whole_batch(
    shape: Cuboid, config: ModelConfig, schedule: Schedule, pool: Pools
) -> None:
    for errors in pool(shape.ranks).run(errors_of_ways, shape, config, schedule):
        assert {way: error for way, error in errors.items() if not error <= EXACT} == {}


# Orders

ORDERS = ("F0 B0 F1 B1", "F0 F1+B0 B1", "F0 F1 B0 B1", "F0 F1 B1 B0", "F0 F1+B0 W0 B1 W1", "F0 F1 B0 B1 W1 W0")
Setting = tuple[ModelConfig, Schedule, Recompute, Policy]
SETTINGS: list[Setting] = [
    (GPT2, PREFETCH, "full", Policy()),
    (LLAMA, Schedule(sub_batches=2), "selective", Policy("retain")),
    (LLAMA, Schedule(False, sub_batches=4), "none", Policy(weights="retain")),
    (GPT2, Schedule(sub_batches=2, chunks=2), "full", Policy("retain", "retain", head_elements=50)),
]


def errors_of_orders(world: World, shape: Cuboid, setting: Setting) -> dict[str, float]:
    config, schedule, recompute, policy = setting
    mesh, wanted, found = Mesh(shape, world.rank), reference(config), {}
    serial = model_on(Serial(config))
    with torch.no_grad():
        losses = [loss_of(serial, batch).item() for batch in batches_on(serial.parallel)]
    model = model_on(CuboidParallel(config, mesh, policy, schedule=schedule), recompute)
    batches = batches_on(model.parallel)
    for order in ORDERS:
        model.zero_grad()
        played = model.play(batches, order, scale=0.7)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 0.7
        values = [abs(loss.item() / other - 1) for loss, other in zip(played, losses, strict=True)]
        found[order] = max(against(model, wanted), *values)
    mesh.close()
    return found


@pytest.mark.parametrize(("shape", "setting"), list(zip(MIXED, SETTINGS, strict=True)), ids=map(str, MIXED))
def test_model_play_gives_same_gradients_in_any_order(shape: Cuboid, setting: Setting, pool: Pools) -> None:
    for errors in pool(shape.ranks).run(errors_of_orders, shape, setting):
        assert {order: error for order, error in errors.items() if not error <= EXACT} == {}


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ("B0 F0", "B0 cannot run there"),
        ("F0 F0 B0", "F0 cannot run there"),
        ("F0+B0", "B0 cannot run there"),
        ("F0 W0 B0", "W0 cannot run there"),
        ("F0 B0 F1", "lacks B1"),
        ("F0 B0 W0 F1 B1", "lacks W1"),
        ("F0 G0", "G0 cannot run there"),
        ("F0 Bx", "Bx cannot run there"),
        ("F0 B", "B cannot run there"),
        ("F0 B-1", "B-1 cannot run there"),
        ("F0+F0 B0", "F0 cannot run there"),
        ("", "order '' lacks F0, B0"),
        ("F0 B0 F2 B2", "lacks F1, B1"),
    ],
)
def test_parse_rejects_bad_order(order: str, says: str) -> None:
    with pytest.raises(ValueError, match="order") as error:
        parse(order)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ([[Move("F", 0)], [Move("F", 1)], [Move("B", 0)]], "order 'F0 F1 B0' lacks B1"),
        ([[Move("B", 0)], [Move("F", 0)], [Move("F", 1), Move("B", 1)]], "B0 cannot run there"),
        ([[Move("F", 0, 1), Move("F", 1)], [Move("B", 0, 1), Move("B", 1)]], "B0 cannot run there"),
    ],
)
def test_model_play_rejects_bad_order_given_as_data(order: Order, says: str) -> None:
    model = model_on(Serial(GPT2))
    with pytest.raises(ValueError, match="order") as error:
        model.play(batches_on(model.parallel), order)
    assert says in str(error.value)


def orders_of_other_counts(world: World) -> list[str]:
    model, said = model_on(Serial(GPT2)), []
    for order in ("F0 B0", "F0 B0 F1 B1 F2 B2"):
        try:
            model.play(batches_on(model.parallel), parse(order))
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def order_on_a_pipe(world: World) -> str:
    model = Transformer(CuboidParallel(GPT2, Mesh(Cuboid(pipe=2), world.rank)))
    place, ids = model.parallel.place(2, SEQ), torch.zeros(SEQ, 2, dtype=torch.long)
    try:
        model.play([(ids, At(place, ids))] * 2, "F0 F1 B1 B0")
    except ValueError as error:
        return str(error)
    return ""


def test_model_play_rejects_order_on_a_pipe() -> None:
    (said,) = silently([0], 2, order_on_a_pipe)
    assert said.startswith("order='F0 F1 B1 B0' is that of one rank, but with pipe=2")
    assert "Schedule(pipeline=…), one of gpipe, 1f1b" in said


def test_model_play_rejects_order_of_other_micro_batches(pool: Pools) -> None:
    for said in pool(1).run(orders_of_other_counts)[0]:
        assert "2 micro-batches" in said


# Autograd


def backward_twice(world: World) -> list[str]:
    model, said = model_on(Serial(GPT2)), []
    (batch,) = batches_on(model.parallel, 1)
    loss = loss_of(model, batch)
    for options in ({"create_graph": True}, {"retain_graph": True}, {}):
        try:
            loss.backward(**options)
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    assert against(model, reference(GPT2)) <= EXACT
    return said


def test_model_second_backward_says_why_not(pool: Pools) -> None:
    double, first, second = pool(1).run(backward_twice)[0]
    assert (
        "create_graph=True: the gradients of a step cannot be differentiated, because its layers save no graph"
        in double
    )
    assert first == ""
    assert "backward() has already run for this loss" in second


def hook_counts(world: World, shape: Cuboid) -> tuple[set[int], set[int]]:
    """How often a parameter's hook is called: by two backwards, and by a step of two micro-batches."""
    mesh = Mesh(shape, world.rank)
    model = model_on(CuboidParallel(GPT2, mesh, schedule=Schedule(sub_batches=2)))
    batches, calls, found = batches_on(model.parallel), dict[int, int](), []
    for i, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, i=i: calls.update({i: calls.get(i, 0) + 1}))
    for act in (lambda: plainly(model, batches), lambda: model.play(batches, parse("F0 F1+B0 B1"))):
        calls.clear()
        act()
        found.append({calls.get(i, 0) for i, _ in enumerate(model.parameters())})
    mesh.close()
    return found[0], found[1]


def test_model_gradient_hooks_are_called_once_per_step(pool: Pools) -> None:
    assert pool(4).run(hook_counts, Cuboid(2, 2, 1)) == [({2}, {1})] * 4


def trained_error(world: World, shape: Cuboid) -> float:
    """The loss after steps of AdamW on the shards, against one device."""
    mesh, losses = Mesh(shape, world.rank), []
    for parallel in (CuboidParallel(LLAMA, mesh), Serial(LLAMA)):
        model = model_on(parallel)
        rule = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            rule.zero_grad()
            plainly(model, batches_on(parallel))
            rule.step()
        with torch.no_grad():
            losses.append(loss_of(model, *batches_on(parallel, 1)).item())
    mesh.close()
    return abs(losses[0] / losses[1] - 1)


@pytest.mark.parametrize("shape", MIXED, ids=str)
def test_model_parameters_train_as_serial_with_torch_optimizer(shape: Cuboid, pool: Pools) -> None:
    assert max(pool(shape.ranks).run(trained_error, shape)) <= 1e-9
