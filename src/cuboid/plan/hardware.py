"""What a machine can do. The one file that knows hardware figures; each preset says where they are from.

Peaks are the vendor's. What is reached is measured: by others for the presets, by `cuboid calibrate` for a file.
"""

import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

KINDS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Link:
    """A collective takes base + hop · rounds + bytes sent ÷ bandwidth. Inside a node the bandwidth is a device's;
    across nodes it is a node's, all its network cards together, one way."""

    base: float  # seconds a call
    hop: float  # seconds a round
    bandwidth: float  # bytes a second


@dataclass(frozen=True)
class Hardware:
    name: str
    node: int  # devices that share network cards
    memory: float  # bytes a device has for tensors
    peak: dict[str, float]  # FLOP/s by precision, for the MFU
    rate: dict[str, float]  # FLOP/s that a large product reaches
    stream: float  # bytes a second read and written by elementwise operations
    inside: dict[str, Link]  # by kind of collective
    across: dict[str, Link]
    depth: float = 128.0  # a product over k features reaches k / (k + depth) of the rate
    tile: tuple[int, int] = (1, 1)  # of a product's output, computed at a time
    units: int = 0  # that compute a tile each; 0: tiles do not matter
    attention: tuple[float, float] = (0.5, 0.4)  # of the rate, in forward and in backward, masked scores left out
    launch: float = 5e-6  # seconds an operation takes however small
    slowdown: float = 0.15  # share of its speed that compute loses while a collective is in flight
    direct: bool = True  # fp32 reduce-scatters too are an all-to-all and a local sum (gloo); NCCL's are rings
    one_wire: bool = False  # collectives inside a node and across nodes use the same wire, one after the other
    cores: int = 0  # that all ranks share, being more; slowdown is then the processor's share of a collective
    wire: float = 0.0  # with cores: bytes a second of a host's link. 0: nothing holds the ranks back but their cores
    source: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.node < 1 or self.memory <= 0 or self.stream <= 0:
            raise ValueError(f"hardware {self.name!r}: node, memory and stream must be above 0")
        if not self.rate or min(self.rate.values()) <= 0 or set(self.rate) - set(self.peak):
            raise ValueError(f"hardware {self.name!r}: every rate must be above 0 and have its peak")
        if self.cores < 0 or self.wire < 0:
            raise ValueError(f"hardware {self.name!r}: cores and wire must not be below 0")
        if not 0 <= self.slowdown <= 1:
            raise ValueError(f"hardware {self.name!r}: slowdown={self.slowdown} must be from 0 to 1")
        for links in (self.inside, self.across):
            if missing := [kind for kind in KINDS if kind not in links]:
                raise ValueError(f"hardware {self.name!r} has no link figures for {', '.join(missing)}")
            if min(link.bandwidth for link in links.values()) <= 0:
                raise ValueError(f"hardware {self.name!r}: every link's bandwidth must be above 0")

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
        return _from_json(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a hardware file: {error}; cuboid calibrate writes one") from None


def _from_json(found: Any) -> Hardware:
    values = _record("the file", found, Hardware)
    for level in ("inside", "across"):
        links = _of_type(level, values[level], dict)
        values[level] = {kind: Link(**_record(f"{level}.{kind}", link, Link)) for kind, link in links.items()}
    for pair in ("tile", "attention"):
        if pair in values:
            values[pair] = tuple(_of_type(pair, values[pair], list))
    return Hardware(**values)


def _record(where: str, found: Any, of: type) -> dict[str, Any]:
    """Its values, if it has all the fields without a default, no others, and numbers where there should be."""
    values = dict(_of_type(where, found, dict))
    known = {each.name: each for each in fields(of)}
    if odd := sorted(set(values) - set(known)):
        raise ValueError(f"{where} has {', '.join(odd)}, which no hardware has")
    needed = (name for name, each in known.items() if each.default is MISSING and each.default_factory is MISSING)
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"{where} does not say {', '.join(missing)}")
    for name, value in values.items():
        if known[name].type in (int, float):
            _of_type(name if of is Hardware else f"{where}.{name}", value, (int, float))
    for name in {"peak", "rate"} & values.keys():
        for precision, value in _of_type(name, values[name], dict).items():
            _of_type(f"{name}.{precision}", value, (int, float))
    return values


def _of_type(where: str, value: Any, types: type | tuple[type, ...]) -> Any:
    if not isinstance(value, types) or isinstance(value, bool):
        kind = {dict: "a table", list: "a list"}.get(types, "a number")  # type: ignore[call-overload]
        raise ValueError(f"{where} is {value!r:.40}, not {kind}")
    return value


_NCCL = "latencies: the constants of NCCL's own tuning model (graph/tuning.cc), rounded"
_SLOW = "slowdown: assumed; NCCL's kernels take 16 to 20 of a GPU's 80 to 132 multiprocessors"

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
        source={
            "peak, memory": "NVIDIA V100 datasheet: 125 and 15.7 TFLOP/s, 16 GB (1 GB kept for the context), 900 GB/s",
            "rate": "assumed: cuBLAS on large squares, 76% of fp16's peak and 90% of fp32's",
            "stream": "assumed: 88% of 900 GB/s, as BabelStream reaches",
            "inside": "assumed: NVLink 2 ring of four GPUs; " + _NCCL,
            "across": "one EDR card a node, 100 Gbit/s, 88% of it",
            "slowdown": _SLOW,
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
        source={
            "peak, memory": "NVIDIA A100 SXM 80 GB datasheet: 312 and 19.5 TFLOP/s, 80 GB (2 GB kept), 2,039 GB/s",
            "rate": "assumed: 84% of the peak on the best large shapes, as cuBLAS is commonly measured",
            "stream": "assumed: 85% of 2,039 GB/s, as BabelStream reaches",
            "inside": "nccl-tests on 8 × A100 with NVSwitch: 230 to 250 GB/s bus bandwidth; " + _NCCL,
            "across": "eight HDR cards a node, 8 × 25 GB/s, 92% of it",
            "attention": "assumed from FlashAttention-2's 180 to 200 (forward) and 150 to 170 TFLOP/s, causal",
            "slowdown": _SLOW,
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
        source={
            "peak, memory": "NVIDIA H100 SXM datasheet: 989 and 67 TFLOP/s dense, 80 GB (2 GB kept), 3,350 GB/s",
            "rate": "assumed: 76% of the peak on large shapes; power keeps it below",
            "stream": "assumed: 87% of 3,350 GB/s",
            "inside": "nccl-tests on 8 × H100 with NVSwitch: 460 to 480 GB/s bus bandwidth; " + _NCCL,
            "across": "eight NDR cards a node, 8 × 50 GB/s, 92% of it",
            "attention": "assumed from FlashAttention-2 on H100, 350 TFLOP/s forward, 300 backward",
            "slowdown": _SLOW,
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
