"""An emulated cluster: hosts that are network namespaces of this machine, on one switch, each with a shaped link.

    host 0: eth0 ═══ port0 ┐
    host 1: eth0 ═══ port1 ┤ bridge, in a separate namespace
    host 2: eth0 ═══ port2 ┘

If links inside a host are shaped too, each of its ranks has its own namespace, on the host's bridge, which the host's
link joins to the others. Groups of hosts may be joined by slower links:

    rank: eth0 ═══ port ─ host's bridge ═══ group's bridge ═══ core

Both ends of a link shape what they send, so both directions have its rate. A sleeping process keeps the namespaces
open. It is killed when its parent ends, in whatever way, and the kernel removes a namespace that no process has open,
with all its links. So nothing is left behind, and the machine's own network is unchanged.
"""

import ctypes
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
MTU = 9000  # few frames per second, but none that occupies a slow link for long
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
    """The bits per second of a rate as tc writes it.

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
    """A host: its namespace's file, its address on the switch, and the namespace and device where its link begins. A
    rank with a link inside its host has its own namespace."""

    namespace: str
    address: str
    uplink: tuple[str, str] = ("", "eth0")

    def sent(self) -> int:
        """Bytes that all ranks of the host have sent over its link so far."""
        namespace, device = self.uplink
        if not namespace:
            return sent(device)
        with Host(namespace, "").visit():
            return sent(device)

    def sent_by_rank(self) -> int:
        """Bytes that the calling rank has sent over its link inside the host so far."""
        return sent()

    @property
    def mac(self) -> str:
        return "02:00" + "".join(f":{int(part):02x}" for part in self.address.split("."))

    def enter(self) -> None:
        """Move this process here. Call it right after a fork: it moves the calling thread, and those it will start."""
        _setns(self.namespace)

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Move the calling thread here, and back at the end. Sockets and processes made meanwhile stay."""
        with open("/proc/thread-self/ns/net") as home:
            self.enter()
            try:
                yield
            finally:
                _setns(f"/proc/thread-self/fd/{home.fileno()}")

    def command(self, *words: str) -> list[str]:
        """The words of a command that runs here."""
        return ["nsenter", f"--net={self.namespace}", *words]


@dataclass(frozen=True)
class Links:
    """Rates such as "25mbit"; "" is unshaped. Inside a host, ranks on an unshaped link share its loopback."""

    between: str = ""  # a host's link to the others
    inside: str = ""  # a rank's link to the others of its host
    slow: tuple[tuple[int, str], ...] = ()  # hosts whose link has another rate
    group: int = 0  # hosts that share a link to all others; 0: there are no groups
    uplink: str = ""  # that link

    def __post_init__(self) -> None:
        for rate in (self.between, self.inside, self.uplink, *(rate for _, rate in self.slow)):
            _shape(rate)
        if self.uplink and not self.group:
            raise ValueError(
                f"uplink={self.uplink!r} joins groups of hosts; give group=N, the number of hosts in a group"
            )

    def of_host(self, host: int) -> str:
        return dict(self.slow).get(host, self.between)


