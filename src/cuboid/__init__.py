"""Cuboid: train Transformers too big for one device on any x × y × z block of devices."""

from cuboid.config import ModelConfig, RopeScaling
from cuboid.hf import from_pretrained, save_pretrained
from cuboid.launch import Pool, World, launch
from cuboid.layout import Spec
from cuboid.loss import Loss
from cuboid.mesh import Cuboid, Mesh, factorisations
from cuboid.model import Transformer
from cuboid.parallel.cuboid import CuboidParallel, Policy
from cuboid.parallel.serial import Serial

__all__ = [
    "Cuboid",
    "CuboidParallel",
    "Loss",
    "Mesh",
    "ModelConfig",
    "Policy",
    "Pool",
    "RopeScaling",
    "Serial",
    "Spec",
    "Transformer",
    "World",
    "factorisations",
    "from_pretrained",
    "launch",
    "save_pretrained",
]
__version__ = "0.1.0"
