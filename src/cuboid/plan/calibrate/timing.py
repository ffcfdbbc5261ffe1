"""Times a machine's operations with all ranks at once, as in training: they share cores, caches and network cards.

Times are the slowest rank's, the median of a few. A GPU's are of many calls between two waits for it: of one alone the
launch and the wait would be timed. Matmuls are of random numbers: equal ones draw less power, so a GPU's clock is
higher than in training.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.comm.axis import Axis
from cuboid.comm.collectives import COLLECTIVES, Kind, from_all
from cuboid.device import is_gpu, synchronize
from cuboid.layers.attention import attend
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import COMPUTE, CuboidParallel
from cuboid.model.transformer import Transformer
from cuboid.plan.hardware import KINDS
from cuboid.plan.layer import Work
from cuboid.run.launch import World

REPEATS = 3
BUSY = 0.02  # seconds for which a GPU has calls to do between two waits
MOST_CALLS = 200


@dataclass(frozen=True)
class Settings:
    """Matmuls have the model's shapes, with `tokens` tokens per rank. Defaults suit the device."""

    model: ModelConfig | None = None
    tokens: int = 0
    precision: str = ""

    def __post_init__(self) -> None:
        if self.precision and self.precision not in COMPUTE:
            raise ValueError(f"precision {self.precision!r} is not one of {', '.join(COMPUTE)}")


@dataclass(frozen=True)
class Scale:
    """Sizes of what is timed: large enough for the device's work to outweigh the launch."""

    model: ModelConfig
    tokens: int
    precision: str
    messages: tuple[int, ...]  # bytes of the whole tensor of a collective
    stream: int  # bytes of a tensor that is read or written: beyond any cache of a GPU
    side: int  # of a square product beside a collective
    beside: int  # bytes of that collective's shard

    @classmethod
    def of(cls, device: torch.device, asked: Settings) -> "Scale":
        scale = ON_GPU if is_gpu(device) else ON_CPU
        given = {name: value for name, value in vars(asked).items() if value}
        return replace(scale, **given)

    @property
    def dtype(self) -> torch.dtype:
        return COMPUTE[self.precision] or torch.float32


ON_CPU = Scale(
    ModelConfig("gpt2", layers=1, hidden=512, heads=8, vocab=512, context=128),
    512,
    "fp32",
    (1 << 12, 1 << 16, 1 << 19, 1 << 22, 1 << 24),
    1 << 22,
    256,
    1 << 20,
)
ON_GPU = Scale(
    ModelConfig("llama", layers=1, hidden=4096, heads=32, vocab=512, context=4096, kv_heads=8, ffn=14336),
    8192,
    "bf16",
    (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 27, 1 << 30),
    1 << 28,
    4096,
    1 << 26,
)


class Bench:
    """Times the world's ranks in lockstep. `alone`: each has its own core; time that others take there does not
    count."""

    def __init__(self, world: World, alone: bool = False) -> None:
        self.world, self._alone = world, alone
        self.all = Axis("world", world.size, world.rank, dist.group.WORLD if world.size > 1 else None)

    def seconds(self, work: Callable[[], object], repeats: int = REPEATS) -> float:
        """Seconds of one call on the slowest rank: the median of a few, after one to warm up."""
        work()
        calls, found = self._calls(work), []
        for _ in range(repeats):
            found.append(self._took(work, calls) / calls)
        return median(found)

    def least(self, work: Callable[[], object], repeats: int) -> float:
        """The least seconds of one call on this rank."""
        work()
        calls = self._calls(work)
        return min(self._mine(work, calls) for _ in range(repeats)) / calls

    def _took(self, work: Callable[[], object], calls: int) -> float:
        return max(from_all(self._mine(work, calls), self.all))

    def _mine(self, work: Callable[[], object], calls: int) -> float:
        self.meet()
        start = self.now()
        for _ in range(calls):
            work()
        return self.now() - start

    def _calls(self, work: Callable[[], object]) -> int:
        """The number of calls between two waits for the device; the same on all ranks, since calls may be
        collectives."""
        if not is_gpu(self.world.device):
            return 1
        return min(MOST_CALLS, max(1, round(BUSY / self._took(work, 1))))

    def computing(self, work: Callable[[], object]) -> float:
        """Like `seconds`, for work without communication."""
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


