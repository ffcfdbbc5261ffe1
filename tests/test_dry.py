"""The same code under the fake backend: one rank of 4,096, whose calls, bytes and FLOPs are the formula's."""

import pytest

from cuboid.mesh.cuboid import Cuboid
from cuboid.model.config import ModelConfig
from cuboid.plan.cost.cuboid import step_cost
from cuboid.plan.dry import compare, dry_run
from cuboid.plan.hardware import PRESETS
from cuboid.plan.layer import Choice, Work
from cuboid.plan.search import predict


@pytest.mark.parametrize(("rank", "special"), [(0, {}), (2345, {"qk_norm": True, "qkv_bias": True})])
def test_dry_run_matches_step_cost_on_one_of_4096_ranks(rank: int, special: dict[str, bool]) -> None:
    config = ModelConfig("llama", layers=1, hidden=1024, heads=128, kv_heads=32, vocab=5000, context=512, **special)
    cuboid = Cuboid(16, 8, 8, data=4)
    counted = dry_run(Work(config, 32, 512, "fp32"), cuboid, Choice(), rank)
    cost = step_cost(config, cuboid, cuboid.coordinates(rank), 32, 512)
    assert (counted.counts, counted.flops) == (cost.counts(), cost.flops)
    assert (counted.parameters, counted.saved) == (cost.parameters, cost.saved)


@pytest.mark.parametrize("micro_batches", [1, 8])
def test_planner_peak_of_micro_batches_matches_dry_run(micro_batches: int) -> None:
    """Has the gradients of those before in it, in the run as in the plan."""
    config, cuboid = ModelConfig("gpt2", layers=4, hidden=256, heads=8, vocab=1000, context=128), Cuboid(data=8)
    work = Work(config, 8, 128, micro_batches=micro_batches)
    found = compare(
        dry_run(work, cuboid, Choice(), backend="nccl"), predict(PRESETS["h100-ndr"], work, cuboid, Choice()), work
    )
    peak = next(each for each in found if each.what == "bytes at the peak")
    assert peak.planned == pytest.approx(peak.counted, rel=0.02)
