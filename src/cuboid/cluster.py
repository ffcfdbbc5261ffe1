"""An emulated cluster: hosts that are network namespaces of this machine, on one switch, each with a shaped link.

    host 0: eth0 ═══ port0 ┐
    host 1: eth0 ═══ port1 ┤ bridge, in a namespace of its own
    host 2: eth0 ═══ port2 ┘

What a host sends is shaped at its eth0, what it receives at its port, both to the same rate. A process that only sleeps
keeps the namespaces open. It is killed when its parent ends, however that ends, and the kernel removes a namespace that
nobody has open, with all its links. So nothing is ever left behind, and nothing shows among the machine's own.
"""

import ctypes
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
MTU = 9000  # few frames a second, yet none that keeps a slow link busy for long
MOST_HOSTS = 1000  # a bridge has 1023 ports, a process 1024 files
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}  # and the Debian packages that have them
RIGHTS = "hosts need root, or a container with the capabilities SYS_ADMIN and NET_ADMIN"


def sent(device: str = "eth0") -> int:
    """Bytes that the calling thread's network namespace has put on a device."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == device:
            return int(counters.split()[8])
    raise ValueError(f"there is no network device {device!r} here")


def bits_per_second(rate: str) -> float:
    """Of a rate as tc knows it.

    >>> bits_per_second("1.5gbit")
    1500000000.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    bits = float(match[1]) * UNITS[match[2]] if match else 0
    if not 10**3 <= bits <= 10**12:
        raise ValueError(
            f"rate={rate!r} is not a number and kbit, mbit or gbit, from 1kbit to 1000gbit; write 25mbit or 1.5gbit"
        )
    return bits


