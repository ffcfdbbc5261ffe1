"""The run folder: everything a run leaves behind, readable by its owner alone.

config.toml      the resolved configuration
metrics.jsonl    one JSON object a line, each with its step, the tokens seen until then, and when it was
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
    """A folder named by the time, where there is none yet."""
    name = datetime.now().strftime("%Y-%m-%d-%H%M%S")
    paths = (parent / (f"{name}-{n}" if n > 1 else name) for n in range(1, 1 << 16))
    return next(path for path in paths if not path.exists()).absolute()


def check_free(path: Path) -> None:
    """Raise if a run cannot begin in this folder because there is something in it."""
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
        """A new folder, or an empty one that is there. Call it once the configuration is known to be good."""
        run = cls(path, tensorboard)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_free(path)
            path.chmod(0o700)
            run.lock()
            run.keep_config(config_toml)
            run.checkpoints.mkdir(mode=0o700)
        except OSError as error:
            raise ValueError(f"run folder {path} cannot be made: {error.strerror}; choose another") from None
        return run

    @classmethod
    def open(cls, path: Path, tensorboard: bool = True) -> "RunFolder":
        run = cls(path, tensorboard)
        if not run.config.is_file():
            raise ValueError(f"{path} is not a run folder: it has no {run.config.name}; give one that a run has made")
        return run

    def lock(self) -> None:
        """Let no other run write here until this one is closed, or its process ends."""
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
        """Written aside and renamed: whoever dies here leaves the old one or the new one."""
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
        """Append numbers of one step, `metrics["step"]`. JSON has no NaN: what is not finite is null there. What a full
        disk does not take is kept until it does; events are then given up."""
        line = {name: value if isfinite(value) else None for name, value in metrics.items()}
        if self._lines is None:
            self._keep_until(inf)  # what a killed run has left of a line must not run into ours
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
        """All lines; a last one torn by a crash is left out."""
        return [{name: nan if value is None else value for name, value in row.items()} for row in self._rows()]

    def rewind(self, step: int) -> None:
        """Forget the steps after `step`, from which the run goes on, so that none is there twice."""
        assert self._lines is None, "rewind before logging"
        self._keep_until(step)
        self._forget_from = step + 1

    def sync(self) -> None:
        """Make all lines durable, before a checkpoint of their last step is."""
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
        """Written aside and renamed: a crash leaves the old lines or the new ones."""
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
