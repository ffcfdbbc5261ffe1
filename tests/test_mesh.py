"""Ranks and coordinates, every cuboid of a count, and the groups a rank is in."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from cuboid.mesh.cuboid import AXES, Cuboid, factorisations
from cuboid.mesh.mesh import Mesh
from cuboid.run.launch import Pool, World

sizes = st.integers(1, 5)
cuboids = st.builds(Cuboid, sizes, sizes, sizes, sizes, st.permutations(AXES).map(tuple), pipe=st.integers(1, 3))


@given(cuboids)
def test_cuboid_rank_and_coordinates_are_inverse(cuboid: Cuboid) -> None:
    found = [cuboid.coordinates(rank) for rank in range(cuboid.ranks)]
    assert [cuboid.rank(coordinates) for coordinates in found] == list(range(cuboid.ranks))
    assert all(0 <= coordinates[axis] < cuboid.sizes[axis] for coordinates in found for axis in AXES)


@given(cuboids, st.permutations(AXES).map(tuple))
def test_cuboid_array_has_every_rank_at_its_coordinates(cuboid: Cuboid, axes: tuple[str, ...]) -> None:
    array = cuboid.array(axes)
    assert array.size == cuboid.ranks
    for rank in range(cuboid.ranks):
        coordinates = cuboid.coordinates(rank)
        assert array[tuple(coordinates[axis] for axis in axes)] == rank


def test_cuboid_last_axis_of_order_has_adjacent_ranks() -> None:
    cuboid = Cuboid(2, 3, 2, 2, order=("z", "y", "replicas", "x"))
    assert cuboid.order == ("pipe", "z", "y", "replicas", "x")  # as orders were written before there was a pipe
    assert cuboid.coordinates(1) == {"pipe": 0, "replicas": 0, "x": 1, "y": 0, "z": 0}
    assert cuboid.coordinates(2) == {"pipe": 0, "replicas": 1, "x": 0, "y": 0, "z": 0}


@pytest.mark.parametrize(("ranks", "count"), [(1, 1), (2, 3), (4, 6), (6, 9), (8, 10), (12, 18), (64, 28)])
def test_factorisations_enumerates_every_cuboid_once(ranks: int, count: int) -> None:
    found = list(factorisations(ranks))
    assert len(set(found)) == len(found) == count
    assert all(cuboid.ranks == ranks for cuboid in found)


def test_cuboid_counts_ranks_and_formats_as_text() -> None:
    cuboid = Cuboid(2, 3, 4, replicas=5)
    assert (cuboid.block, cuboid.ranks) == (24, 120)
    assert str(cuboid) == "2,3,4 replicas=5"
    assert str(Cuboid(2, 3, 4)) == "2,3,4"
    assert str(Cuboid(2, 3, 4, pipe=2)) == "2,3,4 pipe=2"
    assert Cuboid(2, 3, 4, replicas=5, pipe=2).ranks == 240


@pytest.mark.parametrize("text", ["2,3,4", " 2, 3 ,4", "2x3x4", "2×3×4"])
def test_cuboid_parse_accepts_commas_and_crosses(text: str) -> None:
    assert Cuboid.parse(text) == Cuboid(2, 3, 4)


def test_cuboid_parse_reads_data_and_order() -> None:
    assert Cuboid.parse("2,1,1", 3, "z, y, x, replicas") == Cuboid(2, 1, 1, 3, ("z", "y", "x", "replicas"))
    assert Cuboid.parse("2,1,1", pipe=3) == Cuboid(2, pipe=3)


def groups(world: World, cuboid: Cuboid) -> dict[str, tuple[int, int, list[int]]]:
    mesh = Mesh(cuboid, world.rank)
    axes = {name: getattr(mesh, name) for name in AXES} | {"neighbours": mesh.neighbours_on_x(2)}
    found = {
        name: (axis.size, axis.index, dist.get_process_group_ranks(axis.group) if axis.group else [world.rank])
        for name, axis in axes.items()
    }
    mesh.close()
    return found


def test_mesh_groups_are_lines_of_cuboid(pool: Callable[[int], Pool]) -> None:
    cuboid = Cuboid(4, 1, 3, order=("z", "x", "y", "replicas"))
    for rank, found in enumerate(pool(12).run(groups, cuboid)):
        mine = cuboid.coordinates(rank)
        for axis in AXES:
            line = [cuboid.rank({**mine, axis: i}) for i in range(cuboid.sizes[axis])]
            assert found[axis] == (cuboid.sizes[axis], mine[axis], line)
        first = mine["x"] // 2 * 2
        neighbours = [cuboid.rank({**mine, "x": i}) for i in (first, first + 1)]
        assert found["neighbours"] == (2, mine["x"] % 2, neighbours)


def test_mesh_alone_needs_no_process_group() -> None:
    mesh = Mesh(Cuboid(), alone=True)
    assert mesh.device == torch.device("cpu")
    assert all(getattr(mesh, axis).group is None for axis in AXES)


def loops(world: World, shape: Cuboid) -> int:
    """How many threads of gloo's look for messages because of a mesh's groups."""

    def found() -> int:
        names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
        return names.count("gloo_tcp_loop")

    dist.barrier()  # the thread of the world's own group has its name once it has sent something
    before, mesh = found(), Mesh(shape, world.rank, per_host=1, share_device=True)
    gathered = [dist.get_world_size(axis.group) for axis in (mesh.x, mesh.y) if axis.group is not None]
    assert gathered == [2, 2]
    more = found() - before
    dist.barrier()  # who leaves closes connections that others may not have made yet
    mesh.close()
    return more


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted as Linux shows them")
def test_mesh_groups_share_one_gloo_device_if_asked(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(loops, Cuboid(2, 2, 1)) == [1] * 4
