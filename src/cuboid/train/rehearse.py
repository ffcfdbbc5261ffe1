"""Times a few steps of a run on emulated devices. No values are computed, so nothing is saved."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from cuboid.emulate.device import Emulated
from cuboid.emulate.slow_motion import SlowMotion
from cuboid.run.cluster import Cluster
from cuboid.run.launch import Pool, World
from cuboid.train.config import TrainConfig
from cuboid.train.loop import Trainer

STEPS = 3


@dataclass(frozen=True)
class Rehearsed:
    """One step of the slowest rank, with the CPU seconds of all ranks."""

    seconds: float
    busy: float  # of its device
    exposed: float
    cpu: float

    @property
    def cpu_share(self) -> float:
        return self.cpu / (os.cpu_count() or 1) / self.seconds


def rehearse(config: TrainConfig, slow: SlowMotion, hosts: bool, tell: Callable[[Rehearsed], None]) -> None:
    """Runs the steps on emulated hosts with shaped links (`hosts`) or over this machine's loopback."""
    ranks, node = config.cuboid_shape().ranks, slow.hardware.node
    slow.check(ranks)
    if not hosts:
        with Pool(ranks) as pool:
            _show(pool.run(steps, config, slow), tell)
        return
    if ranks % min(node, ranks):
        raise ValueError(f"{ranks} ranks do not fill nodes of {node}; use a multiple, or node=1 in --emulate")
    per_host = min(node, ranks)
    with Cluster(ranks // per_host, slow.links, per_host) as cluster, Pool(ranks, cluster) as pool:
        _show(pool.run(steps, config, slow), tell)


def _show(found: Sequence[Sequence[Rehearsed]], tell: Callable[[Rehearsed], None]) -> None:
    for step in zip(*found, strict=True):
        last = max(step, key=lambda each: each.seconds)
        tell(Rehearsed(last.seconds, last.busy, last.exposed, sum(each.cpu for each in step)))


def steps(world: World, config: TrainConfig, slow: SlowMotion) -> list[Rehearsed]:
    """Timed steps, after one to warm up."""
    trainer, found = Trainer(config, world), []
    with Emulated(slow.of_rank(world.rank), seed=world.rank) as device:
        for _ in range(1 + STEPS):
            device.synchronize()
            dist.barrier()
            device.reset()
            start, cpu = time.perf_counter(), time.process_time()
            trainer.step()
            device.synchronize()
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            found.append(Rehearsed(seconds, device.busy, device.exposed, cpu))
    trainer.model.parallel.mesh.close()
    return found[1:]
