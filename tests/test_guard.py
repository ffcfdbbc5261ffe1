"""Steps that go wrong are skipped or end the run; ranks that hold or compute something else are named."""

import json
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest
import torch
from tiny import on, ranks_of, tiny, write_text
from torch import Tensor

from cuboid.layers import product
from cuboid.mesh.layout import shard_of
from cuboid.model.module import declared
from cuboid.run.launch import Pool, World
from cuboid.train import listing
from cuboid.train.agree import Corrupted, check
from cuboid.train.config import GuardSection, TrainConfig
from cuboid.train.guard import Diverged, Guard
from cuboid.train.loop import Trainer, train
from cuboid.train.progress import StepReport

Pools = Callable[[int], Pool]
UNEVEN = ("data.batch=12", "model.heads=12", "model.hidden=60")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


# what the guard decides


def after(config: GuardSection, steps: list[tuple[float, float]]) -> Guard:
    guard = Guard(config)
    for step, (loss, norm) in enumerate(steps, 1):
        assert guard.admit(step, loss, norm)
        assert not guard.message
    return guard


@pytest.mark.parametrize(
    ("loss", "norm", "said"),
    [
        (nan, 1.0, "step 5: the loss is nan"),
        (inf, nan, "step 5: the loss is inf"),
        (2.0, nan, "step 5: the gradient is not finite"),
        (4.5, 1.0, "step 5: the loss is 4.5; the median of the last 4 steps is 2.2"),
        (2.0, 11.5, "step 5: the gradient's norm is 11.5; the median of the last 4 steps is 1.1"),
    ],
)
def test_guard_skips_warns_or_stops_on_bad_step(loss: float, norm: float, said: str) -> None:
    config = GuardSection(spike="skip", window=4)
    steps = [(2.0, 1.0), (2.4, 1.2), (2.0, 1.0), (9.0, 9.0)]
    guard = after(config, steps)
    assert not guard.admit(5, loss, norm)
    assert guard.message == f"{said}; skipped"
    assert guard.spike == ("median" in said)
    assert guard.skips == 1
    assert list(zip(guard.losses, guard.norms, strict=True)) == steps  # a skipped step is no measure
    assert guard.admit(6, 4.3, 10.9)
    assert not guard.message
    assert guard.losses[-1] == 4.3
    stopping = replace(config, spike="stop") if "median" in said else replace(config, nonfinite="stop")
    with pytest.raises(Diverged, match=r'guard\.(spike|nonfinite) = "stop" ends the run. The last checkpoint is'):
        after(stopping, steps).admit(5, loss, norm)
    warned = after(replace(config, spike="warn"), steps)
    assert warned.admit(5, loss, norm) == ("median" in said)


def test_guard_spike_needs_full_window() -> None:
    guard = after(GuardSection(spike="stop", window=3), [(1.0, 1.0), (1.0, 1.0)])
    assert guard.admit(3, 100.0, 100.0)


def test_guard_zero_factor_disables_spike_detection() -> None:
    guard = after(GuardSection(spike="stop", window=1, loss_factor=0, norm_factor=0), [(1.0, 1.0)])
    assert guard.admit(2, 1e6, 1e6)


def test_guard_stops_after_too_many_skips() -> None:
    guard = Guard(GuardSection(max_skips=2))
    for step in (1, 2):
        assert not guard.admit(step, 1.0, nan)
    assert guard.admit(3, 1.0, 1.0)
    for step in (4, 5):
        assert not guard.admit(step, 1.0, nan)
    with pytest.raises(Diverged, match=r"step 6: .*; skipped, 3 in a row with guard.max_skips = 2"):
        guard.admit(6, 1.0, nan)


def test_guard_tolerates_loss_scale_search() -> None:
    guard = Guard(GuardSection(nonfinite="stop", max_skips=0))
    for step in range(1, 30):
        assert not guard.admit(step, 1.0, nan, searching=True)
    assert not guard.message
    assert guard.skips == 29
    with pytest.raises(Diverged, match="the loss is nan"):
        guard.admit(30, nan, nan, searching=True)


# in a run


def strike(trainer: Trainer, value: float) -> None:
    """Fill the gradient of one parameter, on a rank that has such a shard."""
    parameter = next(trainer.model.parameters())
    parameter.register_hook(lambda gradient: gradient.fill_(value))


def run_struck(world: World, config: TrainConfig, rank: int, value: float) -> list[StepReport]:
    trainer = Trainer(config, world)
    reports = [trainer.step()[0] for _ in range(3)]
    if world.rank == rank:
        strike(trainer, value)
    reports += [trainer.step()[0] for _ in range(2)]
    trainer.model.parallel.mesh.close()
    return reports


@pytest.mark.parametrize("value", [nan, 1e3])
def test_guard_bad_gradient_on_one_rank_skips_on_all(value: float, text: Path, pool: Pools) -> None:
    config = tiny(text, *on("2,2,1"), "guard.window=3", "guard.spike=skip")
    for reports in pool(4).run(run_struck, config, 2, value):
        assert [report.skipped for report in reports] == [False] * 3 + [True] * 2
        assert [report.spike for report in reports] == [False] * 3 + [value == 1e3] * 2
        assert [report.skips for report in reports] == [0, 0, 0, 1, 2]


