"""Where a run starts: in an empty folder, or where this same run was interrupted."""

from pathlib import Path

from cuboid.run.launch import World
from cuboid.train.config import TrainConfig, differences
from cuboid.train.listing import complete
from cuboid.train.run import check_free, fresh_path

SHOWN = 6  # most keys that a message lists


def is_same_run(config: TrainConfig, folder: Path) -> bool:
    """Whether `folder` holds this same run."""
    file = folder / "config.toml"
    return file.is_file() and not differences(config, file.read_text("utf-8"))


def is_begun(config: TrainConfig, folder: Path, resume: Path | None) -> bool:
    """Whether `folder` holds the run to continue: this same one, or the one to resume."""
    return is_same_run(config, folder) or (resume is not None and folder.resolve() in (resume, *resume.parents))


def check_folder(config: TrainConfig, folder: Path, resume: Path | None) -> None:
    """Raise ValueError if the run can neither start nor continue in `folder`, with the keys in which they differ."""
    if is_begun(config, folder, resume):
        return
    try:
        check_free(folder)
    except ValueError as error:
        file = folder / "config.toml"
        different = differences(config, file.read_text("utf-8")) if file.is_file() else []
        if not different:
            raise
        more = f" and {len(different) - SHOWN} more keys" if len(different) > SHOWN else ""
        raise ValueError(f"{error}. The run in it has {', '.join(different[:SHOWN])}{more}") from None


def beginning(
    world: World, config: TrainConfig, folder: Path | None, resume: Path | None
) -> tuple[Path, Path | None] | None:
    """Decides, on rank 0, the run folder and what to resume: what was asked for or, if this same run was interrupted,
    the run itself."""
    if world.rank:
        return None
    if folder is None:
        return fresh_path(), resume
    same = is_same_run(config, folder) and (resume is None or world.attempt)
    if same and complete(folder / "checkpoints"):
        return folder, folder
    return folder, resume
