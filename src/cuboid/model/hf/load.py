"""Loads a Hugging Face folder into a model on any cuboid. Each rank reads only the slices it keeps."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import Range, shard_of
from cuboid.mesh.mesh import Mesh
from cuboid.model.cuboid import CuboidParallel
from cuboid.model.hf.architecture import model_config
from cuboid.model.hf.folder import Stored, stored
from cuboid.model.hf.names import Source, canonical, source_of
from cuboid.model.module import declared
from cuboid.model.transformer import Transformer

Progress = Callable[[int], object]
_TOGETHER = 1 << 20  # elements read at a time


def from_pretrained(
    folder: Path | str,
    cuboid: Cuboid | Mesh,
    dtype: torch.dtype = torch.float32,
    progress: Progress = lambda size: None,
) -> Transformer:
    """Loads the model of a Hugging Face folder. Every rank calls it, and reads only the slices it keeps.

    Args:
        folder: With config.json and safetensors.
        cuboid: The mesh to load it on, or the cuboid of a mesh over all ranks.
        dtype: Of weights at rest.
        progress: Called with the number of further bytes of weights that are loaded.

    Raises:
        ValueError: If the architecture is not supported, a file is missing or damaged, or the model does not fit the
            cuboid.
    """
    config = model_config(Path(folder))
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = cuboid if isinstance(cuboid, Mesh) else Mesh(cuboid, rank)
    model = Transformer(CuboidParallel(config, mesh), None, dtype)
    load(Path(folder), model, progress)
    return model


@torch.no_grad()
def load(folder: Path, model: Transformer, progress: Progress = lambda size: None) -> None:
    """Load a folder's weights into a model, under any parallelism."""
    mesh, found = model.parallel.mesh, check(folder, model)
    for name, parameter, declaration in declared(model):
        source = source_of(model.config, name)
        (top, _), *rest = declaration.spec.ranges(mesh.cuboid, mesh.coordinates)
        first = top + source.slot * declaration.spec.shape[0]
        shard = shard_of(parameter)
        rows = max(1, _TOGETHER // max(1, shard[:1].numel()))
        for start in range(0, len(shard), rows):
            into = shard[start : start + rows]
            into.copy_(read(found[source.name], source, [(first + start, first + start + len(into)), *rest]))
        progress(shard.nbytes)


def read(tensor: Stored, source: Source, ranges: Sequence[Range]) -> Tensor:
    """A slice of their tensor in the layout of ours."""
    return tensor.read(ranges[::-1]).T if source.transposed else tensor.read(ranges)


def check(folder: Path, model: Transformer) -> dict[str, Stored]:
    """The folder's tensors by their names in `Source`. Raises ValueError unless they are exactly this model's."""
    config, found = model.config, {}
    for tensor in stored(folder).values():
        name = canonical(config, tensor.name)
        if name is not None:
            found[name] = tensor
    wanted = {}
    for name, spec in model.specs().items():
        source = source_of(config, name)
        wanted[source.name] = source.shape(spec.shape)
    for name, shape in wanted.items():
        if name not in found:
            raise ValueError(f"{folder} lacks tensor {name} of shape {list(shape)}, which its config.json asks for")
        if found[name].shape != shape:
            raise ValueError(
                f"{found[name].file}: tensor {found[name].name} has shape {list(found[name].shape)} but config.json "
                f"asks for {list(shape)}; use the config.json that belongs to it"
            )
    for name, tensor in found.items():
        if name not in wanted:
            raise ValueError(
                f"{tensor.file}: tensor {tensor.name} is not in the model that config.json describes; use "
                "the config.json that belongs to it"
            )
    return found
