"""Ranks cuboids over every number of micro-batches of a step, as well.

More micro-batches save memory and keep a pipe's places busy, but add gathers and shrink matmuls. So numbers are tried
upwards. A cuboid only counts if it is faster than with fewer micro-batches and, on a pipe, than the tenth plan so far.
The search ends when something fits and every length of a pipe has been tried; `Ranking.tried` has the numbers.
"""

from collections.abc import Callable
from dataclasses import replace

from cuboid.mesh.cuboid import Cuboid
from cuboid.plan.hardware import Hardware
from cuboid.plan.layer import Work
from cuboid.plan.search import CORNERS, MOST_PLACES, Plan, Ranking, rankings

ENOUGH = 10  # plans that are the fastest for certain


def in_micro_batches(work: Work, count: int) -> Work:
    """The same step in another number of micro-batches."""
    return replace(work, batch=work.batch * work.micro_batches // count, micro_batches=count)


def rank_batches(hw: Hardware, work: Work, devices: int, only: Cuboid | None = None, pipeline: str = "") -> Ranking:
    """As `rank`, with the best number of micro-batches for each plan. The ranking's work has the first plan's."""
    batch, error = work.batch * work.micro_batches, None
    longest, best, found = min(work.config.layers, MOST_PLACES, devices), dict[tuple[int, ...], Plan](), list[Ranking]()
    for count in (n for n in range(1, batch + 1) if batch % n == 0):
        try:
            now = in_micro_batches(work, count)
            (ranking,) = rankings(hw, now, [(devices, now.batch)], only, pipeline, _limit(best) if best else None)
        except ValueError as impossible:  # this number, with this cuboid or schedule
            error = error or impossible
            continue
        found.append(ranking)
        best |= {tuple(plan.cuboid.sizes.values()): plan for plan in ranking.plans}
        if best and count >= longest:
            break
    if not found:
        assert error is not None
        raise error
    return _merged(found, sorted(best.values(), key=lambda plan: plan.seconds))


def _limit(best: dict[tuple[int, ...], Plan]) -> Callable[[Cuboid], float]:
    """Seconds that a cuboid's plan has to be below."""
    known = {sizes: plan.seconds for sizes, plan in best.items()}
    enough = ([float("inf")] * ENOUGH + sorted(known.values(), reverse=True))[-ENOUGH]

    def limit(cuboid: Cuboid) -> float:
        own = known.get(tuple(cuboid.sizes.values()), float("inf"))
        return min(own, enough) if cuboid.pipe > 1 else own

    return limit


def _merged(found: list[Ranking], plans: list[Plan]) -> Ranking:
    last = found[-1]
    work = in_micro_batches(last.work, plans[0].micro_batches) if plans else last.work
    flat, fit = [plan for plan in plans if plan.cuboid.pipe == 1], {plan.cuboid for plan in plans}
    too_large = [plan for each in found for plan in each.too_large if plan.cuboid not in fit]
    return replace(
        last,
        work=work,
        plans=plans,
        too_large=sorted(too_large, key=lambda plan: plan.peak),
        considered=sum(each.considered for each in found),
        seconds=sum(each.seconds for each in found),
        corners={name: next((plan for plan in flat if of(plan.cuboid)), None) for name, of in CORNERS.items()},
        tried=tuple(each.work.micro_batches for each in found),
    )
