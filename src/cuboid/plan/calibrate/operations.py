"""Processor time of each operation of a layer. Emulated devices add them up.

Seconds of an operation are launch + bytes ÷ stream, a line for each kind, through what it took in layers of few tokens
and of many. What a step takes beyond its operations is the framework's, and is spread over them. Seconds are the
thread's, not the clock's, so that whoever else uses the processor does not count.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.mesh import Mesh
from cuboid.model.cuboid import COMPUTE, CuboidParallel
from cuboid.model.transformer import Transformer
from cuboid.plan.calibrate.fitting import fit
from cuboid.plan.calibrate.timing import Bench, Scale
from cuboid.plan.hardware import Operation
from cuboid.plan.measure import moved, tensors

REPEATS = 5
SPOKEN_FOR = 1 << 18  # bytes: an operation on fewer tells nothing about its stream


class Timed(NamedTuple):
    name: str
    bytes: int
    seconds: float


class Stopwatch(TorchDispatchMode):
    """Times every operation that computes something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Timed] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.thread_time()
        made = func(*args, **(kwargs or {}))
        took = time.thread_time() - began
        name, values = str(func.overloadpacket), (args, kwargs, made)
        computes = func.namespace == "aten" and not func.is_view and "empty" not in name
        if computes and any(x.is_floating_point() for x in tensors(values)):
            self.found.append(Timed(name, moved(values), took))
        return made


def time_operations(bench: Bench, scale: Scale, stream: float) -> dict[str, Operation]:
    """Times operations in steps of one layer and AdamW, on each rank alone, all at once. `stream`: for operations with
    too few bytes for a rate of their own."""
    mesh = Mesh(Cuboid(), device=bench.world.device, alone=True)
    config = scale.model.replace(layers=1)
    parallel = CuboidParallel(config, mesh, dtype=COMPUTE[scale.precision])
    model = Transformer(parallel)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = max(1, scale.tokens // config.context)
    samples, beyond, count = list[Timed](), 0.0, 0
    for seq in (max(1, config.context // 8), config.context):
        place = parallel.place(batch, seq)
        ids = torch.zeros(seq, batch, dtype=torch.long, device=bench.world.device)

        def step(ids: Tensor = ids, place: Any = place) -> None:
            model(ids, ids, place).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        bench.meet()
        alone = median(_processor_seconds(step) for _ in range(REPEATS))
        steps = []
        for _ in range(REPEATS):
            with Stopwatch() as watch:
                step()
            steps.append(watch.found)
        middle = [
            Timed(each[0].name, each[0].bytes, median(t.seconds for t in each)) for each in zip(*steps, strict=True)
        ]
        samples += middle
        beyond, count = beyond + alone - sum(each.seconds for each in middle), count + len(middle)
    return lines(samples, max(beyond, 0.0) / count, stream)


def _processor_seconds(work: Callable[[], None]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def lines(samples: Iterable[Timed], beyond: float, stream: float) -> dict[str, Operation]:
    """A launch and a stream for each kind, `beyond` added to every launch."""
    by_name: dict[str, list[Timed]] = defaultdict(list)
    for each in samples:
        by_name[each.name].append(each)
    found = {}
    for name, group in by_name.items():
        sizes, took = np.array([each.bytes for each in group]), [each.seconds for each in group]
        launch, per_byte = median(took), 1 / stream
        if sizes.max() >= SPOKEN_FOR:
            (launch, per_byte), _ = fit([np.ones(len(group)), sizes], took)
        found[name] = Operation(launch + beyond, 1 / per_byte if per_byte else 1e15)
    return found
