"""The run folder: all files of a run, readable by their owner alone.

config.toml      the resolved configuration
metrics.jsonl    one JSON object per line, with its step, the tokens seen so far and the time
tensorboard/     the same numbers as events
checkpoints/     one folder each
plot.png         loss and throughput
"""

import fcntl
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from io import RawIOBase
from math import inf, isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def fresh_path(parent: Path = Path("runs")) -> Path:
    """A path named by the time, at which nothing exists yet."""
    name = datetime.now().strftime("%Y-%m-%d-%H%M%S")
    paths = (parent / (f"{name}-{n}" if n > 1 else name) for n in range(1, 1 << 16))
    return next(path for path in paths if not path.exists()).absolute()


def check_free(path: Path) -> None:
    """Raise ValueError if the folder has files in it."""
    if path.is_dir() and any(each.name != "config.aside" for each in path.iterdir()):
        raise ValueError(f"run folder {path} is not empty; resume the run in it or choose another folder")


class RunFolder:
    """Use `create` or `open`. One process writes."""

    def __init__(self, path: Path, tensorboard: bool = True) -> None:
        self.path = path.absolute()
        self._tensorboard = tensorboard
        self._lines: RawIOBase | None = None
        self._unwritten = b""
        self._events: SummaryWriter | None = None
        self._forget_from: int | None = None
        self._locked: int | None = None

    @classmethod
    def create(cls, path: Path, config_toml: str, tensorboard: bool = True) -> "RunFolder":
        """Makes the folder, or takes an empty one. Call it after the configuration has been checked."""
        run = cls(path, tensorboard)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_free(path)
            path.chmod(0o700)
            run.lock()
            run.keep_config(config_toml)
            run.checkpoints.mkdir(mode=0o700)
        except OSError as error:
            raise ValueError(f"run folder {path} cannot be created: {error.strerror}; choose another") from None
        return run

    @classmethod
    def open(cls, path: Path, tensorboard: bool = True) -> "RunFolder":
        run = cls(path, tensorboard)
        if not run.config.is_file():
            raise ValueError(f"{path} is not a run folder: it has no {run.config.name}; give the folder of a run")
        return run

    def lock(self) -> None:
        """Keep other runs from writing here until this one is closed or its process ends."""
        folder = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(folder)
            raise ValueError(
                f"run folder {self.path} is in use by a run; wait until it ends or choose another folder"
            ) from None
        except OSError:  # a file system without locks
            os.close(folder)
        else:
            self._locked = folder

    def keep_config(self, text: str) -> None:
        """Write it aside and rename it: a crash leaves the old file or the new one."""
        aside = self.config.with_suffix(".aside")
        aside.write_text(text, "utf-8")
        aside.replace(self.config)

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def plot(self) -> Path:
        return self.path / "plot.png"

    @property
    def events(self) -> Path:
        return self.path / "tensorboard"

    @property
    def lines(self) -> Path:
        return self.path / "metrics.jsonl"

    def log(self, metrics: Mapping[str, float]) -> None:
        """Append the numbers of one step, `metrics["step"]`. JSON has no NaN: values that are not finite become null.
        If the disk is full, lines are kept until it has room, and events end."""
        line = {name: value if isfinite(value) else None for name, value in metrics.items()}
        if self._lines is None:
            self._keep_until(inf)  # drops the torn line of a killed run
            self._lines = self.lines.open("ab", buffering=0)
        self._unwritten += (json.dumps(line) + "\n").encode()
        with suppress(OSError):
            self._unwritten = self._unwritten[self._lines.write(self._unwritten) :]
        try:
            if self._tensorboard:
                self._log_events(metrics)
        except OSError:
            self._tensorboard = False

    def metrics(self) -> list[dict[str, float]]:
        """All lines, except a last one that a crash has torn."""
        return [{name: nan if value is None else value for name, value in row.items()} for row in self._rows()]

    def rewind(self, step: int) -> None:
        """Drop the steps after `step`, from which the run resumes, so that none is logged twice."""
        assert self._lines is None, "rewind before logging"
        self._keep_until(step)
        self._forget_from = step + 1

    def sync(self) -> None:
        """Make all lines durable. Called before a checkpoint of their last step is written."""
        if self._lines is not None:
            os.fsync(self._lines.fileno())

    def close(self) -> None:
        for stream in (self._lines, self._events):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        if self._locked is not None:
            os.close(self._locked)
        self._lines = self._events = self._locked = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _rows(self) -> list[dict[str, Any]]:
        if not self.lines.exists():
            return []
        whole, _, _ = self.lines.read_text("utf-8").rpartition("\n")  # a torn line has no end
        return [json.loads(line) for line in whole.splitlines()]

    def _keep_until(self, step: float) -> None:
        """Write them aside and rename: a crash leaves the old lines or the new ones."""
        if not self.lines.exists():
            return
        aside = self.lines.with_suffix(".aside")
        with aside.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in self._rows() if row["step"] <= step)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self.lines)

    def _log_events(self, metrics: Mapping[str, float]) -> None:
        if self._events is None:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and not every run wants it

            self._events = SummaryWriter(str(self.events), purge_step=self._forget_from)
        for name, value in metrics.items():
            if name not in ("step", "wall_time"):
                self._events.add_scalar(name, float(value), int(metrics["step"]), metrics.get("wall_time"))
