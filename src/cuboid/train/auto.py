"""A run's cuboid, chosen by the planner: `cuboid train --cuboid auto`."""

from dataclasses import replace
from pathlib import Path

import torch

from cuboid import data
from cuboid.plan import hardware
from cuboid.plan.explain import nothing_fits, why
from cuboid.plan.layer import Work
from cuboid.plan.search import rank
from cuboid.train.config import CuboidSection, MemorySection, OverlapSection, TrainConfig


def guessed_hardware() -> str:
    """The preset of the GPU at hand."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((preset for preset in hardware.PRESETS if preset.split("-")[0].upper() in name), "cpu")


def planned(config: TrainConfig, devices: int, machine: str) -> tuple[TrainConfig, str]:
    """The configuration with the fastest plan's cuboid and what that keeps, makes again and runs in step; and why."""
    d, m = config.data, config.memory
    vocab = data.load_tokenizer(Path(d.tokenizer) if d.tokenizer else None).vocab
    if d.batch % d.micro_batches:
        raise ValueError(f"data.batch = {d.batch} cannot be cut into data.micro_batches = {d.micro_batches}")
    batch = d.batch // d.micro_batches
    work = Work(config.model_config(vocab), batch, d.seq, config.precision.dtype, d.micro_batches)
    ranking = rank(hardware.load(machine or guessed_hardware()), work, devices)
    if not ranking.plans:
        raise ValueError(nothing_fits(ranking))
    best = ranking.plans[0]
    k, choice = best.cuboid, best.choice
    policy = choice.policy
    chosen = replace(
        config,
        cuboid=CuboidSection(k.x, k.y, k.z, k.data, k.order, config.cuboid.others),
        memory=MemorySection(policy.activations, policy.weights, choice.recompute, m.head_elements),
        overlap=OverlapSection(choice.schedule.prefetch, 0 if choice.schedule.parts > 1 else 1, 1),
    )
    return chosen, why(ranking)


def for_ranks(config: TrainConfig, ranks: int, machine: str) -> tuple[TrainConfig, str]:
    """The configuration on as many ranks as there are, and what was changed for that: a cuboid of `cuboid.others`, else
    what the planner finds. Batch, sequence and data stay."""
    wanted = config.cuboid_shape()
    if wanted.ranks == ranks:
        return config, ""
    short = f"there are {ranks} ranks, not the {wanted.ranks} of {wanted}"
    for k in config.other_cuboids():
        if k.ranks == ranks:
            sizes = replace(config.cuboid, x=k.x, y=k.y, z=k.z, data=k.data)
            return replace(config, cuboid=sizes), f"{short}: {k} of cuboid.others"
    try:
        changed, reason = planned(config, ranks, machine)
    except ValueError as error:
        raise ValueError(f"{short}, and no cuboid of {ranks} is possible: {error}") from None
    return changed, f"{short}: {reason}"
