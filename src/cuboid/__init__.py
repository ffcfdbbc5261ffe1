"""Cuboid: train Transformers too big for one device on any x × y × z block of devices."""

from typing import TYPE_CHECKING

from cuboid.lazy import lazily

if TYPE_CHECKING:
    from cuboid.baselines.serial import Serial
    from cuboid.layers.loss import Loss
    from cuboid.mesh.cuboid import Cuboid, factorisations
    from cuboid.mesh.layout import Spec
    from cuboid.mesh.mesh import Mesh
    from cuboid.mesh.place import Place
    from cuboid.model.config import ModelConfig, RopeScaling
    from cuboid.model.cuboid import CuboidParallel, Policy
    from cuboid.model.hf import from_pretrained, save_pretrained
    from cuboid.model.nn import MLP, Attention, Block, Embedding, LayerModule, Linear, Model, Norm
    from cuboid.model.parallel import Parallel
    from cuboid.model.transformer import Transformer
    from cuboid.run.launch import Pool, World, launch
    from cuboid.step.op import chain, fork, local, recomputed, residual
    from cuboid.step.runner import At, Stage
    from cuboid.step.schedule import Schedule
else:
    __getattr__ = lazily(
        __name__,
        {
            "baselines.serial": "Serial",
            "layers.loss": "Loss",
            "mesh.cuboid": "Cuboid factorisations",
            "mesh.layout": "Spec",
            "mesh.mesh": "Mesh",
            "mesh.place": "Place",
            "model.config": "ModelConfig RopeScaling",
            "model.cuboid": "CuboidParallel Policy",
            "model.hf": "from_pretrained save_pretrained",
            "model.nn": "MLP Attention Block LayerModule Linear Model Norm Embedding",
            "model.parallel": "Parallel",
            "model.transformer": "Transformer",
            "run.launch": "Pool World launch",
            "step.op": "chain fork local recomputed residual",
            "step.runner": "At Stage",
            "step.schedule": "Schedule",
        },
    )

__all__ = [
    "MLP",
    "At",
    "Attention",
    "Block",
    "Cuboid",
    "CuboidParallel",
    "Embedding",
    "LayerModule",
    "Linear",
    "Loss",
    "Mesh",
    "Model",
    "ModelConfig",
    "Norm",
    "Parallel",
    "Place",
    "Policy",
    "Pool",
    "RopeScaling",
    "Schedule",
    "Serial",
    "Spec",
    "Stage",
    "Transformer",
    "World",
    "chain",
    "factorisations",
    "fork",
    "from_pretrained",
    "launch",
    "local",
    "recomputed",
    "residual",
    "save_pretrained",
]
__version__ = "0.1.0"
