"""Training is the same whatever it runs on: loss curves, precision, accumulation, overflow, clipping, schedule."""

from collections.abc import Callable, Sequence
from math import inf, isnan
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import Curve, curve, furthest, losses, on, ranks_of, tiny, write_text
from torch import Tensor

from cuboid.baselines.serial import Serial
from cuboid.mesh.layout import Spec, shard_of
from cuboid.model.config import ModelConfig
from cuboid.model.module import declared
from cuboid.model.transformer import Transformer
from cuboid.plan.cost import Cost
from cuboid.plan.cost.cuboid import step_cost
from cuboid.run.launch import Pool, World
from cuboid.train.config import OptimizerSection, ScheduleSection, TrainConfig
from cuboid.train.loop import Trainer, train
from cuboid.train.optimizer import LossScale, adamw, apply, learning_rate

Pools = Callable[[int], Pool]
Shards = dict[str, np.ndarray]
Counts = dict[str, dict[str, tuple[int, int]]]
STEPS = 12
SAME = 1e-5  # in fp32, relative; 1e-3 is what is promised
DROPOUT = "model.dropout=0.1"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def reference(text: Path, pool: Pools) -> Curve:
    """The curve in plain PyTorch on one device."""
    found: Curve = pool(1).run(curve, tiny(text, *on("1,1,1"), DROPOUT), STEPS, True)[0]
    assert losses(found)[-1] < 0.75 * losses(found)[0]  # it learns: two curves do not agree by standing still
    return found


def curve_of(pool: Pools, config: TrainConfig, steps: int = STEPS) -> Curve:
    every: list[Curve] = pool(ranks_of(config)).run(curve, config, steps)
    assert all(each == every[0] for each in every)
    return every[0]


SLOW = [pytest.param(cuboid, marks=pytest.mark.slow) for cuboid in ("4,2,1", "8,1,1")]


@pytest.mark.parametrize("cuboid", ["1,1,1", "2,2,2", "1,4,2", "2,1,2,2", *SLOW])
def test_trainer_loss_curve_is_same_on_every_cuboid(cuboid: str, text: Path, reference: Curve, pool: Pools) -> None:
    assert furthest(curve_of(pool, tiny(text, *on(cuboid), DROPOUT)), reference) < SAME


@pytest.mark.parametrize(("dtype", "rounding"), [("bf16", 2.0**-8), ("fp16", 2.0**-11)])
def test_trainer_low_precision_stays_within_rounding(
    dtype: str, rounding: float, text: Path, reference: Curve, pool: Pools
) -> None:
    found = curve_of(pool, tiny(text, *on("2,2,1"), DROPOUT, f"precision.dtype={dtype}"))
    assert 1e-6 < furthest(losses(found), losses(reference)) < rounding


@pytest.mark.parametrize(
    ("cuboid", "changes"),
    [
        ("2,2,1", "data.micro_batches=2"),
        ("2,2,1", "data.micro_batches=2 overlap.sub_batches=2"),
        ("2,1,2,2", "data.micro_batches=2"),
        ("1,2,1,2", "data.micro_batches=4"),
        ("2,2,1", "memory.recompute=full"),
        ("2,2,1", "memory.recompute=selective"),
    ],
)
def test_trainer_memory_options_do_not_change_loss_curve(
    cuboid: str, changes: str, text: Path, reference: Curve, pool: Pools
) -> None:
    found = curve_of(pool, tiny(text, *on(cuboid), DROPOUT, *changes.split()), 4)
    assert furthest(found, reference[:4]) < SAME


OVER_X, OVER_DATA = ("x", "reduce_scatter"), ("replicas", "all_reduce")


def replicas_summed(world: World, config: TrainConfig) -> tuple[Counts, Counts, list[tuple[str, str]]]:
    """What a step sends, what the formulas say of it, and its sums over x and data as they were launched."""
    trainer = Trainer(config, world)
    parallel, d = trainer.model.parallel, config.data
    mesh, expected = parallel.mesh, Cost()
    mesh.ledger.spans = []
    trainer.step()
    for part in range(d.micro_batches):
        size, last = d.batch // d.micro_batches, part == d.micro_batches - 1
        one = step_cost(parallel.config, mesh.cuboid, mesh.coordinates, size, d.seq, last=last)
        for kind, (calls, sent) in one.traffic.items():
            expected.traffic[kind][0] += calls
            expected.traffic[kind][1] += sent
    launched = [(span.axis, span.kind) for span in mesh.ledger.spans]
    found = {axis: counts for axis, counts in mesh.ledger.counts().items() if axis != "world"}
    mesh.close()
    return found, expected.counts(), [each for each in launched if each in (OVER_X, OVER_DATA)]


