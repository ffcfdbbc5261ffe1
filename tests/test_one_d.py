"""Megatron's 1-D parallel, plain and with sequence parallelism: the step on one device, and its cost by formula."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from sharded import Case, batch_of, compare, compare_own_loss, relative, wrong
from silent import ends, silently

from cuboid.baselines.one_d import OneD
from cuboid.baselines.serial import Serial
from cuboid.layers.loss import Loss
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import shard_of
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.generate import Sampling, generate
from cuboid.model.module import declared
from cuboid.model.parallel import Parallel
from cuboid.model.transformer import Transformer
from cuboid.plan.cost.one_d import one_d_cost
from cuboid.plan.measure import count_flops
from cuboid.run.launch import Pool, World

Pools = Callable[[int], Pool]
VARIANTS = pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
FEW_LOGITS = 40  # at a time, so that the head goes by chunks
SMOOTH = Loss(label_smoothing=0.1, z_loss=0.01)

GPT2 = ModelConfig("gpt2", layers=2, hidden=24, heads=12, vocab=37, context=15, ffn=36, dropout=0.2)
LLAMA = ModelConfig("llama", layers=2, hidden=24, heads=12, kv_heads=6, vocab=5, ffn=48)  # 6 ranks: one has no class
CASES = [
    Case(GPT2, Cuboid(1, 1, 1), 2, 13, dropout=7),
    Case(LLAMA, Cuboid(1, 1, 1), 3, 13, loss=SMOOTH),
    Case(GPT2, Cuboid(1, 2, 1), 3, 13, loss=SMOOTH, dropout=7),
    Case(GPT2, Cuboid(1, 2, 1), 2, 12, dropout=7, recompute="selective"),
    Case(GPT2.replace(tied=False, bias=False), Cuboid(1, 2, 1), 2, 13, dropout=7, recompute="full"),
    Case(LLAMA, Cuboid(1, 2, 1), 3, 12, loss=SMOOTH),
    Case(LLAMA, Cuboid(1, 2, 1), 1, 1),
    Case(GPT2, Cuboid(1, 3, 1), 2, 13, dropout=7),
    Case(LLAMA, Cuboid(1, 3, 1), 2, 13, loss=SMOOTH, recompute="full"),
    Case(GPT2, Cuboid(1, 4, 1), 3, 13, loss=SMOOTH, dropout=7),
    Case(LLAMA.replace(kv_heads=4), Cuboid(1, 4, 1), 2, 13),
    Case(GPT2, Cuboid(1, 2, 1, replicas=2), 6, 13, loss=SMOOTH, dropout=7),
    Case(
        LLAMA.replace(tied=True, bias=True),
        Cuboid(1, 2, 1, 2, ("y", "x", "replicas", "z")),
        4,
        13,
        recompute="selective",
    ),
    Case(GPT2, Cuboid(1, 6, 1), 2, 13, loss=SMOOTH, dropout=7),
    Case(LLAMA, Cuboid(1, 6, 1), 2, 13, loss=SMOOTH),
]


def name_of(case: Case) -> str:
    return f"{case.cuboid}-{case.config.family}-b{case.batch}-s{case.seq}-{case.recompute}".replace(" × ", "-")


def plain(case: Case, mesh: Mesh) -> Parallel:
    return OneD(case.config, mesh)


def in_sequence(case: Case, mesh: Mesh) -> Parallel:
    return OneD(case.config, mesh, sequence=True, head_elements=FEW_LOGITS)


#: Each case with one of the two, in turn; in the slow tests with both.
BOTH = [
    pytest.param(case, sequence, id=f"{name_of(case)}-{name}", marks=[pytest.mark.slow] * ((i % 2 == 1) != sequence))
    for i, case in enumerate(CASES)
    for sequence, name in ((False, "plain"), (True, "sequence"))
]


@pytest.mark.parametrize(("case", "sequence"), BOTH)
def test_one_d_step_matches_one_device(case: Case, sequence: bool, pool: Pools) -> None:
    assert not wrong(pool(case.cuboid.ranks).run(compare, case, in_sequence if sequence else plain)[0])


def step(parallel: Parallel, case: Case, dtype: torch.dtype = torch.float32) -> Transformer:
    model = Transformer(parallel, case.seed, dtype, case.recompute)
    place, (tokens, targets) = parallel.place(case.batch, case.seq), batch_of(case)
    mine = place.take(tokens, 0), place.take(targets, case.loss.ignore_index)
    model(*mine, place, case.loss, case.dropout).backward()
    return model


class Counts(NamedTuple):
    traffic: dict[str, dict[str, tuple[int, int]]]
    flops: int
    matrices: int
    vectors: int


def counted(world: World, case: Case, sequence: bool) -> tuple[Counts, Counts]:
    """What a step does, and what the formulas say. 8 bytes at rest, 2 in products, 4 in statistics: mistaking one for
    another shows."""
    mesh = Mesh(case.cuboid, world.rank)
    with count_flops() as flops:
        model = step(OneD(case.config, mesh, sequence, torch.bfloat16, FEW_LOGITS), case, torch.float64)
    mesh.close()
    matrices = sum(shard_of(parameter).nbytes for parameter in model.parameters() if parameter.dim() > 1)
    vectors = sum(shard_of(parameter).nbytes for parameter in model.parameters() if parameter.dim() == 1)
    found = Counts(mesh.ledger.counts(), flops.get_total_flops(), matrices, vectors)
    sizes = case.batch, case.seq, sequence, 8, 2, case.recompute, FEW_LOGITS
    cost = one_d_cost(case.config, case.cuboid, mesh.coordinates, *sizes)
    return found, Counts(cost.counts(), cost.flops, cost.matrices, cost.vectors)


@pytest.mark.parametrize(("case", "sequence"), BOTH)
def test_one_d_step_counts_match_cost_formulas(case: Case, sequence: bool) -> None:
    size = case.cuboid.ranks
    for found, predicted in silently(ends(size), size, counted, case, sequence):
        assert found == predicted


def bytes_of_a_layer(y: int, sequence: bool) -> dict[str, int]:
    """What a second layer adds."""
    at = Cuboid(1, y, 1).coordinates(0)
    one, two = (one_d_cost(LLAMA.replace(layers=n), Cuboid(1, y, 1), at, 2, 12, sequence).counts() for n in (1, 2))
    return {kind: two["y"][kind][1] - one["y"][kind][1] for kind in two["y"]}


def test_one_d_cost_layer_traffic_matches_megatron() -> None:
    """Four all-reduces of the residual stream; or as many bytes in four all-gathers and four reduce-scatters, and the
    norms' gradients."""
    p, stream, norms = 6, 2 * 12 * LLAMA.hidden * 4, 2 * LLAMA.hidden * 4
    part = stream * (p - 1) // p
    assert bytes_of_a_layer(p, False) == {"all_reduce": 4 * 2 * part, "all_gather": 0}
    small = 2 * norms * (p - 1) // p
    assert bytes_of_a_layer(p, True) == {"all_gather": 4 * part, "reduce_scatter": 4 * part, "all_reduce": small}


