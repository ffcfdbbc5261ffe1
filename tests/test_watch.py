"""A rank that stalls, dies, fails or calls something else ends all ranks, and is named."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import HUNG
from tiny import on, settings, tiny, write_text
from torch import Tensor

from cuboid.comm.collectives import all_gather, all_reduce
from cuboid.comm.flight import Flight
from cuboid.comm.journal import Account, Journal, explain, unfinished
from cuboid.layers import product
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.mesh import Mesh
from cuboid.run.errors import RankError
from cuboid.run.launch import Pool, World, launch
from cuboid.run.watch import ALARM, Alarm, Mismatched, Stalled, Watch, watched, whereabouts
from cuboid.train.config import TrainConfig
from cuboid.train.loop import Trainer

LIMIT = 5.0  # seconds, where a rank stalls; those for which the machine has no time for a rank hardly count
AMPLE = 24.0  # where none does, or one is lost at once
FOREVER = 3600.0


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path)


def steps(world: World, config: TrainConfig, limit: float, rank: int, how: str) -> None:
    """Train under a watch. At the third step something befalls a rank."""
    with watched(world.rank, world.size, limit, config.rank_names()) as watch:
        trainer = Trainer(config, replace(world, watch=watch))
        for step in range(1, 9):
            if step == 3 and world.rank == rank:
                befall(trainer, how)
            trainer.step()


def befall(trainer: Trainer, how: str) -> None:
    if how == "stopped":
        product.all_gather = stop_here  # type: ignore[assignment]
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "busy":
        time.sleep(FOREVER)
    elif how == "forward":
        strike("all_gather", 3)
    elif how == "backward":
        parameter = next(trainer.model.parameters())
        parameter.register_hook(lambda gradient: [][1])
    elif how == "longer":
        lengthen()
    elif how == "unseen":  # as when the backend takes what does not fit, and goes on
        journal = trainer.model.parallel.mesh.y.journal
        assert journal is not None
        journal.note("all_gather", (4,), torch.float32)


def stop_here(x: Tensor, axis: object) -> None:
    """In the forward pass, where others wait: a moment would be in another place on another machine."""
    os.kill(os.getpid(), signal.SIGSTOP)


def strike(name: str, after: int) -> None:
    """From its `after`th call on, a function raises."""
    real, left = getattr(product, name), iter(range(after))

    def struck(x: Tensor, axis: object) -> Flight:
        if next(left, None) is None:
            raise KeyError("the cause")
        flight: Flight = real(x, axis)
        return flight

    setattr(product, name, struck)


def lengthen() -> None:
    """A rank gathers one row too many."""
    real = product.all_gather
    product.all_gather = lambda x, axis: real(torch.cat((x, x[:1])), axis)  # type: ignore[assignment]


@pytest.mark.parametrize("rank", [0, 5])
def test_watch_names_stopped_rank(rank: int, text: Path) -> None:
    with pytest.raises(Stalled, match=rf"step 3: rank {rank}(, which keeps .*)? did not .*stopped, dead") as caught:
        Pool(8).run(steps, tiny(text, *on("2,2,2")), LIMIT, rank, "stopped")
    assert re.search(
        r"axis [xyz], collective \d+: rank \d waits for rank \d with \w+ of \[.*\] float32", str(caught.value)
    )


def test_watch_names_busy_rank_and_its_source_line(text: Path) -> None:
    with pytest.raises(Stalled, match=r"step 3: rank 1 did not arrive: it is at test_watch.py:\d+"):
        Pool(4).run(steps, tiny(text, *on("2,1,2")), LIMIT, 1, "busy")


@pytest.mark.parametrize(
    ("how", "said"),
    [("forward", r"rank 2 failed\n(?s:.*)KeyError: 'the cause'"), ("backward", r"rank 2 failed\n(?s:.*)IndexError")],
)
def test_watch_reports_failure_before_its_consequences(how: str, said: str, text: Path) -> None:
    with pytest.raises(RankError, match=said):
        Pool(4).run(steps, tiny(text, *on("2,1,2")), AMPLE, 2, how)


def test_watch_reports_mismatched_gather_size(text: Path) -> None:
    with pytest.raises(Mismatched, match="step 3: collectives do not match\n  axis") as caught:
        Pool(4).run(steps, tiny(text, *on("1,2,2")), LIMIT, 3, "longer")
    assert re.search(
        r"axis y, collective \d+: rank 1 called all_gather of \[16, 8, 16\] float32; rank 3 called all_gather of \[18,",
        str(caught.value),
    )


def test_watch_finds_silent_mismatch_at_end_of_step(text: Path) -> None:
    said = r"step 3: collectives do not match\n  axis y, collective \d+: rank 0 .*; rank 1 called all_gather of \[4\]"
    with pytest.raises(Mismatched, match=said):
        Pool(4).run(steps, tiny(text, *on("2,2,1")), AMPLE, 1, "unseen")


def calls(world: World, how: str) -> list[float]:
    """Over y of 1,2,2 rank 3 calls something else than rank 1."""
    with watched(world.rank, world.size, LIMIT) as watch:
        mesh, odd = Mesh(Cuboid(1, 2, 2), world.rank, watch=watch), world.rank == 3
        all_reduce(torch.ones(3), mesh.y).wait()
        x = torch.ones(4)
        if how == "shape":
            all_reduce(torch.ones(2) if odd else x, mesh.y).wait()
        elif how == "kind":
            (all_gather if odd else all_reduce)(x, mesh.y).wait()
        elif how == "missing" and not odd:
            all_reduce(x, mesh.y).wait()
        assert watch is not None
        share = torch.tensor([watch.share()], dtype=torch.float64)
        if all_reduce(share, mesh.world).wait().item():
            watch.disagree()
        mesh.close()
        return share.tolist()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "shape",
            r"axis y, collective 2: rank 1 called all_reduce of \[4\] float32; rank 3 called all_reduce of \[2\]",
        ),
        ("kind", r"axis y, collective 2: rank 1 called all_reduce of \[4\] float32; rank 3 called all_gather of \[8\]"),
        ("missing", r"axis y, collective 2: rank 1 waits for rank 3 with all_reduce of \[4\] float32"),
    ],
)
def test_watch_reports_mismatched_collectives(how: str, said: str) -> None:
    with pytest.raises(Stalled if how == "missing" else Mismatched, match=said):
        Pool(4).run(calls, how)


def test_watch_accepts_matching_collectives() -> None:
    with Pool(4) as ranks:
        found = [share for (share,) in ranks.run(calls, "")]
    assert any(found)
    assert sum(found) == 0


# what the accounts of the ranks say


def account(rank: int, *journals: tuple[str, tuple[int, ...], list[str], int], at: str = "here:1") -> Account:
    """Of journals: axis, ranks, calls, the number of the one awaited."""
    pages = []
    for axis, ranks, kinds, awaited in journals:
        journal = Journal(axis, ranks, rank)
        for kind in kinds:
            journal.note(kind, (2, 3), torch.float32)
        journal.awaited = awaited
        pages.append(journal.page())
    return Account.read(json.loads(json.dumps(asdict(Account(7, at, pages)))))


def test_explain_does_not_blame_waiting_ranks() -> None:
    accounts = {
        0: account(0, ("x", (0, 1), ["a", "b"], 2), ("y", (0, 2), ["c"], 0)),
        1: account(1, ("x", (0, 1), ["a"], 0), ("y", (1, 3), ["c"], 1)),
        2: account(2, ("x", (2, 3), ["a", "b"], 2), ("y", (0, 2), ["c"], 0)),
    }
    assert explain(accounts, 4) == (
        False,
        "step 7: rank 3 did not arrive and did not answer: stopped, dead or cut off\n"
        "  axis y, collective 1: rank 1 waits for rank 3 with c of [2, 3] float32\n"
        "  axis x, collective 2: rank 2 waits for rank 3 with b of [2, 3] float32\n"
        "  1 more wait for these",
    )
    accounts[3] = account(3, ("x", (2, 3), ["a"], 0), ("y", (1, 3), [], 0), at="there:2")
    assert explain(accounts, 4)[1].startswith("step 7: rank 3 did not arrive: it is at there:2\n")


def test_explain_reports_wait_cycle_and_lost_messages() -> None:
    pair = (0, 1)
    circle = {
        0: account(0, ("x", pair, ["a"], 1), ("y", pair, [], 0)),
        1: account(1, ("x", pair, [], 0), ("y", pair, ["b"], 1)),
    }
    assert explain(circle, 2)[1].startswith("step 7: ranks wait for one another\n  axis x, collective 1: rank 0 waits")
    lost = {rank: account(rank, ("x", pair, ["a"], 1)) for rank in pair}
    assert explain(lost, 2)[1].startswith("step 7: all ranks arrived, but not what they sent\n")


def test_explain_blames_rank_with_fewest_launches() -> None:
    accounts = {rank: account(rank, ("x", (0, 1, 2), ["a", "b"][: 2 - rank % 2], 0)) for rank in range(3)}
    late = "axis x, collective 2: rank 1 did not arrive at b of [2, 3] float32"
    assert explain(accounts, 3)[1] == f"step 7: {late}\n  rank 1 is at here:1"
    even = {rank: account(rank, ("x", (0, 1), ["a"], 0)) for rank in range(2)}
    assert explain(even, 2)[1] == "step 7: rank 0 is at here:1\n  rank 1 is at here:1"


def test_whereabouts_names_lines_of_all_threads_of_ours() -> None:
    """As of a GPU's backward, which runs in autograd's thread while the main one waits inside PyTorch."""
    inside, go_on, done, said = threading.Event(), threading.Event(), threading.Lock(), list[str]()
    ours = threading.Thread(target=Flight(lambda: inside.set() or go_on.wait()).wait, name="backward")
    theirs = threading.Thread(target=go_on.wait, name="theirs")

    def look() -> None:
        inside.wait(HUNG)
        me = threading.get_ident()
        while not any(said):
            time.sleep(0.01)
            found = whereabouts({me})
            said.append(found if "module.py" in traceback.extract_stack(sys._current_frames()[main])[-1][0] else "")
        said.append(whereabouts({me, ours.ident}))
        done.release()

    main, waiting = threading.main_thread().ident, torch.nn.Module()
    assert main is not None
    waiting.forward = done.acquire
    looking = threading.Thread(target=look)
    done.acquire()
    for thread in (ours, theirs, looking):
        thread.start()
    waiting()  # inside PyTorch
    go_on.set()
    for thread in (ours, theirs, looking):
        thread.join()
    assert re.fullmatch(r"test_watch\.py:\d+; backward at flight\.py:\d+", said[-2])
    assert re.fullmatch(r"test_watch\.py:\d+", said[-1])


def test_unfinished_lists_first_of_each_group_in_flight_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(group: str, number: int, state: str) -> dict[str, object]:
        sizes = {"profiling_name": "nccl:all_gather", "collective_seq_id": number, "input_sizes": [[4, 2]]}
        return {"process_group": ["0", group], "state": state, **sizes}

    entries = [
        entry("y", 6, "completed"),
        entry("y", 7, "started"),
        entry("y", 8, "scheduled"),
        entry("x", 3, "started"),
    ]
    dump, recorders = json.dumps({"entries": entries}).encode(), torch._C._distributed_c10d
    monkeypatch.setattr(recorders, "_dump_nccl_trace_json", lambda **_: dump, raising=False)  # in builds for CUDA
    monkeypatch.setattr(recorders, "_dump_fr_trace_json", lambda **_: b"{}")  # of the CPU's backends
    assert unfinished() == [
        "nccl:all_gather 7 of [[4, 2]] over group y is started",
        "nccl:all_gather 3 of [[4, 2]] over group x is started",
    ]
    monkeypatch.delattr(recorders, "_dump_nccl_trace_json")
    assert unfinished() == []
    monkeypatch.delattr(recorders, "_dump_fr_trace_json")
    assert unfinished() == []


def test_paused_watch_counts_no_time() -> None:
    watch = Watch(0, 2, dist.HashStore(), AMPLE)
    watch.step = 3
    with suppress(KeyError), watch.paused():
        assert watch.step == 0  # outside a step a rank may be busy for any time
        raise KeyError
    assert watch.step == 3


def test_explain_reports_mismatch_older_than_journal() -> None:
    same = {rank: account(rank, ("x", (0, 1), ["a"], 0)) for rank in range(2)}
    assert explain(same, 2, differ=True) == (True, "step 7: collectives do not match, 64 calls or more ago on any axis")


def test_explain_shortens_report_of_many_ranks() -> None:
    accounts = {rank: account(rank, (f"x{rank}", (rank, 99), ["a"], 1)) for rank in range(50)}
    found = explain(accounts, 100)[1].splitlines()
    assert len(found) == 9
    assert found[-1] == "  and 43 more"


# ranks that nobody here supervises


def unsupervised(rank: int, port: int, config: TrainConfig) -> None:
    """As under torchrun, whose agent keeps a store behind that port."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="4", LOCAL_WORLD_SIZE="4")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")
    launch(steps, 4, [config, AMPLE, 1, "killed"])


