"""Hosts are apart, their links as slow as asked, and nothing of them stays."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import connection, get_context
from pathlib import Path

import namespaces
import pytest
import torch
import torch.distributed as dist
from commands import HUNG

from cuboid.run import cluster
from cuboid.run.cluster import Cluster, Links, bits_per_second, sent, try_hosts
from cuboid.run.launch import Pool, World

MB = 1 << 20


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    """Two on each of four hosts."""
    with Cluster(4, per_host=2) as hosts, Pool(8, hosts) as pool:
        yield pool


def swap(partner: int, megabytes: int) -> None:
    """Send that much to the partner and receive as much."""
    out, back = (torch.full((megabytes << 18,), float(dist.get_rank())), torch.empty(megabytes << 18))
    flights = [dist.isend(out, partner), dist.irecv(back, partner)]
    for flight in flights:
        assert flight is not None
        flight.wait()
    assert (back == partner).all()


def sum_of_ranks(world: World) -> tuple[float, str, str]:
    x = torch.tensor([float(world.rank)])
    dist.all_reduce(x)
    return x.item(), os.environ["LOCAL_RANK"], os.readlink("/proc/self/ns/net")


def on_the_wire(world: World, apart: int) -> int:
    """What this host sends while 4 MB go from each rank without that bit in its number to the one with it."""
    partner, x = world.rank ^ apart, torch.zeros(4 * MB, dtype=torch.uint8)
    swap(partner, 1)  # connections are made at their first use
    dist.barrier()
    before = sent()
    dist.barrier()
    if world.rank < partner:
        dist.send(x, partner)
    else:
        dist.recv(x, partner)
    dist.barrier()
    after = sent()
    dist.barrier()
    return after - before


def seconds(world: World) -> float:
    """For 2 MB each way, at the same time."""
    swap(1 - world.rank, 1)
    time.sleep(0.2)  # the bucket fills again
    dist.barrier()
    start = time.monotonic()
    swap(1 - world.rank, 2)
    dist.barrier()
    return time.monotonic() - start


@namespaces.needed
def test_cluster_places_ranks_on_hosts(ranks: Pool) -> None:
    sums, local, hosts = zip(*ranks.run(sum_of_ranks), strict=True)
    assert sums == (28.0,) * 8
    assert local == ("0", "1") * 4
    assert hosts[0::2] == hosts[1::2]
    assert len({*hosts, os.readlink("/proc/self/ns/net")}) == 5


@namespaces.needed
@pytest.mark.parametrize(("apart", "megabytes"), [(1, (0, 0, 0, 0)), (2, (8, 0, 8, 0)), (4, (8, 8, 0, 0))])
def test_cluster_link_carries_only_traffic_between_hosts(ranks: Pool, apart: int, megabytes: tuple[int, ...]) -> None:
    found = ranks.run(on_the_wire, apart)
    for host, wanted in enumerate(megabytes):
        assert found[2 * host] == pytest.approx(wanted * MB, rel=0.05, abs=0.2 * MB), host


@namespaces.needed
def test_cluster_links_do_not_exceed_rate() -> None:
    with Cluster(2, "20mbit") as hosts, Pool(2, hosts) as pool:
        assert min(pool.run(seconds)) > 0.7


def by_level(world: World, apart: int) -> tuple[int, int]:
    """What this rank's own link and its host's have carried while 4 MB go to the rank `apart` places away."""
    assert world.host is not None
    swap(world.rank ^ apart, 1)
    dist.barrier()
    before = sent(), world.host.sent()
    dist.barrier()
    swap(world.rank ^ apart, 4)
    dist.barrier()
    after = sent(), world.host.sent()
    dist.barrier()
    return after[0] - before[0], after[1] - before[1]


@namespaces.needed
def test_cluster_links_inside_and_between_hosts_carry_their_own() -> None:
    """Four hosts of two ranks with separate links, in groups of two hosts; one link is slower."""
    links = Links("1gbit", inside="2gbit", slow=((3, "500mbit"),), group=2, uplink="500mbit")
    with Cluster(4, links, per_host=2) as hosts, Pool(8, hosts) as pool:
        for apart, crossing in ((1, 0), (2, 8), (4, 8)):
            for own, between in pool.run(by_level, apart):
                assert own == pytest.approx(4 * MB, rel=0.05, abs=0.2 * MB), apart
                assert between == pytest.approx(crossing * MB, rel=0.05, abs=0.2 * MB), apart


def listing(*words: str) -> str:
    return subprocess.run(["ip", "-o", *words], capture_output=True, text=True, check=True).stdout


@namespaces.needed
def test_cluster_neighbours_are_static_and_rto_is_long() -> None:
    """None looks addresses up, which fails with many hosts; none takes a slow answer for a lost one."""
    with Cluster(3) as hosts, hosts.host(1).visit():
        known = {line.split()[0] for line in listing("neighbour").splitlines() if "PERMANENT" in line}
        assert known == {hosts.host(0).address, hosts.host(2).address}
        assert "rto_min lock 3s" in listing("route")


def machine() -> tuple[str, str]:
    links = {line.split(":")[1] for line in listing("link").splitlines()}  # counters and times left out
    return ",".join(sorted(links)), listing("netns")


def alive(pid: int) -> bool:
    """A zombie is not: it has left its namespace, whether or not it was reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@namespaces.needed