def rounding(world: World, case: Case, sequence: bool) -> dict[str, float]:
    """How far this rank's gradients, of products in bf16, are from one device's, relative to its full gradient."""
    mesh = Mesh(case.cuboid, world.rank)
    mine = step(OneD(case.config, mesh, sequence, torch.bfloat16, FEW_LOGITS), case)
    whole = step(Serial(case.config), case)
    mesh.close()
    errors, norm = {}, whole.gradient_norm().item()
    for name, parameter, (spec, *_) in declared(mine):
        gradient, wanted = parameter.grad, whole.get_parameter(name).grad
        assert gradient is not None
        assert wanted is not None
        errors[name] = relative(shard_of(gradient), spec.take(wanted, mesh.cuboid, mesh.coordinates), least=norm)
    return errors


@VARIANTS
def test_one_d_bf16_matmul_stays_within_rounding(sequence: bool, pool: Pools) -> None:
    case = Case(GPT2.replace(init_std=0.2), Cuboid(1, 2, 1), 3, 13, loss=SMOOTH, dropout=7)
    for errors in pool(2).run(rounding, case, sequence):
        assert not wrong(errors, 0.015)
        assert wrong(errors, 1e-5)  # bf16 they are


def evaluated(world: World, case: Case, sequence: bool) -> tuple[float, float, set[str]]:
    """The loss of a batch without gradients, and with; the collectives of the former."""
    mesh = Mesh(case.cuboid, world.rank)
    parallel = OneD(case.config, mesh, sequence)
    model = Transformer(parallel, case.seed, torch.float64).eval()
    place, (tokens, targets) = parallel.place(case.batch, case.seq), batch_of(case)
    mine = place.take(tokens, 0), place.take(targets, case.loss.ignore_index)
    with torch.no_grad():
        without = model(*mine, place, case.loss).item()
    kinds = set(mesh.ledger.counts()["y"])
    value = model(*mine, place, case.loss).item()
    mesh.close()
    return without, value, kinds


