"""The ledger against the kernel's own counters.

The ranks live on a host of their own, so that its loopback carries nothing but their traffic; all that they send passes
its counter once.
"""

from collections.abc import Callable
from typing import Any

import namespaces
import pytest
import torch
import torch.distributed as dist

from cuboid.comm.collectives import COLLECTIVES, Kind
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import CuboidParallel
from cuboid.model.transformer import Transformer
from cuboid.run.cluster import Cluster, sent
from cuboid.run.launch import Pool, World

MB = 1 << 20
CUBE = Cuboid(2, 2, 2)
MODEL = ModelConfig("gpt2", layers=2, hidden=512, heads=8, vocab=4096, context=256)
KINDS: tuple[Kind, ...] = ("all_gather", "reduce_scatter", "all_reduce")


def counted(mesh: Mesh, act: Callable[[], Any]) -> tuple[int, int]:
    """What the ledger of this rank and the counter of all say `act` has sent."""
    act()  # connections are made at their first use
    mesh.ledger.reset()
    dist.barrier()
    before = sent("lo")
    dist.barrier()
    act()
    dist.barrier()
    after = sent("lo")
    dist.barrier()  # no rank continues before all have read
    return sum(mesh.ledger.bytes().values()), after - before


def collectives(world: World) -> dict[str, tuple[int, int]]:
    """Of 4 MB a rank, over an axis and over all ranks."""
    mesh, x = Mesh(CUBE, world.rank), torch.ones(1 << 20)
    return {
        f"{kind} over {axis.name}": counted(mesh, lambda: COLLECTIVES[kind](x, axis).wait())  # noqa: B023
        for kind in KINDS
        for axis in (mesh.y, mesh.world)
    }


def training_step(world: World) -> dict[str, tuple[int, int]]:
    mesh = Mesh(CUBE, world.rank)
    parallel = CuboidParallel(MODEL, mesh)
    model, place = Transformer(parallel), parallel.place(4, 256)
    tokens = place.take(torch.zeros(4, 256, dtype=torch.int64), 0)
    return {"a training step": counted(mesh, lambda: model(tokens, tokens, place).backward())}


@namespaces.needed
@pytest.mark.parametrize("work", [collectives, training_step])
def test_ledger_bytes_match_kernel_counters(work: Callable[[World], dict[str, tuple[int, int]]]) -> None:
    with Cluster(1, per_host=CUBE.ranks) as host, Pool(CUBE.ranks, host) as pool:
        found = pool.run(work)
    for name, (_, carried) in found[0].items():
        ledger = sum(rank[name][0] for rank in found)
        assert ledger > MB * CUBE.ranks, name
        assert carried == pytest.approx(ledger, rel=0.05), name
