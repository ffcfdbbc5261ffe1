"""Cuboid: train Transformers too big for one device on any x × y × z block of devices."""

from cuboid.baselines.serial import Serial
from cuboid.layers.loss import Loss
from cuboid.mesh.cuboid import Cuboid, factorisations
from cuboid.mesh.layout import Spec
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig, RopeScaling
from cuboid.model.cuboid import CuboidParallel, Policy
from cuboid.model.hf import from_pretrained, save_pretrained
from cuboid.model.transformer import Transformer
from cuboid.run.launch import Pool, World, launch

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
