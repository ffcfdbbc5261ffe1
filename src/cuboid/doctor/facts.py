"""Facts of a rank: its host, software, device and environment."""

import os
import platform
import socket
from dataclasses import dataclass, field

import torch

from cuboid import __version__
from cuboid.device import free_memory, gpu_count, gpu_software, has_gpu_driver, is_gpu, name_of
from cuboid.run.launch import World

#: Environment variables that control devices, messages and threads.
FAMILIES = ("NCCL_", "GLOO_", "TORCH_", "CUDA_", "CUBLAS_", "PYTORCH_", "OMP_")


@dataclass(frozen=True)
class Facts:
    rank: int
    host: str
    software: dict[str, str]  # versions by name
    device: str
    gpu: bool
    gpus: int  # of the host, as PyTorch sees them
    driver: bool  # whether there is a GPU driver, whatever PyTorch was built for
    cores: int  # available to this process
    free: float  # bytes: of its GPU, or of its host
    environment: dict[str, str] = field(default_factory=dict)


def host_name() -> str:
    return socket.gethostname()


def facts_of(world: World) -> Facts:
    software = {"cuboid": __version__, "torch": torch.__version__, "Python": platform.python_version()}
    return Facts(
        rank=world.rank,
        host=host_name(),
        software=software | gpu_software(),
        device=name_of(world.device),
        gpu=is_gpu(world.device),
        gpus=gpu_count(),
        driver=has_gpu_driver(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        free=free_memory(world.device),
        environment={name: value for name, value in os.environ.items() if name.startswith(FAMILIES)},
    )
