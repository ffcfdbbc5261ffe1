"""A run goes on when its ranks are killed, when the machine is wanted back, and on other ranks than it began with."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest
from commands import started, wait_for
from counts import count
from tiny import curve, losses, on, sets, settings, tiny, write_text

from cuboid.mesh.cuboid import Cuboid
from cuboid.plan import search
from cuboid.plan.hardware import PRESETS, Hardware
from cuboid.plan.layer import Work
from cuboid.plan.search import Ranking
from cuboid.run import stop as stopping
from cuboid.run.launch import Pool, RankDied, World
from cuboid.run.restart import keep_running
from cuboid.run.stop import PREEMPTED, Stop
from cuboid.train import auto, listing
from cuboid.train.auto import for_ranks
from cuboid.train.config import differences, resolved_toml
from cuboid.train.kills import last_step, ranks_of, survive
from cuboid.train.run import RunFolder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


# Restart


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "pipeline"), [("2,2,1", "1f1b"), ("1,2,1,1,2", "1f1b"), ("1,1,1,1,2", "zero-bubble")]
)
def test_train_cli_killed_at_random_is_bit_exact(shape: str, pipeline: str, text: Path, tmp_path: Path) -> None:
    kills = count("kills of a run")
    more = ["model.dropout=0.1", "model.layers=2", "data.micro_batches=2", f"overlap.pipeline={pipeline}"]
    config = tiny(text, *on(shape), *more)
    found = survive(config, kills, 1, tmp_path, print)
    assert found.different == []
    assert len(found.kills) == kills
    assert found.tensors > 20
    assert any(kill.resumed for kill in found.kills)


def die_unless(world: World, attempts: int) -> int:
    if world.attempt < attempts and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return world.attempt


@pytest.mark.parametrize(("most", "saves", "lives"), [(2, False, True), (1, False, False), (1, True, True)])
def test_keep_running_limits_restarts_without_progress(most: int, saves: bool, lives: bool) -> None:
    told: list[str] = []
    stop = Stop()
    stop.begin()
    arguments = (stop, 60.0, most, lambda: len(told) * saves, told.append)
    if lives:
        assert keep_running(die_unless, 2, [2], *arguments) == [2, 2]
        where = "after step 1" if saves else "from the beginning"
        assert told[1] == f"rank 1 was killed by SIGKILL; restarting all ranks {where}"
    else:
        with pytest.raises(RankDied, match="SIGKILL after 1 restarts without a new checkpoint"):
            keep_running(die_unless, 2, [2], *arguments)


def test_keep_running_explains_kills_before_the_first_step() -> None:
    with pytest.raises(RankDied, match=r"rank 1 was killed by SIGKILL before the first step, most likely .* memory"):
        keep_running(die_unless, 2, [1], Stop(), 60.0, 3, int, pytest.fail)


def test_keep_running_does_not_restart_while_stopping() -> None:
    stop = Stop()
    stop._hear(signal.SIGTERM, None)
    with pytest.raises(RankDied, match=r"rank 1 was killed by SIGKILL$"):
        keep_running(die_unless, 2, [1], stop, 60.0, 3, int, pytest.fail)


ON_PIPE = [*on("1,1,1,1,2"), "model.layers=2", "data.micro_batches=4", "overlap.pipeline=zero-bubble"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [on("2,1,1"), ON_PIPE], ids=["cuboid", "pipe"])
def test_train_cli_resumes_when_torchrun_restarts_rank(
    layout: list[str], text: Path, tmp_path: Path, pool: Callable[[int], Pool]
) -> None:
    """In a default folder. It trains until it is stopped, so that no moment to kill a rank is too late."""
    changes = [*layout, "schedule.steps=1000000", "checkpoint.every=2"]
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    words += ["-m", "cuboid", "train", *sets(settings(text, *changes))]

    def run() -> Path:
        return next((tmp_path / "runs").glob("torchrun-*"), tmp_path)

    def saved() -> int:
        return listing.last_step(run() / "checkpoints")

    with (tmp_path / "log").open("w+") as log:
        agent = subprocess.Popen([sys.executable, *words], cwd=tmp_path, stdout=log, stderr=log, text=True)

        def ended() -> str | None:
            return None if agent.poll() is None else (tmp_path / "log").read_text()

        try:
            wait_for(lambda: saved() >= 4, ended)
            os.kill(rank_1(agent), signal.SIGKILL)
            before = saved()
            wait_for(lambda: saved() > before + 2, ended)
        finally:
            agent.terminate()
            agent.wait()
    assert re.search(r"resumed after step \d+", (tmp_path / "log").read_text())
    found = [json.loads(line)["loss"] for line in (run() / "metrics.jsonl").read_text().splitlines()]
    assert found == losses(pool(2).run(curve, tiny(text, *changes), len(found))[0])


def rank_1(agent: "subprocess.Popen[str]") -> int:
    """The process that torchrun has started as rank 1."""
    for process in ranks_of(agent):
        if b"\0RANK=1\0" in Path(f"/proc/{process}/environ").read_bytes():
            return process
    raise AssertionError("there is no rank 1")


# The same command again


def test_differences_compares_only_settings_that_affect_result(text: Path) -> None:
    config = tiny(text, *on("2,1,1"))
    written = resolved_toml(config)
    for change in (*on("1,2,1"), "memory.recompute=full", "logging.every=3", "logging.folder=elsewhere"):
        assert differences(tiny(text, change), written) == [], change
    for change in ("seed=1", "model.hidden=64", "data.batch=16", "optimizer.lr=1", "schedule.steps=13"):
        (found,) = differences(tiny(text, change), written)
        assert found.startswith(f"{change.partition('=')[0]} = ")
    assert "cannot be read" in differences(config, written[: len(written) // 2] + "\ntorn")[0]


def test_run_folder_lock_allows_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "run"
    first, second = RunFolder.create(path, ""), RunFolder.open(path)
    with pytest.raises(ValueError, match="is in use by a run; wait until it ends or choose another folder"):
        second.lock()
    first.close()
    second.lock()
    second.close()


# Preemption


def test_train_cli_preempted_run_saves_and_resumes(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    changes = [*on("2,1,1"), "schedule.steps=1000000", f"logging.folder={run}"]
    words, reached = ["train", *sets(settings(text, *changes))], 0
    for send, signum in ((os.killpg, signal.SIGTERM), (os.kill, signal.SIGUSR1)):  # to all its processes, to one
        with started(*words, folder=tmp_path) as command:
            command.wait_for(lambda enough=reached + 2: last_step(run) > enough)
            send(command.pid, signum)
            code, out, err = command.said()
        assert code == PREEMPTED, err
        assert err == ""
        told = re.search(r"Stopped after step (\d+) of 1000000; all is saved", out)
        assert told
        assert not reached or f"resumed after step {reached}" in out
        reached = int(told[1])
        assert steps_of(run) == list(range(1, reached + 1))


def signalled(times: int) -> None:
    stop = Stop()
    with stop.listening():
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGTERM)
    os._exit(stop.asked)


@pytest.mark.parametrize(("times", "apart", "code"), [(1, -1.0, 1), (2, -1.0, 128 + signal.SIGTERM), (5, 60.0, 1)])
def test_stop_second_signal_exits_immediately(
    times: int, apart: float, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it comes so soon that it is the first again, from somewhere else."""
    monkeypatch.setattr(stopping, "ONE", apart)
    process = get_context("fork").Process(target=signalled, args=(times,))
    process.start()
    process.join()
    assert process.exitcode == code