def product_shapes(scale: Scale) -> list[tuple[int, int, int]]:
    """(m, n, k) of the model's matmuls, unsharded and sharded."""
    c, m = scale.model, scale.tokens
    sides = [(c.q_dim, c.hidden), (c.ffn, c.hidden), (c.hidden, c.ffn)]
    found = [(m, n // shards, k) for n, k in sides for shards in (1, 4)]
    found += [(m, n, k // 4) for n, k in sides[1:]]
    return [*found, (m // 4, c.ffn, c.hidden), (c.ffn, c.hidden, m)]


def time_matmuls(bench: Bench, scale: Scale) -> tuple[list[tuple[int, int, int]], list[float]]:
    dtype, device = scale.dtype, bench.world.device
    shapes, found = product_shapes(scale), []
    for m, n, k in shapes:
        a, b = (torch.randn(side, k, dtype=dtype, device=device) for side in (m, n))
        found.append(bench.computing(lambda a=a, b=b: a @ b.T))  # type: ignore[misc]
    return shapes, found


def time_copy(bench: Bench, size: int) -> float:
    """Bytes per second, read and written, of a sum."""
    x, y = (torch.ones(size // 4, device=bench.world.device) for _ in range(2))
    return 3 * size / bench.computing(lambda: torch.add(x, y, out=y))


def time_attention(bench: Bench, scale: Scale, rate: float) -> tuple[float, float]:
    """Share of the rate reached in forward and in backward, masked scores left out."""
    c, s = scale.model, scale.model.context
    b = max(1, scale.tokens // s)
    shape = (s, b, c.heads, c.head_dim)
    dtype, device = scale.dtype, bench.world.device
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
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


def time_collectives(bench: Bench, node: int, messages: Sequence[int] = ON_CPU.messages) -> list[Sample]:
    found = []
    for cuboid in talking(bench.world.size, node):
        mesh = Mesh(cuboid, bench.world.rank, bench.world.device, per_host=bench.world.local_size)
        for kind in KINDS:
            for size in messages:
                part = size // 4 // (cuboid.y if kind == "all_gather" else 1)
                x = torch.ones(max(part, cuboid.y), device=bench.world.device)
                call: Kind = kind  # type: ignore[assignment]
                seconds = bench.seconds(lambda x=x, call=call, y=mesh.y: COLLECTIVES[call](x, y).wait())  # type: ignore[misc]
                found.append(Sample(call, cuboid, size, seconds))
        mesh.close()
    return found


def time_slowdown(bench: Bench, scale: Scale) -> float:
    """The share of its speed that compute loses while a collective is in flight."""
    if bench.world.size == 1:
        return 0.0
    mesh = Mesh(Cuboid(1, bench.world.size, 1), bench.world.rank, bench.world.device, per_host=bench.world.local_size)
    x = torch.ones(scale.beside // 4, device=bench.world.device)
    sending = bench.seconds(lambda: COLLECTIVES["all_gather"](x, mesh.y).wait())
    a = torch.randn(scale.side, scale.side, dtype=scale.dtype, device=bench.world.device)
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
    """The share of a collective's seconds in which it keeps the shared cores busy."""
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
    """Collectives of ranks on separate emulated hosts."""
    return time_collectives(Bench(world), 1)


# Real layers


def time_layers(bench: Bench, scale: Scale) -> list[tuple[Work, float]]:
    """A forward and backward of one layer on each rank alone, of few tokens and of many."""
    found = []
    mesh = Mesh(Cuboid(), device=bench.world.device, alone=True)
    config = scale.model.replace(layers=1)
    parallel = CuboidParallel(config, mesh, dtype=COMPUTE[scale.precision])
    model = Transformer(parallel)
    for seq in (config.context // 8, config.context):
        batch = max(1, scale.tokens // config.context)
        place = parallel.place(batch, seq)
        ids = torch.zeros(seq, batch, dtype=torch.long, device=bench.world.device)

        def step(ids: Tensor = ids, place: object = place) -> None:
            model(ids, ids, place).backward()
            model.zero_grad()

        found.append((Work(config, batch, seq, scale.precision), bench.computing(step)))
    return found
