"""Cut, take, join: every element has its place, evenly or not; and DTensor agrees about which."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from cuboid.mesh.cuboid import AXES, Cuboid
from cuboid.mesh.layout import Spec, shard_range
from cuboid.mesh.mesh import Mesh
from cuboid.run.launch import Pool, World

sizes = st.integers(1, 3)
cuboids = st.builds(Cuboid, sizes, sizes, sizes, sizes, st.permutations(AXES).map(tuple), pipe=st.just(3))


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    axes, pipe = draw(st.permutations(AXES[1:])), draw(st.sampled_from(((0,), (1,), (0, 2))))
    ends = sorted(draw(st.lists(st.integers(0, len(axes)), min_size=len(shape) + 1, max_size=len(shape) + 1)))
    return Spec(shape, tuple(tuple(axes[a:b]) for a, b in pairwise(ends)), pipe=pipe)


def arange(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


@given(st.integers(1, 50), st.integers(1, 12))
def test_layout_split_matches_torch_chunk_plus_empty_shards(n: int, parts: int) -> None:
    found = [list(range(*shard_range(n, parts, index))) for index in range(parts)]
    chunks = [chunk.tolist() for chunk in torch.arange(n).chunk(parts)]
    assert found == chunks + [[]] * (parts - len(chunks))


@given(specs(), cuboids)
def test_spec_join_inverts_take(spec: Spec, cuboid: Cuboid) -> None:
    whole = arange(spec.shape)
    pieces = [spec.take(whole, cuboid, cuboid.coordinates(rank)) for rank in range(cuboid.ranks)]
    assert torch.equal(spec.join(pieces, cuboid), whole)
    for rank, piece in enumerate(pieces):
        assert tuple(piece.shape) == spec.local_shape(cuboid, cuboid.coordinates(rank))
    assert sum(piece.numel() for piece in pieces) == whole.numel() * spec.copies(cuboid)
    for holders in spec.holders(cuboid):
        assert len({spec.ranges(cuboid, cuboid.coordinates(rank)) for rank in holders}) == 1


@given(specs(), cuboids)
def test_spec_gathered_range_is_union_of_shards(spec: Spec, cuboid: Cuboid) -> None:
    """What a rank has once x no longer cuts is what the ranks along x have between them."""
    assume(all("x" not in axes[:-1] for axes in spec.splits))  # only the last split of a dim can be undone alone
    mine, whole = cuboid.coordinates(int(spec.holders(cuboid)[-1, -1])), arange(spec.shape)
    ranges = spec.ranges(cuboid, mine, gathered=("x",))
    along = {float(v) for x in range(cuboid.x) for v in spec.take(whole, cuboid, {**mine, "x": x}).flatten()}
    assert along == {float(v) for v in whole[tuple(slice(*r) for r in ranges)].flatten()}


def test_spec_nested_split_follows_dtensor_rule() -> None:
    """10 rows split by y=2, then each block of 5 by x=3: DTensor's rule."""
    spec, cuboid = Spec((10,), (("y", "x"),)), Cuboid(3, 2, 1)
    found = [
        spec.ranges(cuboid, {"pipe": 0, "replicas": 0, "x": x, "y": y, "z": 0})[0] for y in range(2) for x in range(3)
    ]
    assert found == [(0, 2), (2, 4), (4, 5), (5, 7), (7, 9), (9, 10)]


def test_spec_join_rejects_disagreeing_replicas() -> None:
    spec, cuboid = Spec((2,), ((),)), Cuboid(2, 1, 1)
    with pytest.raises(ValueError, match="rank 1 disagrees"):
        spec.join([torch.zeros(2), torch.tensor([0.0, 1.0])], cuboid)


DTENSORS = [
    (Spec((7, 6), (("y", "x"), ("z",))), Cuboid(2, 2, 2)),  # into
    (Spec((10, 5), (("z", "x"), ("y",))), Cuboid(2, 2, 2)),  # out of
    (Spec((5,), (("z", "x"),)), Cuboid(2, 1, 4)),
    (Spec((3, 4), (("y", "x"), ("z",))), Cuboid(2, 2, 1, 2)),  # fewer rows than ranks, replicated
    (Spec((9, 7), (("y", "x"), ("z",))), Cuboid(2, 2, 2, order=("z", "replicas", "x", "y"))),
]


def as_dtensor(world: World, spec: Spec, cuboid: Cuboid) -> bool:
    mesh = Mesh(cuboid, world.rank)
    whole = arange(spec.shape)
    local = spec.take(whole, cuboid, mesh.coordinates)
    same = torch.equal(spec.dtensor(local, mesh).full_tensor(), whole)
    mesh.close()
    return same


@pytest.mark.parametrize(("spec", "cuboid"), DTENSORS)
def test_spec_dtensor_full_tensor_matches_whole(spec: Spec, cuboid: Cuboid, pool: Callable[[int], Pool]) -> None:
    assert all(pool(8).run(as_dtensor, spec, cuboid))
