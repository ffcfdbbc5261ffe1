"""The manifest of a checkpoint: size and checksum of every other file, and of the list itself.

Names in it are of regular files in the same folder; nothing else is opened. Files that it does not list are ignored.
"""

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

FILE = "manifest.json"
FORMAT = 2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CHUNK = 1 << 20


class Sum(NamedTuple):
    size: int
    digest: str


class Damaged(ValueError):
    """Files of a checkpoint are not as they were written."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        super().__init__(path, names)  # the arguments, with which pickle rebuilds it on other ranks
        self.path, self.names = path, names

    def __str__(self) -> str:
        listed = ", ".join(self.names)
        return f"checkpoint {self.path} is damaged: {listed} missing or changed since it was written"


class Summing:
    """A file being written, and its checksum so far."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._size, self._digest = file, 0, _hash()

    def write(self, content: bytes | memoryview) -> None:
        self._file.write(content)
        self._digest.update(content)
        self._size += len(content)

    @property
    def sum(self) -> Sum:
        return Sum(self._size, self._digest.hexdigest())


@contextmanager
def durable(path: Path) -> Iterator[Summing]:
    """A new file. It is durable when the block ends."""
    with path.open("xb") as file:
        yield Summing(file)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, content: Mapping[str, Any]) -> Sum:
    with durable(path) as file:
        file.write(json.dumps(content, indent=1).encode())
    return file.sum


def write(folder: Path, sums: Mapping[str, Sum]) -> None:
    with durable(folder / FILE) as file:
        file.write(_text(FORMAT, sums))


def read(folder: Path) -> dict[str, Sum]:
    """Returns a checkpoint's files with their checksums. Raises Damaged if a byte of the manifest was changed."""
    try:
        with _open(folder / FILE) as file:
            text = file.read()
        content = json.loads(text)
    except (OSError, ValueError):
        raise Damaged(folder, [FILE]) from None
    if isinstance(content, dict) and ".metadata" in content:
        raise ValueError(
            f"checkpoint {folder} was written by an earlier version, with a pickle, which can run any program and is "
            "never opened; export it with that version and start from it with model.pretrained"
        )
    try:
        version, sums = content["format"], {name: Sum(*each) for name, each in content["files"].items()}
        whole = _text(version, sums) == text
    except (TypeError, KeyError, AttributeError):
        whole = False
    if not whole:
        raise Damaged(folder, [FILE])
    if version != FORMAT:
        raise ValueError(f"checkpoint {folder} has format {version}, but this version reads {FORMAT}; use a newer one")
    outside = [f"{FILE}, which names {name!r}," for name in sums if not _NAME.fullmatch(name) or name == FILE]
    if outside:
        raise Damaged(folder, outside)
    return sums


def same_size(folder: Path, name: str, wanted: Sum) -> bool:
    """Whether a file has the size that was written; does not read it."""
    try:
        found = (folder / name).lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == wanted.size


def same(folder: Path, name: str, wanted: Sum, progress: Callable[[int], object] = lambda size: None) -> bool:
    """Whether a file is as it was written; `progress` is called with the number of further bytes read."""
    if not same_size(folder, name, wanted):
        return False
    digest = _hash()
    try:
        with _open(folder / name) as file:
            while content := file.read(_CHUNK):
                digest.update(content)
                progress(len(content))
    except OSError:  # unreadable is as good as lost
        return False
    return digest.hexdigest() == wanted.digest


def _open(path: Path) -> IO[bytes]:
    """Opens a regular file to read. Raises OSError for a link, which may point anywhere, or a pipe."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    file = os.fdopen(handle, "rb") if stat.S_ISREG(os.fstat(handle).st_mode) else None
    if file is None:
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def _hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


def _text(version: Any, sums: Mapping[str, Sum]) -> bytes:
    files = {name: list(sums[name]) for name in sorted(sums)}
    digest = _hash()
    digest.update(json.dumps([version, files]).encode())
    content = {"format": version, "files": files, "digest": digest.hexdigest()}
    return json.dumps(content, indent=1).encode() + b"\n"
