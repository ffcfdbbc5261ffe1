"""Several hosts: network namespaces that see each other over one link and nothing else."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tiny import curve, losses, on, settings, tiny, write_text

from cuboid.launch import Pool

ADDRESSES = ("10.77.31.1", "10.77.31.2")


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no network namespaces here: ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two namespaces, joined by their eth0."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    names = [f"cuboid-{os.getpid()}-{i}" for i in range(2)]
    with ExitStack() as cleanup:
        for name in names:
            ip("netns", "add", name)
            cleanup.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        yield names


def test_two_hosts_train_as_one(hosts: list[str], tmp_path: Path, pool: Callable[[int], Pool]) -> None:
    text, run = write_text(tmp_path), tmp_path / "run"
    changes = [*on("2,2,1"), "schedule.steps=4"]
    sets = [word for change in settings(text, *changes, f"logging.folder={run}") for word in ("--set", change)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    meet = ["--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", f"{ADDRESSES[0]}:29400"]
    with ExitStack() as cleanup:
        agents = []
        for name, address in zip(hosts, ADDRESSES, strict=True):
            where = ["--local-addr", address, "--rdzv-conf", f"is_host={int(address == ADDRESSES[0])}"]
            agent = subprocess.Popen(
                ["ip", "netns", "exec", name, *torchrun, *meet, *where, "-m", "cuboid", "train", *sets],
                cwd=tmp_path,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0"},
                start_new_session=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            cleanup.callback(end, agent)
            agents.append(agent)
        said = [agent.communicate(timeout=600)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert ["4 steps in" in each for each in said] == [True, False]  # rank 0 speaks for all
    found = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert found == losses(pool(4).run(curve, tiny(text, *changes), 4)[0])


def end(agent: "subprocess.Popen[str]") -> None:
    """Asked to end, an agent ends its ranks too, which are in sessions of their own."""
    if agent.poll() is None:
        agent.terminate()
        agent.wait(60)
