"""Whatever happens to its files, a checkpoint is used as it was written or not at all, and the one before it is."""

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from itertools import count as numbers
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counts import count
from tiny import on, said_to_resuming, tiny, write_text
from torch import Tensor

from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import shard_of
from cuboid.mesh.mesh import Mesh
from cuboid.model.hf.folder import Stored
from cuboid.run.errors import RankError, RunError
from cuboid.run.launch import Pool, World, launch
from cuboid.train import checkpoint, listing, manifest, storage
from cuboid.train.config import TrainConfig
from cuboid.train.listing import candidates, complete, newest, step_of
from cuboid.train.loop import Trainer
from cuboid.train.writer import Writer

Pools = Callable[[int], Pool]
STEPS = (1, 2, 3)
CORRUPTIONS = count("corrupted checkpoints")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return tiny(write_text(tmp_path_factory.mktemp("text")), *on("2,1,1"))


def write(world: World, config: TrainConfig, run: Path) -> None:
    trainer = Trainer(config, world)
    writer = Writer(run / "checkpoints", trainer.model, keep=0, background=False)
    for step in STEPS:
        trainer.step()
        writer.save(step, trainer.optimizer, trainer.state())
    close(trainer, writer)


def close(trainer: Trainer, *writers: Writer) -> None:
    trainer.model.parallel.mesh.close()
    for writer in writers:
        dist.destroy_process_group(writer._axis.group)


@pytest.fixture(scope="module")
def run(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory, pool: Pools) -> Path:
    """With three checkpoints, written on 2,1,1."""
    folder = tmp_path_factory.mktemp("a run")
    pool(2).run(write, config, folder)
    return folder


# Corruption


def contents(run: Path) -> dict[int, dict[str, bytes | None]]:
    """Of every checkpoint; a link has none."""
    return {
        step_of(path): {file.name: None if file.is_symlink() else file.read_bytes() for file in path.iterdir()}
        for path in complete(run / "checkpoints")
    }


def corrupt(run: Path, dice: random.Random) -> str:
    """Do something to the checkpoints of a run. Other runs have the same files: they are replaced, never written to."""
    folders = complete(run / "checkpoints")
    folder = dice.choice(folders[1:])  # the oldest is spared
    file, other = dice.sample(sorted(folder.iterdir()), 2)
    content = bytearray(file.read_bytes())
    kind = dice.choice(["flip", "truncate", "grow", "zero", "delete", "link", "swap", "exchange", "manifest", "rename"])

    def put(path: Path, new: bytes) -> None:
        path.unlink()
        path.write_bytes(new)

    if kind == "flip":
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        put(file, content)
    elif kind == "truncate":
        put(file, content[: dice.randrange(len(content))])
    elif kind == "grow":
        put(file, content + b"\n")
    elif kind == "zero":
        start = dice.randrange(len(content))
        put(file, content[:start] + bytes(min(512, len(content) - start)) + content[start + 512 :])
    elif kind == "delete":
        file.unlink()
    elif kind == "link":
        elsewhere = run / f"elsewhere-{file.name}"
        file.rename(elsewhere)
        file.symlink_to(elsewhere)
    elif kind == "swap":
        second = other.read_bytes()
        put(file, second)
        put(other, content)
    elif kind == "exchange":
        theirs = dice.choice([each for each in folders[1:] if each != folder]) / file.name
        second = theirs.read_bytes()
        put(theirs, content)
        put(file, second)
    elif kind == "manifest":
        put(folder / manifest.FILE, edited((folder / manifest.FILE).read_text(), dice))
    else:
        first, second_folder = folders[1:]
        first.rename(run / "between")
        second_folder.rename(first)
        (run / "between").rename(second_folder)
    return kind


def edited(text: str, dice: random.Random) -> bytes:
    """A manifest that someone has been at, without the digest of it."""
    content: dict[str, Any] = json.loads(text)
    name = dice.choice(sorted(content["files"]))
    change = dice.choice(["size", "digest", "name", "removed", "added", "format"])
    if change == "size":
        content["files"][name][0] += dice.choice((-1, 1))
    elif change == "digest":
        content["files"][name][1] = content["files"][name][1][::-1]
    elif change == "name":
        content["files"]["../" + name] = content["files"].pop(name)
    elif change == "removed":
        del content["files"][name]
    elif change == "added":
        content["files"]["more.json"] = [2, "0" * 32]
    else:
        content["format"] += 1
    return json.dumps(content, indent=1).encode()


