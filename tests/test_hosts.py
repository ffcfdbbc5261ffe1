"""Several hosts, each with its own torchrun, that see each other over one link and nothing else."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import namespaces
import pytest
from commands import HUNG
from tiny import curve, losses, on, settings, tiny, write_text

from cuboid.run.cluster import Cluster
from cuboid.run.launch import Pool


@pytest.mark.slow
@namespaces.needed
def test_train_cli_on_two_hosts_matches_one_machine(tmp_path: Path, pool: Callable[[int], Pool]) -> None:
    text, run = write_text(tmp_path), tmp_path / "run"
    changes = [*on("2,2,1"), "schedule.steps=4"]
    sets = [word for change in settings(text, *changes, f"logging.folder={run}") for word in ("--set", change)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    with Cluster(2) as cluster, ExitStack() as cleanup:
        meet = ["--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", f"{cluster.host(0).address}:29400"]
        agents = []
        for i in range(2):
            where = ["--local-addr", cluster.host(i).address, "--rdzv-conf", f"is_host={int(i == 0)}"]
            agent = subprocess.Popen(
                cluster.host(i).command(*torchrun, *meet, *where, "-m", "cuboid", "train", *sets),
                cwd=tmp_path,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0"},
                start_new_session=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            cleanup.callback(end, agent)
            agents.append(agent)
        said = [agent.communicate(timeout=HUNG)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert ["4 steps in" in each for each in said] == [True, False]  # rank 0 speaks for all
    found = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert found == losses(pool(4).run(curve, tiny(text, *changes), 4)[0])


def end(agent: "subprocess.Popen[str]") -> None:
    """An agent that is asked to end also ends its ranks, which have their own sessions."""
    if agent.poll() is None:
        agent.terminate()
        agent.wait(HUNG)
