"""A checkpoint is complete or absent. A run resumed from it equals one that was never stopped, on any cuboid."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import namespaces
import pytest
import torch
import torch.distributed as dist
from tiny import furthest, on, ranks_of, said_to_resuming, tiny, write_text
from torch import Tensor

from cuboid.device import HostCopies
from cuboid.run.cluster import Cluster
from cuboid.run.errors import RankError
from cuboid.run.launch import Pool, World
from cuboid.run.watch import watched
from cuboid.train import checkpoint
from cuboid.train.config import TrainConfig
from cuboid.train.listing import complete, newest, step_of
from cuboid.train.loop import Trainer
from cuboid.train.writer import WRITING, Writer, connected

Pools = Callable[[int], Pool]
DROPOUT = "model.dropout=0.1"
AMPLE = 24.0  # seconds that the watch allows where no rank stalls


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


class Run:
    """A trainer that writes checkpoints and keeps account of what it sees."""

    def __init__(
        self, world: World, config: TrainConfig, folder: Path, resume: Path | None = None, keep: int = 0
    ) -> None:
        self.trainer, self.losses, self.samples = Trainer(config, world), list[float](), list[set[int]]()
        self.writer = Writer(folder, self.trainer.model, keep, config.checkpoint.background)
        if resume is not None:
            self.trainer.resume(resume)
        read = self.trainer.batches.samples.read

        def noted(numbers: Tensor, positions: Tensor) -> Any:
            self.samples.append(set(self.trainer.batches.samples.windows(numbers).tolist()))
            return read(numbers, positions)

        self.trainer.batches.samples.read = noted  # type: ignore[method-assign]

    def until(self, step: int) -> "Run":
        while self.trainer.done < step:
            self.losses.append(self.trainer.step()[0].loss)
        return self

    def save(self, wait: bool = True) -> "Run":
        self.writer.save(self.trainer.done, self.trainer.optimizer, self.trainer.state())
        if wait:
            self.writer.wait()
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Copies of this rank's."""
        found = checkpoint.tensors(self.trainer.model, self.trainer.optimizer, HostCopies(torch.device("cpu")).launch)
        steps = {str(i): state["step"].clone() for i, state in enumerate(self.trainer.optimizer.state.values())}
        return {name: tensor.to_local() for name, tensor in found.items()} | steps

    def close(self) -> None:
        self.trainer.model.parallel.mesh.close()
        dist.destroy_process_group(self.writer._axis.group)


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# Resuming


def stopped_and_straight(world: World, config: TrainConfig, folder: Path) -> bool:
    straight = Run(world, config, folder).until(2).save(wait=False).until(4)
    straight.writer.wait()
    again = Run(world, config, folder, folder / "step-00000002").until(4)
    found = same(straight.tensors(), again.tensors()) and straight.losses[2:] == again.losses
    assert straight.trainer.state() == again.trainer.state()
    straight.close()
    again.close()
    return found


@pytest.mark.parametrize(("cuboid", "dtype"), [("2,2,2", "fp32"), ("1,2,1,2", "fp16")])
def test_checkpoint_resume_on_same_cuboid_is_bitwise_equal(
    cuboid: str, dtype: str, text: Path, tmp_path: Path, pool: Pools
) -> None:
    config = tiny(text, *on(cuboid), DROPOUT, f"precision.dtype={dtype}", "precision.growth_interval=2")
    assert all(pool(ranks_of(config)).run(stopped_and_straight, config, tmp_path))


def stretch(
    world: World, config: TrainConfig, folder: Path, resume: Path | None, until: int
) -> tuple[list[float], list[set[int]]]:
    run = Run(world, config, folder, resume).until(until).save()
    run.close()
    return run.losses, run.samples[: len(run.losses)]  # those of a further step have been read ahead


def test_checkpoint_resume_across_cuboids_matches_straight_run(text: Path, tmp_path: Path, pool: Pools) -> None:
    cuboids = ["2,2,2", "1,4,2", "4,1,1", "1,1,1"]
    config = tiny(text, *on("1,1,1"), DROPOUT)
    (straight, seen), *_ = pool(1).run(stretch, config, tmp_path / "straight", None, 8)
    losses, samples, resume = list[float](), list[set[int]](), None
    for i, cuboid in enumerate(cuboids):
        config = tiny(text, *on(cuboid), DROPOUT)
        every = pool(ranks_of(config)).run(stretch, config, tmp_path / "moved", resume, 2 * (i + 1))
        losses += every[0][0]
        samples += [set[int]().union(*of_ranks) for of_ranks in zip(*(of_rank for _, of_rank in every), strict=True)]
        resume = newest(tmp_path / "moved")
    assert furthest(losses, straight) < 1e-5
    assert samples == seen
    assert len(set[int]().union(*samples)) == 8 * 8  # none twice, and each step has its eight


