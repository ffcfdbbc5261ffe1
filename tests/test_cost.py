"""The formulas against the ledger, the FLOP counter and autograd, on every rank; and an even share of everything."""

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
from silent import ends, silently

from cuboid.layers.loss import Loss
from cuboid.mesh.cuboid import Cuboid, factorisations
from cuboid.mesh.layout import shard_of
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import CuboidParallel, Policy
from cuboid.model.transformer import Transformer
from cuboid.plan.measure import Memory, count_flops
from cuboid.run.launch import World
from cuboid.step.schedule import OFF, Schedule
from cuboid.verify import DTYPES, Case, batch_of, measure, verify

GPT2 = ModelConfig("gpt2", layers=2, hidden=24, heads=24, vocab=37, context=24, ffn=40, dropout=0.1)
LLAMA = ModelConfig("llama", layers=1, hidden=24, heads=24, kv_heads=4, vocab=41, context=24, ffn=36, head_dim=2)
QWEN2 = LLAMA.replace(qkv_bias=True)
QWEN3 = LLAMA.replace(qk_norm=True, head_dim=4)
SUB_BATCHES = Schedule(sub_batches=2)
OPTIONS = cycle(
    [
        (GPT2, 12, "fp64", Policy(head_elements=64), "none"),
        (LLAMA, 2, "bf16", Policy("retain", "regather"), "selective"),
        (GPT2.replace(tied=False, bias=False), 1, "fp32", Policy("regather", "retain"), "full"),
        (LLAMA.replace(kv_heads=24, tied=True), 6, "fp64", Policy("retain", "retain", 64), "full"),
        (LLAMA, 3, "fp32", Policy(), "none"),
    ]
)
CASES = [
    Case(config, cuboid, batch, 13, dtype, policy, Loss(z_loss=1e-3), recompute)
    for ranks in (1, 2, 4, 6, 8)
    for cuboid, (config, batch, dtype, policy, recompute) in zip(factorisations(ranks), OPTIONS, strict=False)
] + [
    Case(GPT2, Cuboid(2, 3, 2), 12, 13),
    Case(GPT2, Cuboid(2, 3, 2), 12, 13, schedule=SUB_BATCHES),
    Case(LLAMA, Cuboid(1, 2, 2), 4, 13, policy=Policy("retain"), recompute="full", schedule=SUB_BATCHES),
    Case(LLAMA, Cuboid(4, 2, 1), 4, 16, recompute="selective", schedule=SUB_BATCHES),
    Case(LLAMA.replace(kv_heads=24), Cuboid(2, 3, 2), 2, 24, schedule=Schedule(chunks=4)),
    Case(LLAMA, Cuboid(1, 2, 2), 1, 24, recompute="full", schedule=Schedule(chunks=3)),
    Case(GPT2, Cuboid(1, 3, 2), 4, 13, policy=Policy("retain"), schedule=Schedule(sub_batches=4, chunks=2)),
    Case(LLAMA, Cuboid(2, 1, 2, replicas=2), 4, 13),
    Case(GPT2, Cuboid(1, 3, 1, replicas=2), 2, 13, recompute="selective"),
    Case(QWEN2, Cuboid(2, 3, 2), 4, 13),
    Case(QWEN3, Cuboid(2, 3, 2), 4, 13),
    Case(QWEN3, Cuboid(2, 1, 2, replicas=2), 4, 13, dtype="bf16", schedule=SUB_BATCHES),
    Case(QWEN3, Cuboid(4, 2, 1), 2, 13, dtype="bf16", policy=Policy("retain")),
    Case(QWEN3.replace(kv_heads=2), Cuboid(4, 2, 1), 1, 16, recompute="none"),
    Case(QWEN3, Cuboid(1, 2, 2), 4, 13, recompute="selective", dtype="bf16"),
    Case(QWEN3, Cuboid(2, 2, 1), 4, 13, recompute="full"),
    Case(GPT2.replace(qk_norm=True), Cuboid(2, 1, 2), 1, 13),
]
DEEP = LLAMA.replace(layers=3, tied=True)
SELECTIVE, FULL, RETAIN = ("selective", Policy()), ("full", Policy("retain")), ("none", Policy("retain", "retain"))
FROZEN = [
    Case(config, cuboid, batch, 13, dtype, policy, recompute=recompute, schedule=schedule, freeze=freeze)  # type: ignore[arg-type]
    for config, cuboid, batch, dtype, (recompute, policy), schedule, freeze in [
        (GPT2, Cuboid(2, 3, 2), 12, "fp64", SELECTIVE, SUB_BATCHES, "embed|positions|blocks.0"),
        (GPT2, Cuboid(2, 1, 2, replicas=2), 4, "bf16", RETAIN, SUB_BATCHES, r"blocks\.0|norm1.bias"),
        (GPT2, Cuboid(1, 2, 2), 4, "fp32", FULL, Schedule(chunks=2), r"positions|attention.[qk]|up.bias|down"),
        (LLAMA, Cuboid(2, 2, 1), 4, "fp64", FULL, SUB_BATCHES, r"embed|blocks|^norm"),
        (LLAMA, Cuboid(2, 2, 2), 2, "fp32", SELECTIVE, OFF, "embed|gate|attention.out"),
        (DEEP, Cuboid(2, 2, 2), 8, "fp32", RETAIN, Schedule(), r"embed|blocks.[02]"),
        (DEEP, Cuboid(4, 1, 2), 2, "fp32", ("none", Policy()), Schedule(), r"embed|blocks.[01]"),
        (QWEN3, Cuboid(2, 1, 2, replicas=2), 4, "fp32", ("none", Policy()), Schedule(), "norm_q|embed|attention.v"),
        (QWEN2, Cuboid(1, 3, 2), 4, "fp64", ("none", Policy()), SUB_BATCHES, "weight"),
        (LLAMA, Cuboid(4, 2, 1), 1, "fp32", ("none", Policy()), Schedule(), "embed|blocks|head"),
    ]
]


