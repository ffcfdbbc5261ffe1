"""Hardware figures, in this file only; each preset names their sources.

Peaks are the vendor's. Rates that are reached were measured: by others for the presets, by `cuboid calibrate` for a
file.
"""

import json
import re
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

KINDS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Limits:
    """The valid values of a figure. The limits are far from any machine's: they keep sums finite."""

    least: float
    most: float
    whole: bool = False
    none: bool = False  # whether 0 is valid too: it stands for none

    def __contains__(self, value: Any) -> bool:
        number = isinstance(value, int if self.whole else int | float) and not isinstance(value, bool)
        return number and (self.least <= value <= self.most or (self.none and value == 0))

    def __str__(self) -> str:
        return f"{'0 or ' * self.none}a {'whole ' * self.whole}number from {self.least:g} to {self.most:g}"


Count = Annotated[int, Limits(1, 1 << 20, whole=True)]
CountOrNone = Annotated[int, Limits(0, 1 << 20, whole=True)]
Speed = Annotated[float, Limits(1e-6, 1e30)]  # FLOPs or bytes per second
SpeedOrNone = Annotated[float, Limits(1e-6, 1e30, none=True)]
Seconds = Annotated[float, Limits(0, 1e6)]
Share = Annotated[float, Limits(0, 1)]
Ratio = Annotated[float, Limits(1e-6, 1e6)]


@dataclass(frozen=True)
class Link:
    """A collective takes base + hop · rounds + bytes sent ÷ bandwidth. Inside a node the bandwidth is that of a device;
    across nodes it is that of a node, with all its network cards, in one direction."""

    base: Seconds  # per call
    hop: Seconds  # per round
    bandwidth: Speed


@dataclass(frozen=True)
class Operation:
    """It takes launch + bytes read and written ÷ stream."""

    launch: Seconds
    stream: Speed


#: How to measure links with cuboid calibrate.
REMEDY = {"inside": "with --ranks of at least 2", "across": "with torchrun on at least two nodes"}
UNKNOWN = Link(0.0, 0.0, 1.0)  # for a link that was not measured and over which nothing is sent


@dataclass(frozen=True)
class Hardware:
    """A machine's figures. Every value is checked against the limits in its annotation."""

    name: str
    node: Count  # devices that share network cards
    memory: Annotated[float, Limits(1, 1e30)]  # bytes per device for tensors
    peak: dict[str, Speed]  # by precision, for the MFU
    rate: dict[str, Speed]  # that a large matmul reaches
    stream: Speed  # bytes read and written by elementwise operations
    inside: dict[str, Link]  # by kind of collective; empty: not measured
    across: dict[str, Link]
    depth: Annotated[float, Limits(0, 1e9)] = 128.0  # a matmul over k features reaches k / (k + depth) of the rate
    tile: tuple[Count, Count] = (1, 1)  # of a matmul's output, computed at a time
    units: CountOrNone = 0  # that compute a tile each; 0: tiles do not matter
    attention: tuple[Ratio, Ratio] = (0.5, 0.4)  # of the rate, in forward and in backward, masked scores left out
    launch: Seconds = 5e-6  # of any operation, however small
    slowdown: Share = 0.15  # share of its speed that compute loses while a collective is in flight
    direct: bool = True  # fp32 reduce-scatters too are an all-to-all and a local sum (gloo); NCCL's are rings
    one_wire: bool = False  # collectives inside a node and across nodes share one wire
    cores: CountOrNone = 0  # that more ranks share; slowdown is then the processor's share of a collective
    wire: SpeedOrNone = 0.0  # with cores: bytes per second of a host's link; 0: only cores limit the ranks
    operations: dict[str, Operation] = field(default_factory=dict)  # by PyTorch's name, of those measured one by one
    group: CountOrNone = 0  # nodes that share a link to all others; 0: there are no such groups
    uplink: SpeedOrNone = 0.0  # with a group: bytes per second of that link, in one direction
    source: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _record(f"hardware {self.name!r}", vars(self), Hardware)
        if not self.rate or set(self.rate) - set(self.peak):
            raise ValueError(
                f"hardware {self.name!r} has rates of {_listed(self.rate)} and peaks of {_listed(self.peak)}; it must "
                "have at least one rate, and a peak for each"
            )
        if bool(self.group) != bool(self.uplink):
            raise ValueError(
                f"hardware {self.name!r} has group={self.group} and uplink={self.uplink:g}; give both, nodes behind "
                "one link and its bytes per second, or neither"
            )
        for level in ("inside", "across"):
            found = getattr(self, level)
            if found and set(found) != set(KINDS):
                raise ValueError(
                    f"hardware {self.name!r} has {level} of {_listed(found)}; it must be of {', '.join(KINDS)}, or "
                    "empty if it was not measured"
                )

    @property
    def usual(self) -> str:
        """The default precision: bf16 if it is faster, else fp32, else the one there is."""
        return max(sorted({"fp32", "bf16"} & self.rate.keys(), reverse=True) or self.rate, key=self.rate.__getitem__)

    def link(self, level: str, kind: str) -> Link:
        found: dict[str, Link] = getattr(self, level)
        return found.get(kind, UNKNOWN)

    def lacks(self, devices: int) -> str:
        """The links that this many devices need but that were not measured: inside, across, or ""."""
        needed = {"inside": min(devices, self.node) > 1, "across": devices > self.node}
        return next((level for level, needs in needed.items() if needs and not getattr(self, level)), "")

    def check_links(self, devices: int) -> None:
        if level := self.lacks(devices):
            raise ValueError(
                f"a plan of {devices} devices needs links {level} nodes of {self.node}, and hardware {self.name!r} has "
                f"none measured; run cuboid calibrate {REMEDY[level]}, write figures into the file, or use a preset"
            )

    def export(self) -> dict[str, Any]:
        return asdict(self)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.export(), indent=1) + "\n", "utf-8")


