"""Measures this machine for the planner: matmuls, copies, attention, collectives, real layers."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.progress import Progress

from cuboid.device import is_gpu, usable_memory
from cuboid.plan.calibrate.fitting import fit_layers, fit_links, fit_matmuls
from cuboid.plan.calibrate.operations import time_operations
from cuboid.plan.calibrate.timing import (
    Bench,
    Scale,
    Settings,
    on_hosts,
    time_attention,
    time_collectives,
    time_copy,
    time_layers,
    time_matmuls,
    time_processor,
    time_slowdown,
)
from cuboid.plan.hardware import KINDS, REMEDY, Hardware, Link
from cuboid.run.cluster import Cluster
from cuboid.run.launch import Pool, World

UNSHAPED = "100gbit"  # more than a processor sends


@dataclass
class Calibration:
    hardware: Hardware
    errors: dict[str, float] = field(default_factory=dict)  # mean relative error of each fit
    seconds: float = 0.0


def calibrate(world: World, settings: Settings, name: str) -> Calibration | None:
    """Runs on every rank. Rank 0 shows the progress and returns the result."""
    node, cores, scale = world.local_size, cores_shared(world), Scale.of(world.device, settings)
    began, bench = time.perf_counter(), Bench(world, alone=not cores and not is_gpu(world.device))
    direct = not is_gpu(world.device)
    with told(world.rank == 0) as tell:
        tell("matmuls")
        shapes, measured = time_matmuls(bench, scale)
        tell("copies")
        stream = time_copy(bench, scale.stream)
        (per_flop, per_output, launch), matmul_error = fit_matmuls(shapes, measured)
        rate = 1 / per_flop
        tell("attention")
        attention = time_attention(bench, scale, rate)
        tell("collectives")
        samples = time_collectives(bench, node, scale.messages)
        tell("compute beside communication")
        slowdown = time_processor(bench, cores) if cores else time_slowdown(bench, scale)
        tell("real layers")
        layers = time_layers(bench, scale)
        tell("operations, one by one")
        operations = {} if is_gpu(world.device) else time_operations(bench, scale, stream)
        tell("fitting")
    if world.rank:
        return None
    errors = {"matmuls": matmul_error}
    links: dict[str, dict[str, Link]] = {"inside": {}, "across": {}}
    for kind in KINDS:
        for level, found in links.items():
            link, error = fit_links(samples, kind, node, direct, stream, crossing=level == "across")
            if link is not None:
                found[kind], errors[f"{kind} {level}"] = link, error
    source = {"all": f"cuboid calibrate, {world.size} ranks, {scale.precision}; the peak is the rate reached"}
    source |= {level: unmeasured(level, world) for level, found in links.items() if not found}
    hardware = Hardware(
        name=name,
        node=node,
        memory=usable_memory(world.device, world.size),
        peak={scale.precision: rate},
        rate={scale.precision: rate},
        stream=stream,
        inside=links["inside"],
        across=links["across"],
        depth=per_output * rate,
        attention=attention,
        launch=max(launch, 1e-6),
        slowdown=slowdown,
        direct=direct,
        one_wire=direct,
        cores=cores,
        operations=operations,
        source=source,
    )
    hardware, errors["one real layer"] = fit_layers(hardware, layers)
    return Calibration(hardware, errors, time.perf_counter() - began)


def across_hosts(found: Calibration, ranks: int) -> Calibration:
    """Adds the links across emulated hosts, where a byte takes more processor time than over loopback. Unchanged if
    each rank has a core, or hosts cannot be made."""
    hw, began = found.hardware, time.perf_counter()
    if not hw.cores:
        return found
    try:
        with Cluster(ranks, UNSHAPED) as cluster, Pool(ranks, cluster) as pool:
            samples = pool.run(on_hosts)[0]
    except ValueError:
        return found
    across, errors = {}, dict(found.errors)
    for kind in KINDS:
        link, errors[f"{kind} across"] = fit_links(samples, kind, 1, hw.direct, hw.stream, crossing=True)
        assert link is not None  # more ranks than cores are two at least
        across[kind] = link
    source = hw.source | {"across": f"cuboid calibrate, {ranks} emulated hosts of one rank"}
    hw = replace(hw, across=across, source=source)
    return Calibration(hw, errors, found.seconds + time.perf_counter() - began)


def unmeasured(level: str, world: World) -> str:
    """The note in the file on links that no two ranks had."""
    return f"not measured: {world.size} ranks, {world.local_size} per node; calibrate {REMEDY[level]}"


def cores_shared(world: World) -> int:
    """The cores of this machine, if all ranks are here and outnumber them; else 0."""
    cores = len(os.sched_getaffinity(0))
    return cores if not is_gpu(world.device) and world.size == world.local_size > cores else 0


@contextmanager
def told(speaks: bool, parts: int = 8) -> Iterator[Callable[[str], None]]:
    """A bar on stderr. Call it with the name of what begins."""
    with Progress(console=Console(stderr=True, quiet=not speaks), disable=not speaks) as progress:
        task = progress.add_task("", total=parts)
        yield lambda text: progress.update(task, description=text, advance=1)
