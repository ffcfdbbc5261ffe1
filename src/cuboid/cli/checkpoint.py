"""`cuboid checkpoint`: list, verify and prune the checkpoints of a run."""

import json
import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cuboid.cli.bar import bar
from cuboid.cli.command import Command, CommandGroup
from cuboid.cli.option import JSON, option
from cuboid.mesh.cuboid import Cuboid
from cuboid.train.progress import duration, quantity

app = typer.Typer(name="checkpoint", cls=CommandGroup, add_completion=False)

RUN = Annotated[Path, typer.Argument(help="A run folder, or one of its checkpoints.")]


@app.callback()
def checkpoint() -> None:
    """List, verify and prune the checkpoints of a run."""


@app.command("list", cls=Command)
def list_(run: RUN, as_json: JSON = False) -> None:
    """Print each checkpoint: step, size, age, the cuboid it was written on, and whether it looks intact.

    This checks the manifest, the state and the sizes of the other files; cuboid checkpoint verify reads all files.
    """
    from cuboid.train.listing import candidates

    rows = [row(path) for path in reversed(candidates(run))]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("step", "size", "age", "cuboid", "state"):
        table.add_column(column, justify="right" if column in ("step", "size", "age") else "left")
    for each in rows:
        size, age = f"{quantity(each['bytes'])}B", duration(each["age_seconds"])
        cuboid = str(Cuboid.stored(each["cuboid"])) if each["cuboid"] else ""
        table.add_row(each["name"], size, age, cuboid, each["damage"] or "looks intact")
    Console(highlight=False, markup=False, soft_wrap=True).print(table)


def row(path: Path) -> dict[str, Any]:
    from cuboid.train.listing import inspect
    from cuboid.train.manifest import Damaged

    files = [file.lstat() for file in path.iterdir()]
    found: dict[str, Any] = {
        "name": path.name,
        "path": str(path),
        "bytes": sum(file.st_size for file in files),
        "age_seconds": time.time() - max((file.st_mtime for file in files), default=path.lstat().st_mtime),
        "cuboid": None,
        "damage": "",
    }
    try:
        found["cuboid"] = inspect(path)[1].get("cuboid")
    except Damaged as error:
        found["damage"] = f"damaged: {', '.join(error.names)}"
    except ValueError as error:  # from another version
        found["damage"] = str(error)
    return found


@app.command(cls=Command)
def verify(run: RUN, as_json: JSON = False) -> None:
    """Read every file of every checkpoint and compare it with its checksum.

    Exits 0 if all are good, 1 if any is damaged.
    """
    from cuboid.train.listing import candidates

    console = Console(highlight=False, markup=False, soft_wrap=True, stderr=as_json)
    found = {path: damage(path, console) for path in reversed(candidates(run))}
    if as_json:
        typer.echo(json.dumps({str(path): wrong for path, wrong in found.items()}, indent=2))
    else:
        for path, wrong in found.items():
            console.print(f"{path}: {'damaged: ' + ', '.join(wrong) if wrong else 'good'}")
    if any(found.values()):
        raise typer.Exit(1)


def damage(path: Path, console: Console) -> list[str]:
    """The damaged files of a checkpoint."""
    from cuboid.train import manifest
    from cuboid.train.listing import inspect
    from cuboid.train.manifest import Damaged

    try:
        sums, _ = inspect(path)
    except Damaged as error:
        return list(error.names)
    with bar(console, f"reading {path}", sum(each.size for each in sums.values())) as advance:
        return sorted(name for name, each in sums.items() if not manifest.same(path, name, each, advance))


@app.command(cls=Command)
def prune(
    run: Annotated[Path, typer.Argument(help="A run folder in which nothing is being written.")],
    keep: Annotated[int, option("Newest good checkpoints to keep.", None, 1)] = 2,
    dry_run: Annotated[bool, option("Only print what would be removed.", flag="--dry-run")] = False,
) -> None:
    """Remove all but the newest good checkpoints: older ones, damaged ones, and unfinished ones of killed runs.

    Checkpoints to be kept are read and compared with their checksums first. If none is good, none is removed.
    """
    from cuboid.train.listing import candidates, step_of
    from cuboid.train.run import RunFolder

    console = Console(highlight=False, markup=False, soft_wrap=True)
    newest = candidates(run)[0]
    if newest == run.resolve():
        raise ValueError(f"{run} is a checkpoint; give the run folder whose checkpoints are to be pruned")
    folder = newest.parent
    with RunFolder(folder.parent if folder.name == "checkpoints" else folder) as locked:
        locked.lock()  # a live run may be writing a checkpoint
        kept = _prune(folder, keep, dry_run, console)
    console.print(f"keeps {', '.join(str(step_of(path)) for path in reversed(kept))}")


def _prune(folder: Path, keep: int, dry_run: bool, console: Console) -> list[Path]:
    """Returns the checkpoints that are kept, newest first."""
    from cuboid.train.listing import complete
    from cuboid.train.writer import leftovers, remove

    kept: list[Path] = []
    for path in reversed(complete(folder)):
        if len(kept) < keep and not damage(path, console):
            kept.append(path)
    if not kept:
        raise ValueError(f"no checkpoint in {folder} is good; none is removed")
    gone = [path for path in complete(folder) if path not in kept]
    for path in [*gone, *leftovers(folder)]:
        console.print(f"{'would remove' if dry_run else 'removes'} {path}")
        if not dry_run:
            try:
                remove(path) if path in gone else shutil.rmtree(path)
            except OSError as error:
                raise ValueError(f"{path} cannot be removed: {error.strerror}; remove it by hand") from None
    return kept