def test_watch_survivors_name_dead_rank(text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    door, fork, config = socket.create_server(("127.0.0.1", 0)), get_context("fork"), tiny(text, *on("2,1,2"))
    port = door.getsockname()[1]
    ranks = [fork.Process(target=unsupervised, args=(rank, port, config), daemon=True) for rank in range(4)]
    for each in ranks:
        each.start()
    # Not before: its thread looks up the name of who comes, and a rank forked meanwhile inherits the C library's lock
    # of that as held, and waits for ever when it looks one up itself.
    _store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach())
    for each in ranks:
        each.join()
    assert [each.exitcode for each in ranks] == [1, -signal.SIGKILL, 1, 1]
    said = capfd.readouterr().err
    assert said.count("error: step 3: rank 1 did not arrive and did not answer: stopped, dead or cut off") == 1, said
    assert re.search(r"rank \d heard: .*[Cc]onnection", said)


def keep(door: socket.socket) -> None:
    """A store behind that door."""
    port, listen = door.getsockname()[1], door.detach()
    _store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listen)
    time.sleep(FOREVER)


def test_watch_does_not_wait_for_lost_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        keeper, port = get_context("fork").Process(target=keep, args=(door,), daemon=True), door.getsockname()[1]
        keeper.start()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    with Watch(1, 3, store, AMPLE) as watch:
        store.set(ALARM, json.dumps(asdict(Alarm(2, why="a connection is lost"))))
        store.get("watch/1")  # it has answered, and waits for the verdict
        keeper.kill()
        keeper.join()
        assert watch._judged.wait(HUNG)
        with pytest.raises(Stalled, match="rank 0, which keeps the run's store, did not answer"):
            watch.look(None)


