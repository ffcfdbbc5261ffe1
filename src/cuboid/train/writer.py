"""Writes checkpoints: aside, made durable, then renamed into place, by a thread with its own process group.

If it fails on any rank, all ranks learn of it, what was written aside is removed, and earlier checkpoints stay intact.
The writer tries again a few times; then the run ends.
"""

import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from cuboid.comm.axis import Axis
from cuboid.comm.collectives import from_all, from_first
from cuboid.device import HostCopies
from cuboid.model.transformer import Transformer
from cuboid.run.errors import RankError, RunError
from cuboid.train import manifest
from cuboid.train.checkpoint import tensors
from cuboid.train.listing import STATE, complete, step_of
from cuboid.train.storage import PieceWriter

_ASIDE = ".aside"
CONNECTING = timedelta(minutes=5)
WRITING = timedelta(minutes=30)  # for which a rank may write while others wait for it


class Writer:
    """Writes checkpoints into `folder`, keeping the newest `keep` (0: all). Every rank makes one."""

    def __init__(
        self,
        folder: Path,
        model: Transformer,
        keep: int,
        background: bool,
        attempts: int = 1,
        pause: float = 0.0,
    ) -> None:
        self.folder, self.model, self.keep, self.background = folder, model, keep, background
        self.attempts, self.pause = attempts, pause
        mesh = model.parallel.mesh
        self._axis, self._watch = connected(mesh.rank, mesh.world.size), mesh.watch
        self._copies = HostCopies(mesh.device, background)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, optimizer: torch.optim.Optimizer | None, state: Mapping[str, Any]) -> None:
        """Copy everything now and write it, in the background if so configured. A model that was never trained has no
        optimizer."""
        self.wait()
        copies = tensors(self.model, optimizer, self._copies.launch)
        if optimizer is not None:
            self._before_next_step(optimizer)
        self._thread = threading.Thread(target=self._write, args=(step, copies, {"step": step, **state}))
        self._thread.start()
        if not self.background:
            self.wait()

    def _before_next_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Hold the next step until everything is copied."""

        def hold(*_: Any) -> None:
            self._copies.hold()
            hook.remove()

        hook = optimizer.register_step_pre_hook(hold)

    def wait(self) -> None:
        """Wait until the last checkpoint is in place, however long that takes. Raises what went wrong with it."""
        if self._thread is not None:
            with self._watch.paused() if self._watch is not None else nullcontext():
                self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if isinstance(error, RunError):
            raise error
        if error is not None:
            raise RuntimeError(f"a checkpoint could not be written to {self.folder}: {error}") from error

    @property
    def failed(self) -> bool:
        """Whether `wait` is going to raise. Ranks may learn it at different steps."""
        return self._error is not None

    def _write(self, step: int, copies: dict[str, DTensor], state: dict[str, Any]) -> None:
        final, needed = self.folder / f"step-{step:08d}", sum(each.nbytes for each in copies.values())
        try:
            self._copies.land()
            for left in reversed(range(self.attempts)):
                free, failure = self._attempt(final, needed, copies, state)
                if not failure:
                    return
                said = (
                    f"checkpoint {final} could not be written: {failure}; at least {needed:,} bytes are needed and "
                    f"{free:,} were free; "
                )
                if left:
                    self._say(f"{said}trying again in {self.pause:g} s, {left} times at most")
                    time.sleep(self.pause)
            raise RunError(f"{said}earlier checkpoints are intact; make room, then resume the run")
        except BaseException as error:  # handed to the next `wait`
            self._error = error

    def _attempt(self, final: Path, needed: int, copies: dict[str, DTensor], state: dict[str, Any]) -> tuple[int, str]:
        """Returns the bytes that were free, and what went wrong or ""; the same on all ranks."""
        aside = final.with_name(final.name + _ASIDE)
        storage = PieceWriter(aside, self._axis.index)
        free, failure = self._on_first(lambda: self._begin(aside, needed))
        if not failure:
            try:
                dcp.save(copies, storage_writer=storage, process_group=self._axis.group)
            except CheckpointException as error:
                cause, _ = next(iter(error.failures.values()))
                failure = _reason(cause)
        if not failure:
            _, failure = self._on_first(lambda: self._publish(aside, final, storage.sums, state))
        if failure and self._axis.index == 0:
            shutil.rmtree(aside, ignore_errors=True)
        return free, failure

    def _on_first(self, do: Callable[[], int]) -> tuple[int, str]:
        """Runs `do` on the first rank; returns its result and why it failed, or "", on all ranks."""
        found = (0, "")
        if self._axis.index == 0:
            try:
                found = (do(), "")
            except Exception as error:
                found = (_free(self.folder), _reason(error))
        answer: tuple[int, str] = from_first(found, self._axis)
        return answer

    def _begin(self, aside: Path, needed: int) -> int:
        """Makes the folder aside. Returns the bytes that are free; raises OSError if too few are."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in leftovers(self.folder):  # by a run that was killed
            shutil.rmtree(left)
        free, total = _free(self.folder), shutil.disk_usage(self.folder).total
        if free < needed and total:  # some file systems report 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))
        aside.mkdir(mode=0o700)
        return free

    def _publish(self, aside: Path, final: Path, sums: Mapping[str, manifest.Sum], state: Mapping[str, Any]) -> int:
        state_sum = manifest.write_json(aside / STATE, state)
        manifest.write(aside, {**sums, STATE: state_sum})
        _sync(aside)
        forget(self.folder, step_of(final) - 1)
        aside.rename(final)
        _sync(self.folder)
        if self.keep:
            for old in complete(self.folder)[: -self.keep]:
                try:
                    remove(old)
                except OSError as error:  # the new one is in place nevertheless
                    self._say(f"checkpoint {old} could not be removed: {_reason(error)}")
        return 0

    def _say(self, text: str) -> None:
        if self._axis.index == 0:
            print(f"warning: {text}", file=sys.stderr, flush=True)


def connected(rank: int, size: int) -> Axis:
    """All ranks over gloo, in a group of their own. They connect at once: the first checkpoint may be hours away, and
    NCCL may use other interfaces.

    Raises:
        RankError: If this rank cannot reach the others.
    """
    try:
        group = dist.new_group(backend="gloo", timeout=CONNECTING)
        axis = Axis("checkpoint", size, rank, group)
        from_all(None, axis)  # around a ring: each rank reaches its neighbours
    except RuntimeError as error:
        what = str(error).partition("\n")[0].rpartition("] ")[2]  # after the place in gloo's source
        raise RankError(
            f"rank {rank} of {size} could not connect to the others over gloo, which checkpoints need: {what}; set "
            "GLOO_SOCKET_IFNAME to the interface between hosts, such as eth0"
        ) from None
    dist.distributed_c10d._set_pg_timeout(WRITING, group)
    return axis


def leftovers(folder: Path) -> list[Path]:
    """Folders that were being written, or removed, when a run was killed."""
    return sorted(folder.glob(f"step-*{_ASIDE}"))


def forget(folder: Path, after: int) -> None:
    """Remove the checkpoints of steps that a resumed run repeats."""
    for path in complete(folder):
        if step_of(path) > after:
            remove(path)


def remove(path: Path) -> None:
    """Rename it first: half removed, it must not look like a checkpoint."""
    gone = path.with_name(f"{path.name}.removed{_ASIDE}")
    path.rename(gone)
    shutil.rmtree(gone)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def _free(folder: Path) -> int:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(there).free


def _sync(folder: Path) -> None:
    """Make the folder's own entries durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