@pytest.fixture(scope="module")
def saved(text: Path, tmp_path_factory: pytest.TempPathFactory, pool: Pools) -> Path:
    """A checkpoint of step 2, written on 2,1,1."""
    folder = tmp_path_factory.mktemp("saved")
    pool(2).run(stretch, tiny(text, *on("2,1,1")), folder, None, 2)
    return newest(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.hidden=64", ["checkpoint of another model", "model.hidden=32 (here 64)"]),
        ("model.family=llama", ["model.family='gpt2' (here 'llama')", "model.tied=True (here False)"]),
        ("data.batch=16", ["data.batch = 8", "data.batch = 16 would repeat or skip samples"]),
        ("data.seed=1", ["data.seed = 0", "data.seed = 1 would repeat or skip samples"]),
        ("data.val_fraction=0.2", ["other text"]),
        ("model.dropout=0.5", ["resumed"]),
        ("data.micro_batches=2", ["resumed"]),
        ("precision.dtype=bf16", ["resumed"]),
    ],
)
def test_checkpoint_resume_allows_only_compatible_changes(
    change: str, said: list[str], saved: Path, text: Path, pool: Pools
) -> None:
    first, second = pool(2).run(said_to_resuming, tiny(text, *on("2,1,1"), change), saved)
    assert first == second
    for words in said:
        assert words in first


def test_checkpoint_resume_rejects_other_text(saved: Path, tmp_path: Path, pool: Pools) -> None:
    config = tiny(write_text(tmp_path, seed=1), *on("1,1,1"))
    assert "other text" in pool(1).run(said_to_resuming, config, saved)[0]


# Files


def kept(world: World, config: TrainConfig, folder: Path, keep: int) -> list[list[int]]:
    """The steps on disk: after five saves, and once more after the run is resumed from step 3."""
    run = Run(world, config, folder, keep=keep)
    (folder / "step-00000099.aside").mkdir(parents=True)  # left by a run that was killed
    for step in range(1, 6):
        run.until(step).save()
    found = [[step_of(path) for path in complete(folder)]]
    again = Run(world, config, folder, folder / "step-00000003", keep=keep).until(4).save()
    found.append([step_of(path) for path in complete(folder)])
    run.close()
    again.close()
    return found


@pytest.mark.parametrize(("keep", "expected"), [(0, [[1, 2, 3, 4, 5], [1, 2, 3, 4]]), (3, [[3, 4, 5], [3, 4]])])
def test_checkpoint_writer_removes_old_and_abandoned_checkpoints(
    keep: int, expected: list[list[int]], text: Path, tmp_path: Path, pool: Pools
) -> None:
    folder = tmp_path / "checkpoints"
    assert pool(1).run(kept, tiny(text, *on("1,1,1")), folder, keep)[0] == expected
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{step:08d}" for step in expected[1]]


def while_training_goes_on(world: World, config: TrainConfig, folder: Path) -> bool:
    run = Run(world, config, folder).until(2)
    before = run.tensors()
    run.save(wait=False)
    with torch.no_grad():
        for parameter in run.trainer.model.parameters():
            parameter.zero_()
            for moment in run.trainer.optimizer.state[parameter].values():
                moment.zero_()
    run.writer.wait()
    run.trainer.resume(newest(folder))
    found = same(run.tensors(), before)
    run.close()
    return found


def test_checkpoint_writer_background_matches_foreground(text: Path, tmp_path: Path, pool: Pools) -> None:
    manifests = []
    for background in ("true", "false"):
        folder = tmp_path / background
        config = tiny(text, *on("1,2,1"), f"checkpoint.background={background}")
        assert all(pool(2).run(while_training_goes_on, config, folder))
        manifests.append(json.loads((newest(folder) / "manifest.json").read_text()))
    assert manifests[0] == manifests[1]


# Waiting


def patient(world: World, config: TrainConfig, folder: Path) -> int:
    """A checkpoint that takes until the watch has stopped counting. The step in which it counts afterwards."""
    with watched(world.rank, world.size, AMPLE) as watch:
        assert watch is not None
        trainer = Trainer(config, replace(world, watch=watch))
        writer = Writer(folder, trainer.model, 0, background=False)
        trainer.step()
        free = writer._begin

        def begin(aside: Path, needed: int) -> int:
            while watch.step:
                time.sleep(0.01)
            return free(aside, needed)

        writer._begin = begin  # type: ignore[method-assign]
        writer.save(trainer.done, trainer.optimizer, trainer.state())
        return watch.step


def test_checkpoint_may_take_longer_than_the_watch_allows_a_rank(text: Path, tmp_path: Path) -> None:
    with Pool(2) as ranks:
        assert ranks.run(patient, tiny(text, *on("1,2,1")), tmp_path / "saved") == [1, 1]
    assert [path.name for path in complete(tmp_path / "saved")] == ["step-00000001"]


def connect(world: World) -> float:
    """Seconds for which ranks wait for others that write."""
    group = connected(world.rank, world.size).group
    assert group is not None
    return float(group._get_backend(world.device).options._timeout.total_seconds())


def connect_on_loopback(world: World) -> None:
    """As where the name of a host leads to its loopback, while its messages of a step go elsewhere."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    connect(world)


@namespaces.needed
def test_checkpoint_writer_connects_hosts_before_the_first_step() -> None:
    said = r"rank \d of 2 could not connect to the others over gloo, which checkpoints need: .*; set GLOO_SOCKET_IFNAME"
    with Cluster(2) as hosts:
        with Pool(2, hosts) as ranks:
            assert ranks.run(connect) == [WRITING.total_seconds()] * 2
        with pytest.raises(RankError, match=said) as caught, Pool(2, hosts) as ranks:
            ranks.run(connect_on_loopback)
    assert "\n" not in str(caught.value)
    assert "pytorch" not in str(caught.value)