def test_stop_ctrl_c_exits_zero_not_preempted() -> None:
    for signum, code in ((signal.SIGINT, 0), (signal.SIGTERM, PREEMPTED), (signal.SIGUSR1, PREEMPTED)):
        stop = Stop()
        stop._hear(signum, None)
        assert (stop.asked, stop.obeyed, stop.code) == (True, False, code)


# Other ranks


def test_for_ranks_takes_listed_cuboid(text: Path) -> None:
    config = tiny(text, *on("2,2,2"), "cuboid.others=1,2,2; 2,1,1 replicas=2; 1,2,1")
    assert for_ranks(config, 8, "") == (config, "")
    for ranks, expected in ((4, Cuboid(1, 2, 2)), (2, Cuboid(1, 2, 1))):
        found, why = for_ranks(config, ranks, "")
        assert found.cuboid_shape() == expected
        assert found.other_cuboids() == config.other_cuboids()
        assert why == f"there are {ranks} ranks, not the 8 of 2,2,2; taking {expected} from cuboid.others"


def test_for_ranks_takes_listed_pipe(text: Path) -> None:
    """Blocks are dealt evenly where it has other stages than the run's."""
    pipe = ["model.layers=4", "data.micro_batches=2", "overlap.split=3,1", "overlap.pipeline=zero-bubble"]
    config = tiny(text, *on("1,2,1,1,2"), *pipe, "cuboid.others=1,2,1 pipe=4; 1,1,1 pipe=2; 1,1,1")
    listed = {8: (Cuboid(1, 2, 1, pipe=4), ()), 2: (Cuboid(pipe=2), (3, 1)), 1: (Cuboid(), ())}
    for ranks, (expected, split) in listed.items():
        found, why = for_ranks(config, ranks, "")
        found.check()
        assert found.cuboid_shape() == expected
        assert found.schedule_on(expected).split == split
        assert why == f"there are {ranks} ranks, not the 4 of 1,2,1 pipe=2; taking {expected} from cuboid.others"


