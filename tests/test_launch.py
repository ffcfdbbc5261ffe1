"""Ranks start, fail and end together, whoever started them."""

import faulthandler
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import HUNG
from tiny import curve, losses, on, settings, tiny, write_text

from cuboid.run.errors import RankError
from cuboid.run.interfaces import check_interfaces
from cuboid.run.launch import Pool, World, join_world, launch, rank_of
from cuboid.run.meeting import fresh_store
from cuboid.run.started import local_ranks

Pools = Callable[[int], Pool]


def pid_of(world: World) -> int:
    return os.getpid()


def fail(world: World, how: str) -> object:
    """Rank 1 fails while the others wait for it."""
    if world.rank != 1:
        dist.barrier()
    elif how == "raise":
        raise KeyError("the cause")
    elif how == "exit":
        os._exit(3)
    elif how.startswith("SIG"):
        faulthandler.disable()  # pytest's would tell of it at length
        os.kill(os.getpid(), signal.Signals[how])
    return lambda: "cannot be sent"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", r"rank 1 failed\n(?s:.*)in fail\n(?s:.*)KeyError: 'the cause'"),
        ("exit", "rank 1 ended with exit code 3"),
        ("SIGKILL", "rank 1 was killed by SIGKILL$"),
        ("SIGILL", "rank 1 was killed by SIGILL; the processor does not .* ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"),
        ("answer", r"rank 1 failed\n(?s:.*)lambda"),
    ],
)
def test_pool_ends_all_ranks_when_one_fails(how: str, said: str) -> None:
    pool = Pool(3)
    pids = pool.run(pid_of)
    with pytest.raises(RankError, match=said):
        pool.run(fail, how)
    for pid in pids:
        with pytest.raises(ProcessLookupError):  # gone, and no zombie either
            os.kill(pid, 0)


def wait_long(world: World, pipe: int) -> None:
    os.write(pipe, b".")
    time.sleep(2 * HUNG)


def start_and_wait(pipe: int) -> None:
    launch(wait_long, 2, [pipe])


def test_launch_ranks_end_when_parent_is_killed() -> None:
    ours, theirs = os.pipe()
    starter = get_context("fork").Process(target=start_and_wait, args=(theirs,))
    starter.start()
    os.close(theirs)  # the starter and its ranks have it still
    with open(ours, "rb", buffering=0) as pipe:
        assert pipe.read(1) + pipe.read(1) == b".."
        starter.kill()
        starter.join()
        ended, _, _ = select.select([pipe], [], [], HUNG)
        assert ended
        assert pipe.read(1) == b""


def rank_and_size(world: World) -> tuple[int, int]:
    return world.rank, world.size


def test_launch_returns_results_in_rank_order() -> None:
    assert launch(rank_and_size, 3) == [(0, 3), (1, 3), (2, 3)]


def test_launch_rejects_torchrun_world_size_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"torchrun started 2 ranks but this command needs 8; set --nproc-per-node"):
        launch(rank_and_size, 8)


def meet_twice(world: World, port: int) -> list[int]:
    """Through torchrun's store, which stays; how many have come to the one they meet in."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE=str(world.size))
    found = []
    for _ in range(2):
        time.sleep(0.1 * world.rank)
        store = fresh_store(world.rank, world.size, 60)
        store.add("came", 1)
        dist.barrier()
        found.append(store.add("came", 0))
        dist.barrier()
    return found


def test_join_world_has_gloo_connect_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun's ranks too: a thousand of them would make half a million unused connections."""
    seen = list[str | None]()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "")
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: seen.append(os.environ["TORCH_GLOO_LAZY_INIT"]))
    monkeypatch.setattr("cuboid.run.launch._keep_memory", lambda: None)
    join_world(dist.HashStore())
    assert seen == ["1"]


