"""Bytes of a step that leave their host, and so pass its network card.

Ranks lie on hosts in order, `per_host` on each. A ring collective (all_gather, all_reduce) sends everything to the next
rank of its group, so that one rank of a host sends for all; a direct one (reduce_scatter, all_to_all) sends to each
member alike.
"""

from collections.abc import Mapping

from cuboid.bench.problem import Problem
from cuboid.mesh.cuboid import AXES, Cuboid, factorisations, orders
from cuboid.plan.cost.cuboid import step_cost

RINGS = ("all_gather", "all_reduce")
Traffic = Mapping[tuple[str, str], list[int]]


def egress(traffic: Traffic, cuboid: Cuboid, per_host: int) -> int:
    """Bytes that the busiest host sends to others if every rank has this traffic."""
    hosts = [0.0] * -(-cuboid.ranks // per_host)
    for rank in range(cuboid.ranks):
        here, at = rank // per_host, cuboid.coordinates(rank)
        for (axis, kind), (_, sent) in traffic.items():
            if axis not in AXES:
                continue
            size = cuboid.sizes[axis]
            group = [cuboid.rank({**at, axis: i}) // per_host for i in range(size)]
            others = [group[(at[axis] + 1) % size]] if kind in RINGS else [*group[: at[axis]], *group[at[axis] + 1 :]]
            hosts[here] += sent * sum(host != here for host in others) / len(others)
    return round(max(hosts))


def feasible(problem: Problem, ranks: int) -> list[Cuboid]:
    """All cuboids of this many ranks on which the problem runs."""
    found = []
    for cuboid in factorisations(ranks):
        try:
            problem.config.check(cuboid, problem.batch, problem.seq)
        except ValueError:
            continue
        found.append(cuboid)
    return found


def best(problem: Problem, ranks: int, per_host: int, flat: bool = False) -> Cuboid:
    """The cuboid and order over ranks whose busiest host sends the least; among equals the one that sends least in
    total. With `flat` only z = 1: FSDP × TP."""

    def sent(cuboid: Cuboid) -> tuple[int, int]:
        cost = step_cost(problem.config, cuboid, cuboid.coordinates(0), problem.batch, problem.seq, problem.policy)
        return egress(cost.traffic, cuboid, per_host), sum(cost.bytes().values())

    shapes = [shape for shape in feasible(problem, ranks) if shape.z == 1 or not flat]
    if not shapes:
        raise ValueError(
            f"no cuboid of {ranks} ranks takes {problem.config.heads} heads, hidden {problem.config.hidden}, "
            f"batch {problem.batch}; choose sizes that {ranks} divides"
        )
    return min((cuboid for shape in shapes for cuboid in orders(shape)), key=sent)