@pytest.mark.parametrize("ranks", [1, 3, 6, 16])
def test_for_ranks_plans_cuboid_if_none_is_listed(ranks: int, text: Path) -> None:
    config = tiny(text, *on("2,2,2"), "cuboid.others=1,2,2")
    found, why = for_ranks(config, ranks, "")
    found.check()
    assert found.cuboid_shape().ranks == ranks
    assert why.startswith(f"there are {ranks} ranks, not the 8 of 2,2,2: {found.cuboid.x},")
    assert not differences(found, resolved_toml(config))


def only_pipes(hw: Hardware, work: Work, devices: int) -> Ranking:
    return search.rank(hw, work, devices, Cuboid(1, devices // 2, 1, pipe=2))


def test_train_auto_takes_schedule_and_split_of_pipe(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the run said of its own."""
    monkeypatch.setattr(auto, "rank", only_pipes)
    config = tiny(text, *on("2,1,1"), "model.layers=5", "data.micro_batches=4", "overlap.beside=true")
    data, model = config.data, config.model_config(auto.vocab_of(config.data))
    (plan,) = only_pipes(PRESETS["cpu"], Work(model, 2, data.seq, "fp32", 4), 4).plans
    found, why = auto.planned(config, 4, "cpu")
    found.check()
    chosen, schedule = found.schedule_on(found.cuboid_shape()), plan.choice.schedule
    assert found.cuboid_shape() == plan.cuboid
    assert (chosen.pipeline, chosen.stages, chosen.split) == (schedule.pipeline, schedule.stages, schedule.split)
    assert "pipe=2 is the fastest" in why


def nothing_fits(config: object, ranks: int, machine: str) -> None:
    raise ValueError("nothing fits")


def test_for_ranks_rejects_impossible_rank_count(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "planned", nothing_fits)
    said = r"there are 2 ranks, not the 8 of 2,2,2, and no cuboid of 2 is possible: nothing fits"
    with pytest.raises(ValueError, match=said):
        for_ranks(tiny(text, *on("2,2,2")), 2, "")


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ("1,2", "is not three sizes"),
        ("1,2,2 replicas=a", "is not three sizes"),
        ("1x3x1", "heads=8 cannot be split into y·z=3"),
        ("1,1,1 replicas=3", "data.batch = 8 cannot be split into data.micro_batches · cuboid.replicas = 3"),
    ],
)
def test_config_rejects_bad_other_cuboids(others: str, said: str, text: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        tiny(text, f"cuboid.others={others}")