def test_cluster_is_invisible_and_leaves_nothing() -> None:
    before = machine()
    with Cluster(2, "1gbit") as hosts:
        assert alive(hosts.keeper)
        assert machine() == before
    assert not os.path.exists(f"/proc/{hosts.keeper}")
    assert machine() == before


def own(pipe: connection.Connection) -> None:
    with Cluster(2) as hosts:
        pipe.send(hosts.keeper)
        time.sleep(2 * HUNG)


@namespaces.needed
def test_cluster_hosts_end_when_owner_is_killed() -> None:
    ours, theirs = get_context("fork").Pipe()
    owner = get_context("fork").Process(target=own, args=(theirs,))
    owner.start()
    keeper = ours.recv()
    assert alive(keeper)
    owner.kill()
    owner.join()
    end = time.monotonic() + HUNG
    while alive(keeper) and time.monotonic() < end:
        time.sleep(0.01)
    assert not alive(keeper)


@namespaces.needed
def test_host_command_runs_in_host_namespace() -> None:
    with Cluster(2) as hosts:
        words = hosts.host(1).command(sys.executable, "-c", "import os; print(os.stat('/proc/self/ns/net').st_ino)")
        found = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        assert int(found) == os.stat(hosts.host(1).namespace).st_ino


def children() -> set[int]:
    pid = os.getpid()
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@namespaces.needed
def test_cluster_failed_setup_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    monkeypatch.setattr(cluster, "MTU", "large")
    with pytest.raises(ValueError, match=r'ip could not set up a host \((?s:.*)"large"(?s:.*)NET_ADMIN'):
        Cluster(2).__enter__()
    assert children() == before


def refused(pipe: connection.Connection) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setuid(65534)
    try:
        try_hosts("walk")
    except ValueError as error:
        pipe.send(str(error))


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_try_hosts_rejects_missing_privileges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    ours, theirs = get_context("fork").Pipe()
    process = get_context("fork").Process(target=refused, args=(theirs,))
    process.start()
    theirs.close()
    assert ours.recv() == (
        "no network namespace could be made (Operation not permitted): hosts need root, or a container with the "
        "capabilities SYS_ADMIN and NET_ADMIN; walk"
    )
    process.join()


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (["tc"], r"hosts are made with tc, not found here: install iproute2 \(Debian's names\); walk"),
        (["ip", "nsenter"], r"hosts are made with ip, nsenter, not found here: install iproute2 and util-linux \("),
    ],
)
def test_try_hosts_names_missing_tools(missing: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool in missing else f"/usr/bin/{tool}")
    with pytest.raises(ValueError, match=said):
        try_hosts("walk")


@pytest.mark.parametrize(
    ("hosts", "rate", "said"),
    [
        (0, "", "hosts=0: from 1 to 1000 hosts fit on the switch"),
        (1001, "", "hosts=1001: from 1 to 1000"),
        *((1, rate, f"rate='{rate}' is not a number and kbit") for rate in ("fast", "25", "25mb", "0gbit", "-1mbit")),
        (1, "0.5kbit", "from 1kbit to 1000gbit; write 25mbit or 1.5gbit"),
        (1, "2000gbit", "from 1kbit to 1000gbit"),
    ],
)
def test_cluster_rejects_bad_sizes_and_rates(hosts: int, rate: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    with pytest.raises(ValueError, match=said):
        Cluster(hosts, rate)


def test_bits_per_second_parses_units() -> None:
    assert [bits_per_second(rate) for rate in ("64kbit", "25mbit", "1.5gbit")] == [64e3, 25e6, 1.5e9]


def test_pool_rejects_ranks_that_do_not_fill_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    with pytest.raises(ValueError, match="8 ranks cannot run 3 on each of 4 hosts; hosts × ranks per host must be"):
        Pool(8, Cluster(4, per_host=3))


def test_sent_rejects_unknown_device() -> None:
    with pytest.raises(ValueError, match="there is no network device 'eth99' here"):
        sent("eth99")
