"""The same code under the fake backend: one rank of 4,096, whose calls, bytes and FLOPs are the formula's."""

import pytest

from cuboid.config import ModelConfig
from cuboid.cost.cuboid import step_cost
from cuboid.mesh import Cuboid
from cuboid.plan.dry import dry_run
from cuboid.plan.layer import Choice, Work


@pytest.mark.parametrize(("rank", "special"), [(0, {}), (2345, {}), (2345, {"qk_norm": True, "qkv_bias": True})])
def test_one_rank_of_many(rank: int, special: dict[str, bool]) -> None:
    config = ModelConfig("llama", layers=1, hidden=1024, heads=128, kv_heads=32, vocab=5000, context=512, **special)
    cuboid = Cuboid(16, 8, 8, data=4)
    counted = dry_run(Work(config, 32, 512, "fp32"), cuboid, Choice(), rank)
    cost = step_cost(config, cuboid, cuboid.coordinates(rank), 32, 512)
    assert (counted.counts, counted.flops) == (cost.counts(), cost.flops)
    assert (counted.parameters, counted.saved) == (cost.parameters, cost.saved)
