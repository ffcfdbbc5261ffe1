"""`cuboid doctor`: checks a new machine, or cluster, in one command.

Ranks report their facts and try what training will need, stage by stage; the first rank draws the conclusions. A
failure or hang on any rank ends the examination with an error that names it.
"""

import shutil
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
import torch.distributed as dist

from cuboid.comm.collectives import from_all, from_first
from cuboid.device import name_of
from cuboid.doctor import checks
from cuboid.doctor.facts import facts_of, host_name
from cuboid.doctor.finding import Finding
from cuboid.doctor.trials import try_compiler, try_exactness, try_links, try_training
from cuboid.mesh.mesh import Mesh
from cuboid.model.cuboid import COMPUTE, Policy
from cuboid.plan.cost.cuboid import step_cost
from cuboid.plan.hardware import Hardware, load, of_gpu
from cuboid.run.errors import RankError
from cuboid.run.launch import World
from cuboid.run.watch import watched
from cuboid.train.auto import vocab_of
from cuboid.train.config import TrainConfig
from cuboid.train.precision import settled
from cuboid.train.preflight import need, remedy
from cuboid.train.writer import connected

PATIENCE = 120.0  # seconds for which a rank may be silent
MOMENTS = 3  # tensors of a parameter in a checkpoint: itself, and two of AdamW's


def look(world: World, config: TrainConfig, _: str) -> list[Finding]:
    """Findings that need no trial."""
    mesh = Mesh(config.cuboid_shape(), world.rank, world.device, watch=world.watch, per_host=world.local_size)
    facts = from_all(facts_of(world), mesh.world)
    mesh.close()
    if world.rank:
        return []
    gpu, wanted = facts[0].gpu, need(config, world.apart, facts[0].gpu)
    free = min(each.free for each in facts) / (1 if gpu else world.local_size)
    return [
        checks.versions(facts),
        checks.devices(facts, config.precision.dtype),
        checks.topology(facts, config.cuboid_shape(), sent_by(config)),
        *checks.settings(facts, config.precision.deterministic),
        checks.memory(facts, wanted, remedy(config, 1 if gpu else world.local_size, free, world.apart, gpu)),
    ]


def store(world: World, config: TrainConfig, _: str) -> list[Finding]:
    """The first rank writes a file where checkpoints will be, and all ranks look for it. They tell each other over the
    group that checkpoints use."""
    with world.watch.paused() if world.watch is not None else nullcontext():  # so that gloo may say why it cannot
        everyone = connected(world.rank, world.size)
    wanted = Path(config.logging.folder or "runs").absolute()
    folder = next(path for path in (wanted, *wanted.parents) if path.is_dir())
    fault, file = "", None
    if world.rank == 0:
        try:
            file = NamedTemporaryFile(dir=folder, prefix=".cuboid-doctor-")  # noqa: SIM115  # gone when it is closed
        except OSError as error:
            fault = error.strerror or str(error)
    path = from_first(file.name if file is not None else None, everyone)
    seen = from_all((host_name(), path is None or Path(path).exists()), everyone)
    if file is not None:
        file.close()
    dist.destroy_process_group(everyone.group)
    if world.rank:
        return []
    model = config.model_config(config.model.vocab or vocab_of(config.data))
    hosts = {host: all(sees for other, sees in seen if other == host) for host, _ in seen}
    return [checks.storage(str(folder), hosts, shutil.disk_usage(folder).free, 4 * MOMENTS * model.parameters, fault)]


def sent_by(config: TrainConfig) -> dict[str, int]:
    """Bytes that the first rank sends over each axis for a micro-batch of the configured run, by formula."""
    cuboid, d, m = config.cuboid_shape(), config.data, config.memory
    model = config.model_config(config.model.vocab or vocab_of(d))
    policy, compute = Policy(m.activations, m.weights, m.head_elements), COMPUTE[config.precision.dtype]
    at, size = cuboid.coordinates(0), 4 if compute is None else compute.itemsize
    batch = d.batch // d.micro_batches
    return step_cost(model, cuboid, at, batch, d.seq, policy, m.recompute, 4, size).bytes()


def on_links(world: World, config: TrainConfig, hardware: str) -> list[Finding]:
    found = try_links(world, config.cuboid_shape(), hardware_of(hardware, world.device))
    return found if world.rank == 0 else []


def hardware_of(name: str, device: torch.device) -> Hardware | None:
    """The hardware with which links are compared: the given one or, on a GPU, its preset. No preset describes a CPU."""
    return load(name) if name else of_gpu(name_of(device))


STAGES: dict[str, Callable[[World, TrainConfig, str], list[Finding]]] = {
    "machine": look,
    "storage": store,
    "compile": lambda world, config, _: try_compiler(world, config),
    "links": on_links,
    "exactness": lambda world, config, _: try_exactness(world, config.cuboid_shape()),
    "training": lambda world, config, _: try_training(world, config),
}


def on_rank(world: World, stage: str, config: TrainConfig, hardware: str) -> list[Finding]:
    """Runs a stage on every rank; the first rank's findings count."""
    with watched(world.rank, world.size, PATIENCE) as watch:
        if watch is not None:
            watch.step = 1  # from here on no rank may be silent
        return STAGES[stage](replace(world, watch=watch), settled(config, world)[0], hardware)


def examine(
    ask: Callable[[str], list[Finding]], tell: Callable[[Finding], None]
) -> tuple[list[Finding], Exception | None]:
    """Runs all stages through `ask`, and passes each finding to `tell` at once. A stage that fails is the last, because
    ranks are unreliable then; its exception is returned too."""
    found = list[Finding]()

    def add(findings: Iterable[Finding]) -> None:
        for each in findings:
            found.append(each)
            tell(each)

    names = list(STAGES)
    for i, name in enumerate(names):
        try:
            add(ask(name))
        except Exception as error:
            add([failed(name, error, names[i + 1 :])])
            return found, error
    return found, None


def failed(stage: str, error: Exception, left: list[str]) -> Finding:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    said = lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1].strip()}"
    untried = f"; not tried: {', '.join(left)}" if left else ""
    remedy = "repeat it with NCCL_DEBUG=WARN, and with fewer ranks, to see which of them it is"
    if isinstance(error, ValueError | RankError) and "; " in said and len(lines) == 1:  # which ends with its own
        said, _, remedy = said.rpartition("; ")
    return Finding(stage, "error", f"{said}{untried}", remedy, {"error": str(error)})
