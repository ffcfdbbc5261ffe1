"""Any small cuboid, any sizes, any schedule and options: the step is the step on one device, and all ranks launch the
same collectives in the same order."""

import re
from collections.abc import Callable

import pytest
from counts import count
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import differences
from sharded import Case, compare, wrong
from silent import silently
from tiny import Cuboid as Command

from cuboid.layers.loss import Loss
from cuboid.mesh.cuboid import AXES, Cuboid, factorisations
from cuboid.model.config import ModelConfig, RopeScaling
from cuboid.model.cuboid import Policy
from cuboid.model.freeze import parameter_names
from cuboid.run.launch import Pool
from cuboid.step.schedule import PIPELINES, Schedule


@st.composite
def cuboids(draw: st.DrawFn, most: int) -> Cuboid:
    ranks = draw(st.integers(1, most))
    data = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    pipe = draw(st.sampled_from([n for n in (1, 2, 3) if ranks // data % n == 0]))
    grid = draw(st.sampled_from(list(factorisations(ranks // data // pipe))))
    return Cuboid(grid.x, grid.y, grid.z, data, draw(st.permutations(AXES).map(tuple)), pipe=pipe)


@st.composite
def configs(draw: st.DrawFn, cuboid: Cuboid, seq: int, stages: int) -> ModelConfig:
    heads = cuboid.y * cuboid.z * draw(st.integers(1, 3))
    return ModelConfig(
        family=draw(st.sampled_from(("gpt2", "llama"))),
        layers=stages - 1 + draw(st.integers(1, 2)),
        hidden=cuboid.z * draw(st.integers(2, 7)),
        heads=heads,
        kv_heads=draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])),
        head_dim=2 * draw(st.integers(1, 3)),
        vocab=draw(st.integers(2, 30)),
        context=seq + draw(st.integers(0, 3)),
        ffn=draw(st.integers(1, 30)),
        tied=draw(st.booleans()),
        bias=draw(st.booleans()),
        qkv_bias=draw(st.sampled_from((None, False, True))),
        qk_norm=draw(st.booleans()),
        dropout=draw(st.sampled_from((0.0, 0.3))),
        rope_scaling=draw(st.sampled_from((None, RopeScaling(original_context=4)))),
    )


@st.composite
def orders(draw: st.DrawFn, micro_batches: int) -> str:
    """Any order of forwards, backwards and, perhaps, weight gradients, up to three beside each other."""
    kinds, moves = draw(st.sampled_from(("FB", "FBW"))), list[str]()
    done = [0] * micro_batches
    while ready := [i for i, n in enumerate(done) if n < len(kinds)]:
        chosen = draw(st.lists(st.sampled_from(ready), min_size=1, max_size=3, unique=True))
        moves.append("+".join(f"{kinds[done[i]]}{i}" for i in chosen))
        for i in chosen:
            done[i] += 1
    return " ".join(moves)


#: Single parameters, one of those that are multiplied together, whole stages.
FROZEN = (r"\.q\.", "mlp.up.weight", "bias", "norm", "embed", r"blocks\.0", r"embed|blocks\.0", "blocks", "head")


@st.composite
def frozen(draw: st.DrawFn, config: ModelConfig) -> str:
    """A pattern that leaves some parameters trained; often none."""
    names = parameter_names(config)
    found = {each: sum(re.search(each, name) is not None for name in names) for each in FROZEN}
    fit = [each for each, count in found.items() if 0 < count < len(names)]
    return draw(st.one_of(st.just(""), st.sampled_from(fit)))


@st.composite
def cases(draw: st.DrawFn, most: int) -> Case:
    """Of at most so many ranks."""
    cuboid, seq = draw(cuboids(most)), draw(st.integers(1, 9))
    pipeline, stages, micro_batches = draw(st.sampled_from(PIPELINES)), 1, draw(st.integers(1, 3))
    if cuboid.pipe > 1 and pipeline != "1f1b":
        stages = 2 if pipeline == "interleaved" else draw(st.integers(1, 2))
    elif cuboid.pipe == 1:
        pipeline = "1f1b"
    keep = st.sampled_from(("regather", "retain"))
    config = draw(configs(cuboid, seq, cuboid.pipe * stages))
    return Case(
        config,
        cuboid,
        batch=cuboid.replicas * draw(st.integers(1, 6)),
        seq=seq,
        policy=Policy(draw(keep), draw(keep), draw(st.sampled_from((1, 50, 1 << 20)))),
        loss=Loss(label_smoothing=draw(st.sampled_from((0.0, 0.2))), z_loss=draw(st.sampled_from((0.0, 0.1)))),
        dropout=draw(st.sampled_from((None, 3))),
        recompute=draw(st.sampled_from(("none", "selective", "full"))),
        seed=draw(st.integers(0, 99)),
        schedule=Schedule(
            prefetch=draw(st.booleans()),
            sub_batches=draw(st.integers(1, 4)),
            chunks=draw(st.integers(1, 3)),
            beside=draw(st.booleans()),
            pipeline=pipeline,
            stages=stages,
        ),
        micro_batches=micro_batches,
        order=draw(st.one_of(st.just(""), orders(micro_batches))) if cuboid.pipe == 1 else "",
        freeze=draw(frozen(config)),
    )


@settings(max_examples=count("random cuboids and models"))
@given(case=cases(most=6))
def test_cuboid_parallel_random_step_matches_one_device(case: Case, pool: Callable[[int], Pool]) -> None:
    assert not wrong(pool(case.cuboid.ranks).run(compare, case)[0])


@settings(max_examples=count("random launch orders"))
@given(case=cases(most=8))
def test_cuboid_parallel_random_step_launches_alike_on_all_ranks(case: Case) -> None:
    assert silently([0], 1, differences, [case]) == [[]]


# Ranks whose queries need different numbers of key heads, and sequences that x splits too

UNEVEN = Case(
    ModelConfig("llama", layers=3, hidden=96, heads=6, kv_heads=2, vocab=64, context=12),
    Cuboid(2, 3, 1),
    batch=3,
    seq=12,
    schedule=Schedule(sub_batches=3),
)


def test_cuboid_parallel_launches_alike_where_ranks_pick_unequal_key_heads() -> None:
    assert silently([0], 1, differences, [UNEVEN]) == [[]]


#: The last ranks of y own no word of the vocabulary.
FEW_WORDS = Case(
    ModelConfig("gpt2", layers=2, hidden=96, heads=8, vocab=5, context=12, tied=False),
    Cuboid(2, 4, 1),
    batch=4,
    seq=12,
    schedule=Schedule(sub_batches=2),
    micro_batches=2,
)


def test_cuboid_parallel_launches_alike_where_ranks_own_no_words() -> None:
    assert silently([0], 1, differences, [FEW_WORDS]) == [[]]


@pytest.mark.slow
def test_verify_passes_where_ranks_pick_unequal_key_heads(cuboid: Command) -> None:
    options = "--family llama --cuboid 2,3,1 --heads 6 --kv-heads 2 --hidden 96 --seq 12 --vocab 64 --batch 3"
    said = cuboid("verify", *options.split(), "--sub-batches", 3)
    assert said.code == 0, said.out
