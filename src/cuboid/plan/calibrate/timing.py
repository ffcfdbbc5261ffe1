"""What a machine takes, all ranks at once as in training: cores, caches and network cards are shared then too.

Times are the slowest rank's, the median of a few.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.comm.axis import Axis
from cuboid.comm.collectives import COLLECTIVES, Kind, from_all
from cuboid.device import synchronize
from cuboid.layers.attention import attend
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import COMPUTE, CuboidParallel
from cuboid.model.transformer import Transformer
from cuboid.plan.hardware import KINDS
from cuboid.plan.layer import Work
from cuboid.run.launch import World

MESSAGES = (1 << 12, 1 << 16, 1 << 19, 1 << 22, 1 << 24)  # bytes of the whole tensor of a collective
REPEATS = 3


MODEL = ModelConfig("gpt2", layers=1, hidden=512, heads=8, vocab=512, context=128)


@dataclass(frozen=True)
class Settings:
    """Products are of the model's shapes, for so many tokens a rank."""

    model: ModelConfig = MODEL
    tokens: int = 512
    precision: str = "fp32"

    def __post_init__(self) -> None:
        if self.precision not in COMPUTE:
            raise ValueError(f"precision {self.precision!r} is not one of {', '.join(COMPUTE)}")

    @property
    def dtype(self) -> torch.dtype:
        return COMPUTE[self.precision] or torch.float32


class Bench:
    """The world's ranks in step. `alone`: each has a core of its own, and whoever else uses it does not count."""

    def __init__(self, world: World, alone: bool = False) -> None:
        self.world, self._alone = world, alone
        self.all = Axis("world", world.size, world.rank, dist.group.WORLD if world.size > 1 else None)

    def seconds(self, work: Callable[[], object], repeats: int = REPEATS) -> float:
        """Of one call, on the slowest rank; the median of a few, after one to warm up."""
        work()
        found = []
        for _ in range(repeats):
            self.meet()
            start = self.now()
            work()
            found.append(max(from_all(self.now() - start, self.all)))
        return median(found)

    def computing(self, work: Callable[[], object]) -> float:
        """As `seconds`, of work that waits for nobody."""
        if not self._alone:
            return self.seconds(work)
        work()
        found = []
        for _ in range(REPEATS):
            self.meet()
            start = time.thread_time()
            work()
            found.append(time.thread_time() - start)
        return max(from_all(median(found), self.all))

    def meet(self) -> None:
        if self.world.size > 1:
            dist.barrier()

    def now(self) -> float:
        synchronize()
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
    dtype, device = settings.dtype, bench.world.device
    shapes, found = product_shapes(settings), []
    for m, n, k in shapes:
        a, b = torch.ones(m, k, dtype=dtype, device=device), torch.ones(n, k, dtype=dtype, device=device)
        found.append(bench.computing(lambda a=a, b=b: a @ b.T))  # type: ignore[misc]
    return shapes, found


def time_copy(bench: Bench, size: int = 1 << 22) -> float:
    """Bytes a second, read and written, of a sum."""
    x, y = (torch.ones(size // 4, device=bench.world.device) for _ in range(2))
    return 3 * size / bench.computing(lambda: torch.add(x, y, out=y))


def time_attention(bench: Bench, settings: Settings, rate: float) -> tuple[float, float]:
    """Share of the rate reached in forward and in backward, masked scores left out."""
    c, s = settings.model, settings.model.context
    b = max(1, settings.tokens // s)
    shape = (s, b, c.heads, c.head_dim)
    dtype, device = settings.dtype, bench.world.device
    q, k, v = (torch.ones(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    with torch.no_grad():
        forward = bench.computing(lambda: attend(q, k, v))
    both = bench.computing(lambda: attend(q, k, v).sum().backward())
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
        orders = [("x", "z", "replicas", "y")] + ([("y", "x", "z", "replicas")] if ranks > node and p < ranks else [])
        for order in orders:
            yield Cuboid(1, p, 1, ranks // p, order)


def time_collectives(bench: Bench, node: int) -> list[Sample]:
    found = []
    for cuboid in talking(bench.world.size, node):
        mesh = Mesh(cuboid, bench.world.rank, bench.world.device, per_host=bench.world.local_size)
        for kind in KINDS:
            for size in MESSAGES:
                part = size // 4 // (cuboid.y if kind == "all_gather" else 1)
                x = torch.ones(max(part, cuboid.y), device=bench.world.device)
                call: Kind = kind  # type: ignore[assignment]
                seconds = bench.seconds(lambda x=x, call=call, y=mesh.y: COLLECTIVES[call](x, y).wait())  # type: ignore[misc]
                found.append(Sample(call, cuboid, size, seconds))
        mesh.close()
    return found


def time_slowdown(bench: Bench) -> float:
    """The share of its speed that compute loses while a collective is in flight."""
    if bench.world.size == 1:
        return 0.0
    mesh = Mesh(Cuboid(1, bench.world.size, 1), bench.world.rank, bench.world.device, per_host=bench.world.local_size)
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


def time_processor(bench: Bench, cores: int, calls: int = 10) -> float:
    """The share of a collective's seconds in which it keeps the cores busy, that all ranks share."""
    mesh = Mesh(Cuboid(1, bench.world.size, 1), bench.world.rank, bench.world.device)
    x = torch.ones(1 << 18)
    COLLECTIVES["all_gather"](x, mesh.y).wait()
    dist.barrier()
    began, busy = time.perf_counter(), time.process_time()
    for _ in range(calls):
        COLLECTIVES["all_gather"](x, mesh.y).wait()
    took, busy = time.perf_counter() - began, time.process_time() - busy
    share = sum(from_all(busy, bench.all)) / (cores * max(from_all(took, bench.all)))
    mesh.close()
    return float(np.clip(share, 0, 1))


def on_hosts(world: World) -> list[Sample]:
    """Collectives of ranks on hosts of their own."""
    return time_collectives(Bench(world), 1)


# Real layers


def time_layers(bench: Bench, settings: Settings) -> list[tuple[Work, float]]:
    """A forward and backward of one layer on each rank alone, of few tokens and of many."""
    found = []
    mesh = Mesh(Cuboid(), device=bench.world.device, alone=True)
    config = settings.model.replace(layers=1)
    parallel = CuboidParallel(config, mesh, dtype=COMPUTE[settings.precision])
    model = Transformer(parallel)
    for seq in (config.context // 8, config.context):
        batch = max(1, settings.tokens // config.context)
        place = parallel.place(batch, seq)
        ids = torch.zeros(seq, batch, dtype=torch.long, device=bench.world.device)

        def step(ids: Tensor = ids, place: object = place) -> None:
            model(ids, ids, place).backward()
            model.zero_grad()

        found.append((Work(config, batch, seq, settings.precision), bench.computing(step)))
    return found
