"""The parallelism of a run: its cuboid with a suitable schedule, or one device to compare with."""

import torch

from cuboid.baselines.serial import Serial
from cuboid.device import is_gpu
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import COMPUTE, CuboidParallel, Policy, suitable_schedule
from cuboid.model.parallel import Parallel
from cuboid.run.launch import World
from cuboid.step.schedule import Schedule
from cuboid.train.config import TrainConfig


def on_cuboid(config: TrainConfig, model: ModelConfig, world: World) -> Parallel:
    memory, schedule = config.memory, schedule_of(config, model, world.apart, is_gpu(world.device))
    cuboid, policy = config.cuboid_shape(), Policy(memory.activations, memory.weights, memory.head_elements)
    mesh = Mesh(cuboid, world.rank, world.device, watch=world.watch, per_host=world.local_size)
    return CuboidParallel(model, mesh, policy, COMPUTE[config.precision.dtype], schedule)


def schedule_of(config: TrainConfig, model: ModelConfig, apart: bool, gpu: bool) -> Schedule:
    """The configured schedule; what is left open is chosen by size."""
    d, asked, itemsize = config.data, config.overlap, (COMPUTE[config.precision.dtype] or torch.float32).itemsize
    suits = suitable_schedule(model, config.cuboid_shape(), d.batch // d.micro_batches, d.seq, itemsize, apart, gpu)
    sub_batches, chunks = asked.sub_batches or suits.sub_batches, asked.chunks or suits.chunks
    return config.schedule_on(config.cuboid_shape(), sub_batches, chunks)


def on_one_device(config: TrainConfig, model: ModelConfig, world: World) -> Parallel:
    return Serial(model, COMPUTE[config.precision.dtype], world.device)
