"""The same code under the fake backend: one rank of 4,096, whose calls, bytes and FLOPs are the formula's."""

from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from cuboid.config import ModelConfig
from cuboid.cost.cuboid import step_cost
from cuboid.measure import count_flops
from cuboid.mesh import Cuboid, Mesh
from cuboid.model import Transformer
from cuboid.parallel.cuboid import CuboidParallel


def dry(config: ModelConfig, cuboid: Cuboid, rank: int, batch: int, seq: int, answer) -> None:
    dist.init_process_group("fake", rank=rank, world_size=cuboid.ranks, store=FakeStore())
    mesh = Mesh(cuboid, rank)
    with FakeTensorMode(), count_flops() as flops:
        parallel = CuboidParallel(config, mesh)
        model, place = Transformer(parallel), parallel.place(batch, seq)
        ids = torch.zeros(len(place.positions), len(place.samples), dtype=torch.long)
        model(ids, ids, place).backward()
    cost = step_cost(config, cuboid, mesh.coordinates, batch, seq)
    answer.send((mesh.ledger.counts() == cost.counts(), flops.get_total_flops() == cost.flops))


@pytest.mark.parametrize("rank", [0, 2345])
def test_one_rank_of_many(rank: int) -> None:
    config = ModelConfig("llama", layers=1, hidden=1024, heads=128, kv_heads=32, vocab=5000, context=512)
    fork = get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=dry, args=(config, Cuboid(16, 8, 8, data=4), rank, 32, 512, theirs))
    child.start()
    theirs.close()  # so that a child that dies ends the wait
    assert ours.recv() == (True, True)
    child.join()
