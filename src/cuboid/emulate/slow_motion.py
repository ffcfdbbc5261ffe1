"""A cluster in slow motion: devices, links and figures for the planner, from the text of `--emulate`.

    v100-edr/2000                       a preset of the planner, everything 2,000 times slower
    fp32=2e9,stream=1e9,between=50mbit  figures
    core.json                           what cuboid calibrate measured, at its own speed
    v100-edr/2000,jitter=0.05           … with noise, a slow rank (rank3=0.2), a slow link (host2=5mbit), groups of
                                        hosts behind a slower link (group=4,uplink=10mbit), a latency (latency=0.01)
    v100-edr/20000,shrink=12            … for a model whose hidden size and tokens are 12 times smaller
    paper                               that: 16 nodes of four V100, as the paper had
    paper/40000                         … in slower motion, so that 64 ranks have the cores' time

Links and memory are slower by the factor r. Of a model shrunk by f, hidden size and tokens alike, f² fewer bytes are
sent and f³ fewer FLOPs done; so FLOP rates are slower by f·r, everything lasts r / f² times as long, and ratios stay.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from cuboid.emulate.device import UNLIMITED, Device
from cuboid.plan.hardware import KINDS, PRESETS, Hardware, Link, Operation, every_kind, load
from cuboid.run.cluster import Links, bits_per_second

HOST = 5e-6  # seconds of the host per operation (assumed): PyTorch's dispatcher and a launch
#: The paper's cluster. Its strong scaling stands for hidden size 3072, 64 heads and 24 × 512 tokens.
PAPER_CLUSTER, PAPER_FACTOR, PAPER_MODEL = "v100-edr", 20000, "shrink=12"
#: Figures that may be given besides a preset, or instead of it; then the first two are required.
FIGURES = {
    "fp32": "FLOP/s of matmuls",
    "stream": "bytes/s of memory",
    "bf16": "FLOP/s of matmuls",
    "fp16": "FLOP/s of matmuls",
    "launch": "seconds a kernel takes at least",
    "memory": "bytes of a device",
    "shrink": "how many times smaller hidden size and tokens are than those of the model that is meant",
    "node": "devices of a host",
    "inside": "rate of a device's link inside its host, such as 240mbit",
    "between": "rate of a host's link, such as 44mbit",
    "host": "seconds the host takes to launch a kernel",
    "latency": "seconds a message takes besides what its links take",
    "jitter": "standard deviation of an operation's time, as a share of it",
    "group": "hosts that share a link to all others",
    "uplink": "rate of that link",
    "rank3": "share by which rank 3 is slower",
    "host2": "rate of host 2's link",
}

NUMBERED = re.compile(r"(rank|host)(\d+)")


@dataclass(frozen=True)
class SlowMotion:
    hardware: Hardware  # in slow motion, for the planner
    factor: float  # of the links
    shrink: float  # of hidden size and tokens
    device: Device
    links: Links
    stragglers: tuple[tuple[int, float], ...] = ()

    def check(self, ranks: int) -> None:
        """Raise ValueError if it names a rank or host that does not exist with this many ranks."""
        hosts = -(-ranks // self.hardware.node)
        for kind, named, count in (("rank", self.stragglers, ranks), ("host", self.links.slow, hosts)):
            for number, value in named:
                if number >= count:
                    raise ValueError(f"--emulate has {kind}{number}={value}, but there are {count}, numbered from 0")

    def instant(self) -> "SlowMotion":
        """Devices that take no time."""
        rates = dict.fromkeys(self.hardware.rate, 1e30)
        fast = replace(self.hardware, rate=rates, peak=rates, stream=1e30, launch=0.0, memory=UNLIMITED, operations={})
        return replace(self, device=Device(fast), stragglers=())

    def of_rank(self, rank: int) -> Device:
        return replace(self.device, slower=dict(self.stragglers).get(rank, 0.0))

    @property
    def times(self) -> float:
        """How many times slower everything is than the real model on the real machine."""
        return self.factor / self.shrink**2

    def meant(self, hidden: int, tokens: int) -> str:
        """The run that this one stands for. Ratios are per layer, so they hold for any number of layers."""
        layer = 12 * (hidden * self.shrink) ** 2
        return (
            f"stands for hidden {hidden * self.shrink:,.0f} and {tokens * self.shrink:,.0f} tokens, "
            f"{layer / 1e6:,.0f}M parameters per layer (1B are {1e9 / layer:.1f} layers); run are hidden "
            f"{hidden:,} and {tokens:,} tokens, links {self.factor:,.0f} × and FLOP rates "
            f"{self.factor * self.shrink:,.0f} × slower, so that a step takes {self.times:,.0f} × as long"
        )

    def without_links(self) -> str:
        hw = self.hardware
        rates = ", ".join(f"{name} {rate / 1e9:.3g} GFLOP/s" for name, rate in hw.rate.items())
        stream = hw.stream / 1e9
        return f"{self.devices}: {rates}, {f'{stream:,.0f}' if stream >= 999.5 else f'{stream:.3g}'} GB/s of memory"

    @property
    def devices(self) -> str:
        """The devices, by name if they are of a preset."""
        preset = self.hardware.name.partition("/")[0] in PRESETS
        return f"emulated devices {self.hardware.name}" if preset else "emulated devices"

    def __str__(self) -> str:
        links = self.links
        shaped = ", ".join(
            f"{rate} {where}" for where, rate in (("inside", links.inside), ("between", links.between)) if rate
        )
        return f"{self.without_links()}, links {shaped or 'unshaped'}"


def slowed(hw: Hardware, factor: float, shrink: float = 1.0) -> Hardware:
    """The same machine in slow motion. Its messages are gloo's, whose reduce-scatters are direct."""
    times = factor / shrink**2

    def links(found: dict[str, Link]) -> dict[str, Link]:
        return {
            kind: Link(link.base * times, link.hop * times, link.bandwidth / factor) for kind, link in found.items()
        }

    return replace(
        hw,
        name=f"{hw.name}/{factor:g}",
        memory=hw.memory / shrink**2,
        peak={name: rate / factor / shrink for name, rate in hw.peak.items()},
        rate={name: rate / factor / shrink for name, rate in hw.rate.items()},
        depth=hw.depth / shrink,
        tile=(max(1, round(hw.tile[0] / shrink)), max(1, round(hw.tile[1] / shrink))),
        stream=hw.stream / factor,
        launch=hw.launch * times,
        operations={name: Operation(each.launch * times, each.stream / factor) for name, each in hw.operations.items()},
        inside=links(hw.inside),
        across=links(hw.across),
        direct=True,
    )