# under torchrun

SCRIPT = """
import os, signal, sys
from cuboid.layers import product
from cuboid.cli import main
from cuboid.train.loop import Trainer

how, step = sys.argv.pop(1), Trainer.step

def befallen(self, stop=False):
    if self.done == 2 and os.environ["RANK"] == "3":
        if how == "fail":
            raise KeyError("the cause")
        open("pid", "w").write(str(os.getpid()))
        product.all_gather = lambda x, axis: os.kill(os.getpid(), signal.SIGSTOP)
    return step(self, stop)

Trainer.step = befallen
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("SIGSTOP", r"error: step 3: rank 3 did not arrive and did not answer: stopped, .*\n  axis [xy], coll"),
        ("fail", r"Root Cause \(first observed failure\):\n(.*\n){3}  rank +: 3 (?s:.*)KeyError: 'the cause'"),
    ],
)
def test_watch_names_stopped_or_failed_rank_under_torchrun(how: str, said: str, text: Path, tmp_path: Path) -> None:
    (tmp_path / "befallen.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    changes = settings(text, *on("2,2,1"), f"watch.timeout={LIMIT}")
    sets = [word for change in changes for word in ("--set", change)]
    command = [*torchrun, "befallen.py", how, "train", *sets]
    lines = []
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if line.startswith("error: step"):  # torchrun waits long for a stopped rank to end by itself
                with suppress(ProcessLookupError):  # every rank says so: it may have ended at the first one's word
                    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert process.returncode == 1
    assert re.search(said, "".join(lines)), "".join(lines)
    assert sum(line.startswith("error: ") for line in lines) == 1, "".join(lines)
    assert "".join(lines).count("KeyError: 'the cause'") == 2 * (how == "fail")  # rank 0's line, and the summary
