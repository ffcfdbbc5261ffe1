"""A cluster in slow motion: what `--emulate` asks for, as devices, links and figures for the planner.

    v100-edr/2000                       a preset of the planner, everything 2,000 times slower
    fp32=2e9,stream=1e9,between=50mbit  figures
    v100-edr/2000,jitter=0.05           … with noise, a slow rank (rank3=0.2), a slow link (host2=5mbit), groups of
                                        hosts behind a slower link (group=4,uplink=10mbit), a latency (latency=0.01)

Rates of compute, memory and links are divided by the factor and times multiplied by it, so all ratios stay.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from cuboid.cluster import Links, bits_per_second
from cuboid.emulate import Device
from cuboid.plan.hardware import KINDS, PRESETS, Hardware, Link, every_kind

HOST = 5e-6  # seconds, assumed: what PyTorch's dispatcher and a launch take of the host
LARGEST = 1e9
#: What may be given besides a preset, or in its place; the first two are needed there.
FIGURES = {
    "fp32": "FLOP/s of products",
    "stream": "bytes/s of memory",
    "bf16": "FLOP/s of products",
    "fp16": "FLOP/s of products",
    "launch": "seconds a kernel takes at least",
    "memory": "bytes of a device",
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


@dataclass(frozen=True)
class SlowMotion:
    hardware: Hardware  # in slow motion: what the planner predicts with
    factor: float
    device: Device
    links: Links
    stragglers: tuple[tuple[int, float], ...] = ()

    def instant(self) -> "SlowMotion":
        """Devices that take no time."""
        rates = dict.fromkeys(self.hardware.rate, 1e30)
        fast = replace(self.hardware, rate=rates, peak=rates, stream=1e30, launch=0.0, memory=1e30)
        return replace(self, device=Device(fast), stragglers=())

    def of_rank(self, rank: int) -> Device:
        return replace(self.device, slower=dict(self.stragglers).get(rank, 0.0))

    def __str__(self) -> str:
        hw, links = self.hardware, self.links
        rates = ", ".join(f"{name} {rate / 1e9:.3g} GFLOP/s" for name, rate in hw.rate.items())
        shaped = ", ".join(
            f"{rate} {where}" for where, rate in (("inside", links.inside), ("between", links.between)) if rate
        )
        return f"emulated devices {hw.name}: {rates}, {hw.stream / 1e9:.3g} GB/s, links {shaped or 'unshaped'}"


def slowed(hw: Hardware, factor: float) -> Hardware:
    """The same machine in slow motion. Its messages are gloo's, whose reduce-scatters are direct."""

    def links(found: dict[str, Link]) -> dict[str, Link]:
        return {
            kind: Link(link.base * factor, link.hop * factor, link.bandwidth / factor) for kind, link in found.items()
        }

    return replace(
        hw,
        name=f"{hw.name}/{factor:g}",
        peak={name: rate / factor for name, rate in hw.peak.items()},
        rate={name: rate / factor for name, rate in hw.rate.items()},
        stream=hw.stream / factor,
        launch=hw.launch * factor,
        inside=links(hw.inside),
        across=links(hw.across),
        direct=True,
    )


def parse(text: str) -> SlowMotion:
    first, *rest = (part.strip() for part in text.split(","))
    if "=" in first:
        factor, given = 1.0, _pairs([first, *rest])
        base, host = _of_figures(text, given), 0.0
    else:
        name, _, slower = first.partition("/")
        if name not in PRESETS:
            raise ValueError(
                f"--emulate {text!r} begins with neither a preset nor a figure; presets are {', '.join(PRESETS)}, such "
                f"as v100-edr/2000; figures are name=value: {', '.join(FIGURES)}"
            )
        factor, given = _number("the factor", slower or "1", 1.0), _pairs(rest)
        base, host = slowed(PRESETS[name], factor), HOST * factor
    hw = _changed(base, given)
    links = Links(
        between=given.get("between", _rate(hw.across)),
        inside=given.get("inside", _rate(hw.inside)),
        slow=tuple((int(name[4:]), rate) for name, rate in given.items() if re.fullmatch(r"host\d+", name)),
        group=int(_number("group", given.get("group", "0"), 0.0)),
        uplink=given.get("uplink", ""),
    )
    device = Device(
        hw,
        host=_number("host", given.get("host", str(host)), 0.0),
        latency=_number("latency", given.get("latency", "0"), 0.0),
        jitter=_number("jitter", given.get("jitter", "0"), 0.0),
    )
    stragglers = tuple(
        (int(name[4:]), _number(name, value, 0.0)) for name, value in given.items() if re.fullmatch(r"rank\d+", name)
    )
    return SlowMotion(hw, factor, device, links, stragglers)


def _pairs(parts: list[str]) -> dict[str, str]:
    known = {re.sub(r"\d+$", "", name) if name[:4] in ("rank", "host") else name for name in FIGURES} | {"host"}
    found = {}
    for part in parts:
        name, equals, value = part.partition("=")
        kind = re.sub(r"\d+$", "", name) if name[:4] in ("rank", "host") else name
        if not equals or kind not in known or (kind == "rank" and name == "rank"):
            lines = "; ".join(f"{name}: {what}" for name, what in FIGURES.items())
            raise ValueError(f"--emulate has {part!r}, which is no figure of a device or link; it takes {lines}")
        found[name] = value
    return found


def _number(name: str, value: str, least: float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not least <= number <= 1e30:
        raise ValueError(f"--emulate: {name} is {value!r}; it must be a number of at least {least:g}")
    return number


def _rate(links: dict[str, Link]) -> str:
    """For tc."""
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
    return Hardware("figures", 1, 1e30, one, one, 1.0, none, none, depth=0.0, launch=0.0, slowdown=0.0, source={})


def _changed(hw: Hardware, given: dict[str, str]) -> Hardware:
    def figure(name: str) -> float:
        return _number(name, given[name], 0.0)

    rates = {name: figure(name) for name in ("fp32", "bf16", "fp16") if name in given}
    changes: dict[str, Any] = {name: figure(name) for name in ("stream", "launch", "memory") if name in given}
    if "node" in given:
        changes["node"] = int(figure("node"))
    for level, name in (("inside", "inside"), ("across", "between")):
        if name in given:
            known = getattr(hw, level)
            bandwidth = bits_per_second(given[name]) / 8 if given[name] else 1e30
            changes[level] = {kind: replace(link, bandwidth=bandwidth) for kind, link in known.items()}
    return replace(hw, rate=hw.rate | rates, peak=hw.peak | rates, **changes)
