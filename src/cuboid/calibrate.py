"""Measure the machine at hand for the planner: products, copies, attention, collectives, real layers.

All ranks do everything at once, as in training: cores, caches and network cards are shared then too. Times are the
slowest rank's, the median of a few; each fit reports how far it is from what was measured.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from cuboid.attention import attend
from cuboid.comm import COLLECTIVES, Kind, from_all
from cuboid.config import ModelConfig
from cuboid.launch import World
from cuboid.mesh import Axis, Cuboid, Mesh
from cuboid.model import Transformer
from cuboid.parallel.cuboid import CuboidParallel
from cuboid.plan.hardware import KINDS, Hardware, Link
from cuboid.plan.search import predict
from cuboid.plan.sizes import groups
from cuboid.plan.step import Choice, Work
from cuboid.plan.time import Array

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MESSAGES = (1 << 12, 1 << 16, 1 << 19, 1 << 22)  # bytes of the whole tensor of a collective
REPEATS = 3


MODEL = ModelConfig("gpt2", layers=1, hidden=512, heads=8, vocab=512, context=128)


@dataclass(frozen=True)
class Settings:
    """Products are of the model's shapes, for so many tokens a rank."""

    model: ModelConfig = MODEL
    tokens: int = 512
    precision: str = "fp32"

    def __post_init__(self) -> None:
        if self.precision not in DTYPES:
            raise ValueError(f"precision {self.precision!r} is not one of {', '.join(DTYPES)}")


@dataclass
class Calibration:
    hardware: Hardware
    errors: dict[str, float] = field(default_factory=dict)  # mean relative error of each fit
    seconds: float = 0.0