def local(trainer: Trainer) -> list[Tensor]:
    return [each.to_local().clone() for each in checkpoint.tensors(trainer.model, trainer.optimizer).values()]


def resumed(world: World, config: TrainConfig, good: Path, runs: list[Path]) -> list[int]:
    """The step each run is resumed from, having what the good run has at it; -1 if it is rejected, -2 if it differs."""
    trainer, wanted, found = Trainer(config, world), {}, []
    for path in complete(good / "checkpoints"):
        trainer.resume(path)
        wanted[step_of(path)] = local(trainer)
    for run in runs:
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.fill_(float("nan"))
        try:
            trainer.resume(run)
        except ValueError:
            found.append(-1 if all(shard_of(p).isnan().all() for p in trainer.model.parameters()) else -2)
            continue
        same = all(torch.equal(a, b) for a, b in zip(local(trainer), wanted[trainer.done], strict=True))
        found.append(trainer.done if same else -2)
    close(trainer)
    return found


def test_checkpoint_corrupted_falls_back_to_newest_good(
    run: Path, config: TrainConfig, tmp_path: Path, pool: Pools
) -> None:
    """Every bit of what is used is as it was written."""
    good, runs, kinds, wanted = contents(run), [], [], []
    for seed in range(CORRUPTIONS):
        copy = shutil.copytree(run, tmp_path / str(seed), copy_function=os.link)
        kinds.append(corrupt(copy, random.Random(seed)))
        found = contents(copy)
        runs.append(copy)
        wanted.append(max(step for step in STEPS if found[step] == good[step]))
    assert set(wanted) == set(STEPS)  # the newest, one before it, two before it
    assert contents(run) == good
    for found_steps in pool(2).run(resumed, config, run, runs):
        wrong = [(seed, kinds[seed], found_steps[seed], wanted[seed]) for seed in range(CORRUPTIONS)]
        assert not [each for each in wrong if each[2] != each[3]]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.safetensors", "tensors.json", "state.json"])
def test_resume_rejects_explicitly_given_damaged_checkpoint(
    name: str, run: Path, config: TrainConfig, tmp_path: Path, pool: Pools
) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    newest_one = candidates(copy)[0]
    flip(newest_one / name)
    first, second = pool(2).run(said_to_resuming, config, newest_one)
    assert first == second
    assert first == f"checkpoint {newest_one} is damaged: {name} missing or changed since it was written; use another"
    assert pool(2).run(said_to_resuming, config, copy) == ["resumed from 2"] * 2


def test_resume_lists_every_checkpoint_if_all_are_damaged(
    run: Path, config: TrainConfig, tmp_path: Path, pool: Pools
) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    flip(copy / "checkpoints" / "step-00000001" / "rank-00001.safetensors")
    (copy / "checkpoints" / "step-00000002" / "rank-00000.safetensors").unlink()
    (copy / "checkpoints" / "step-00000003" / manifest.FILE).unlink()
    first, second = pool(2).run(said_to_resuming, config, copy)
    assert first == second
    listed = (
        "step-00000003: manifest.json; step-00000002: rank-00000.safetensors; step-00000001: rank-00001.safetensors"
    )
    assert listed in first
    with pytest.raises(ValueError, match="no complete checkpoint"):
        candidates(tmp_path / "nothing")


