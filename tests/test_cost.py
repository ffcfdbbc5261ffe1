"""The formulas against the ledger, the FLOP counter and autograd, on every rank; and an even share of everything."""

from itertools import cycle

import pytest

from cuboid.config import ModelConfig
from cuboid.loss import Loss
from cuboid.mesh import Cuboid, factorisations
from cuboid.parallel.cuboid import Policy
from cuboid.schedule import Schedule
from cuboid.verify import Case, verify

GPT2 = ModelConfig("gpt2", layers=2, hidden=24, heads=24, vocab=37, context=16, ffn=40, dropout=0.1)
LLAMA = ModelConfig("llama", layers=1, hidden=24, heads=24, kv_heads=4, vocab=41, context=16, ffn=36, head_dim=2)
QWEN2 = LLAMA.replace(qkv_bias=True)
QWEN3 = LLAMA.replace(qk_norm=True, head_dim=4)
PARTS = Schedule(parts=2)
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
    Case(GPT2, Cuboid(2, 3, 2), 12, 13, schedule=PARTS),
    Case(LLAMA, Cuboid(1, 2, 2), 4, 13, policy=Policy("retain"), recompute="full", schedule=PARTS),
    Case(LLAMA, Cuboid(4, 2, 1), 4, 16, recompute="selective", schedule=PARTS),
    Case(LLAMA.replace(kv_heads=24), Cuboid(2, 3, 2), 2, 24, schedule=Schedule(chunks=4)),
    Case(LLAMA, Cuboid(1, 2, 2), 1, 24, recompute="full", schedule=Schedule(chunks=3)),
    Case(GPT2, Cuboid(1, 3, 2), 4, 13, policy=Policy("retain"), schedule=Schedule(parts=4, chunks=2)),
    Case(LLAMA, Cuboid(2, 1, 2, data=2), 4, 13),
    Case(GPT2, Cuboid(1, 3, 1, data=2), 2, 13, recompute="selective"),
    Case(QWEN2, Cuboid(2, 3, 2), 4, 13),
    Case(QWEN3, Cuboid(2, 3, 2), 4, 13),
    Case(QWEN3, Cuboid(2, 1, 2, data=2), 4, 13, dtype="bf16", schedule=PARTS),
    Case(QWEN3, Cuboid(4, 2, 1), 2, 13, dtype="bf16", policy=Policy("retain")),
    Case(QWEN3.replace(kv_heads=2), Cuboid(4, 2, 1), 1, 16, recompute="none"),
    Case(QWEN3, Cuboid(1, 2, 2), 4, 13, recompute="selective", dtype="bf16"),
    Case(QWEN3, Cuboid(2, 2, 1), 4, 13, recompute="full"),
    Case(GPT2.replace(qk_norm=True), Cuboid(2, 1, 2), 1, 13),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.cuboid}-{c.config.family}-{c.batch}-{c.dtype}-{c.recompute}")
def test_every_count_is_the_formulas(pool, case: Case) -> None:
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


@pytest.mark.parametrize("shape", [(2, 2, 2), (4, 2, 1), (1, 4, 2), (2, 3, 2), (1, 2, 3)])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_rank_has_its_share_and_no_more(pool, shape: tuple[int, int, int], family: str) -> None:
    config = EVEN if family == "llama" else EVEN.replace(family="gpt2", kv_heads=24, tied=True, bias=True)
    if config.kv_heads % (shape[1] * shape[2]):
        config = config.replace(kv_heads=24)
    case = Case(config, Cuboid(*shape), 4, 48, "fp32")
    balance = pool(case.cuboid.ranks).run(verify, case)[0].balance
    for name in ("bytes of matrices", "FLOPs"):
        assert balance[name].largest == balance[name].mean == balance[name].share
    assert balance["saved activations"].largest == pytest.approx(balance["saved activations"].share, rel=0.02)


AT_REST = ("parameters", "gradients", "saved activations")


def test_at_rest_and_in_passing(pool) -> None:
    """With everything gathered and computed again: at rest within a tenth of an even share, and what is alive for a
    moment does not grow with depth."""
    passing = []
    for layers in (4, 7):
        case = Case(EVEN.replace(layers=layers), Cuboid(2, 2, 2), 8, 48, "fp32", recompute="full")
        reports = [pool(8).run(verify, case)[0] for _ in range(2)]
        for rest in (report.balance["all at rest"] for report in reports):
            assert rest.largest <= 1.1 * rest.share
        peaks = [{kind: size for kind, size in each.peak.items() if kind not in AT_REST} for each in reports]
        passing.append(min(peaks, key=lambda peak: sum(peak.values())))  # gloo may let go of a message late
    assert sum(passing[0].values()) == pytest.approx(sum(passing[1].values()), rel=0.01)
    assert {"weights", "comm", "product"} <= passing[0].keys()
