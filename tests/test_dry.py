"""The same code under the fake backend: one rank of 4,096, whose calls, bytes and FLOPs are the formula's."""

import pytest

from cuboid.mesh.cuboid import Cuboid
from cuboid.model.config import ModelConfig
from cuboid.plan.cost.cuboid import step_cost
from cuboid.plan.dry import compare, dry_run
from cuboid.plan.hardware import PRESETS
from cuboid.plan.layer import Choice, Work
from cuboid.plan.search import predict
from cuboid.step.schedule import Schedule


@pytest.mark.parametrize(("rank", "special"), [(0, {}), (2345, {"qk_norm": True, "qkv_bias": True})])
def test_dry_run_matches_step_cost_on_one_of_4096_ranks(rank: int, special: dict[str, bool]) -> None:
    config = ModelConfig("llama", layers=1, hidden=1024, heads=128, kv_heads=32, vocab=5000, context=512, **special)
    cuboid = Cuboid(16, 8, 8, replicas=4)
    counted = dry_run(Work(config, 32, 512, "fp32"), cuboid, Choice(), rank)
    cost = step_cost(config, cuboid, cuboid.coordinates(rank), 32, 512)
    assert (counted.counts, counted.flops) == (cost.counts(), cost.flops)
    assert (counted.parameters, counted.saved) == (cost.parameters, cost.saved)


@pytest.mark.parametrize("micro_batches", [1, 8])
def test_planner_peak_of_micro_batches_matches_dry_run(micro_batches: int) -> None:
    """Has the gradients of those before in it, in the run as in the plan."""
    config, cuboid = ModelConfig("gpt2", layers=4, hidden=256, heads=8, vocab=1000, context=128), Cuboid(replicas=8)
    work = Work(config, 8, 128, micro_batches=micro_batches)
    assert -0.02 < peak_error(work, cuboid, Choice()) < 0.02


@pytest.mark.parametrize(("sub_batches", "above"), [(1, 0.08), (2, 0.25)])
@pytest.mark.parametrize("cuboid", [Cuboid(2, 2, 2), Cuboid(4, 2, 1)], ids=str)
def test_planner_peak_of_forward_beside_backward_bounds_dry_run(cuboid: Cuboid, sub_batches: int, above: float) -> None:
    """Whose turn it is follows from sizes, so two passes may be apart: the plan may be too high, hardly too low."""
    config = ModelConfig("gpt2", layers=6, hidden=256, heads=8, vocab=1000, context=128)
    choice = Choice(schedule=Schedule(sub_batches=sub_batches, beside=True))
    assert -0.02 < peak_error(Work(config, 16, 128, micro_batches=3), cuboid, choice) < above


def peak_error(work: Work, cuboid: Cuboid, choice: Choice) -> float:
    """Of the plan against a dry run on NCCL."""
    plan = predict(PRESETS["h100-ndr"], work, cuboid, choice)
    found = compare(dry_run(work, cuboid, choice, backend="nccl"), plan, work)
    peak = next(each for each in found if each.what == "bytes at the peak")
    print(f"{peak.planned / peak.counted - 1:+.1%} planned")  # pytest -rP
    return peak.planned / peak.counted - 1