def id_of(case: Case) -> str:
    return (
        f"{case.cuboid}-{case.config.family}-{case.batch}-{case.dtype}-{case.recompute}{'-frozen' * bool(case.freeze)}"
    )


def counted(world: World, case: Case) -> tuple[list[Any], list[Any]]:
    """Traffic, bytes of parameters, FLOPs and saved activations of a step, and what the formulas say."""
    mesh, (storage, compute, _) = Mesh(case.cuboid, world.rank), DTYPES[case.dtype]
    parallel = CuboidParallel(case.config, mesh, case.policy, compute, case.schedule)
    model, place = Transformer(parallel, case.seed, storage, case.recompute), parallel.place(case.batch, case.seq)
    model.freeze(case.freeze)
    tokens, targets = batch_of(case)
    batch = place.take(tokens, 0), place.take(targets, -100), place, case.loss
    with Memory(model) as memory:  # a separate step, because the FLOP counter keeps tensors alive
        loss = model(*batch, dropout=case.seed)
        held = memory.saved(loss)
        loss.backward()
    mesh.ledger.reset()
    with count_flops() as flops:
        model(*batch, dropout=case.seed).backward()
    sizes = [sum(shard_of(p).nbytes for p in model.parameters() if (p.dim() > 1) == matrix) for matrix in (True, False)]
    cost = case.cost(world.rank)
    found = [mesh.ledger.counts(), *sizes, flops.get_total_flops(), held]
    return found, [cost.counts(), cost.matrices, cost.vectors, cost.flops, cost.saved]