class Cluster:
    """Hosts 0 … `hosts`−1 of `per_host` ranks each, which exist while its context is open. `links` may be one rate.

    Open it in the main thread: the keeper of the namespaces ends with the thread that forked it.
    """

    def __init__(self, hosts: int, links: Links | str = "", per_host: int = 1) -> None:
        self.links = Links(links) if isinstance(links, str) else links
        self.size, self.per_host = hosts, per_host
        if not 1 <= hosts <= MOST_HOSTS // self._apart:
            raise ValueError(f"hosts={hosts}: from 1 to {MOST_HOSTS // self._apart} hosts fit on the switch")
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if missing:
            packages = " and ".join(sorted({TOOLS[tool] for tool in missing}))
            raise ValueError(
                f"hosts are made with {', '.join(missing)}, not found here: install {packages} (Debian's names)"
            )
        self.keeper = 0
        self._places: list[Host] = []  # of hosts or, where links inside are shaped, of ranks

    @property
    def _apart(self) -> int:
        """Namespaces per host."""
        return self.per_host if self.links.inside else 1

    def host(self, i: int) -> Host:
        """The place of a host's first rank, and of all that share its loopback."""
        return self.place(i * self.per_host)

    def place(self, rank: int) -> Host:
        assert self._places, "the cluster is not open"
        return self._places[rank * self._apart // self.per_host]

    def __enter__(self) -> "Cluster":
        count = self.size * self._apart
        self.keeper = _fork_keeper(count + 1)
        files = (f"/proc/{self.keeper}/fd/{1 + i}" for i in range(count + 1))
        switch, *places = (Host(file, f"10.77.{i >> 8}.{i & 255}") for i, file in enumerate(files))
        if self.links.inside:
            uplinks = ((switch.namespace, f"up{i // self.per_host}") for i in range(count))
            places = [replace(place, uplink=uplink) for place, uplink in zip(places, uplinks, strict=True)]
        try:
            _batch(switch, "ip", self._wires(places))
            _batch(switch, "tc", self._rates())
            for i, place in enumerate(places):
                _batch(place, "ip", _links(place, places))
                _batch(place, "tc", _shaped("eth0", self._rate_of(i)))
                _wait_for_answers(place)
        except BaseException:
            _end(self.keeper)
            raise
        self._places = places
        return self

    def __exit__(self, *exc: object) -> None:
        self._places = []
        _end(self.keeper)

    def _rate_of(self, place: int) -> str:
        return self.links.inside or self.links.of_host(place)

    def _wires(self, places: list[Host]) -> Iterator[str]:
        """Commands for the switch: its bridges, the links between them, and a port for each place."""
        yield from _bridge("core")
        for g in self._groups:
            yield from _bridge(f"group{g}")
            yield from _joined(f"out{g}", f"group{g}", f"in{g}", "core")
        for h in range(self.size) if self.links.inside else ():
            yield from _bridge(f"host{h}")
            yield from _joined(f"up{h}", f"host{h}", f"down{h}", self._above(h))
        for i, place in enumerate(places):
            eth0 = f"name eth0 address {place.mac} mtu {MTU} netns {place.namespace}"
            yield f"link add name port{i} mtu {MTU} type veth peer {eth0}"
            bridge = f"host{i // self._apart}" if self.links.inside else self._above(i)
            yield f"link set dev port{i} master {bridge} up"

    @property
    def _groups(self) -> range:
        return range(-(-self.size // self.links.group) if self.links.group else 0)

    def _above(self, host: int) -> str:
        """The bridge that a host's link leads to."""
        return f"group{host // self.links.group}" if self.links.group else "core"

    def _rates(self) -> Iterator[str]:
        for g in self._groups:
            yield from (line for end in ("out", "in") for line in _shaped(f"{end}{g}", self.links.uplink))
        for h in range(self.size) if self.links.inside else ():
            yield from (line for end in ("up", "down") for line in _shaped(f"{end}{h}", self.links.of_host(h)))
        for i in range(self.size * self._apart):
            yield from _shaped(f"port{i}", self._rate_of(i))


def can_make_hosts() -> bool:
    try:
        try_hosts("")
    except ValueError:
        return False
    return True


def try_hosts(instead: str) -> None:
    """Make a host and remove it. Raises ValueError if that fails; `instead` is the remedy in the message."""
    try:
        with Cluster(1, "1gbit"):
            pass
    except ValueError as error:
        raise ValueError(f"{error}; {instead}") from None


def _shape(rate: str) -> str:
    """tc's token bucket for a rate: it holds 4 ms or a few frames, queues the rest, and never drops it."""
    if not rate:
        return ""
    burst = max(32 << 10, int(bits_per_second(rate) / 8 * 0.004))
    return f"tbf rate {rate} burst {burst} limit {1 << 30}"


def _shaped(device: str, rate: str) -> Iterator[str]:
    if rate:
        yield f"qdisc add dev {device} root {_shape(rate)}"


def _bridge(name: str) -> Iterator[str]:
    yield f"link add name {name} mtu {MTU} type bridge"
    yield f"link set dev {name} up"


def _joined(one: str, its_bridge: str, other: str, its: str) -> Iterator[str]:
    """A link between two bridges, by the names of its ends."""
    yield f"link add name {one} mtu {MTU} type veth peer name {other} mtu {MTU}"
    yield f"link set dev {one} master {its_bridge} up"
    yield f"link set dev {other} master {its} up"


def _links(host: Host, hosts: list[Host]) -> Iterator[str]:
    """A host's link and all addresses. Looking them up overflows the machine's neighbour table at some 30 hosts."""
    yield "link set dev lo up"
    yield "link set dev eth0 up"
    yield f"address add {host.address}/16 dev eth0 noprefixroute"
    yield "route add 10.77.0.0/16 dev eth0 rto_min 3s"
    for other in hosts:
        if other != host:
            yield f"neighbour add {other.address} lladdr {other.mac} dev eth0 nud permanent"


def _wait_for_answers(host: Host) -> None:
    """Disable early retransmission: packets are late, never lost, and repeats would fill a quarter of a slow link."""
    with host.visit(), suppress(OSError):  # if the container may not set this, so be it
        Path("/proc/sys/net/ipv4/tcp_early_retrans").write_text("0")


def _batch(host: Host, tool: str, lines: Iterable[str]) -> None:
    text = "\n".join(lines)
    if not text:
        return
    with host.visit():
        done = subprocess.run([tool, "-batch", "-"], input=text, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{tool} could not set up a host ({done.stderr.strip()}): {RIGHTS}")


def _fork_keeper(count: int) -> int:
    """Forks a process that holds new network namespaces open, as files 1 … count, until it is killed; returns its
    id."""
    answer, tell = os.pipe()
    parent, keeper = os.getpid(), os.fork()
    if keeper == 0:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # Ctrl-C is for the parent
            _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:  # else it has ended already, and no signal will come
                os.dup2(tell, 0)
                os.closerange(1, os.sysconf("SC_OPEN_MAX"))  # readers of the parent's pipes must see them close
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
        reason = os.strerror(error[0]) if error else "its keeper died"
        raise ValueError(f"no network namespace could be made ({reason}): {RIGHTS}")
    return keeper


def _make_namespaces(count: int) -> int:
    """Opens them as the lowest free files. Returns 0 or the error's number."""
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
    """Calls a function of the C library that Python does not wrap."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def _end(keeper: int) -> None:
    os.kill(keeper, signal.SIGKILL)
    os.waitpid(keeper, 0)
