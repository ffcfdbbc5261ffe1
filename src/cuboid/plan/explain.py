"""Explains why the first plan is first and what limits it or, if nothing fits, what would help."""

from contextlib import suppress

from cuboid.mesh.cuboid import Cuboid
from cuboid.plan.batches import in_micro_batches
from cuboid.plan.hardware import Hardware
from cuboid.plan.layer import Work
from cuboid.plan.search import CORNERS, Plan, Ranking, fits, rank

NAMES = {
    "x": "weights (x)",
    "y": "activations (y)",
    "z": "activations (z)",
    "replicas": "gradients (replicas)",
    "pipe": "other stages (pipe)",
    "world": "the norm",
}


def limit(plan: Plan) -> str:
    """The largest part of the step, in words."""
    parts = {f"waiting for {NAMES[axis]}": seconds for axis, seconds in plan.exposed.items()} | plan.compute
    name = max(parts, key=lambda part: parts[part])
    return f"{name}, {parts[name] / plan.seconds:.0%} of the step"


def why(ranking: Ranking) -> str:
    """Why the first plan is first, and which numbers of micro-batches that is true of."""
    return f"{_reason(ranking)} {_tried(ranking)}"


def _tried(ranking: Ranking) -> str:
    count, searched_pipes = ranking.work.micro_batches, any(plan.cuboid.pipe > 1 for plan in ranking.plans)
    if len(ranking.tried) > 1:
        return f"Of {', '.join(map(str, ranking.tried))} micro-batches, {count} took the least time."
    no_pipe = "" if count > 1 or searched_pipes else "; a pipe is only tried with 2 or more"
    return f"No other number of micro-batches than {count} was tried, and another may be faster{no_pipe}."


def _reason(ranking: Ranking) -> str:
    """One sentence on why the first plan is first."""
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
    if gain < 1.005:
        return f"{first.cuboid} is as fast as the best {name}, {rival.cuboid}; its limit is {limit(first)}."
    return (
        f"{first.cuboid} is {gain:.2f} × as fast as the best {name}, {rival.cuboid}, because {reason}; "
        f"its limit is {limit(first)}."
    )


def gigabytes(size: float) -> str:
    """
    >>> gigabytes(2.5e9), gigabytes(2.5e12)
    ('2.5 GB', '2,500 GB')
    """
    return f"{size / 1e9:.3g} GB" if size < 999.5e9 else f"{size / 1e9:,.0f} GB"


def nothing_fits(ranking: Ranking, only: Cuboid | None = None) -> str:
    """Explains an empty ranking, of one or all cuboids: which memory is too large, the smallest change that helps."""
    least, hw = ranking.too_large[0], ranking.hardware
    largest = max(least.memory, key=lambda kind: least.memory[kind])
    devices = f"{ranking.devices} device{'s' * (ranking.devices > 1)}"
    which = (
        f"nothing fits on {devices}: the smallest, {least.cuboid},"
        if only is None
        else f"{least.cuboid} does not fit: it"
    )
    kind = {"optimizer": "optimizer states"}.get(largest, largest)
    head = (
        f"{which} needs {gigabytes(least.peak)} per device (recompute {least.choice.recompute}; {kind} alone take "
        f"{gigabytes(least.memory[largest])}), and a device has {gigabytes(hw.memory)}"
    )
    return f"{head}; {remedy(hw, ranking.work, ranking.devices, only, ranking.pipeline)}"


def remedy(hw: Hardware, work: Work, devices: int, only: Cuboid | None = None, pipeline: str = "") -> str:
    """The smallest change that makes it fit: more micro-batches, another cuboid, else more devices."""
    if fewer := _micro_batches(hw, work, devices, only, pipeline):
        return f"--micro-batches {fewer} would fit"
    if only is not None:
        if fits(hw, work, devices, pipeline=pipeline):
            other = rank(hw, work, devices, pipeline=pipeline).plans[0]
            return f"more micro-batches would not help; of {devices} devices {other.cuboid} would fit"
        if fewer := _micro_batches(hw, work, devices, None, pipeline):
            first = rank(hw, in_micro_batches(work, fewer), devices, pipeline=pipeline).plans[0]
            return f"{first.cuboid} would fit with --micro-batches {fewer}"
    for factor in (2, 4, 8, 16, 32, 64):
        if not hw.lacks(devices * factor) and fits(hw, work, devices * factor, pipeline=pipeline):
            return f"more micro-batches would not help; {devices * factor} devices would"
    return "neither more micro-batches nor 64 × as many devices would help; use a smaller model or larger devices"


def _micro_batches(hw: Hardware, work: Work, devices: int, only: Cuboid | None, pipeline: str) -> int:
    """The fewest micro-batches that make it fit; 0 if none do."""
    counts = (n * work.micro_batches for n in range(2, work.batch + 1) if work.batch % n == 0)
    for count in counts:
        smaller = in_micro_batches(work, count)
        if only is not None and smaller.batch % only.replicas:
            continue
        with suppress(ValueError):  # the pipeline's schedule is impossible with this many
            if fits(hw, smaller, devices, only, pipeline):
                return count
    return 0


def corner(ranking: Ranking, name: str) -> str:
    """Why a corner has no plan."""
    flat = (plan for plan in ranking.too_large if plan.cuboid.pipe == 1)
    large = next((plan for plan in flat if CORNERS[name](plan.cuboid)), None)
    if large is not None:
        return f"{name}: does not fit; {large.cuboid} needs {gigabytes(large.peak)} per device."
    c, devices = ranking.work.config, ranking.devices
    return f"{name}: {devices} devices, heads={c.heads}, hidden={c.hidden} and batch={ranking.work.batch} have none."
