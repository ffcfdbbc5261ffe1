"""Two hosts of four ranks. One is lost in the middle of a run, and comes back: the run goes on with what there is.

Hosts are given time: one that is merely slow must not pass for one that is lost.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import namespaces
import pytest
from commands import HUNG
from test_cluster import alive
from tiny import curve, furthest, losses, on, settings, tiny, write_text

from cuboid.run.cluster import Cluster, Host
from cuboid.run.launch import Pool
from cuboid.train.kills import last_step, ranks_of

CHANGES = [
    "model.layers=2",
    "model.hidden=64",
    "model.ffn=128",
    "data.seq=64",
    "data.batch=16",
    "optimizer.lr=0.001",
    "schedule.steps=1000000",
    "checkpoint.every=5",
    "watch.timeout=40",
    "cuboid.others=1,2,2",
]
CONF = "keep_alive_interval=2,keep_alive_max_attempt=10,last_call_timeout=20,read_timeout=60"


class Agents:
    """A torchrun on each host, with what it has said in a file."""

    def __init__(self, cluster: Cluster, folder: Path, words: list[str]) -> None:
        self.cluster, self.folder, self.words = cluster, folder, words
        self.running: dict[int, subprocess.Popen[str]] = {}

    def start(self, i: int) -> None:
        host, first = self.cluster.host(i), self.cluster.host(0)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "4"]
        meet = ["--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", f"{first.address}:29400"]
        where = ["--local-addr", host.address, "--rdzv-conf", f"is_host={int(i == 0)},{CONF}", "--max-restarts", "9"]
        with open(self.folder / f"host{i}.txt", "a") as said:
            self.running[i] = subprocess.Popen(
                host.command(*torchrun, *meet, *where, "-m", "cuboid", "train", *self.words),
                cwd=self.folder,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                start_new_session=True,
                stdout=said,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def lose(self, i: int) -> None:
        """The agent alone; its ranks must end by themselves."""
        ranks = ranks_of(self.running[i])
        self.running[i].kill()
        self.running[i].wait()
        assert len(ranks) == 4
        deadline = time.monotonic() + HUNG
        while any(map(alive, ranks)):
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def cut(self, i: int, state: str) -> None:
        """The cable: the port of the switch goes down, or up. No process is notified."""
        switch = Host(f"/proc/{self.cluster.keeper}/fd/1", "")
        subprocess.run(switch.command("ip", "link", "set", "dev", f"port{i}", state), check=True)

    def end(self) -> None:
        for agent in self.running.values():
            if agent.poll() is None:
                agent.terminate()
        for agent in self.running.values():
            agent.wait(HUNG)

    def said(self, i: int = 0) -> str:
        return (self.folder / f"host{i}.txt").read_text()


def wait_for(agents: Agents, what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 2 * HUNG
    while not what():
        assert agents.running[0].poll() is None, agents.said()
        assert time.monotonic() < deadline, agents.said() + agents.said(1)
        time.sleep(0.1)


@pytest.mark.slow
@namespaces.needed
@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_train_cli_survives_loss_and_return_of_host(how: str, tmp_path: Path, pool: Callable[[int], Pool]) -> None:
    text, run = write_text(tmp_path), tmp_path / "run"
    changes = [*CHANGES, *on("2,2,2")]
    words = [word for each in settings(text, *changes, f"logging.folder={run}") for word in ("--set", each)]
    seconds: dict[str, float] = {}
    with Cluster(2) as cluster, ExitStack() as cleanup:
        agents = Agents(cluster, tmp_path, words)
        cleanup.callback(agents.end)

        def ranks() -> list[int]:
            return [int(found) for found in re.findall(r"^cuboid .*, (\d+) ranks", agents.said(), re.M)]

        def further(steps: int) -> None:
            reached = last_step(run) + steps
            wait_for(agents, lambda: last_step(run) >= reached)

        for i in range(2):
            agents.start(i)
        wait_for(agents, lambda: last_step(run) > 12)
        lost = time.monotonic()
        if how == "killed":
            agents.lose(1)
        else:
            agents.cut(1, "down")
        wait_for(agents, lambda: ranks() == [8, 4])
        seconds["until 4 ranks trained"] = time.monotonic() - lost
        further(10)
        if how == "cut off":
            agents.running[1].kill()  # if it has not given up by itself
            agents.running[1].wait()
            agents.cut(1, "up")
        back = time.monotonic()
        agents.start(1)
        wait_for(agents, lambda: ranks() == [8, 4, 8])
        seconds["until 8 ranks trained"] = time.monotonic() - back
        further(10)
        os.killpg(agents.running[0].pid, signal.SIGTERM)
        agents.running[0].wait(HUNG)
        agents.end()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    found = [row["loss"] for row in rows]
    alone = losses(pool(8).run(curve, tiny(text, *changes), len(rows))[0])
    print(f"{how}: {len(rows)} steps, {furthest(found, alone):.1e} from the run that lost nobody;", seconds)
    resumed = re.findall(r"resumed after step (\d+)", agents.said())
    print("resumed after", resumed)
    assert furthest(found, alone) < 1e-3
    assert furthest(found[:10], alone[:10]) == 0