def test_guard_stop_raises_diverged_naming_step(text: Path) -> None:
    with pytest.raises(Diverged, match=r'^step 4: the gradient is not finite; guard.nonfinite = "stop" ends the run'):
        Pool(4).run(run_struck, tiny(text, *on("2,2,1"), "guard.nonfinite=stop"), 2, nan)


def spiked(world: World, config: TrainConfig, folder: Path, resume: Path | None) -> None:
    """A run in which steps 6 and 8 are spikes."""
    real = Trainer.step

    def step(self: Trainer, stop: bool = False) -> tuple[StepReport, bool]:
        if self.done in (5, 7) and world.rank == 0:
            hook = next(self.model.parameters()).register_hook(lambda gradient: gradient.fill_(50.0))
        else:
            hook = None
        try:
            return real(self, stop)
        finally:
            if hook is not None:
                hook.remove()

    Trainer.step = step  # type: ignore[method-assign]
    try:
        train(world, config, folder, resume)
    finally:
        Trainer.step = real  # type: ignore[method-assign]


def test_guard_resumed_run_skips_same_steps(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On new ranks: those of an earlier test do not print to this one's `capfd`."""
    changes = (*on("2,1,1"), "guard.window=5", "guard.spike=skip", "checkpoint.every=7", "checkpoint.keep=0")
    config = tiny(text, *changes, "schedule.steps=9", "logging.sample_tokens=0")
    with Pool(2) as ranks:
        ranks.run(spiked, config, tmp_path / "whole", None)
        first = listing.complete(tmp_path / "whole" / "checkpoints")[0]
        assert json.loads((first / "state.json").read_text())["guard"]["skips"] == 1
        ranks.run(spiked, config, tmp_path / "resumed", first)
    whole, resumed = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "resumed")
    )
    kept = ("step", "loss", "grad_norm", "skipped", "spike", "skips")
    whole, resumed = ([[row[name] for name in kept] for row in rows if "loss" in row] for rows in (whole, resumed))
    assert [row[3] for row in whole] == [False] * 5 + [True, False, True, False]
    assert whole[7:] == resumed
    assert capfd.readouterr().out.count("step 8: the gradient's norm is ") == 2


# silent corruption


def corrupted(world: World, config: TrainConfig, where: str, rank: int) -> None:
    """Two steps and a check; on one rank a bit is flipped in between."""
    trainer = Trainer(config, world)
    for _ in range(2):
        trainer.step()
    if world.rank == rank:
        flip(trainer, where)
    check(trainer.model, trainer.optimizer, 2, 2)


def flip(trainer: Trainer, where: str) -> None:
    if where == "a matmul":
        real = product.mm

        def mm(A: Tensor, B: Tensor, out: Tensor, add: bool) -> None:
            real(A, B, out, add)
            flip_bit(out[-1:, -1:])

        product.mm = mm
    for name, parameter, _ in declared(trainer.model):
        if where == name:
            flip_bit(shard_of(parameter))
        elif where.endswith(f" of {name}"):
            flip_bit(shard_of(trainer.optimizer.state[parameter][where.split()[0]]))


def flip_bit(x: Tensor) -> None:
    x.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


@pytest.mark.parametrize(
    ("cuboid", "where", "rank", "said"),
    [
        ("2,2,2", "blocks.0.norm1.weight", 3, "copies of {} differ between ranks 1, 3"),
        ("1,3,2", "blocks.0.norm1.weight", 3, "rank 3 differs in copies of {} from ranks 1, 5"),
        ("1,3,2", "exp_avg_sq of blocks.0.mlp.up.bias", 2, "copies of {} differ between ranks 2, 3"),
        ("1,2,1,3", "blocks.0.mlp.up.weight", 4, "rank 4 differs in copies of {} from ranks 0, 2"),
        ("1,3,2", "a matmul", 4, "rank 4 differs in matmuls with rank 2's positions.weight from ranks 2, 3"),
        ("2,1,1", "a matmul", 1, "matmuls with rank 0's positions.weight differ between ranks 0, 1"),
    ],
)
def test_agree_check_names_corrupted_rank(cuboid: str, where: str, rank: int, said: str, text: Path) -> None:
    config = tiny(text, *on(cuboid), *UNEVEN)
    with pytest.raises(Corrupted, match=r"^step 2: ") as caught:
        Pool(ranks_of(config)).run(corrupted, config, where, rank)
    first, *lines, remedy = str(caught.value).splitlines()
    assert said.format(where) in [first.removeprefix("step 2: "), *(line.strip() for line in lines)]
    assert "resume from a checkpoint of step 0 or before" in remedy


@pytest.mark.parametrize("cuboid", ["2,3,2", "2,1,2,2"])
def test_agree_check_passes_healthy_ranks(cuboid: str, text: Path, pool: Pools) -> None:
    config = tiny(text, *on(cuboid), *UNEVEN, "guard.check_every=1")
    pool(ranks_of(config)).run(run_checked, config, 4)


def run_checked(world: World, config: TrainConfig, steps: int) -> None:
    trainer = Trainer(config, world)
    for _ in range(steps):
        trainer.step()
    trainer.model.parallel.mesh.close()