def test_trainer_sums_replicas_once_per_step_during_backward(text: Path, pool: Pools) -> None:
    config = tiny(text, *on("2,1,2,2"), "data.micro_batches=2", "model.layers=5")
    for found, expected, sums in pool(8).run(replicas_summed, config):
        assert found == expected
        first = sums.index(OVER_DATA, sums.index(OVER_X))  # the loss is summed over data before that
        assert sums[first:].count(OVER_X) >= 3  # layers whose gradients come later


# fp16


def steps_with_overflow(world: World, config: TrainConfig, at: int, rank: int) -> list[tuple[bool, bool, float]]:
    """Of five steps: was it skipped, did it change nothing, the scale after it. At step `at` one rank overflows."""
    trainer, found = Trainer(config, world), []
    parameter = next(trainer.model.parameters())
    for step in range(5):
        strikes = (step, world.rank) == (at, rank)
        hook = parameter.register_hook(lambda gradient: gradient.fill_(inf)) if strikes else None
        before = everything(trainer)
        report, _ = trainer.step()
        same = all(torch.equal(old, new) for old, new in zip(before, everything(trainer), strict=True))
        found.append((report.skipped, same, trainer.scale.scale))
        assert isnan(report.grad_norm) == report.skipped
        if hook is not None:
            hook.remove()
    assert trainer.updates == 4
    trainer.model.parallel.mesh.close()
    return found


def everything(trainer: Trainer) -> list[Tensor]:
    """A copy of all parameters and of the optimizer's state."""
    states = trainer.optimizer.state.values()
    return [
        shard_of(t).clone() for t in (*trainer.model.parameters(), *(t for state in states for t in state.values()))
    ]


def test_trainer_overflow_on_one_rank_skips_step_on_all(text: Path, pool: Pools) -> None:
    config = tiny(
        text, *on("2,2,1"), "precision.dtype=fp16", "precision.loss_scale=1024", "precision.growth_interval=2"
    )
    expected = [
        (False, False, 1024),
        (True, True, 512),
        (False, False, 512),
        (False, False, 1024),  # two good steps: it grows again
        (False, False, 1024),
    ]
    for found in pool(4).run(steps_with_overflow, config, 1, 2):
        assert found == expected


def scales(world: World, config: TrainConfig, steps: int) -> list[tuple[bool, float]]:
    trainer = Trainer(config, world)
    found = [(trainer.step()[0].skipped, trainer.scale.scale) for _ in range(steps)]
    trainer.model.parallel.mesh.close()
    return found


def test_trainer_lowers_loss_scale_until_it_fits(text: Path, pool: Pools) -> None:
    config = tiny(text, *on("2,1,1"), "precision.dtype=fp16", "precision.loss_scale=1e9")
    first, second = pool(2).run(scales, config, 16)
    assert first == second
    skipped = [skip for skip, _ in first]
    assert 0 < sum(skipped) < 16
    assert skipped == sorted(skipped, reverse=True)  # first all that overflow, then none
    assert first[-1][1] == 1e9 / 2 ** sum(skipped)


def test_loss_scale_grows_and_stays_at_least_one() -> None:
    scale = LossScale(2.0, interval=3)
    for overflowed, expected in ((False, 2), (False, 2), (False, 4), (True, 2), (True, 1), (True, 1)):
        scale.update(overflowed)
        assert scale.scale == expected
    fixed = LossScale()
    fixed.update(True)
    assert fixed.scale == 1


# the optimizer


