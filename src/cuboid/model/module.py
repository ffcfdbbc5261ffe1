"""Modules declare their parameters by global shapes and hold this rank's shards.

On several ranks a parameter is a DTensor, whose local tensor is the shard that a step works on; on one device it is a
plain tensor. So optimizers, clipping, state dicts and `torch.distributed.checkpoint` work as for any module.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cuboid.layers.randomness import key_of, normal, normal_quantiles
from cuboid.mesh.layout import Spec, shard_of
from cuboid.model.parallel import Parallel, Role


class Declared(NamedTuple):
    """How a parameter is sharded, and its initial value, `mean` + normal(`std`)."""

    spec: Spec
    std: float
    mean: float


class Module(nn.Module):
    """A module that declares its parameters by their global shapes and holds this rank's shards."""

    def __init__(self, parallel: Parallel) -> None:
        super().__init__()
        self.parallel = parallel
        self.declared: dict[str, Declared] = {}

    def declare(
        self, name: str, role: Role, *shape: int, std: float = 0.0, mean: float = 0.0, pipe: Sequence[int] = ()
    ) -> nn.Parameter:
        """Registers a parameter. `pipe`: the places of a pipeline that hold it, if not only this rank's."""
        mesh = self.parallel.mesh
        spec = replace(self.parallel.spec(role, shape), pipe=tuple(pipe) or (mesh.pipe.index,))
        shard = torch.empty(spec.local_shape(mesh.cuboid, mesh.coordinates), device=mesh.device)
        self.declared[name] = Declared(spec, std, mean)
        parameter = spec.parameter(shard, mesh)
        self.register_parameter(name, parameter)
        return parameter

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Also takes unsharded tensors. Copies values even with assign=True, because layers and optimizers refer to the
        existing parameters."""
        assign = local_metadata.get("assign_to_params_buffers", False)
        for name, d in self.declared.items():
            given, mine = state_dict.get(prefix + name), self.get_parameter(name)
            if not isinstance(given, Tensor) or given.shape != mine.shape:
                continue  # torch says so
            if assign and (given.dtype, given.device) != (mine.dtype, mine.device):
                error_msgs.append(
                    f"{prefix}{name} is {given.dtype} on {given.device} and cannot be assigned to a parameter that is "
                    f"{mine.dtype} on {mine.device}; load it without assign=True, which copies and converts"
                )
            state_dict[prefix + name] = self._here(given, d.spec, mine)
        metadata = local_metadata | {"assign_to_params_buffers": False}
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def _here(self, given: Tensor, spec: Spec, mine: nn.Parameter) -> Tensor:
        """The tensor as it is sharded on this mesh, if that needs no communication; else as given."""
        mesh = self.parallel.mesh
        if not isinstance(mine, DTensor):
            return given
        if not isinstance(given, DTensor):
            return spec.dtensor(spec.take(given, mesh.cuboid, mesh.coordinates).to(mesh.device), mesh)
        alike = DeviceMesh.__eq__(given.device_mesh, mine.device_mesh) and given.placements == mine.placements
        return spec.dtensor(shard_of(given), mesh) if alike else given

    def _no_hook(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            f"a hook on {type(self).__name__}, a module inside a model: it runs on sub-batches of a rank's shards, so "
            "a hook would not get the module's inputs and outputs; register it on the model itself, or on a parameter"
        )

    register_forward_hook = register_forward_pre_hook = _no_hook
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _no_hook


def declared(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Declared]]:
    """Every parameter below `module` with its name and declaration."""
    for path, child in module.named_modules():
        if isinstance(child, Module):
            for name, declaration in child.declared.items():
                yield f"{path}.{name}".lstrip("."), child.get_parameter(name), declaration


@torch.no_grad()
def initialise(module: nn.Module, seed: int) -> None:
    """Sets initial values by seed, name and global index: the same on every cuboid. A rank makes only its shards."""
    quantiles = normal_quantiles()
    for name, parameter, (spec, std, mean) in declared(module):
        shard = shard_of(parameter).fill_(mean)
        if std:
            mesh = next(m for m in module.modules() if isinstance(m, Module)).parallel.mesh
            ranges = spec.ranges(mesh.cuboid, mesh.coordinates)
            shard.add_(normal(key_of(seed, name), spec.shape, ranges, std, quantiles).to(shard))