@pytest.mark.parametrize(
    ("variable", "value", "fits"),
    [
        ("GLOO_SOCKET_IFNAME", "lo", True),
        ("GLOO_SOCKET_IFNAME", "lo,eth9", False),
        ("GLOO_SOCKET_IFNAME", "", True),
        ("NCCL_SOCKET_IFNAME", "eth9,l", True),  # beginnings of names
        ("NCCL_SOCKET_IFNAME", "=l", False),
        ("NCCL_SOCKET_IFNAME", "=lo:4000", True),
        ("NCCL_SOCKET_IFNAME", "^docker", True),
        ("NCCL_SOCKET_IFNAME", "ib", False),
    ],
)
def test_interfaces_must_be_there(variable: str, value: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setenv(variable, value)
    backend = variable.partition("_")[0].lower()
    if fits:
        check_interfaces(backend)
        return
    with pytest.raises(ValueError, match=f"{variable}={value} .* has lo, eth0; set it to one of these"):
        check_interfaces(backend)


def test_join_world_on_gpus_wants_to_be_told_the_place_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of mpirun and srun. All ranks of all hosts would count as ranks of one."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    said = r"rank 1 of 2 sees GPUs, .* did not set LOCAL_RANK and LOCAL_WORLD_SIZE; set .*SLURM_LOCALID"
    with pytest.raises(ValueError, match=said):
        launch(rank_and_size, 2)
    with pytest.raises(ValueError, match=said):  # before memory is planned for CPUs
        local_ranks(2)


def test_join_world_looks_at_interfaces_of_checkpoints_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str]()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("cuboid.run.launch.backend_for", lambda _: "nccl")
    monkeypatch.setattr("cuboid.run.launch.check_interfaces", seen.append)
    monkeypatch.setattr("cuboid.run.launch._keep_memory", lambda: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    join_world(dist.HashStore())
    assert seen == ["nccl", "gloo"]


def test_rank_that_cannot_join_says_why(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere")
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME=nowhere"), Pool(2) as ranks:
        ranks.run(rank_of)
    assert capfd.readouterr().err == ""


def test_fresh_store_ignores_entries_of_dead_ranks() -> None:
    old = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    old.set("cuboid/question/2", "asked by a rank that is gone")
    with Pool(3) as ranks:
        assert ranks.run(meet_twice, old.port) == [[3, 3]] * 3


@pytest.mark.slow
def test_train_cli_torchrun_matches_forked_ranks(tmp_path: Path, pool: Pools) -> None:
    text, run = write_text(tmp_path), tmp_path / "a run"
    changes = [*on("1,2,1"), "schedule.steps=4"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    sets = [word for change in settings(text, *changes, f"logging.folder={run}") for word in ("--set", change)]
    done = subprocess.run(
        [*torchrun, "-m", "cuboid", "train", *sets], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("4 steps in") == 1  # one rank speaks
    found = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert found == losses(pool(2).run(curve, tiny(text, *changes), 4)[0])


@pytest.mark.slow
def test_train_cli_torchrun_reports_rejection_once(tmp_path: Path) -> None:
    """Found by the ranks, after they have met."""
    text = tmp_path / "short.txt"
    text.write_text("too little")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    sets = [word for change in settings(text, *on("1,2,1")) for word in ("--set", change)]
    done = subprocess.run(
        [*torchrun, "-m", "cuboid", "train", *sets], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1
    assert done.stderr.count("a sample of seq=16 needs 17") == 1, done.stderr
    assert f"{Path('cuboid', 'train', 'loop.py')}" not in done.stderr  # no traceback of ours


def test_port_in_use_is_one_line(tmp_path: Path) -> None:
    """Where ranks were started by hand or by a scheduler: no traceback, and none of C++."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        done = subprocess.run(
            [sys.executable, "-m", "cuboid", "verify", "--cuboid", "1,2,1"],
            env=os.environ | where,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=HUNG,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: rank 0 of 2 could not join the others at 127.0.0.1:"), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("listens", [False, True], ids=["closed port", "no store behind it"])
def test_wrong_address_is_one_line(listens: bool, tmp_path: Path) -> None:
    """PyTorch logs a C++ stack trace per attempt at a closed port, and waits endlessly for a server that is silent."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if listens:
            other.listen()
        where = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(other.getsockname()[1])}
        done = subprocess.run(
            [sys.executable, "-m", "cuboid", "train", "--cuboid", "1,2,1", "--set", "watch.timeout=1"],
            env=os.environ | where | {"LOCAL_RANK": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=HUNG,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: rank 1 of 2 could not join the others at 127.0.0.1:"), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
