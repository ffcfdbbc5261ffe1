"""Building a model takes a rank the memory and the time of its shards, not of the unsharded model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from silent import silently
from steps import batches_on, loss_of
from torch import Tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import shard_of
from cuboid.mesh.mesh import Mesh
from cuboid.model import module
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import CuboidParallel
from cuboid.model.transformer import Transformer
from cuboid.run.launch import Pool, World

MB = 1 << 20
BIG = ModelConfig("gpt2", layers=2, hidden=2048, heads=16, vocab=256, context=64)  # 400 MB in fp32
SMALL = ModelConfig("gpt2", layers=1, hidden=64, heads=4, vocab=37, context=16)
CUBE = Cuboid(2, 2, 2)


def status(field: str) -> int:
    """Bytes, of a line of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def peak_of_build(world: World) -> tuple[int, int]:
    """How far memory rose while the big model was built, and the bytes of this rank's shards."""
    mesh = Mesh(CUBE, world.rank)
    Transformer(CuboidParallel(SMALL, mesh))  # what PyTorch loads at its first use is not the model's
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = status("VmRSS")
    model = Transformer(CuboidParallel(BIG, mesh))
    peak = status("VmHWM") - before
    mesh.close()
    return peak, sum(shard_of(parameter).nbytes for parameter in model.parameters())


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's memory counters")
def test_transformer_build_memory_is_bounded_by_shards() -> None:
    with Pool(CUBE.ranks) as pool:  # new ranks: used ones have free memory at hand that would hide a peak
        found = pool.run(peak_of_build)
    for peak, shards in found:
        assert shards == pytest.approx(4 * BIG.parameters / CUBE.ranks, rel=0.01)
        # beside the shards: one of them in fp64, and what is under way
        assert peak < shards + 60 * MB


@contextmanager
def counting() -> Iterator[list[int]]:
    """The values drawn."""
    drawn, normal = [], module.normal

    def counted(*args: Any) -> Tensor:
        values = normal(*args)
        drawn.append(values.numel())
        return values

    with patch.object(module, "normal", counted):
        yield drawn


def drawn_in_build(world: World) -> tuple[int, int]:
    mesh = Mesh(CUBE, world.rank)
    with counting() as drawn:
        model = Transformer(CuboidParallel(SMALL, mesh))
    mesh.close()
    return sum(drawn), sum(shard_of(p).numel() for p in model.parameters() if p.dim() == 2)


def test_transformer_build_draws_only_own_shards(pool: Callable[[int], Pool]) -> None:
    for drawn, held in pool(CUBE.ranks).run(drawn_in_build):
        assert drawn == held


def planned_in_build_and_backward(world: World) -> list[str]:
    """Operations whose sharding DTensor worked out. It keeps results by mesh, so on a new one each shape counts."""
    mesh, found = Mesh(CUBE, world.rank), list[str]()
    plan = ShardingPropagator.propagate_op_sharding_non_cached

    def noted(propagator: ShardingPropagator, schema: Any) -> Any:
        found.append(str(schema.op))
        return plan(propagator, schema)

    with patch.object(ShardingPropagator, "propagate_op_sharding_non_cached", noted):
        model = Transformer(CuboidParallel(SMALL.replace(vocab=11), mesh), 0, torch.float64)
        (batch,) = batches_on(model.parallel, 1)
        loss_of(model, batch).backward()
        model.norm.weight.grad.add_(1)  # which is noticed
    return found


def test_transformer_build_and_backward_need_no_sharding_of_dtensor() -> None:
    """It takes milliseconds for each shape of a parameter."""
    (found,) = silently([0], CUBE.ranks, planned_in_build_and_backward)
    assert found == ["aten.add_.Tensor"]