class Keep:
    """In the optimizer's place: what it would have been given."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.param_groups, self.gradients = model, [dict[str, float]()], Shards()

    def step(self) -> None:
        self.gradients = gradients_of(self.model)

    def zero_grad(self) -> None:
        pass


def gradients_of(model: Transformer) -> Shards:
    """By name, in a form that travels between processes."""
    gradients = ((name, parameter.grad) for name, parameter, _ in declared(model))
    return {name: shard_of(gradient).clone().numpy() for name, gradient in gradients if gradient is not None}


def clipped(world: World, config: TrainConfig) -> tuple[float, Shards, Shards, dict[str, Spec]]:
    """The gradient's norm, a rank's gradients before and after clipping, and how they are split."""
    trainer = Trainer(config, world)
    model = trainer.model
    tokens, targets = trainer.batches(0)
    loss = model(tokens, targets, trainer.place)
    loss.backward()
    keep, before = Keep(model), gradients_of(model)
    applied = apply(model, keep, LossScale(), trainer.guard, loss.detach(), 0.01, 0.5, 1)  # type: ignore[arg-type]
    assert keep.param_groups == [{"lr": 0.5}]
    model.parallel.mesh.close()
    return applied.norm, before, keep.gradients, {name: d.spec for name, _, d in declared(model)}


@pytest.mark.parametrize("cuboid", ["2,2,2", "2,1,1,2"])
def test_optimizer_clips_by_global_gradient_norm(cuboid: str, text: Path, pool: Pools) -> None:
    config = tiny(text, *on(cuboid))
    norms, before, after, specs = zip(*pool(ranks_of(config)).run(clipped, config), strict=True)

    def whole(shards: Sequence[Shards], name: str) -> Tensor:
        return specs[0][name].join([torch.from_numpy(each[name]) for each in shards], config.cuboid_shape())

    parameters = {name: torch.nn.Parameter(torch.empty(spec.shape)) for name, spec in specs[0].items()}
    for name, parameter in parameters.items():
        parameter.grad = whole(before, name)
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 0.01).item()
    assert norm > 0.1
    assert norms == pytest.approx([norm] * len(norms), rel=SAME)
    for name, parameter in parameters.items():
        torch.testing.assert_close(whole(after, name), parameter.grad, rtol=SAME, atol=1e-9)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_adamw_does_not_decay_norms_and_biases(family: str) -> None:
    model = Transformer(Serial(ModelConfig(family, layers=1, hidden=16, heads=2, vocab=8, context=4)))
    optimizer = adamw(model, OptimizerSection(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        spared = "norm" in name or name.endswith(".bias")
        assert decay.pop(id(parameter)) == (0.0 if spared else 0.3), name
    assert not decay


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("cosine", [0.5, 1.0, 0.9141, 0.6891, 0.4109, 0.1859, 0.1]),
        ("linear", [0.5, 1.0, 0.82, 0.64, 0.46, 0.28, 0.1]),
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_learning_rate_warms_up_then_decays(decay: str, expected: list[float]) -> None:
    schedule = ScheduleSection(steps=7, warmup=2, decay=decay, min_lr_ratio=0.1)  # type: ignore[arg-type]
    found = [learning_rate(step, schedule, 3.0) / 3.0 for step in range(7)]
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("steps", "warmup", "expected"), [(3, 0, [1.0, 0.5, 0.0]), (1, 0, [1.0]), (2, 2, [0.5, 1.0])])
def test_learning_rate_handles_short_schedule(steps: int, warmup: int, expected: list[float]) -> None:
    schedule = ScheduleSection(steps=steps, warmup=warmup, decay="linear", min_lr_ratio=0)
    assert [learning_rate(step, schedule, 1.0) for step in range(steps)] == pytest.approx(expected)


def rejection(world: World, config: TrainConfig, folder: Path) -> str:
    try:
        train(world, config, folder, None)
    except ValueError as error:
        return str(error)
    return ""


def test_train_every_rank_raises_what_rank_0_rejects(text: Path, tmp_path: Path, pool: Pools) -> None:
    """Under torchrun a rank that waits for one which is gone would report a lost connection instead."""
    (tmp_path / "something").touch()
    found = pool(2).run(rejection, tiny(text, *on("2,1,1")), tmp_path)
    assert found == [f"run folder {tmp_path} is not empty; resume the run in it or choose another folder"] * 2
