"""The planner on pipelines: what a place holds, sends and computes, how blocks are split, when stages run."""

from dataclasses import fields, replace

import numpy as np
import pytest

from cuboid.mesh.cuboid import Cuboid
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import Policy
from cuboid.plan.cost.cuboid import step_cost
from cuboid.plan.dry import compare, dry_run
from cuboid.plan.hardware import PRESETS, Hardware, Link, every_kind
from cuboid.plan.layer import Choice, Work
from cuboid.plan.pipeline import Pieces, dealt, pipeline_of, segment_of
from cuboid.plan.search import pipes, predict, rank
from cuboid.plan.sizes import Sizes
from cuboid.plan.step import prices_of
from cuboid.step.schedule import Schedule

H100, CPU = PRESETS["h100-ndr"], PRESETS["cpu"]
GPT2 = ModelConfig("gpt2", layers=8, hidden=256, heads=8, vocab=1000, context=128)
LLAMA = ModelConfig("llama", layers=9, hidden=256, heads=8, kv_heads=4, vocab=600, context=128, tied=True)


def scheduled(name: str, **more: object) -> Schedule:
    return Schedule(pipeline=name, stages=2 if name == "interleaved" else 1, **more)  # type: ignore[arg-type]


HELD = [
    (GPT2, Cuboid(2, 2, 1, pipe=4), Choice(schedule=scheduled("1f1b")), "nccl"),
    (GPT2, Cuboid(2, 2, 1, pipe=4), Choice(schedule=scheduled("gpipe")), "nccl"),
    (GPT2, Cuboid(2, 2, 1, pipe=4), Choice(schedule=scheduled("interleaved")), "nccl"),
    (GPT2, Cuboid(2, 2, 1, pipe=4), Choice(schedule=scheduled("zero-bubble")), "nccl"),
    (LLAMA, Cuboid(1, 2, 2, pipe=3), Choice("full", schedule=scheduled("1f1b", split=(4, 3, 2))), "gloo"),
    (LLAMA, Cuboid(2, 1, 2, 2, pipe=2), Choice("selective", Policy("retain"), scheduled("1f1b", parts=2)), "gloo"),
    (LLAMA, Cuboid(1, 1, 2, pipe=4), Choice(schedule=scheduled("zero-bubble")), "gloo"),
]


@pytest.mark.parametrize(("config", "cuboid", "choice", "backend"), HELD, ids=lambda each: str(each)[:40])
def test_planner_peak_of_every_place_matches_dry_run(
    config: ModelConfig, cuboid: Cuboid, choice: Choice, backend: str
) -> None:
    """And calls, bytes, FLOPs and parameters are equal."""
    work = Work(config, 8, 128, "bf16" if backend == "nccl" else "fp32", 8)
    plan = predict(H100 if backend == "nccl" else CPU, work, cuboid, choice)
    for place in range(cuboid.pipe):
        rank = cuboid.rank(cuboid.coordinates(0) | {"pipe": place})
        found = compare(dry_run(work, cuboid, choice, rank, backend), plan, work, rank)
        peak = next(each for each in found if each.what == "bytes at the peak")
        print(f"place {place}: {peak.counted:,} bytes counted, {peak.planned / peak.counted - 1:+.1%} planned")
        assert [each for each in found if not each.ok] == []
        assert peak.planned == pytest.approx(peak.counted, rel=0.05)