class Bench:
    """The world's ranks in step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.all = Axis("world", world.size, world.rank, dist.group.WORLD if world.size > 1 else None)

    def seconds(self, work: Callable[[], object], repeats: int = REPEATS) -> float:
        """Of one call, on the slowest rank; the median of a few, after one to warm up."""
        work()
        found = []
        for _ in range(repeats):
            if self.world.size > 1:
                dist.barrier()
            start = self.now()
            work()
            found.append(max(from_all(self.now() - start, self.all)))
        return median(found)

    def now(self) -> float:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


# Products, copies, attention


def product_shapes(settings: Settings) -> list[tuple[int, int, int]]:
    """(m, n, k) of the model's products, whole and cut."""
    c, m = settings.model, settings.tokens
    sides = [(c.q_dim, c.hidden), (c.ffn, c.hidden), (c.hidden, c.ffn)]
    found = [(m, n // cut, k) for n, k in sides for cut in (1, 4)]
    found += [(m, n, k // 4) for n, k in sides[1:]]
    return [*found, (m // 4, c.ffn, c.hidden), (c.ffn, c.hidden, m)]


def time_products(bench: Bench, settings: Settings) -> tuple[list[tuple[int, int, int]], list[float]]:
    dtype, device = DTYPES[settings.precision], bench.world.device
    shapes, found = product_shapes(settings), []
    for m, n, k in shapes:
        a, b = torch.ones(m, k, dtype=dtype, device=device), torch.ones(n, k, dtype=dtype, device=device)
        found.append(bench.seconds(lambda a=a, b=b: a @ b.T))  # type: ignore[misc]
    return shapes, found


def fit(columns: Sequence[Array], measured: Sequence[float]) -> tuple[list[float], float]:
    """Factors of at least 0, by least squares of the relative error; and the mean of it."""
    y = np.array(measured)
    table = np.stack([np.asarray(column, dtype=float) for column in columns], 1) / y[:, None]
    active = list(range(len(columns)))
    while True:
        found, *_ = np.linalg.lstsq(table[:, active], np.ones(len(y)), rcond=None)
        if len(active) == 1 or (found >= 0).all():
            break
        active.pop(int(found.argmin()))
    factors = [0.0] * len(columns)
    for i, value in zip(active, found, strict=True):
        factors[i] = max(float(value), 0.0)
    return factors, float(np.abs(table @ np.array(factors) - 1).mean())


def time_copy(bench: Bench, size: int = 1 << 22) -> float:
    """Bytes a second, read and written, of a sum."""
    x, y = (torch.ones(size // 4, device=bench.world.device) for _ in range(2))
    return 3 * size / bench.seconds(lambda: torch.add(x, y, out=y))


def time_attention(bench: Bench, settings: Settings, rate: float) -> tuple[float, float]:
    """Share of the rate reached in forward and in backward, masked scores left out."""
    c, s = settings.model, settings.model.context
    b = max(1, settings.tokens // s)
    shape = (s, b, c.heads, c.head_dim)
    dtype, device = DTYPES[settings.precision], bench.world.device
    q, k, v = (torch.ones(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    with torch.no_grad():
        forward = bench.seconds(lambda: attend(q, k, v))
    both = bench.seconds(lambda: attend(q, k, v).sum().backward())
    half = b * c.heads * s * s * c.head_dim / 2
    backward = max(both - forward, forward)
    return 4 * half / forward / rate, 10 * half / backward / rate


# Collectives


@dataclass(frozen=True)
class Sample:
    kind: Kind
    cuboid: Cuboid  # whose axis y talks, all groups at once
    size: int  # bytes of the whole
    seconds: float


def talking(ranks: int, node: int) -> Iterator[Cuboid]:
    """Axes of every size, within nodes where they fit, and across."""
    for p in (n for n in range(2, ranks + 1) if ranks % n == 0):
        orders = [("x", "z", "data", "y")] + ([("y", "x", "z", "data")] if ranks > node and p < ranks else [])
        for order in orders:
            yield Cuboid(1, p, 1, ranks // p, order)


def time_collectives(bench: Bench, node: int) -> list[Sample]:
    found = []
    for cuboid in talking(bench.world.size, node):
        mesh = Mesh(cuboid, bench.world.rank, bench.world.device)
        for kind in KINDS:
            for size in MESSAGES:
                part = size // 4 // (cuboid.y if kind == "all_gather" else 1)
                x = torch.ones(max(part, cuboid.y), device=bench.world.device)
                call: Kind = kind  # type: ignore[assignment]
                seconds = bench.seconds(lambda x=x, call=call, y=mesh.y: COLLECTIVES[call](x, y).wait())  # type: ignore[misc]
                found.append(Sample(call, cuboid, size, seconds))
        mesh.close()
    return found


def fit_links(
    samples: Sequence[Sample], kind: str, node: int, direct: bool, stream: float, crossing: bool
) -> tuple[Link | None, float]:
    """Base, hop and bandwidth of one kind of collective, inside nodes or across; the features are time.py's."""
    rows, measured = [], []
    for each in samples:
        group = groups([each.cuboid], np.ones(1, dtype=np.int64), node)["y"]
        p, inside = int(group.size[0]), int(group.inside[0])
        if each.kind != kind or (inside < p) != crossing:
            continue
        scattered = kind == "reduce_scatter" and direct
        times = 2 if kind == "all_reduce" else 1
        rounds = 2 * np.log2(p / inside if crossing else p) if kind == "all_reduce" else p - 1
        moved = times * each.size * (p - 1) / p
        if crossing:
            moved = moved * node / inside if not scattered else each.size * (p - inside) / p * node
        summing = 3 * (p - 1) / p * each.size / stream if scattered else 0.0
        rows.append((1.0, float(rounds), moved))
        measured.append(max(each.seconds - summing, 0.2 * each.seconds))
    if not rows:
        return None, 0.0
    (base, hop, per_byte), error = fit(list(np.array(rows).T), measured)
    return Link(base, hop, 1 / per_byte if per_byte else 1e15), error


def time_slowdown(bench: Bench) -> float:
    """The share of its speed that compute loses while a collective is in flight."""
    if bench.world.size == 1:
        return 0.0
    mesh = Mesh(Cuboid(1, bench.world.size, 1), bench.world.rank, bench.world.device)
    x = torch.ones(1 << 18, device=bench.world.device)
    sending = bench.seconds(lambda: COLLECTIVES["all_gather"](x, mesh.y).wait())
    a = torch.ones(256, 256, device=bench.world.device)
    one = bench.seconds(lambda: a @ a)
    count = max(1, round(1.5 * sending / one))

    def compute() -> None:
        for _ in range(count):
            a @ a

    def both() -> Tensor:
        flight = COLLECTIVES["all_gather"](x, mesh.y)
        compute()
        return flight.wait()

    computing, together = bench.seconds(compute), bench.seconds(both)
    mesh.close()
    return float(np.clip((together - computing) / sending, 0, 1))


# Real layers


def time_layers(bench: Bench, settings: Settings) -> list[tuple[Work, float]]:
    """A forward and backward of one layer on each rank alone, of few tokens and of many."""
    found = []
    mesh = Mesh(Cuboid(), device=bench.world.device, alone=True)
    compute = None if settings.precision == "fp32" else DTYPES[settings.precision]
    config = settings.model.replace(layers=1)
    parallel = CuboidParallel(config, mesh, dtype=compute)
    model = Transformer(parallel)
    for seq in (config.context // 8, config.context):
        batch = max(1, settings.tokens // config.context)
        place = parallel.place(batch, seq)
        ids = torch.zeros(seq, batch, dtype=torch.long, device=bench.world.device)

        def step(ids: Tensor = ids, place: object = place) -> None:
            model(ids, ids, place).backward()
            model.zero_grad()

        found.append((Work(config, batch, seq, settings.precision), bench.seconds(step)))
    return found


def fit_layers(hw: Hardware, layers: Sequence[tuple[Work, float]]) -> tuple[Hardware, float]:
    """The speed of elementwise operations and the time of the smallest, so that real layers take what they took."""

    def error(candidate: Hardware) -> float:
        gaps = [predict(candidate, work, Cuboid(), Choice()).seconds / seconds - 1 for work, seconds in layers]
        return float(np.abs(gaps).mean())

    streams = hw.stream * np.geomspace(0.1, 2, 14)
    launches = hw.launch * np.geomspace(0.3, 10, 12)
    candidates = [replace(hw, stream=float(s), launch=float(t)) for s in streams for t in launches]
    best = min(candidates, key=error)
    return best, error(best)


# All of it


def calibrate(world: World, settings: Settings, name: str) -> Calibration | None:
    """On every rank; rank 0 shows its progress and returns what was found."""
    began, bench = time.perf_counter(), Bench(world)
    node = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    direct = world.device.type != "cuda"
    with told(world.rank == 0) as tell:
        tell("products")
        shapes, measured = time_products(bench, settings)
        tell("copies")
        stream = time_copy(bench)
        m, n, k = (np.array(side, dtype=float) for side in zip(*shapes, strict=True))
        (per_flop, per_output, launch), product_error = fit([2 * m * n * k, 2 * m * n, np.ones_like(m)], measured)
        rate = 1 / per_flop
        tell("attention")
        attention = time_attention(bench, settings, rate)
        tell("collectives")
        samples = time_collectives(bench, node)
        tell("compute beside communication")
        slowdown = time_slowdown(bench)
        tell("real layers")
        layers = time_layers(bench, settings)
        tell("fitting")
    if world.rank:
        return None
    errors = {"products": product_error}
    inside, across = {}, {}
    for kind in KINDS:
        near, errors[f"{kind} inside"] = fit_links(samples, kind, node, direct, stream, crossing=False)
        far, gap = fit_links(samples, kind, node, direct, stream, crossing=True)
        if far is not None:
            errors[f"{kind} across"] = gap
        near = near or Link(0.0, 0.0, 1e15)  # a device alone in its node talks to nobody inside
        inside[kind], across[kind] = near, far or near
    hardware = Hardware(
        name=name,
        node=node,
        memory=memory_of(world),
        peak={settings.precision: rate},
        rate={settings.precision: rate},
        stream=stream,
        inside=inside,
        across=across,
        depth=per_output * rate,
        attention=attention,
        launch=max(launch, 1e-6),
        slowdown=slowdown,
        direct=direct,
        one_wire=direct,
        source={"all": f"cuboid calibrate, {world.size} ranks, {settings.precision}; the peak is the rate reached"},
    )
    hardware, errors["one real layer"] = fit_layers(hardware, layers)
    return Calibration(hardware, errors, time.perf_counter() - began)


def memory_of(world: World) -> float:
    """Bytes a rank may use."""
    if world.device.type == "cuda":
        return 0.95 * torch.cuda.mem_get_info(world.device)[1]
    return 0.9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / world.size


@contextmanager
def told(speaks: bool, parts: int = 7) -> Iterator[Callable[[str], None]]:
    """A bar on stderr; call it with what begins."""
    with Progress(console=Console(stderr=True, quiet=not speaks), disable=not speaks) as progress:
        task = progress.add_task("", total=parts)
        yield lambda text: progress.update(task, description=text, advance=1)
