"""Writes a model on any cuboid as a Hugging Face folder. One tensor at a time is unsharded; the first rank writes.

A model that came from such a folder has its `Provenance`: export then writes the same files with the same tensors in
the same precision, and copies the other files.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cuboid.comm.collectives import from_first, gather_pieces
from cuboid.data.tokenizer import FILE as TOKENIZER
from cuboid.data.tokenizer import Tokenizer
from cuboid.mesh.layout import Spec, shard_of
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.hf import folder as files
from cuboid.model.hf.architecture import CONFIG, config_json, kind_of, model_config, read_config
from cuboid.model.hf.folder import DTYPES, NAMES, Planned
from cuboid.model.hf.load import Progress
from cuboid.model.hf.names import Source, canonical, source_of
from cuboid.model.module import declared
from cuboid.model.transformer import Transformer

SHARD_BYTES = 5 << 30
_PLACE, _TENSORS = "huggingface", "tensors.json"
_BESIDE = (".json", ".txt", ".model", ".jinja")


@dataclass(frozen=True)
class Provenance:
    """What a run keeps of the folder its model came from: all but the weights, and the file of each of them."""

    folder: Path
    tensors: Mapping[str, tuple[str, str]]  # file and dtype, by the name in the file

    @classmethod
    def keep(cls, source: Path, run: Path) -> None:
        """Copy the files beside the weights into a run's folder."""
        place = run / _PLACE
        place.mkdir(exist_ok=True)
        for path in sorted(source.iterdir()):
            if path.is_file() and path.suffix in _BESIDE and path.name != _TENSORS:
                shutil.copyfile(path, place / path.name)
        where = {name: (tensor.file.name, tensor.dtype) for name, tensor in files.stored(source).items()}
        (place / _TENSORS).write_text(json.dumps(where, indent=1) + "\n", "utf-8")

    @classmethod
    def of(cls, run: Path) -> "Provenance | None":
        """A run's provenance, if its model came from a folder. Raises ValueError for links, or names with a folder in
        them, which would lead elsewhere."""
        place = run / _PLACE
        if not (place / _TENSORS).is_file():
            return None
        for path in (place, *place.iterdir()):
            if path.is_symlink():
                raise ValueError(f"{path} is a link; replace it by the file it points to")
        try:
            where = json.loads((place / _TENSORS).read_text("utf-8"))
            tensors = {str(name): (str(file), str(dtype)) for name, (file, dtype) in where.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{place / _TENSORS} was changed: {error}; import the model again") from None
        for name, (file, dtype) in tensors.items():
            if Path(file).name != file or not file.endswith(".safetensors") or dtype not in DTYPES:
                raise ValueError(
                    f"{place / _TENSORS} has tensor {name} in {file!r} as {dtype}; only safetensors files in the "
                    "folder itself are written; import the model again"
                )
        return cls(place, tensors)

    def fits(self, config: ModelConfig) -> bool:
        """Whether config.json still describes the model, apart from how it is trained."""
        theirs = model_config(self.folder)
        return theirs == config.replace(dropout=theirs.dropout, init_std=theirs.init_std)

    def copy_to(self, folder: Path, plan: Mapping[str, list[Planned]]) -> None:
        """Copy the files beside the weights; the precision and the index are those of the written weights."""
        for path in self.folder.iterdir():
            if path.name not in (_TENSORS, files.INDEX):
                shutil.copyfile(path, folder / path.name)
        written = {each.name: (file, each.dtype) for file, tensors in plan.items() for each in tensors}
        if written == self.tensors:
            if (self.folder / files.INDEX).is_file():
                shutil.copyfile(self.folder / files.INDEX, folder / files.INDEX)
            return
        values = read_config(folder)
        values |= {key: _dtype_name(plan) for key in ("dtype", "torch_dtype") if key in values}
        (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n", "utf-8")


class Part(NamedTuple):
    """A parameter of ours, as a slice of one of their tensors."""

    source: Source
    parameter: Tensor  # empty where another rank's stage has it
    spec: Spec


def save_pretrained(
    model: Transformer,
    out: Path | str,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    provenance: Provenance | None = None,
    tokenizer: Tokenizer | None = None,
    progress: Progress = lambda size: None,
) -> None:
    """Write a folder that `transformers` loads. Every rank calls it.

    Args:
        model: The model, on any cuboid.
        out: The folder; it must be empty or not exist.
        dtype: Of the weights; None: their original one, if their provenance is known, else the one at rest.
        shard_bytes: The most that one safetensors file holds.
        provenance: Of the folder that the model came from: the files beside its weights.
        tokenizer: Saved with the model.
        progress: Called with the number of further bytes of weights that are written.

    Raises:
        ValueError: If `out` is not empty, or `transformers` has no such model.
    """
    place, mesh = Path(out).resolve(), model.parallel.mesh
    kind_of(model.config)
    provenance = provenance if provenance is not None and provenance.fits(model.config) else None
    parts = parts_of(model)
    plan = _plan(model.config, parts, dtype, shard_bytes, provenance)
    refusal = from_first(_refusal(place), mesh.world)
    if refusal:
        raise ValueError(refusal)
    aside = place.with_name(f".{place.name}.{os.getpid()}.new")
    try:
        if mesh.rank == 0:
            aside.mkdir(parents=True)
        for file, tensors in plan.items():
            _write(aside / file, tensors, [parts[_theirs(model.config, each)] for each in tensors], mesh, progress)
        if mesh.rank == 0:
            _write_beside(aside, model.config, plan, provenance, tokenizer)
            aside.replace(place)  # an empty folder, if it exists
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    from_first(None, mesh.world)  # no rank returns before the folder exists


def parts_of(model: Transformer) -> dict[str, list[Part]]:
    """The slices of each of their tensors, in order."""
    found: dict[str, list[Part]] = {}
    mine = {name: parameter for name, parameter, _ in declared(model)}
    none = next(iter(mine.values())).detach().new_empty(0)
    for name, spec in model.specs().items():
        source = source_of(model.config, name)
        found.setdefault(source.name, []).append(Part(source, mine.get(name, none), spec))
    return {name: sorted(parts, key=lambda part: part.source.slot) for name, parts in found.items()}


def _plan(
    config: ModelConfig,
    parts: Mapping[str, list[Part]],
    dtype: torch.dtype | None,
    shard_bytes: int,
    provenance: Provenance | None,
) -> dict[str, list[Planned]]:
    """Which tensors go into which file, in the order they are written."""
    shapes = {name: first.source.shape(first.spec.shape) for name, (first, *_) in parts.items()}
    if provenance is None:
        at_rest = dtype or next(iter(parts.values()))[0].parameter.dtype
        planned = [Planned(name, shape, NAMES[at_rest]) for name, shape in shapes.items()]
        groups = files.sharded(planned, shard_bytes)
    else:
        groups = {}
        for name, (file, came_as) in provenance.tensors.items():
            theirs = canonical(config, name)
            if theirs is not None:
                as_dtype = came_as if dtype is None else NAMES[dtype]
                groups.setdefault(file, []).append(Planned(name, shapes[theirs], as_dtype))
    return {file: files.in_order(tensors) for file, tensors in groups.items()}


def _theirs(config: ModelConfig, planned: Planned) -> str:
    name = canonical(config, planned.name)
    assert name is not None
    return name


def _refusal(out: Path) -> str:
    if out.exists() and not out.is_dir():
        return f"{out} is a file; name a folder to export to"
    if out.is_dir() and any(out.iterdir()):
        return f"folder {out} is not empty; name a new one to export to"
    return ""


def _write(path: Path, tensors: list[Planned], parts: list[list[Part]], mesh: Mesh, progress: Progress) -> None:
    """One file, on the first rank; the others send their shards."""
    if mesh.rank:
        for each in parts:
            whole(each, mesh)
        return
    with path.open("wb") as file:
        file.write(files.header(tensors))
        for planned, each in zip(tensors, parts, strict=True):
            file.write(files.raw(whole(each, mesh).to(DTYPES[planned.dtype])))
            progress(planned.bytes)
        file.flush()
        os.fsync(file.fileno())


@torch.no_grad()
def whole(parts: list[Part], mesh: Mesh) -> Tensor:
    """Gathers a tensor of theirs on the first rank; others get an empty one. All ranks call it."""
    joined = []
    for _, parameter, spec in parts:
        pieces = gather_pieces(shard_of(parameter), mesh.world)
        if mesh.rank == 0:
            joined.append(spec.join([piece.cpu() for piece in pieces], mesh.cuboid))
    if mesh.rank:
        return torch.empty(0)
    tensor = torch.cat(joined) if len(joined) > 1 else joined[0]
    return tensor.T if parts[0].source.transposed else tensor


def _write_beside(
    folder: Path,
    config: ModelConfig,
    plan: Mapping[str, list[Planned]],
    provenance: Provenance | None,
    tokenizer: Tokenizer | None,
) -> None:
    """Write all files but the weights."""
    if len(plan) > 1 or files.FILE not in plan:
        (folder / files.INDEX).write_text(files.index_json(plan), "utf-8")
    if provenance is not None:
        provenance.copy_to(folder, plan)
        return
    end = None
    if tokenizer is not None:
        tokenizer.save(folder)
    if tokenizer is not None and (folder / TOKENIZER).is_file():
        end = tokenizer.end
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n', "utf-8")
    values = config_json(config, _dtype_name(plan), end)
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n", "utf-8")


def _dtype_name(plan: Mapping[str, list[Planned]]) -> str:
    """The precision of the weights (of the first of them) in config.json's words."""
    first = next(iter(plan.values()))[0]
    return str(DTYPES[first.dtype]).removeprefix("torch.")