def parse(text: str) -> SlowMotion:
    first, *rest = (part.strip() for part in text.split(","))
    if first.partition("/")[0] == "paper":
        first, rest = f"{PAPER_CLUSTER}/{first.partition('/')[2] or PAPER_FACTOR}", [PAPER_MODEL, *rest]
    shrink = 1.0
    if "=" in first:
        factor, given = 1.0, _pairs([first, *rest])
        base, host = _of_figures(text, given), 0.0
    elif first.endswith(".json"):
        factor, given, host = 1.0, _pairs(rest), 0.0
        base = replace(load(first), inside={}, across={})  # messages go through the machine that was measured
    else:
        name, _, slower = first.partition("/")
        if name not in PRESETS:
            raise ValueError(
                f"--emulate {text!r} begins with neither a preset nor a figure, nor is it a file of cuboid calibrate "
                f"(.json); presets are {', '.join(PRESETS)}, such as v100-edr/2000; figures are "
                f"name=value: {', '.join(FIGURES)}"
            )
        factor, given = _number("the factor", slower or "1", 1.0), _pairs(rest)
        shrink = _number("shrink", given.get("shrink", "1"), 1.0)
        base, host = slowed(PRESETS[name], factor, shrink), HOST * factor / shrink**2
    hw = _changed(base, given)
    links = Links(
        between=given.get("between", _rate(hw.across)),
        inside=given.get("inside", _rate(hw.inside)),
        slow=tuple(_numbered("host", given)),
        group=int(_number("group", given.get("group", "0"), 0.0)),
        uplink=given.get("uplink", ""),
    )
    device = Device(
        hw,
        host=_number("host", given.get("host", str(host)), 0.0),
        latency=_number("latency", given.get("latency", "0"), 0.0),
        jitter=_number("jitter", given.get("jitter", "0"), 0.0),
        sends=bool(hw.operations),
    )
    stragglers = tuple((i, _number(f"rank{i}", share, 0.0)) for i, share in _numbered("rank", given))
    return SlowMotion(hw, factor, shrink, device, links, stragglers)


def _pairs(parts: list[str]) -> dict[str, str]:
    found = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals or not (name in FIGURES or NUMBERED.fullmatch(name)):
            lines = "; ".join(f"{name}: {what}" for name, what in FIGURES.items())
            raise ValueError(f"--emulate has {part!r}, which is no figure of a device or link; it takes {lines}")
        found[name] = value
    return found


def _numbered(kind: str, given: dict[str, str]) -> Iterator[tuple[int, str]]:
    for name, value in given.items():
        match = NUMBERED.fullmatch(name)
        if match and match[1] == kind:
            yield int(match[2]), value


def _number(name: str, value: str, least: float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not least <= number <= 1e30:
        raise ValueError(f"--emulate: {name} is {value!r}; it must be a number of at least {least:g}")
    return number


def _rate(links: dict[str, Link]) -> str:
    """The rate of links, as tc takes it."""
    if not links:
        return ""
    bits = 8 * min(links[kind].bandwidth for kind in KINDS)
    return f"{bits / 1e6:.3f}mbit" if bits < 1e12 else ""


def _of_figures(text: str, given: dict[str, str]) -> Hardware:
    missing = [name for name in ("fp32", "stream") if name not in given]
    if missing:
        raise ValueError(f"--emulate {text!r} does not say {', '.join(missing)}; give a preset or these figures")
    none = every_kind(Link(0.0, 0.0, 1e30))
    one = {"fp32": 1.0}
    return Hardware("figures", 1, UNLIMITED, one, one, 1.0, none, none, depth=0.0, launch=0.0, slowdown=0.0, source={})


def _changed(hw: Hardware, given: dict[str, str]) -> Hardware:
    def figure(name: str) -> float:
        return _number(name, given[name], 0.0)

    rates = {name: figure(name) for name in ("fp32", "bf16", "fp16") if name in given}
    changes: dict[str, Any] = {name: figure(name) for name in ("stream", "launch", "memory") if name in given}
    if "node" in given:
        changes["node"] = int(figure("node"))
    if given.get("uplink") and "group" in given:  # else Links says what is missing
        changes |= {"group": int(figure("group")), "uplink": bits_per_second(given["uplink"]) / 8}
    for level, name in (("inside", "inside"), ("across", "between")):
        if name in given:
            known = getattr(hw, level)
            bandwidth = bits_per_second(given[name]) / 8 if given[name] else 1e30
            links = known or every_kind(Link(0.0, 0.0, 1.0))
            changes[level] = {kind: replace(link, bandwidth=bandwidth) for kind, link in links.items()}
    return replace(hw, rate=hw.rate | rates, peak=hw.peak | rates, **changes)
