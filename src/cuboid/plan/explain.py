"""Why the first plan is first and what limits it; and where nothing fits, which limit binds and what would help."""

from dataclasses import replace

from cuboid.plan.hardware import Hardware
from cuboid.plan.layer import Work
from cuboid.plan.search import CORNERS, Plan, Ranking, rank

NAMES = {
    "x": "weights (x)",
    "y": "activations (y)",
    "z": "activations (z)",
    "data": "gradients (data)",
    "world": "the norm",
}


def limit(plan: Plan) -> str:
    """The largest part of the step, in words."""
    parts = {f"waiting for {NAMES[axis]}": seconds for axis, seconds in plan.exposed.items()} | plan.compute
    name = max(parts, key=lambda part: parts[part])
    return f"{name}, {parts[name] / plan.seconds:.0%} of the step"


def why(ranking: Ranking) -> str:
    """One sentence."""
    first = ranking.plans[0]
    rivals = {name: plan for name, plan in ranking.corners.items() if plan and plan.cuboid.sizes != first.cuboid.sizes}
    if not rivals:
        return f"{first.cuboid} is the fastest of {len(ranking.plans)} cuboids; its limit is {limit(first)}."
    name, rival = min(rivals.items(), key=lambda each: each[1].seconds)
    gain = rival.seconds / first.seconds
    waits, theirs = (sum(plan.exposed.values()) for plan in (first, rival))
    works, work = (sum(plan.compute.values()) for plan in (first, rival))
    if theirs - waits >= work - works:
        reason = f"it waits {waits:.3g} s for communication where the other waits {theirs:.3g} s"
    else:
        reason = f"it computes for {works:.3g} s where the other computes for {work:.3g} s"
        if first.choice.recompute != rival.choice.recompute:
            reason += f" (recompute {first.choice.recompute} against {rival.choice.recompute})"
    return (
        f"{first.cuboid} is {gain:.2f} × as fast as the best {name}, {rival.cuboid}, because {reason}; "
        f"its limit is {limit(first)}."
    )


def nothing_fits(ranking: Ranking) -> str:
    """For an empty ranking: what binds, and the smallest change that helps."""
    work, devices, hw = ranking.work, ranking.devices, ranking.hardware
    least = ranking.too_large[0]
    largest = max(least.memory, key=lambda kind: least.memory[kind])
    head = (
        f"nothing fits: the smallest, {least.cuboid} with recompute {least.choice.recompute}, needs "
        f"{least.peak / 1e9:.3g} GB a device of {hw.memory / 1e9:.3g} GB, most of it {largest} "
        f"({least.memory[largest] / 1e9:.3g} GB)"
    )
    return f"{head}; {remedy(hw, work, devices)}"


def remedy(hw: Hardware, work: Work, devices: int) -> str:
    """The smallest change that makes it fit: fewer sequences at a time, else more devices."""
    parts = [n for n in range(2, work.batch + 1) if work.batch % n == 0]
    for count in parts:
        smaller = replace(work, batch=work.batch // count, micro_batches=work.micro_batches * count)
        if rank(hw, smaller, devices).plans:
            return f"--micro-batches {smaller.micro_batches} would fit"
    for factor in (2, 4, 8, 16, 32, 64):
        if rank(hw, work, devices * factor).plans:
            return f"no fewer sequences at a time would help, {devices * factor} devices would"
    return "no fewer sequences at a time nor 64 × as many devices would help; use a smaller model or larger devices"


def corner(ranking: Ranking, name: str) -> str:
    """Why a corner has no plan."""
    large = next((plan for plan in ranking.too_large if CORNERS[name](plan.cuboid)), None)
    if large is not None:
        return f"{name}: does not fit; {large.cuboid} needs {large.peak / 1e9:.3g} GB a device."
    c, devices = ranking.work.config, ranking.devices
    return f"{name}: {devices} devices, heads={c.heads}, hidden={c.hidden} and batch={ranking.work.batch} have none."
