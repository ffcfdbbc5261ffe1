"""What a step holds does not grow: bytes between forward and backward are the formula's, and the peak is the plan's.

A closure, a generator or a tuple that keeps one tensor alive too long is enough to fail here.
"""

import pytest
import torch
from silent import silently

from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import shard_of
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import COMPUTE, CuboidParallel, Policy
from cuboid.model.transformer import Transformer
from cuboid.plan.hardware import PRESETS
from cuboid.plan.layer import Choice, Work
from cuboid.plan.measure import Memory
from cuboid.plan.search import predict
from cuboid.run.launch import World
from cuboid.step.runner import At
from cuboid.step.schedule import OFF, Schedule

GPT2 = ModelConfig("gpt2", 4, 128, 8, 500, 64)
LLAMA = ModelConfig("llama", 4, 128, 16, 500, 64, kv_heads=8)
WIDE = ModelConfig("gpt2", 3, 256, 8, 64, 32)  # few tokens: the fullest moment is a layer's first matmul, in backward
SUB_BATCHES = Schedule(sub_batches=2)
CPU = PRESETS["cpu"]

#: Model, cuboid, precision, choice, micro-batches, and how far the peak may be from the plan's.
CASES = [
    (GPT2, Cuboid(2, 2, 2), "fp32", Choice(), 1, 0.003),
    (WIDE, Cuboid(2, 1, 1), "fp32", Choice(), 1, 0.003),
    (WIDE, Cuboid(2, 1, 2), "bf16", Choice(), 1, 0.003),
    (WIDE.replace(family="llama", tied=False), Cuboid(2, 2, 1), "fp32", Choice("full"), 1, 0.003),
    (LLAMA, Cuboid(4, 2, 1), "bf16", Choice(), 1, 0.003),
    (LLAMA, Cuboid(2, 2, 2), "fp32", Choice("selective", Policy("retain", "retain")), 1, 0.003),
    (LLAMA, Cuboid(2, 2, 1), "fp32", Choice("full"), 1, 0.003),
    (GPT2, Cuboid(2, 2, 1), "bf16", Choice("full", schedule=OFF), 1, 0.003),
    (LLAMA, Cuboid(2, 1, 2), "bf16", Choice("full", Policy("retain")), 1, 0.003),
    (GPT2, Cuboid(2, 2, 1), "bf16", Choice(schedule=SUB_BATCHES), 1, 0.03),
    (LLAMA, Cuboid(1, 2, 2), "bf16", Choice(schedule=SUB_BATCHES), 1, 0.03),
    (LLAMA, Cuboid(2, 2, 1), "fp32", Choice("none", Policy("retain"), SUB_BATCHES), 1, 0.03),
    (WIDE, Cuboid(2, 1, 2), "bf16", Choice(schedule=Schedule(chunks=4)), 1, 0.03),
    (GPT2, Cuboid(2, 1, 1, replicas=2), "fp32", Choice(), 3, 0.003),
    (LLAMA, Cuboid(2, 2, 1), "fp32", Choice(), 3, 0.003),
]

#: The same, and what is frozen.
FROZEN = [
    (GPT2, Cuboid(2, 2, 1), "fp32", Choice(), 1, 0.03, "embed|positions|blocks.[01]"),
    (GPT2, Cuboid(2, 2, 2), "fp32", Choice("full"), 1, 0.03, "blocks.[12]"),
    (LLAMA, Cuboid(4, 2, 1), "bf16", Choice(), 1, 0.03, "embed|blocks|^norm"),
    (LLAMA, Cuboid(2, 2, 1), "fp32", Choice("selective"), 1, 0.03, "attention|embed"),
    (WIDE, Cuboid(2, 1, 2), "fp32", Choice(), 1, 0.03, "mlp|positions"),
    (GPT2, Cuboid(2, 2, 2), "fp32", Choice(), 1, 0.05, "embed|positions|blocks.[012]"),
    (LLAMA, Cuboid(2, 1, 1, replicas=2), "fp32", Choice(), 3, 0.03, "embed|blocks.0"),
]


def held(world: World, work: Work, cuboid: Cuboid, choice: Choice) -> tuple[int, int]:
    """Bytes that a forward leaves for its backward, and at the peak of steps, AdamW's moments included."""
    parallel = CuboidParallel(
        work.config, Mesh(cuboid, world.rank), choice.policy, COMPUTE[work.precision], choice.schedule
    )
    model, place = Transformer(parallel, recompute=choice.recompute), parallel.place(work.batch, work.seq)
    model.freeze(work.freeze)
    ids = torch.zeros(len(place.positions), len(place.samples), dtype=torch.long)
    with Memory(model) as memory:
        loss = model(ids, ids, place)
        saved = memory.saved(loss)
        loss.backward()
        model.zero_grad()
        if work.micro_batches > 1:
            model.play([(ids, At(place, ids))] * work.micro_batches)
    trained = sum(shard_of(p).nbytes for p in model.parameters() if p.requires_grad)
    return saved, memory.peak + 2 * trained


@pytest.mark.parametrize(
    ("config", "cuboid", "precision", "choice", "micro_batches", "bound", "freeze"),
    [*((*case, "") for case in CASES), *FROZEN],
)
def test_step_holds_what_formulas_say(
    config: ModelConfig, cuboid: Cuboid, precision: str, choice: Choice, micro_batches: int, bound: float, freeze: str
) -> None:
    work = Work(config, 16, config.context, precision, micro_batches, freeze)
    ((saved, peak),) = silently([0], cuboid.ranks, held, work, cuboid, choice)

    plan = predict(CPU, work, cuboid, choice)
    print(f"{plan.peak / peak - 1:+.2%} planned")  # pytest -rP
    assert saved == plan.cost(work).saved
    assert plan.peak == pytest.approx(peak, rel=bound)