def single(case: Case) -> bool:
    """Of one long axis, longer than two: those with several find what it does."""
    return case.cuboid.ranks > 2 and case.cuboid.ranks in case.cuboid.sizes.values()


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=id_of(case), marks=[pytest.mark.slow] * single(case)) for case in CASES + FROZEN]
)
def test_step_cost_matches_every_measured_count(case: Case) -> None:
    size = case.cuboid.ranks
    for found, predicted in silently(ends(size), size, counted, case):
        assert found == predicted


def test_full_recomputation_without_prefetch_gathers_weights_twice() -> None:
    """Four blocks' twice, the norm's twice, both embeddings' once."""
    case = Case(LLAMA.replace(layers=4), Cuboid(2, 2, 1), 4, 13, recompute="full", schedule=OFF)
    ((found, predicted),) = silently([0], 4, counted, case)
    assert found[0]["x"]["all_gather"][0] == 12
    assert found == predicted


@pytest.mark.parametrize("case", [CASES[-1], CASES[-6], CASES[-7], CASES[-12]], ids=id_of)
def test_verify_counts_equal_formulas_on_every_rank(pool, case: Case) -> None:
    """Ranks that do send, all of them looked at."""
    report = pool(case.cuboid.ranks).run(verify, case)[0]
    assert report.traffic_predicted, report.traffic
    assert {name: b.predicted for name, b in report.balance.items() if b.predicted is not None} == {
        "bytes of matrices": True,
        "bytes of norms, biases": True,
        "FLOPs": True,
        "saved activations": True,
    }
    assert report.ok, report.errors


EVEN = ModelConfig("llama", layers=2, hidden=192, heads=24, kv_heads=12, vocab=480, context=48, ffn=384)


@pytest.mark.parametrize("shape", [(2, 2, 2), (4, 2, 1), (1, 4, 2), (2, 3, 2), (1, 2, 3), (4, 4, 2)])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_cuboid_parallel_balances_bytes_and_flops_evenly(shape: tuple[int, int, int], family: str) -> None:
    """By the formulas, which the tests above hold to what is counted."""
    config = EVEN if family == "llama" else EVEN.replace(family="gpt2", kv_heads=24, tied=True, bias=True)
    if config.kv_heads % (shape[1] * shape[2]):
        config = config.replace(kv_heads=24)
    case = Case(config, Cuboid(*shape), 8, 48, "fp32")
    whole = replace(case, cuboid=Cuboid()).cost(0)
    for cost in map(case.cost, range(case.cuboid.ranks)):
        assert (cost.matrices, cost.flops) == (whole.matrices / case.cuboid.ranks, whole.flops / case.cuboid.ranks)
        assert cost.saved == pytest.approx(whole.saved / case.cuboid.ranks, rel=0.02)


AT_REST = ("parameters", "gradients", "saved activations")


def peaks(world: World, case: Case) -> tuple[int, dict[str, int]]:
    """Bytes at rest, and by kind at the peak of a step."""
    found = measure(case, CuboidParallel(case.config, Mesh(case.cuboid, world.rank)))
    return found.quantities[4], found.memory.at_peak()


def test_cuboid_parallel_transient_memory_is_depth_independent() -> None:
    """With everything regathered and recomputed: at rest within a tenth of an even share, and what is alive for a
    moment does not grow with depth."""
    passing = []
    for layers in (4, 7):
        case = Case(EVEN.replace(layers=layers), Cuboid(2, 2, 2), 8, 48, "fp32", recompute="full")
        whole, ranks = replace(case, cuboid=Cuboid()).cost(0), case.cuboid.ranks
        found = silently(ends(ranks), ranks, peaks, case)
        share = (4 * (whole.matrices + whole.vectors) + whole.saved) / ranks
        assert max(at_rest for at_rest, _ in found) <= 1.1 * share
        passing.append({kind: size for kind, size in found[0][1].items() if kind not in AT_REST})
    assert sum(passing[0].values()) == pytest.approx(sum(passing[1].values()), rel=0.01)
    assert {"step.weights", "comm.collectives", "layers.product"} <= passing[0].keys()
