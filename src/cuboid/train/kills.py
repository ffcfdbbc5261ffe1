"""Compares a run whose ranks are killed at random moments with the same run left alone."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from cuboid.run.launch import Pool, World
from cuboid.train import checkpoint
from cuboid.train.config import CheckpointSection, RestartSection, TrainConfig, resolved_toml
from cuboid.train.listing import inspect, newest
from cuboid.train.loop import Trainer

MOMENTS = ("in a step", "in a save", "while starting")
SAVE_EVERY, KILL_EVERY = 2, 6  # steps
TAIL = 60  # steps after the last kill is due, because the killer may be late
PATIENCE = 600.0  # seconds to wait for what must happen


@dataclass
class Kill:
    moment: str
    step: int  # the last one before the kill
    resumed: int = 0  # the step it resumed after
    repeated: int = 0  # steps that were repeated


@dataclass(frozen=True)
class Survival:
    """How a killed run differs from the one left alone."""

    kills: list[Kill]
    tensors: int
    different: list[str]  # tensors, and files of the run, that are not bitwise equal

    @property
    def ok(self) -> bool:
        return not self.different


def survive(config: TrainConfig, kills: int, seed: int, folder: Path, tell: Callable[[str], None]) -> Survival:
    """Train twice in `folder`, once alone and once with `kills` kills, and compare all files of both runs."""
    if not Path(f"/proc/{os.getpid()}/task").is_dir():
        raise ValueError("--kills finds the ranks to kill in /proc, which is not here; run it on Linux")
    config = replace(
        config,
        data=replace(config.data, max_bytes=200_000),
        schedule=replace(config.schedule, steps=kills * KILL_EVERY + TAIL, warmup=0),
        checkpoint=CheckpointSection(every=SAVE_EVERY, keep=2),
        restart=RestartSection(max_restarts=kills + 1),
        logging=replace(config.logging, eval_every=0, tensorboard=False, sample_tokens=0),
    )
    config.check()
    tell(f"{config.schedule.steps} steps without kills")
    alone = start(config, folder / "alone")
    if alone.wait():
        raise RuntimeError(f"the run without kills failed: {log_of(folder / 'alone')}")
    killed = start(config, folder / "killed")
    try:
        ranks = config.cuboid_shape().ranks
        done = list(kill_ranks(killed, ranks, folder / "killed", kills, random.Random(seed), tell))
        killed.wait(PATIENCE)
    finally:
        killed.kill()  # and its ranks end with it
        killed.wait()
    log = log_of(folder / "killed")
    resumed = [
        int(step or 0) for step in re.findall(r"restarting all ranks (?:after step (\d+)|from the beginning)", log)
    ]
    if killed.returncode or len(resumed) != kills:
        raise RuntimeError(f"exit code {killed.returncode} after {len(resumed)} restarts of {kills}: {log}")
    before = Kill("", 0)
    for kill, step in zip(done, resumed, strict=True):
        kill.resumed = step
        progress = (kill.step, step) != (before.step, before.resumed)  # else it was killed again before its first step
        kill.repeated, before = max(0, kill.step - step) * progress, kill
    return compare(config, done, folder / "alone", folder / "killed")


def start(config: TrainConfig, run: Path) -> "subprocess.Popen[bytes]":
    """Runs `cuboid train`. Its output goes to a file: with many kills there is more than a pipe holds."""
    file = run.with_suffix(".toml")
    file.write_text(resolved_toml(replace(config, logging=replace(config.logging, folder=str(run)))), "utf-8")
    words = [sys.executable, "-m", "cuboid", "train", str(file)]
    with run.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=log)


def log_of(run: Path) -> str:
    return run.with_suffix(".log").read_text("utf-8", "replace")


def kill_ranks(
    process: "subprocess.Popen[bytes]",
    ranks: int,
    run: Path,
    kills: int,
    dice: random.Random,
    tell: Callable[[str], None],
) -> Iterator[Kill]:
    """Kills one rank after each start: while ranks start or, once the run has progressed, in a step or in a save."""
    dead: set[int] = set()

    def until(what: Callable[..., object], *args: object) -> None:
        deadline = time.monotonic() + PATIENCE
        while not what(*args):
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                process.wait()
                raise RuntimeError(f"the killed run ended: {log_of(run)}")
            time.sleep(0.001)

    for number in range(1, kills + 1):
        moment = dice.choices(MOMENTS, (2, 2, number > 1))[0]  # a run killed before its first step is not restarted
        until(lambda before: len(ranks_of(process) - before) == ranks, dead)
        if moment == "while starting":
            time.sleep(dice.uniform(0, 1))
        else:
            until(lambda further: last_step(run) >= further, number * KILL_EVERY)
            if moment == "in a save":  # the next one that is seen before it is over
                until(lambda late: saving(run) or last_step(run) >= late, (number + 1) * KILL_EVERY)
            time.sleep(dice.uniform(0, 0.02))
        begun, step = saving(run), last_step(run)
        victims = ranks_of(process)
        os.kill(dice.choice(sorted(victims)), signal.SIGKILL)
        if moment != "while starting":
            moment = MOMENTS[bool(begun and saving(run) == begun)]
        dead = victims  # only the last ones: process ids are reused
        tell(f"kill {number} of {kills}: {moment}, after step {step}")
        yield Kill(moment, step)


def ranks_of(process: "subprocess.Popen[bytes]") -> set[int]:
    """The processes that it forked."""
    try:
        return {int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()}
    except FileNotFoundError:
        return set()


def last_step(run: Path) -> int:
    """The last one logged."""
    try:
        lines = (run / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()
    except FileNotFoundError:
        return 0
    return int(json.loads(lines[-1])["step"]) if lines else 0


def saving(run: Path) -> list[str]:
    """Checkpoints that are being written."""
    folder = run / "checkpoints"
    return sorted(path.name for path in folder.glob("*.aside")) if folder.is_dir() else []


def compare(config: TrainConfig, kills: list[Kill], alone: Path, killed: Path) -> Survival:
    ours, theirs = newest(alone), newest(killed)
    with Pool(config.cuboid_shape().ranks) as pool:
        every = pool.run(different_tensors, config, ours, theirs)
    different = sorted({name for names, _ in every for name in names})
    if inspect(ours)[1] != inspect(theirs)[1]:
        different.append("state.json")
    steps = [step for step, *_ in curve(killed)]
    if curve(alone) != curve(killed) or steps != list(range(1, config.schedule.steps + 1)):
        different.append("metrics.jsonl")
    return Survival(kills, every[0][1], different)


def curve(run: Path) -> list[tuple[int, float, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


def different_tensors(world: World, config: TrainConfig, ours: Path, theirs: Path) -> tuple[list[str], int]:
    """Names of this rank's shards of parameters and optimizer state that differ in any bit, and how many there are."""
    trainer = Trainer(config, world)

    def loaded(path: Path) -> dict[str, bytes]:
        trainer.resume(path)
        tensors = checkpoint.tensors(trainer.model, trainer.optimizer)
        found = {name: tensor.to_local() for name, tensor in tensors.items()}
        found |= {f"optimizer.step.{i}": each["step"] for i, each in enumerate(trainer.optimizer.state.values())}
        return {name: bits(tensor) for name, tensor in found.items()}

    a, b = loaded(ours), loaded(theirs)
    trainer.model.parallel.mesh.close()
    return [name for name in a if a[name] != b[name]], len(a)


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()
