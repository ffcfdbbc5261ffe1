"""Collectives against sums and concatenations done by hand, over every axis of a mixed cuboid."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cuboid.comm.axis import Axis
from cuboid.comm.collectives import (
    COLLECTIVES,
    TRANSPOSE,
    Kind,
    all_gather,
    all_reduce,
    gather_pieces,
    reduce_scatter,
)
from cuboid.comm.ledger import Span
from cuboid.comm.transport.gloo import SMALL, Gloo
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.mesh import Mesh
from cuboid.run.launch import Pool, World

MIXED = Cuboid(2, 3, 2, order=("y", "replicas", "x", "z"))
ROWS = 6  # 2 and 3 divide it


def data_of(rank: int, kind: str = "", width: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(rank + 100 * len(kind))
    return torch.randn(ROWS, width, generator=generator, dtype=torch.float64)


def line(mesh: Mesh, axis: str) -> list[int]:
    """The ranks that differ from this one on `axis` alone, in the order of the axis."""
    return [mesh.cuboid.rank({**mesh.coordinates, axis: i}) for i in range(mesh.cuboid.sizes[axis])]


def by_hand(kind: Kind, mesh: Mesh, axis: str, width: int = 4) -> Tensor:
    all_x, index = [data_of(rank, width=width) for rank in line(mesh, axis)], mesh.coordinates[axis]
    total = torch.stack(all_x).sum(0)
    return {
        "all_gather": torch.cat(all_x),
        "reduce_scatter": total.chunk(len(all_x))[index],
        "all_reduce": total,
        "copy": all_x[index],
    }[kind]


def on_mesh(world: World, function: Callable[..., Any], cuboid: Cuboid, *args: Any, per_host: int | None = None) -> Any:
    mesh = Mesh(cuboid, world.rank, per_host=per_host)
    try:
        return function(mesh, *args)
    finally:
        mesh.close()


def error_of(mesh: Mesh, kind: Kind, width: int = 4) -> float:
    x = data_of(mesh.rank, width=width)
    errors = [
        COLLECTIVES[kind](x, getattr(mesh, axis)).wait() - by_hand(kind, mesh, axis, width) for axis in ("x", "y", "z")
    ]
    return max(float(error.abs().max()) for error in errors)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_comm_matches_hand_computed_results(kind: Kind, pool: Callable[[int], Pool]) -> None:
    assert max(pool(12).run(on_mesh, error_of, MIXED, kind)) < 1e-15


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_comm_large_tensors_match_hand_computed_results(kind: Kind, pool: Callable[[int], Pool]) -> None:
    """They go another way."""
    width = 2 * Gloo.least_alone // (8 * ROWS)
    assert max(pool(12).run(on_mesh, error_of, MIXED, kind, width)) < 1e-15


def error_between_hosts(mesh: Mesh, kind: Kind, back: set[str]) -> float:
    ways = {axis.name: axis.transport for axis in (mesh.x, mesh.y, mesh.z) if isinstance(axis.transport, Gloo)}
    assert {name for name, transport in ways.items() if transport.back is not None} == back
    assert {name for name, transport in ways.items() if transport.aside is not None} == back & {"z"}
    return error_of(mesh, kind)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize(("per_host", "back"), [(1, {"x", "y", "z"}), (2, {"x", "y"}), (4, {"y"})])
def test_comm_between_hosts_matches_hand_computed_results(
    kind: Kind, per_host: int, back: set[str], pool: Callable[[int], Pool]
) -> None:
    function = partial(on_mesh, per_host=per_host)
    assert max(pool(12).run(function, error_between_hosts, MIXED, kind, back)) < 1e-15


def either_first(mesh: Mesh) -> float:
    """Two ranks launch a small and a large message, one the small one first, the other the large one."""
    both = [torch.ones(4), torch.ones(SMALL)]
    flights = [all_gather(x, mesh.z) for x in (both if mesh.z.index == 0 else reversed(both))]
    return sum(float(flight.wait().sum()) for flight in flights)


def test_comm_small_and_large_messages_launch_in_any_order(pool: Callable[[int], Pool]) -> None:
    """Over one connection each would be taken for the other."""
    assert pool(2).run(partial(on_mesh, per_host=1), either_first, Cuboid(1, 1, 2)) == [2.0 * (SMALL + 4)] * 2


def inner_products(mesh: Mesh, kind: Kind) -> list[tuple[float, float]]:
    """⟨A x, y⟩ and ⟨x, Aᵀ y⟩ over each axis. A value that is the same on every rank of the axis counts once."""
    found = []
    for axis in (mesh.x, mesh.y, mesh.z):
        x = data_of(line(mesh, axis.name)[0] if kind == "copy" else mesh.rank)
        Ax = COLLECTIVES[kind](x, axis).wait()
        y = data_of(line(mesh, axis.name)[0] if kind == "all_reduce" else mesh.rank, kind).repeat(axis.size, 1)
        y = y[: len(Ax)]
        Aty = COLLECTIVES[TRANSPOSE[kind]](y, axis).wait()
        left = (Ax * y).sum() / (axis.size if kind == "all_reduce" else 1)
        right = (x * Aty).sum() / (axis.size if kind == "copy" else 1)
        total = all_reduce(torch.stack((left, right)), mesh.world).wait()
        found.append((total[0].item(), total[1].item()))
    return found


@pytest.mark.parametrize("kind", TRANSPOSE)
def test_comm_backward_is_transpose(kind: Kind, pool: Callable[[int], Pool]) -> None:
    for left, right in pool(12).run(on_mesh, inner_products, MIXED, kind)[0]:
        assert left == pytest.approx(right, rel=1e-12)


def sum_of_small(mesh: Mesh) -> tuple[float, float]:
    """256 + 1 + 1 in bf16, where 256 + 1 is 256; and 256 + 1 asked for in fp32."""
    y, x = mesh.y, mesh.x
    of_three = torch.full((3,), 256.0 if y.index == 0 else 1.0, dtype=torch.bfloat16)
    of_two = torch.full((2,), 256.0 if x.index == 0 else 1.0, dtype=torch.bfloat16)
    three, two = reduce_scatter(of_three, y), reduce_scatter(of_two, x, dtype=torch.float32)
    return three.wait().item(), two.wait().item()


def test_reduce_scatter_sums_low_precision_in_fp32(pool: Callable[[int], Pool]) -> None:
    assert set(pool(12).run(on_mesh, sum_of_small, MIXED)) == {(258.0, 257.0)}


def traffic(mesh: Mesh) -> tuple[dict[str, Any], list[Span]]:
    spans: list[Span] = []
    mesh.ledger.spans = spans
    fp32, bf16 = torch.ones(6, 5), torch.ones(6, 5, dtype=torch.bfloat16)
    flights = [
        all_gather(fp32, mesh.y),
        all_gather(bf16, mesh.y),
        reduce_scatter(fp32, mesh.y),
        all_gather(fp32, mesh.x),
        all_reduce(fp32, mesh.z),
    ]
    for flight in flights:
        flight.wait()
    while not all(span.landed for span in spans):  # the backend's thread may be a moment behind
        time.sleep(1e-3)
    return mesh.ledger.counts(), spans


def test_ledger_counts_calls_and_bytes_sent(pool: Callable[[int], Pool]) -> None:
    size = 6 * 5 * 4
    for counts, spans in pool(12).run(on_mesh, traffic, MIXED):
        assert counts == {
            "x": {"all_gather": (1, size)},
            "y": {"all_gather": (2, 2 * size + 2 * size // 2), "reduce_scatter": (1, size * 2 // 3)},
            "z": {"all_reduce": (1, 2 * size // 2)},
        }
        assert all(span.launched < min(span.landed, span.resumed) for span in spans)
        assert all(span.entry.exposed > 0 for span in spans)


def test_ledger_reset_clears_counts(pool: Callable[[int], Pool]) -> None:
    assert pool(1).run(on_mesh, forgotten, Cuboid()) == [{}]


def forgotten(mesh: Mesh) -> dict[str, Any]:
    mesh.ledger.launched("x", "all_gather", 3)
    mesh.ledger.reset()
    return mesh.ledger.counts()


def out_of_order(mesh: Mesh) -> float:
    """Launch everything, then wait in an order of this rank's own."""
    x = data_of(mesh.rank)
    calls: list[tuple[Kind, Axis]] = [(kind, axis) for axis in (mesh.x, mesh.y, mesh.z) for kind in COLLECTIVES]
    flights = [COLLECTIVES[kind](x, axis) for kind, axis in calls]
    error = 0.0
    for i in torch.randperm(len(calls), generator=torch.Generator().manual_seed(mesh.rank)).tolist():
        kind, axis = calls[i]
        error = max(error, float((flights[i].wait() - by_hand(kind, mesh, axis.name)).abs().max()))
    return error


def test_flight_wait_works_in_any_order(pool: Callable[[int], Pool]) -> None:
    assert max(pool(12).run(on_mesh, out_of_order, MIXED)) < 1e-15


def over_one(mesh: Mesh) -> tuple[bool, dict[str, Any]]:
    x = data_of(mesh.rank)
    return all(launch(x, mesh.z).wait() is x for launch in COLLECTIVES.values()), mesh.ledger.counts()


def test_comm_axis_of_one_launches_and_copies_nothing(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(on_mesh, over_one, Cuboid(1, 2, 1)) == [(True, {})] * 2


def ragged(mesh: Mesh) -> bool:
    mine = torch.full((mesh.rank, 2), float(mesh.rank))
    return all(
        torch.equal(piece, torch.full((rank, 2), float(rank)))
        for rank, piece in enumerate(gather_pieces(mine, mesh.world))
    )


def test_gather_pieces_takes_any_shape(pool: Callable[[int], Pool]) -> None:
    assert all(pool(4).run(on_mesh, ragged, Cuboid(2, 2, 1)))
