"""`cuboid import`, `cuboid export`: Hugging Face folders to checkpoints and back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cuboid.cli.bar import bar
from cuboid.cli.option import ON_CUBOID, option
from cuboid.dtypes import EXPORTED, known
from cuboid.mesh.cuboid import Cuboid

if TYPE_CHECKING:
    import torch

    from cuboid.run.launch import World
    from cuboid.train.origin import Origin


def import_(
    folder: Annotated[Path, typer.Argument(help="A Hugging Face folder: config.json and safetensors.")],
    out: Annotated[Path, typer.Argument(help="The run folder to make, with one checkpoint.")],
    cuboid: ON_CUBOID = "1,1,1",
) -> None:
    """Turn a Hugging Face folder into a checkpoint that loads on any cuboid.

    Training does not need this command: model.pretrained takes the folder itself.

    Example:
      cuboid import folder runs/imported
    """
    shape = Cuboid.parse(cuboid)
    from cuboid.model.hf.architecture import model_config

    model_config(folder).check(shape, shape.x, 1)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not an empty folder; name a new one to import to")
    from cuboid.run.launch import launch

    launch(import_on_rank, shape.ranks, [folder.resolve(), out.resolve(), shape])


def import_on_rank(world: World, folder: Path, out: Path, cuboid: Cuboid) -> None:
    import torch

    from cuboid.data.tokenizer import FILE
    from cuboid.mesh.mesh import Mesh
    from cuboid.model.hf import folder as files
    from cuboid.model.hf.load import from_pretrained
    from cuboid.model.hf.save import Provenance
    from cuboid.train.listing import newest
    from cuboid.train.writer import Writer

    mesh, console = Mesh(cuboid, world.rank, world.device), rank_console(world)
    tensors = files.stored(folder).values()
    wide = torch.float64 if any(tensor.dtype == "F64" for tensor in tensors) else torch.float32
    with bar(console, f"reading {folder}", sum(t.bytes for t in tensors) // mesh.cuboid.ranks) as advance:
        model = from_pretrained(folder, mesh, wide, advance)
    if world.rank == 0:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        out.chmod(0o700)
        Provenance.keep(folder, out)
        if (folder / FILE).is_file():
            (out / FILE).write_bytes((folder / FILE).read_bytes())
    writer = Writer(out / "checkpoints", model, keep=0, background=False)
    writer.save(0, None, {"model": asdict(model.config), "updates": 0, "data": None, "cuboid": cuboid.sizes})
    console.print(f"wrote {newest(out)}")


def export(
    model: Annotated[Path, typer.Argument(help="A run folder, or one of its checkpoints.")],
    out: Annotated[Path, typer.Argument(help="The Hugging Face folder to make.")],
    dtype: Annotated[
        str,
        option(f"Number format of the weights: {', '.join(EXPORTED)}.", otherwise="as they were imported, else fp32"),
    ] = "",
    shard_gb: Annotated[float, option("Largest file, in GB (10⁹ bytes).", None, 1e-6)] = 5.0,
    cuboid: ON_CUBOID = "1,1,1",
) -> None:
    """Write a trained model as a Hugging Face folder.

    transformers loads it, and so do cuboid sample, cuboid eval and model.pretrained.

    Example:
      cuboid export runs/NAME exported --dtype bf16
    """
    shape, dtype = Cuboid.parse(cuboid), known(dtype, EXPORTED) if dtype else ""
    from cuboid.model.hf.architecture import kind_of
    from cuboid.train.origin import Origin

    origin = Origin.find(model)
    kind_of(origin.config)
    origin.config.check(shape, shape.x, 1)
    import torch

    from cuboid.run.launch import launch

    stored = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    launch(export_on_rank, shape.ranks, [origin, out.resolve(), stored.get(dtype), int(shard_gb * 1e9), shape])


def export_on_rank(
    world: World, origin: Origin, out: Path, dtype: torch.dtype | None, shard_bytes: int, cuboid: Cuboid
) -> None:
    import torch

    from cuboid.mesh.mesh import Mesh
    from cuboid.model.cuboid import CuboidParallel
    from cuboid.model.hf.save import save_pretrained
    from cuboid.model.transformer import Transformer

    mesh, console = Mesh(cuboid, world.rank, world.device), rank_console(world)
    provenance = origin.provenance
    wide = provenance is not None and any(came_as == "F64" for _, came_as in provenance.tensors.values())
    at_rest = torch.float64 if wide else torch.float32
    model = Transformer(CuboidParallel(origin.config, mesh), None, at_rest)
    origin.load(model)
    size = origin.config.parameters * (dtype or at_rest).itemsize
    with bar(console, f"writing {out}", size) as advance:
        save_pretrained(model, out, dtype, shard_bytes, provenance, origin.tokenizer(), advance)
    console.print(f"wrote {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")


def rank_console(world: World) -> Console:
    """The console of rank 0; a silent one on other ranks."""
    return Console(quiet=world.rank != 0, highlight=False, markup=False, soft_wrap=True)
