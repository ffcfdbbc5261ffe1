"""Lets the planner choose a run's cuboid: `cuboid train --cuboid auto`."""

from dataclasses import replace
from pathlib import Path

from cuboid import data
from cuboid.device import any_gpu, gpu_at_hand
from cuboid.model.cuboid import Policy
from cuboid.plan.explain import nothing_fits, why
from cuboid.plan.hardware import PRESETS, Hardware, load, of_gpu
from cuboid.plan.layer import Choice, Work
from cuboid.plan.pipeline import Pipelines
from cuboid.plan.search import MOST_PLACES, pipes, rank
from cuboid.plan.sizes import Sizes
from cuboid.plan.stage import StageCosts
from cuboid.plan.step import prices_of
from cuboid.run.started import local_ranks
from cuboid.train.config import CuboidSection, DataSection, MemorySection, TrainConfig


def guessed_hardware(gpu: tuple[str, int] | None) -> tuple[Hardware, str]:
    """The preset of ranks with this GPU, a name and bytes, with the GPU's own memory, and a sentence that says so."""
    if gpu is None:
        seen = "there are fewer GPUs than ranks" if any_gpu() else "PyTorch sees no GPU"
        return PRESETS["cpu"], f"Hardware: the preset cpu, as {seen}."
    gpu_name, gpu_memory = gpu
    if (preset := of_gpu(gpu_name)) is not None:
        memory = 0.95 * gpu_memory // 1e9 * 1e9  # the same on all ranks
        return replace(preset, memory=memory), f"Hardware: the preset {preset.name}, as the GPU is {gpu_name!r}."
    raise ValueError(
        f"the GPU is {gpu_name!r}, and presets are {', '.join(PRESETS)}; give --cuboid auto and --hardware with a "
        "preset like it, or with a file of cuboid calibrate"
    )


def vocab_of(d: DataSection) -> int:
    """Size of the vocabulary: from the header of a built folder, else from the tokenizer."""
    for path in map(Path, d.paths):
        if (path / "train.json").is_file():
            return data.TokenFile(path / "train.bin").header.vocab
    return data.load_tokenizer(Path(d.tokenizer) if d.tokenizer else None).vocab


def planned(config: TrainConfig, devices: int, machine: str, pipe: int | None = None) -> tuple[TrainConfig, str]:
    """Returns the configuration with the fastest plan's cuboid, memory policy and schedule, and why it was chosen. With
    `pipe`, the fastest on a pipe of this many places."""
    d, m = config.data, config.memory
    if d.batch % d.micro_batches:
        raise ValueError(f"data.batch = {d.batch} cannot be split into data.micro_batches = {d.micro_batches}")
    batch = d.batch // d.micro_batches
    model = config.model_config(vocab_of(d))
    hardware, guess = (load(machine), "") if machine else guessed_hardware(gpu_at_hand(local_ranks(devices)))
    dtype = config.computed_in(hardware.usual).precision.dtype
    work = Work(model, batch, d.seq, dtype, d.micro_batches, config.model.freeze)
    if pipe is not None and pipe not in (1, *pipes(work, devices)):
        more = f"--set data.micro_batches={pipe} or more, " if d.micro_batches < pipe else ""
        raise ValueError(
            f"--pipe {pipe} with --cuboid auto: the planner takes pipes of no more places than data.micro_batches = "
            f"{d.micro_batches}, model.layers = {model.layers} or {MOST_PLACES}, which divide the {devices} ranks; use "
            f"{more}another pipe, or --cuboid X,Y,Z"
        )
    ranking = rank(hardware, work, devices)
    if pipe is not None:
        for plans in (ranking.plans, ranking.too_large):
            plans[:] = [plan for plan in plans if plan.cuboid.pipe == pipe]
        ranking.corners.clear()  # `why` compares with what was searched
    if not ranking.plans:
        raise ValueError(nothing_fits(ranking, None if pipe is None else ranking.too_large[0].cuboid))
    best = ranking.plans[0]
    k, choice = best.cuboid, best.choice
    policy = choice.policy
    chosen = replace(
        config,
        cuboid=CuboidSection(k.x, k.y, k.z, k.replicas, k.order, config.cuboid.others, k.pipe),
        memory=MemorySection(policy.activations, policy.weights, choice.recompute, m.head_elements),
        overlap=replace(
            config.overlap,
            prefetch=choice.schedule.prefetch,
            sub_batches=0 if choice.schedule.sub_batches > 1 else 1,
            chunks=1,
        ),
    )
    if k.pipe > 1:
        names = ("pipeline", "stages", "split")
        how = {name: getattr(choice.schedule, name) for name in names} | {"beside": False}
        chosen = replace(chosen, overlap=replace(chosen.overlap, **how))
    else:
        chosen = replace(chosen, overlap=replace(chosen.overlap, split=()))
    return chosen, f"{why(ranking)} {guess}".rstrip()


def planned_split(config: TrainConfig, machine: str) -> tuple[int, ...]:
    """The blocks of each stage of a run's pipe, split by planned time or, if that does not fit, by memory. Empty if
    that is evenly, or if the planner does not know the machine."""
    d, m, cuboid = config.data, config.memory, config.cuboid_shape()
    try:
        hardware = load(machine) if machine else guessed_hardware(gpu_at_hand(local_ranks(cuboid.ranks)))[0]
        config = config.computed_in(hardware.usual)
        model = config.model_config(vocab_of(d))
        batch = d.batch // d.micro_batches
        work = Work(model, batch, d.seq, config.precision.dtype, d.micro_batches, config.model.freeze)
        schedule = config.schedule_on(cuboid, config.overlap.sub_batches or 1)
        choice = Choice(m.recompute, Policy(m.activations, m.weights, m.head_elements), schedule)
        sizes = Sizes(model, [cuboid], hardware.node, batch, d.seq, hardware.group)
        costs = StageCosts(prices_of(hardware, work, sizes), work, sizes, choice)
    except ValueError:  # of another GPU, of a number format or of links without figures
        return ()
    found = Pipelines(costs, schedule, least="time")
    if found.peak[0] > hardware.memory:
        found = Pipelines(costs, schedule, least="memory")
    return found.split(0)


def for_ranks(config: TrainConfig, ranks: int, machine: str) -> tuple[TrainConfig, str]:
    """Returns the configuration for this number of ranks, and what was changed: a cuboid of `cuboid.others`, else the
    planner's. Batch, sequence and data stay."""
    wanted = config.cuboid_shape()
    if wanted.ranks == ranks:
        return config, ""
    short = f"there are {ranks} ranks, not the {wanted.ranks} of {wanted}"
    for k in config.other_cuboids():
        if k.ranks == ranks:
            sizes = replace(config.cuboid, x=k.x, y=k.y, z=k.z, replicas=k.replicas, pipe=k.pipe)
            overlap = config.overlap if k.pipe == wanted.pipe else replace(config.overlap, split=())
            return replace(config, cuboid=sizes, overlap=overlap), f"{short}; taking {k} from cuboid.others"
    try:
        changed, reason = planned(config, ranks, machine)
    except ValueError as error:
        raise ValueError(f"{short}, and no cuboid of {ranks} is possible: {error}") from None
    return changed, f"{short}: {reason}"
