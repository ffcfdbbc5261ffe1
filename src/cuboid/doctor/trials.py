"""Trials by all ranks: the compiler, each axis's links, a step compared with one device's, and twenty steps of
training."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite, lcm
from statistics import median

import numpy as np
import torch

from cuboid.comm.collectives import all_gather, from_all
from cuboid.comm.journal import listed
from cuboid.device import is_gpu
from cuboid.doctor.finding import Finding, Status
from cuboid.fuse import NEEDS, SWITCH, compile_fault
from cuboid.mesh.cuboid import AXES, Cuboid
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.plan.calibrate.timing import Bench
from cuboid.plan.hardware import Hardware
from cuboid.plan.sizes import groups
from cuboid.plan.time import collective_seconds
from cuboid.run.launch import World
from cuboid.train.compare import Curves, curves
from cuboid.train.config import TrainConfig
from cuboid.train.progress import quantity
from cuboid.verify import Case, Report, verify

STEPS = 20
SIZES = {"cpu": (1 << 12, 1 << 22), "gpu": (1 << 12, 1 << 28)}  # bytes of a small message and of a large one, gathered
FAR = 2.0  # times as long as by calibration
ODD = 3.0  # times as long as the axis's other lines
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}  # of the loss, the same as in `cuboid verify --steps`
REPEATS = 5


# The compiler


def compiler(faults: Sequence[str]) -> Finding:
    """The finding on torch.compile. `faults`: of each rank, what it fails at, "" if it works."""
    broken = [rank for rank, fault in enumerate(faults) if fault]
    if not broken:
        said = f"torch.compile works on {len(faults)} rank{'s' * (len(faults) > 1)}, so elementwise work is fused"
        return Finding("compile", "ok", said)
    said = f"torch.compile fails on {listed(broken)}, so elementwise work runs unfused and slower"
    fault = faults[broken[0]]
    return Finding("compile", "warning", f"{said}: {fault}", f"unset {SWITCH}" if fault.startswith(SWITCH) else NEEDS)


def try_compiler(world: World, config: TrainConfig) -> list[Finding]:
    if not (is_gpu(world.device) or config.overlap.compile):
        return [Finding("compile", "ok", "a CPU runs elementwise work unfused, unless overlap.compile=true")]
    mesh = Mesh(config.cuboid_shape(), world.rank, world.device, watch=world.watch)
    faults = from_all(compile_fault(world.device), mesh.world)
    mesh.close()
    return [compiler(faults)]


# Links


@dataclass(frozen=True)
class Connected:
    """A line of ranks on an axis: seconds of an all-gather of few bytes and of many."""

    ranks: tuple[int, ...]
    small: float
    large: float


def time_axis(world: World, mesh: Mesh, axis: str) -> list[Connected]:
    """Times all lines of an axis at once, as in training; the least of a few times."""
    bench, (small, large) = Bench(world), SIZES["gpu" if is_gpu(world.device) else "cpu"]
    group, found = getattr(mesh, axis), []
    for size in (small, large):
        x = torch.ones(max(size // 4 // group.size, 1), device=world.device)
        found.append(bench.least(lambda x=x: all_gather(x, group).wait(), REPEATS))  # type: ignore[misc]
    times = from_all(tuple(found), mesh.world)
    others = tuple(other for other in AXES if other != axis)
    lines = mesh.cuboid.array((*others, axis)).reshape(-1, group.size).tolist()
    return [Connected(tuple(line), *(max(times[rank][i] for rank in line) for i in (0, 1))) for line in lines]


def links(axis: str, lines: Sequence[Connected], size: int, across: bool, expected: float, against: str) -> Finding:
    """The finding on one axis. `expected`: seconds of a large message by calibration (`against`), 0 without one."""
    slowest = max(lines, key=lambda line: line.large)
    p = len(slowest.ranks)
    rate = size * (p - 1) / p / slowest.large
    small = median(line.small for line in lines)
    where = "between hosts" if across else "inside a host"
    said = f"axis {axis}, {p} ranks {where}: {quantity(rate)}B/s, {1e3 * small:.2g} ms for a small message"
    figures = {"axis": axis, "bytes per second": rate, "seconds": small, "expected": expected, "across": across}
    usual = median(line.large for line in lines)
    if len(lines) > 1 and slowest.large > ODD * usual:
        odd = f"; ranks {', '.join(map(str, slowest.ranks))} take {slowest.large / usual:.2g} × as long as the others"
        remedy = "look for a slow cable, card or host, or for other jobs there"
        return Finding("links", "warning", said + odd, remedy, figures)
    if not expected:
        return Finding("links", "ok", said, figures=figures)
    share = expected / slowest.large
    if share < 1 / FAR:
        remedy = "see the settings above; is another job on these links? else calibrate anew: cuboid calibrate"
        return Finding("links", "warning", f"{said}, {share:.0%} of {against}", remedy, figures)
    return Finding("links", "ok", f"{said}, {share:.0%} of {against}", figures=figures)


def try_links(world: World, cuboid: Cuboid, hardware: Hardware | None) -> list[Finding]:
    mesh = Mesh(cuboid, world.rank, world.device, watch=world.watch, per_host=world.local_size)
    found = []
    of_axis = groups([cuboid], np.ones(1, dtype=np.int64), world.local_size)
    for axis in (axis for axis in AXES if cuboid.sizes[axis] > 1):
        lines, size = time_axis(world, mesh, axis), SIZES["gpu" if is_gpu(world.device) else "cpu"][1]
        across = bool(of_axis[axis].inside[0] < of_axis[axis].size[0])
        expected, against = 0.0, ""
        if hardware is not None and getattr(hardware, "across" if across else "inside"):
            expected = float(collective_seconds(hardware, "all_gather", of_axis[axis], np.array([size]), False)[0])
            against = f"{hardware.name}'s"
        found.append(links(axis, lines, size, across, expected, against))
    mesh.close()
    if any(not each.figures["expected"] for each in found):
        said = "links were not held against a calibration" if hardware is None else f"{hardware.name} lacks some links"
        found.append(Finding("links", "ok", said, "cuboid calibrate hardware.json, then --hardware hardware.json"))
    return found or [Finding("links", "ok", "one rank sends nothing")]


# Exactness


def small_model(cuboid: Cuboid, family: str = "gpt2") -> tuple[ModelConfig, int, int]:
    """A model that the cuboid can split, and a batch for it, so that every axis takes part."""
    heads = cuboid.y * cuboid.z if cuboid.y * cuboid.z > 1 else 2
    unit, batch = lcm(cuboid.y, cuboid.z), 2 * cuboid.x * cuboid.replicas * cuboid.pipe
    layers, seq = max(2, 2 * cuboid.pipe), -(-32 // unit) * unit
    return ModelConfig(family, layers, 8 * heads, heads, vocab=260, context=seq), batch, seq


def exactness(report: Report, cuboid: Cuboid) -> Finding:
    gradients = sum(name.startswith("d ") for name in report.errors)
    name, error = max(report.errors.items(), key=lambda item: item[1])
    command = f"cuboid verify --cuboid {cuboid.x},{cuboid.y},{cuboid.z}" + "".join(
        f" --{axis} {getattr(cuboid, axis)}" for axis in ("replicas", "pipe") if getattr(cuboid, axis) > 1
    )
    figures = {"worst": error, "tolerance": report.tolerance}
    if report.ok:
        said = (
            f"loss, logits and {gradients} gradients of a small model in fp64 are one device's to {error:.0e}; bytes, "
            "FLOPs and memory are the formulas'"
        )
        return Finding("exactness", "ok", said, figures=figures)
    if error > report.tolerance or error != error:
        return Finding("exactness", "error", f"{name} is {error:.1e} off one device's", f"{command} shows all", figures)
    odd = [] if report.traffic_predicted else ["bytes sent"]
    odd += [name for name, each in report.balance.items() if each.predicted is False]
    said = f"values are one device's to {error:.0e}, but {', '.join(odd)} are not the formulas'"
    return Finding("exactness", "warning", said, f"plans may be off; {command} shows all", figures)


def try_exactness(world: World, cuboid: Cuboid) -> list[Finding]:
    model, batch, seq = small_model(cuboid)
    report = verify(world, Case(model, cuboid, batch, seq))
    return [exactness(report, cuboid)] if report is not None else []


# Training


def small_run(config: TrainConfig) -> TrainConfig:
    """Twenty steps of a small model on the configured cuboid, in its precision, from Python's own library."""
    k, default = config.cuboid_shape(), TrainConfig()
    model, batch, seq = small_model(k, config.model.family)
    return replace(
        default,
        model=replace(
            default.model, family=config.model.family, layers=model.layers, hidden=model.hidden, heads=model.heads
        ),
        cuboid=config.cuboid,
        data=replace(default.data, seq=seq, batch=batch, micro_batches=k.pipe, max_bytes=100_000),
        schedule=replace(default.schedule, steps=STEPS, warmup=2),
        precision=config.precision,
    )


def training(found: Curves, precision: str) -> Finding:
    first, last, off = found.serial[0], found.serial[-1], found.difference
    said = f"{STEPS} steps of a small model in {precision}: loss {first:.3f} → {last:.3f}, one device's to {off:.0e}"
    figures = {"serial": found.serial, "cuboid": found.cuboid, "difference": off}
    status: Status = "ok" if isfinite(off) and off <= TOLERANCE[precision] else "error"
    remedy = (
        "" if status == "ok" else "--set precision.dtype=fp32 tells whether it is the precision; then cuboid verify"
    )
    return Finding("training", status, said, remedy, figures)


def try_training(world: World, config: TrainConfig) -> list[Finding]:
    run = small_run(config)
    found = curves(world, run, torch.float32, quiet=True)
    return [training(found, run.precision.dtype)] if found is not None else []
