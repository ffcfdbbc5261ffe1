"""Random numbers by global index: a shard equals the slice of the unsharded tensor, bit for bit, for any split."""

from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st

from cuboid.layers.randomness import Keys, dropout, key_of, normal
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import Spec
from cuboid.run.launch import Pool, World

Index = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@st.composite
def slices(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    ranges = []
    for n in shape:
        a, b = sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))
        ranges.append((a, b))
    return shape, tuple(ranges)


def whole_of(key: int, shape: tuple[int, ...], std: float) -> torch.Tensor:
    return normal(key, shape, tuple((0, n) for n in shape), std)


@given(slices(), st.integers(0, 10))
def test_normal_slice_equals_slice_of_whole(
    cut: tuple[tuple[int, ...], tuple[tuple[int, int], ...]], seed: int
) -> None:
    shape, ranges = cut
    key = key_of(seed, "w")
    whole = whole_of(key, shape, 0.3)
    assert torch.equal(normal(key, shape, ranges, 0.3), whole[tuple(slice(*r) for r in ranges)])


def test_normal_slice_longer_than_chunk_matches_whole() -> None:
    shape = (3000, 700)
    whole = whole_of(5, shape, 1.0)
    assert torch.equal(normal(5, shape, ((100, 2900), (1, 699)), 1.0), whole[100:2900, 1:699])


def test_normal_values_are_gaussian_and_independent() -> None:
    """A million values: mean, spread, tails and the independence of neighbours, rows and keys."""
    a, b = whole_of(key_of(0, "a"), (1000, 1000), 0.5), whole_of(key_of(0, "b"), (1000, 1000), 0.5)
    assert abs(a.mean()) < 0.002
    assert abs(a.std() / 0.5 - 1) < 0.003
    assert abs((a.abs() > 1.0).double().mean() - 0.0455) < 0.001  # beyond two standard deviations
    for other in (b, a.roll(1, 0), a.roll(1, 1), a.T):
        assert abs((a * other).mean()) < 0.002


def test_key_of_differs_by_seed_and_name() -> None:
    assert len({key_of(seed, name) for seed in range(10) for name in ("a", "b", "ab")}) == 30


def test_keys_are_written_where_they_lie() -> None:
    keys = Keys(1, torch.device("cpu"))
    a = keys["a"]
    keys.write(2)
    assert (keys["a"] is a, int(a), int(keys["b"])) == (True, key_of(2, "a"), key_of(2, "b"))


def index_of(spec: Spec, cuboid: Cuboid, rank: int) -> Index:
    s, b, d = (torch.arange(*r) for r in spec.ranges(cuboid, cuboid.coordinates(rank)))
    return s, b, d


SHAPE = (12, 7, 30)
WHOLE = (torch.arange(12), torch.arange(7), torch.arange(30))


def test_dropout_mask_is_same_on_any_sharding() -> None:
    x = torch.randn(SHAPE, dtype=torch.float64)
    whole = dropout(x, 0.3, key=9, index=WHOLE)
    spec = Spec(SHAPE, (("y",), ("x",), ("z",)))
    for cuboid in (Cuboid(2, 3, 2), Cuboid(7, 1, 4), Cuboid(1, 5, 1)):
        pieces = [
            dropout(spec.take(x, cuboid, cuboid.coordinates(rank)), 0.3, 9, index_of(spec, cuboid, rank))
            for rank in range(cuboid.ranks)
        ]
        assert torch.equal(spec.join(pieces, cuboid), whole)


def test_dropout_keeps_and_scales_expected_share() -> None:
    index = (torch.arange(100), torch.arange(20), torch.arange(200))
    x = torch.ones(100, 20, 200)
    for p in (0.1, 0.5, 0.9):
        y = dropout(x, p, key=3, index=index)
        kept = y != 0
        assert abs(kept.double().mean() - (1 - p)) < 0.003
        assert torch.allclose(y[kept], torch.tensor(1 / (1 - p)))
        rates = [kept.double().mean(dims) for dims in ((1, 2), (0, 2), (0, 1))]  # of positions, samples, features
        assert all((rate - (1 - p)).abs().max() < 0.06 for rate in rates)
    assert dropout(x, 0.0, 3, index) is x


def test_dropout_mask_differs_by_key_and_position() -> None:
    x = torch.ones(SHAPE)
    s, b, d = WHOLE
    masks = [dropout(x, 0.5, key, (s + far, b, d)) for key in (1, 2) for far in (0, 1 << 20)]
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert abs(((mask - 1) * (other - 1)).mean()) < 0.1


def backward(world: World) -> bool:
    x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    y = dropout(x, 0.3, 9, WHOLE)
    y.backward(torch.ones_like(y))
    return bool(x.grad is not None and torch.equal(x.grad * x, y))


def test_dropout_backward_uses_forward_mask(pool: Callable[[int], Pool]) -> None:
    assert pool(1).run(backward) == [True]
