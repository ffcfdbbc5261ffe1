"""Checks, before ranks start, that a run fits into its host's free memory, by the planner's figures.

The planner knows a step's peak to a few percent, and a process needs more besides. So a run is rejected only if the
plan is clearly above what is free, and the run would have failed.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from math import ceil

from cuboid.device import free_memory, gpus_for, is_gpu
from cuboid.mesh.cuboid import Cuboid
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import Policy
from cuboid.plan.cost.cuboid import step_cost
from cuboid.plan.explain import gigabytes
from cuboid.plan.hardware import PRESETS
from cuboid.plan.layer import Choice, Work
from cuboid.plan.pipeline import planned
from cuboid.plan.search import shapes
from cuboid.run.launch import World
from cuboid.run.started import local_ranks
from cuboid.step.pipeline import bubble, orders
from cuboid.train.auto import vocab_of
from cuboid.train.config import TrainConfig
from cuboid.train.layout import schedule_of

CLEARLY = 1.05  # how much a plan may exceed what will be held
FORCE = "--force starts it regardless"


@dataclass(frozen=True)
class Need:
    """Bytes that one rank holds at its peak, by kind."""

    by_kind: dict[str, int]

    @property
    def peak(self) -> int:
        return sum(self.by_kind.values())

    @property
    def at_rest(self) -> int:
        """Bytes that neither another cuboid of as many ranks nor recomputation can reduce."""
        return sum(self.by_kind[kind] for kind in ("parameters", "optimizer"))

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {gigabytes(size)}" for kind, size in self.by_kind.items())
        return f"{gigabytes(self.peak)} ({kinds})"


def need(config: TrainConfig, apart: bool, gpu: bool = False) -> Need:
    """What the first rank needs, whose shards are largest. `apart`: see `World.apart`."""
    config = config.computed_in("bf16" if gpu else "fp32")
    d, m, cuboid = config.data, config.memory, config.cuboid_shape()
    model = config.model_config(config.model.vocab or vocab_of(d))
    batch = d.batch // d.micro_batches
    work = Work(model, batch, d.seq, config.precision.dtype, d.micro_batches, config.model.freeze)
    policy = Policy(m.activations, m.weights, m.head_elements)
    choice = Choice(m.recompute, policy, schedule_of(config, model, apart, gpu))
    found = planned(PRESETS["h100-ndr" if gpu else "cpu"], work, cuboid, choice)  # one with NCCL, one with gloo
    return Need({each.name: int(getattr(found, each.name)[0]) for each in fields(found)})


def check(config: TrainConfig, local: int) -> None:
    """Raise ValueError if `local` ranks on this host need clearly more memory than it has free."""
    apart, free = local < config.cuboid_shape().ranks, free_memory()
    found = need(config, apart)
    if local * found.peak > CLEARLY * free:
        raise ValueError(
            f"the run does not fit: a rank needs {found} at its peak; {_ranks_here(local)} "
            f"{gigabytes(local * found.peak)}, and {gigabytes(free)} are free; "
            f"{remedy(config, local, free / local, apart)}; {FORCE}"
        )


def _ranks_here(local: int) -> str:
    return f"the {local} ranks of this host need" if local > 1 else "it is this host's only rank and needs"


def check_device(world: World, config: TrainConfig) -> None:
    """The same check for this rank's GPU, if it has one."""
    if not is_gpu(world.device):
        return
    found, free = need(config, world.apart, gpu=True), free_memory(world.device)
    if found.peak > CLEARLY * free:
        raise ValueError(
            f"the run does not fit: a rank needs {found} at its peak, and a GPU has {gigabytes(free)} free; "
            f"{remedy(config, 1, free, world.apart, gpu=True)}; {FORCE}"
        )


def check_weights(config: ModelConfig, cuboid: Cuboid) -> None:
    """Raise ValueError if the fp32 weights that this host's ranks will hold do not fit into its memory."""
    local = local_ranks(cuboid.ranks)
    if gpus_for(local):
        return
    first, of_place = cuboid.coordinates(0), list[int]()  # of each place of a pipe, the rank with the largest shards
    for place in range(cuboid.pipe):
        cost = step_cost(config, cuboid, {**first, "pipe": place}, cuboid.x * cuboid.replicas, 1)
        of_place += [cost.parameters] * (cuboid.block * cuboid.replicas)
    size = sum(sorted(of_place)[-local:])  # the fullest places may be on this host
    if size > CLEARLY * (free := free_memory()):
        raise ValueError(
            f"the model does not fit: its weights are {gigabytes(size)} on this host, and {gigabytes(free)} are free; "
            "use one with more memory, or several with torchrun"
        )