def every_kind(link: Link) -> dict[str, Link]:
    return dict.fromkeys(KINDS, link)


def load(name: str) -> Hardware:
    """A preset by its name, or a file that `cuboid calibrate` wrote."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if not path.is_file():
        near = get_close_matches(name, PRESETS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"hardware {name!r} is neither a preset nor a file; {hint}presets are {', '.join(PRESETS)}; cuboid "
            "calibrate writes a file of the machine at hand"
        )
    try:
        return Hardware(**_record("the file", json.loads(path.read_text("utf-8")), Hardware))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a hardware file: {error}; cuboid calibrate writes one") from None


def of_gpu(name: str) -> Hardware | None:
    """The preset of a GPU by the name that its driver gives it.

    >>> [hw.name if hw else "" for hw in map(of_gpu, ("NVIDIA A100-SXM4-80GB", "NVIDIA L4", "CPU"))]
    ['a100-hdr', '', '']
    """
    words = re.split(r"\W", name.upper())
    gpus = {name: hw for name, hw in PRESETS.items() if name != "cpu"}
    return next((hw for name, hw in gpus.items() if name.partition("-")[0].upper() in words), None)


def peak_of(name: str, precision: str) -> float:
    """FLOPs per second that the vendor gives a GPU of this name; 0 where they are not known. Cards for PCIe have the
    names of presets, which are SXM, and other peaks."""
    hw = of_gpu(name)
    return hw.peak.get(precision, 0.0) if hw and not re.search("pcie|nvl", name, re.IGNORECASE) else 0.0


def _listed(names: Any) -> str:
    return ", ".join(names) or "none"


_hints = cache(get_type_hints)


def _record(where: str, found: Any, of: type) -> dict[str, Any]:
    """Its values, if it has all the fields without a default, no others, and each is what its type asks for."""
    known = {each.name: each for each in fields(of)}
    if odd := sorted(set(_table(where, found)) - set(known)):
        raise ValueError(f"{where} has {', '.join(odd)}, which no hardware has")
    needed = (name for name, each in known.items() if each.default is MISSING and each.default_factory is MISSING)
    if missing := [name for name in needed if name not in found]:
        raise ValueError(f"{where} does not say {', '.join(missing)}")
    kinds, inner = _hints(of, include_extras=True), f"{where}." if of is not Hardware else ""
    return {name: _fit(f"{inner}{name}", value, kinds[name]) for name, value in found.items()}


def _fit(where: str, value: Any, kind: Any) -> Any:
    """The value as a field's type has it; raise if it is none."""
    args = get_args(kind)
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return kind(**_record(where, vars(value) if isinstance(value, kind) else value, kind))
    if get_origin(kind) is dict:
        return {name: _fit(f"{where}.{name}", each, args[1]) for name, each in _table(where, value).items()}
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(args):
            raise _refusal(where, value, f"a list of {len(args)} numbers")
        return tuple(_fit(f"{where}[{i}]", each, of) for i, (each, of) in enumerate(zip(value, args, strict=True)))
    if get_origin(kind) is Annotated:
        if value not in args[1]:
            raise _refusal(where, value, str(args[1]))
    elif not isinstance(value, kind):
        raise _refusal(where, value, "true or false" if kind is bool else "a text")
    return value