@dataclass(frozen=True)
class Host:
    """A namespace, by the file that stands for it, and the host's address on the switch."""

    namespace: str
    address: str

    @property
    def mac(self) -> str:
        return "02:00" + "".join(f":{int(part):02x}" for part in self.address.split("."))

    def enter(self) -> None:
        """Move this process here for good. Right after a fork: only the calling thread moves, and those it starts."""
        _setns(self.namespace)

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Move the calling thread here for a while. A socket or process begun meanwhile stays."""
        with open("/proc/thread-self/ns/net") as home:
            self.enter()
            try:
                yield
            finally:
                _setns(f"/proc/thread-self/fd/{home.fileno()}")

    def command(self, *words: str) -> list[str]:
        """A command, to be run here."""
        return ["nsenter", f"--net={self.namespace}", *words]


class Cluster:
    """Hosts 0 … `hosts`−1, there while its context is open. `rate` is each link's, such as "25mbit"; "" is unshaped.

    Open it in the main thread: the keeper of the namespaces ends with the thread that forked it.
    """

    def __init__(self, hosts: int, rate: str = "") -> None:
        if not 1 <= hosts <= MOST_HOSTS:
            raise ValueError(f"hosts={hosts}: from 1 to {MOST_HOSTS} hosts fit on the switch")
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if missing:
            packages = " and ".join(sorted({TOOLS[tool] for tool in missing}))
            raise ValueError(
                f"hosts are made with {', '.join(missing)}, not found here: install {packages} (Debian's names)"
            )
        self.size, self.rate, self._shape = hosts, rate, _shape(rate)
        self.keeper = 0
        self._hosts: list[Host] = []

    def host(self, i: int) -> Host:
        assert self._hosts, "the cluster is not open"
        return self._hosts[i]

    def __enter__(self) -> "Cluster":
        self.keeper = _fork_keeper(self.size + 1)
        files = (f"/proc/{self.keeper}/fd/{1 + i}" for i in range(self.size + 1))
        switch, *hosts = (Host(file, f"10.77.{i >> 8}.{i & 255}") for i, file in enumerate(files))
        try:
            self._set_up(switch, _switch(hosts), (f"port{i}" for i in range(self.size)))
            for host in hosts:
                self._set_up(host, _links(host, hosts), ["eth0"])
                _wait_for_answers(host)
        except BaseException:
            _end(self.keeper)
            raise
        self._hosts = hosts
        return self

    def __exit__(self, *exc: object) -> None:
        self._hosts = []
        _end(self.keeper)

    def _set_up(self, host: Host, links: Iterable[str], shaped: Iterable[str]) -> None:
        _batch(host, "ip", links)
        if self._shape:
            _batch(host, "tc", (f"qdisc add dev {device} root {self._shape}" for device in shaped))


def try_hosts(instead: str) -> None:
    """Make one and end it, before any work; `instead` is what to do where that fails."""
    try:
        with Cluster(1, "1gbit"):
            pass
    except ValueError as error:
        raise ValueError(f"{error}; {instead}") from None


def _shape(rate: str) -> str:
    """The token bucket of a rate, for tc: it holds 4 ms or a few frames, and lets the rest wait, never dropping it."""
    if not rate:
        return ""
    burst = max(32 << 10, int(bits_per_second(rate) / 8 * 0.004))
    return f"tbf rate {rate} burst {burst} limit {1 << 30}"


def _switch(hosts: list[Host]) -> Iterator[str]:
    """Its ports, each joined to the eth0 of a host."""
    yield f"link add name bridge mtu {MTU} type bridge"
    yield "link set dev bridge up"
    for i, host in enumerate(hosts):
        eth0 = f"name eth0 address {host.mac} mtu {MTU} netns {host.namespace}"
        yield f"link add name port{i} mtu {MTU} type veth peer {eth0}"
        yield f"link set dev port{i} master bridge up"


def _links(host: Host, hosts: list[Host]) -> Iterator[str]:
    """Its own, and the others' addresses: looked up, they overflow the machine's one table of such at some 30 hosts."""
    yield "link set dev lo up"
    yield "link set dev eth0 up"
    yield f"address add {host.address}/16 dev eth0 noprefixroute"
    yield "route add 10.77.0.0/16 dev eth0 rto_min 3s"
    for other in hosts:
        if other != host:
            yield f"neighbour add {other.address} lladdr {other.mac} dev eth0 nud permanent"


def _wait_for_answers(host: Host) -> None:
    """A packet may be late here but is never lost; what is sent again too early would fill a quarter of a slow link."""
    with host.visit(), suppress(OSError):  # if the container may not set this, so be it
        Path("/proc/sys/net/ipv4/tcp_early_retrans").write_text("0")


def _batch(host: Host, tool: str, lines: Iterable[str]) -> None:
    with host.visit():
        done = subprocess.run([tool, "-batch", "-"], input="\n".join(lines), capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{tool} could not set up a host ({done.stderr.strip()}): {RIGHTS}")


def _fork_keeper(count: int) -> int:
    """A process that makes network namespaces and has them open, as its files 1 … count, until killed; its id."""
    answer, tell = os.pipe()
    parent, keeper = os.getpid(), os.fork()
    if keeper == 0:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # Ctrl-C is for the parent
            _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:  # else it has ended already, and no signal comes
                os.dup2(tell, 0)
                os.closerange(1, os.sysconf("SC_OPEN_MAX"))  # whoever reads a pipe of the parent's must see it close
                os.write(0, bytes([_make_namespaces(count)]))
                os.close(0)
                signal.pause()
        finally:
            os._exit(1)
    os.close(tell)
    with open(answer, "rb") as pipe:
        error = pipe.read()
    if error != b"\0":
        _end(keeper)
        reason = os.strerror(error[0]) if error else "its keeper has died"
        raise ValueError(f"no network namespace could be made ({reason}): {RIGHTS}")
    return keeper


def _make_namespaces(count: int) -> int:
    """Open as files, the lowest there are; 0 or the number of the error."""
    try:
        for _ in range(count):
            _call("unshare", CLONE_NEWNET)
            os.open("/proc/self/ns/net", os.O_RDONLY)
    except OSError as error:
        return error.errno or 255
    return 0


def _setns(namespace: str) -> None:
    with open(namespace) as file:
        _call("setns", file.fileno(), CLONE_NEWNET)


def _call(name: str, *args: int) -> None:
    """A function of the C library that Python has no name for."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def _end(keeper: int) -> None:
    os.kill(keeper, signal.SIGKILL)
    os.waitpid(keeper, 0)