def remedy(config: TrainConfig, local: int, free: float, apart: bool, gpu: bool = False) -> str:
    """The first of `changes` with which a rank fits into what is free, by the planner."""
    least = need(config, apart, gpu)
    for change, changed in changes(config):
        now = need(changed, apart, gpu)
        if now.peak <= free:
            return f"{change} would fit, with {gigabytes(local * now.peak)}"
        least = min(least, now, key=lambda each: each.peak)
    hosts = ceil(least.peak / free) if free else 0
    more = f" or at least {hosts} times the memory" if hosts else ""
    return (
        f"no recomputation, micro-batches or other cuboid of as many ranks is enough: the least is "
        f"{gigabytes(local * least.peak)}, {gigabytes(local * least.at_rest)} of it parameters and optimizer; use a "
        f"smaller model{more}"
    )


def changes(config: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    """Changes that save memory, small ones first: recomputation, micro-batches, both, another cuboid, all of these."""
    yield from _recomputed(config)
    yield from _in_micro_batches(config)
    for change, full in [*_recomputed(config)][-1:]:
        for more, changed in _in_micro_batches(full):
            yield f"{change} {more}", changed
    k, d = config.cuboid, config.data
    model = config.model_config(config.model.vocab or vocab_of(d))
    for replicas, x, y, z in shapes(model, config.cuboid_shape().ranks // k.pipe, d.batch // d.micro_batches):
        if (x, y, z) != (k.x, k.y, k.z) and replicas <= k.replicas:
            other, change = (
                replace(config, cuboid=replace(k, replicas=replicas, x=x, y=y, z=z)),
                f"--cuboid {x},{y},{z}",
            )
            change += f" --replicas {replicas}" * (replicas != k.replicas)
            yield change, other
            for more, changed in _recomputed(other):
                yield f"{change} {more}", changed
                for most, finest in [*_in_micro_batches(changed)][-1:]:
                    yield f"{change} {more} {most}", finest


def _recomputed(config: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    levels = ("none", "selective", "full")
    for level in levels[1 + levels.index(config.memory.recompute) :]:
        memory = replace(config.memory, recompute=level)  # type: ignore[arg-type]
        yield f"--set memory.recompute={level}", replace(config, memory=memory)


def _in_micro_batches(config: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    for count in _counts(config, config.data.micro_batches + 1):
        data = replace(config.data, micro_batches=count)
        yield f"--set data.micro_batches={count}", replace(config, data=data)


def _counts(config: TrainConfig, least: int) -> Iterator[int]:
    """The numbers of micro-batches, `least` or more, that the batch and the schedule allow."""
    cuboid, batch = config.cuboid_shape(), config.data.batch
    for count in range(least, batch // cuboid.replicas + 1):
        if batch % (count * cuboid.replicas) == 0:
            try:
                orders(config.schedule_on(cuboid), cuboid.pipe, count)
            except ValueError:  # not with this schedule
                continue
            yield count


def idle_places(config: TrainConfig) -> str:
    """A warning if a pipe has fewer micro-batches than places, else ""."""
    d, cuboid = config.data, config.cuboid_shape()
    schedule, count, places = config.schedule_on(cuboid), d.micro_batches, cuboid.pipe
    if count >= places:
        return ""
    seconds = {"F": 1, "B": 1 if schedule.pipeline == "zero-bubble" else 2, "W": 1}  # a forward's, roughly
    idle = bubble(orders(schedule, places, count), lambda move: seconds[move.kind])
    fits = next(_counts(config, places), 0)
    use = f"--set data.micro_batches={fits}" if fits else "a larger data.batch"
    return (
        f"{count} micro-batch{'es' * (count > 1)} on a pipe of {places} places: about {idle:.0%} of a step is idle; "
        f"use {use}, or a shorter pipe"
    )


def crowd(local: int) -> str:
    """A warning if there are more ranks than cores, else ""."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if local <= cores:
        return ""
    return (
        f"{local} ranks share {cores} core{'s' * (cores > 1)}, so a step takes {local / cores:.3g} × as long or longer"
    )