def test_checkpoint_newest_skips_incomplete_and_links(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    folder = copy / "checkpoints"
    (folder / "step-00000099.aside").mkdir()
    (folder / "step-00000098").symlink_to(folder / "step-00000001")  # none of ours
    found = complete(folder)
    assert [step_of(path) for path in found] == [1, 2, 3]
    for given in (copy, folder, found[-1]):
        assert newest(given) == found[-1]
    monkeypatch.chdir(found[0])
    assert newest(Path(".")) == found[0]
    (found[-1] / "state.json").unlink()
    assert newest(copy) == found[-2]


# Reading


def bytes_read(world: World, config: TrainConfig, run: Path) -> tuple[int, int]:
    """While resuming, and of the tensors resumed."""
    trainer, read, fill = Trainer(config, world), [], Stored._fill
    with pytest.MonkeyPatch.context() as patch:

        def noted(self: Stored, file: Any, into: memoryview, at: int) -> None:
            read.append(len(into))
            fill(self, file, into, at)

        patch.setattr(Stored, "_fill", noted)
        trainer.resume(run)
    held = sum(each.nbytes for each in local(trainer))
    close(trainer)
    return sum(read), held


@pytest.mark.parametrize("cuboid", ["1,2,2", "4,1,1"])
def test_resume_reads_only_own_shards(cuboid: str, run: Path, config: TrainConfig, pool: Pools) -> None:
    other = tiny(Path(config.data.paths[0]), *on(cuboid))
    for read, held in pool(4).run(bytes_read, other, run):
        assert read == held > 0


# Writing


def failing(
    world: World, config: TrainConfig, folder: Path, rank: int, where: str, times: int
) -> tuple[str, list[str]]:
    """What a rank hears of a write that fails so often on one rank, and what is there afterwards."""
    trainer, left = Trainer(config, world), [times]
    writer = Writer(folder, trainer.model, keep=1, background=True, attempts=3, pause=0.01)
    trainer.step()
    writer.save(1, trainer.optimizer, trainer.state())
    writer.wait()
    trainer.step()
    durable = manifest.durable

    def fail(path: Path) -> Any:
        if world.rank == rank and path.name == where and left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return durable(path)

    heard = "saved"
    with pytest.MonkeyPatch.context() as patch:
        for module in (manifest, storage):
            patch.setattr(module, "durable", fail)
        writer.save(2, trainer.optimizer, trainer.state())
        try:
            writer.wait()
        except RunError as error:
            heard = str(error)
    there = sorted(path.name for path in folder.iterdir())
    if heard == "saved":
        trainer.resume(folder)
        assert trainer.done == 2
    else:  # a later one can still be written
        listing.inspect(folder / "step-00000001")
        writer.save(2, trainer.optimizer, trainer.state())
        writer.wait()
    close(trainer, writer)
    return heard, there


@pytest.mark.parametrize(
    ("rank", "where"), [(1, "rank-00001.safetensors"), (0, "tensors.json"), (0, "state.json"), (0, "manifest.json")]
)
@pytest.mark.parametrize("times", [2, 3])
def test_checkpoint_writer_retries_then_fails_on_all_ranks(
    rank: int, where: str, times: int, config: TrainConfig, tmp_path: Path, pool: Pools
) -> None:
    (first, there), (second, _) = pool(2).run(failing, config, tmp_path, rank, where, times)
    assert first == second
    if times == 2:
        assert first == "saved"
        assert there == ["step-00000002"]
    else:
        assert f"step-00000002 could not be written: {os.strerror(errno.EIO)}" in first
        assert where in first
        assert "bytes are needed and" in first
        assert there == ["step-00000001"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def killed(world: World, config: TrainConfig, folder: Path, at: int) -> None:
    """Save once more, and end as a killed process does at the so manieth thing done to the disk."""
    trainer = Trainer(config, world)
    writer = Writer(folder, trainer.model, keep=1, background=False)
    trainer.resume(folder)
    trainer.step()
    calls = numbers()

    def dying(do: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if next(calls) == at:
                os._exit(9)
            return do(*args, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in [(os, "fsync"), (os, "unlink"), (os, "rmdir"), (Path, "mkdir"), (Path, "rename")]:
            patch.setattr(owner, name, dying(getattr(owner, name)))
        writer.save(trainer.done, trainer.optimizer, trainer.state())


def test_checkpoint_writer_kill_mid_save_keeps_valid_checkpoint(run: Path, config: TrainConfig, tmp_path: Path) -> None:
    alone = tiny(Path(config.data.paths[0]), *on("1,1,1"))
    wholes, ended = [], []
    for at in numbers():
        folder = tmp_path / str(at)
        shutil.copytree(run / "checkpoints" / "step-00000001", folder / "step-00000001")
        try:
            launch(killed, 1, [alone, folder, at])
            break
        except RankError as error:
            ended.append(str(error))
        for path in complete(folder):
            checkpoint.choose(path, Mesh(Cuboid(), alone=True), lambda path, state: None)
        wholes.append([step_of(path) for path in complete(folder)])
    assert set(ended) == {"rank 0 ended with exit code 9"}
    assert wholes[0] == [1]
    assert wholes[-1] == [2]
    assert [1, 2] in wholes
    assert len(wholes) > 12
    assert [path.name for path in (tmp_path / str(at)).iterdir()] == ["step-00000002"]
