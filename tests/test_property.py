"""Any small cuboid, any sizes, any options: the step is the step on one device."""

from collections.abc import Callable

from counts import count
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded import Case, compare, wrong

from cuboid.layers.loss import Loss
from cuboid.mesh.cuboid import AXES, Cuboid, factorisations
from cuboid.model.config import ModelConfig, RopeScaling
from cuboid.model.cuboid import Policy
from cuboid.run.launch import Pool


@st.composite
def cuboids(draw: st.DrawFn) -> Cuboid:
    ranks = draw(st.integers(1, 6))
    data = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    grid = draw(st.sampled_from(list(factorisations(ranks // data))))
    return Cuboid(grid.x, grid.y, grid.z, data, draw(st.permutations(AXES).map(tuple)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    cuboid = draw(cuboids())
    heads = cuboid.y * cuboid.z * draw(st.integers(1, 3))
    seq = draw(st.integers(1, 9))
    config = ModelConfig(
        family=draw(st.sampled_from(("gpt2", "llama"))),
        layers=draw(st.integers(1, 2)),
        hidden=cuboid.z * draw(st.integers(2, 7)),
        heads=heads,
        kv_heads=draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])),
        head_dim=2 * draw(st.integers(1, 3)),
        vocab=draw(st.integers(2, 30)),
        context=seq + draw(st.integers(0, 3)),
        ffn=draw(st.integers(1, 30)),
        tied=draw(st.booleans()),
        bias=draw(st.booleans()),
        dropout=draw(st.sampled_from((0.0, 0.3))),
        rope_scaling=draw(st.sampled_from((None, RopeScaling(original_context=4)))),
    )
    keep = st.sampled_from(("regather", "retain"))
    return Case(
        config,
        cuboid,
        batch=cuboid.data * draw(st.integers(1, 5)),
        seq=seq,
        policy=Policy(draw(keep), draw(keep), draw(st.sampled_from((1, 50, 1 << 20)))),
        loss=Loss(label_smoothing=draw(st.sampled_from((0.0, 0.2))), z_loss=draw(st.sampled_from((0.0, 0.1)))),
        dropout=draw(st.sampled_from((None, 3))),
        recompute=draw(st.sampled_from(("none", "selective", "full"))),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=count("random cuboids and models"))
@given(case=cases())
def test_cuboid_parallel_random_step_matches_one_device(case: Case, pool: Callable[[int], Pool]) -> None:
    assert not wrong(pool(case.cuboid.ranks).run(compare, case)[0])