def _table(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refusal(where, value, "a table")
    return value


def _refusal(where: str, value: Any, rule: str) -> ValueError:
    return ValueError(f"{where} is {value!r:.40}; it must be {rule}")


_NCCL = "latencies: the constants of NCCL's own tuning model (graph/tuning.cc), rounded"

#: Of every GPU preset.
_GPU = {
    "depth, launch": "assumed: a matmul costs as if it had 128 features more, a kernel takes 5 µs to start",
    "slowdown": "assumed; NCCL's kernels take 16 to 20 of a GPU's 80 to 132 multiprocessors",
    "direct": "NCCL's reduce-scatters are rings",
    "one_wire": "NVLink and network cards are apart",
    "cores, wire": "none: every rank has a GPU and cores of its own",
    "operations": "none were measured: memory bounds them, at the rate of stream",
}

PRESETS: dict[str, Hardware] = {
    "v100-edr": Hardware(
        name="v100-edr",
        node=4,
        memory=15e9,
        peak={"fp16": 125e12, "bf16": 15.7e12, "fp32": 15.7e12},
        rate={"fp16": 95e12, "bf16": 14e12, "fp32": 14e12},
        stream=0.79e12,
        inside=every_kind(Link(10e-6, 2e-6, 60e9)),
        across=every_kind(Link(15e-6, 5e-6, 11e9)),
        tile=(128, 128),
        units=80,
        attention=(0.35, 0.3),
        direct=False,
        source=_GPU
        | {
            "peak, memory": "NVIDIA V100 datasheet: 125 and 15.7 TFLOP/s, 16 GB (1 GB kept for the context), 900 GB/s",
            "rate": "assumed: cuBLAS on large squares, 76% of fp16's peak and 90% of fp32's",
            "stream": "assumed: 88% of 900 GB/s, as BabelStream reaches",
            "inside": "assumed: NVLink 2 ring of four GPUs; " + _NCCL,
            "node, across": "assumed: four GPUs and one EDR card per node, 88% of its 100 Gbit/s, latencies",
            "tile, units": "assumed: 128 × 128, a tile that cuBLAS often takes, on the datasheet's 80 multiprocessors",
            "attention": "assumed: half of an A100's share, without FlashAttention-2 for its generation",
        },
    ),
    "a100-hdr": Hardware(
        name="a100-hdr",
        node=8,
        memory=78e9,
        peak={"fp16": 312e12, "bf16": 312e12, "fp32": 19.5e12},
        rate={"fp16": 262e12, "bf16": 262e12, "fp32": 18e12},
        stream=1.73e12,
        inside=every_kind(Link(10e-6, 2e-6, 235e9)),
        across=every_kind(Link(15e-6, 5e-6, 184e9)),
        tile=(128, 256),
        units=108,
        attention=(0.7, 0.6),
        direct=False,
        source=_GPU
        | {
            "peak, memory": "NVIDIA A100 SXM 80 GB datasheet: 312 and 19.5 TFLOP/s, 80 GB (2 GB kept), 2,039 GB/s",
            "rate": "assumed: 84% of the peak on the best large shapes, as cuBLAS is commonly measured",
            "stream": "assumed: 85% of 2,039 GB/s, as BabelStream reaches",
            "inside": "nccl-tests on 8 × A100 with NVSwitch: 230 to 250 GB/s bus bandwidth; " + _NCCL,
            "node, across": "NVIDIA DGX A100: eight GPUs, eight HDR cards of 25 GB/s; assumed: 92% of it, latencies",
            "tile, units": "assumed: 128 × 256, a tile that cuBLAS often takes, on the datasheet's 108 multiprocessors",
            "attention": "assumed from FlashAttention-2's 180 to 200 (forward) and 150 to 170 TFLOP/s, causal",
        },
    ),
    "h100-ndr": Hardware(
        name="h100-ndr",
        node=8,
        memory=78e9,
        peak={"fp16": 989e12, "bf16": 989e12, "fp32": 67e12},
        rate={"fp16": 750e12, "bf16": 750e12, "fp32": 50e12},
        stream=2.9e12,
        inside=every_kind(Link(10e-6, 2e-6, 460e9)),
        across=every_kind(Link(15e-6, 5e-6, 368e9)),
        tile=(128, 256),
        units=132,
        attention=(0.48, 0.4),
        direct=False,
        source=_GPU
        | {
            "peak, memory": "NVIDIA H100 SXM datasheet: 989 and 67 TFLOP/s dense, 80 GB (2 GB kept), 3,350 GB/s",
            "rate": "assumed: 76% of the peak on large shapes; power keeps it below",
            "stream": "assumed: 87% of 3,350 GB/s",
            "inside": "nccl-tests on 8 × H100 with NVSwitch: 460 to 480 GB/s bus bandwidth; " + _NCCL,
            "node, across": "NVIDIA DGX H100: eight GPUs, eight NDR cards of 50 GB/s; assumed: 92% of it, latencies",
            "tile, units": "assumed: 128 × 256, a tile that cuBLAS often takes, on the datasheet's 132 multiprocessors",
            "attention": "assumed from FlashAttention-2 on H100, 350 TFLOP/s forward, 300 backward",
        },
    ),
    "cpu": Hardware(
        name="cpu",
        node=8,
        memory=2e9,
        peak={"fp32": 37e9, "bf16": 8e9, "fp16": 0.5e9},
        rate={"fp32": 35e9, "bf16": 7e9, "fp16": 0.5e9},
        stream=2e9,
        inside=every_kind(Link(1e-3, 0.2e-3, 0.1e9)),
        across=every_kind(Link(1e-3, 0.2e-3, 0.1e9)),
        depth=32.0,
        launch=20e-6,
        slowdown=1.0,
        one_wire=True,
        cores=2,
        source={"all": "orders of magnitude of eight ranks on two cores, gloo over loopback; calibrate yours"},
    ),
}