@VARIANTS
def test_one_d_evaluation_loss_matches_training_loss(sequence: bool, pool: Pools) -> None:
    for without, value, kinds in pool(2).run(evaluated, Case(GPT2, Cuboid(1, 2, 1), 2, 13), sequence):
        assert without == value
        assert kinds == {"all_gather", "reduce_scatter" if sequence else "all_reduce"}


@VARIANTS
def test_one_d_own_loss_matches_one_device(sequence: bool, pool: Pools) -> None:
    case = Case(GPT2, Cuboid(1, 2, 1, replicas=2), 4, 12)
    for errors in pool(4).run(compare_own_loss, case, in_sequence if sequence else plain):
        assert not wrong(errors)


def tokens_of(world: World, config: ModelConfig, cuboid: Cuboid, sequence: bool) -> tuple[list[int], list[int]]:
    mesh = Mesh(cuboid, world.rank)
    on_many, on_one = (Transformer(p, dtype=torch.float64) for p in (OneD(config, mesh, sequence), Serial(config)))
    found, wanted = (list(generate(model.eval(), [3, 1, 4, 1, 5], 6, Sampling(0))) for model in (on_many, on_one))
    mesh.close()
    return found, wanted


@VARIANTS
@pytest.mark.parametrize("config", [GPT2.replace(tied=False), LLAMA.replace(vocab=37)], ids=["gpt2", "llama"])
def test_one_d_generate_with_cache_matches_one_device(config: ModelConfig, sequence: bool, pool: Pools) -> None:
    cuboid = Cuboid(1, 2, 1, replicas=2)
    for found, wanted in pool(4).run(tokens_of, config.replace(init_std=0.3), cuboid, sequence):
        assert found == wanted
        assert len(set(wanted)) > 2  # not one token over and over


def refused(world: World, config: ModelConfig, cuboid: Cuboid) -> tuple[str, dict[str, Any]]:
    mesh = Mesh(cuboid, world.rank)
    try:
        OneD(config, mesh).place(batch=2, seq=4)
    except ValueError as error:
        return str(error), mesh.ledger.counts()
    finally:
        mesh.close()
    return "not refused", {}


@pytest.mark.parametrize(
    ("config", "cuboid", "text"),
    [
        (GPT2.replace(heads=3, kv_heads=3), Cuboid(1, 4, 1), "heads=3 cannot be split into y·z=4; use heads 4"),
        (
            LLAMA,
            Cuboid(1, 4, 1),
            "kv_heads=6 cannot be split into y=4; use kv_heads 4 or 12, or a cuboid with y one of",
        ),
        (
            GPT2.replace(ffn=34),
            Cuboid(1, 4, 1),
            "ffn=34 cannot be split into y=4; use ffn 36, or a cuboid with y one of",
        ),
        (
            GPT2,
            Cuboid(2, 2, 1),
            "cuboid 2,2,1 has x=2 and z=1, but 1-D parallelism splits over y only; use x=1, z=1 and",
        ),
        (GPT2, Cuboid(1, 1, 4), "cuboid 1,1,4 has x=1 and z=4"),
        (GPT2, Cuboid(1, 1, 1, replicas=4), "batch=2 cannot be split over replicas=4"),
    ],
    ids=["heads", "kv_heads", "ffn", "x", "z", "batch"],
)
def test_one_d_rejects_unsupported_sizes(config: ModelConfig, cuboid: Cuboid, text: str, pool: Pools) -> None:
    for message, traffic in pool(4).run(refused, config, cuboid):
        assert message.startswith(text)
        assert not traffic
    with pytest.raises(ValueError) as refusal:
        one_d_cost(config, cuboid, cuboid.coordinates(0), 2, 4)
    assert str(refusal.value).startswith(text)
