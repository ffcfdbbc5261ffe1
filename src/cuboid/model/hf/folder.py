"""The safetensors files of a folder: one, or several with an index. Pickles are never opened.

A file has 8 bytes (the header's length, little-endian), the header (JSON: each tensor's dtype, shape and offsets), and
the tensors end to end.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cuboid.mesh.layout import Range

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def _bytes(shape: Sequence[int], dtype: str) -> int:
    return torch.Size(shape).numel() * DTYPES[dtype].itemsize


class Stored(NamedTuple):
    """A tensor in a file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors calls it
    offset: int  # of its first byte in the file

    def read(self, at: Sequence[Range]) -> Tensor:
        """Reads the slice at these ranges, and nothing else. It is not mapped: memory would count the pages around
        it."""
        found = torch.empty([stop - start for start, stop in at], dtype=DTYPES[self.dtype])
        if not found.numel():
            return found
        (top, _), *rest = at
        width, size = torch.Size(self.shape[1:]).numel(), found.element_size()
        left = rest[0][0] if rest else 0
        whole_rows = all(each == (0, n) for each, n in zip(rest, self.shape[1:], strict=True))
        runs = found.view(1, -1) if whole_rows else found  # contiguous in the file
        with self.file.open("rb", buffering=0) as file:
            for i, run in enumerate(runs.view(torch.uint8).numpy()):
                self._fill(file, memoryview(run), self.offset + ((top + i) * width + left) * size)
        return found

    def _fill(self, file: RawIOBase, into: memoryview, at: int) -> None:
        file.seek(at)
        while into:
            count = file.readinto(into)
            if not count:
                raise ValueError(f"{self.file} ends inside tensor {self.name}; download it again")
            into = into[count:]

    @property
    def bytes(self) -> int:
        return _bytes(self.shape, self.dtype)


def stored(folder: Path) -> dict[str, Stored]:
    """All tensors of a folder by name, from the files' headers."""
    found: dict[str, Stored] = {}
    for path, names in _files(folder).items():
        inside = stored_in(path)
        for name in names or ():
            if name not in inside:
                raise ValueError(f"{path} lacks tensor {name}, which {INDEX} says it has; download it again")
        for name, tensor in inside.items():
            if name in found:
                raise ValueError(f"tensor {name} is in {found[name].file} and in {path}; keep one of them")
            found[name] = tensor
    return found


def stored_in(path: Path) -> dict[str, Stored]:
    """All tensors of a file by name."""
    found = {}
    with _open(path) as file:
        offsets = _offsets(path)
        for name in sorted(file.keys()):
            tensor = file.get_slice(name)
            if tensor.get_dtype() not in DTYPES:
                raise ValueError(
                    f"{path}: tensor {name} is of type {tensor.get_dtype()}; only {', '.join(DTYPES)} can be read"
                )
            found[name] = Stored(path, name, tuple(tensor.get_shape()), tensor.get_dtype(), offsets[name])
    return found


def _offsets(path: Path) -> dict[str, int]:
    """The offset of each tensor of a file that is known to be complete."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {name: 8 + length + at["data_offsets"][0] for name, at in header.items() if name != "__metadata__"}


@contextmanager
def _open(path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}; download it again") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}; check the path") from None


def _files(folder: Path) -> dict[Path, list[str] | None]:
    """The weight files, each with the tensors that the index lists for it; None without an index."""
    if (folder / FILE).is_file():
        return {folder / FILE: None}
    index = folder / INDEX
    if not index.is_file():
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        if pickles:
            raise ValueError(
                f"{folder} has weights in {', '.join(pickles)} alone: a pickle can run any program and is never "
                "opened; get or make a safetensors file of it"
            )
        raise ValueError(f"{folder} has no {FILE} and no {INDEX}; give a folder of a Hugging Face model")
    try:
        where: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is not an index of weights: {error}; download it again") from None
    files: dict[Path, list[str] | None] = {}
    for name, file in where.items():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(
                f"{index}: tensor {name} is said to be in {file}; only safetensors files beside it are opened"
            )
        names = files.setdefault(folder / file, [])
        assert names is not None
        names.append(name)
    return files


class Planned(NamedTuple):
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return _bytes(self.shape, self.dtype)


def in_order(tensors: Sequence[Planned]) -> list[Planned]:
    """Tensors in the safetensors library's order: widest elements first, then by name."""
    return sorted(tensors, key=lambda tensor: (-DTYPES[tensor.dtype].itemsize, tensor.name))


def sharded(tensors: Sequence[Planned], most: int) -> dict[str, list[Planned]]:
    """Files of at most `most` bytes (or of one tensor), filled in turn."""
    groups: list[list[Planned]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.bytes > most:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.bytes
    if len(groups) == 1:
        return {FILE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def index_json(files: Mapping[str, Sequence[Planned]]) -> str:
    total = sum(tensor.bytes for group in files.values() for tensor in group)
    where = {tensor.name: file for file, group in files.items() for tensor in group}
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return json.dumps(content, indent=2) + "\n"


def header(tensors: Sequence[Planned]) -> bytes:
    """The header of a file with these tensors in this order."""
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        content[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.bytes],
        }
        at += tensor.bytes
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of eight
    return len(text).to_bytes(8, "little") + text


def raw(value: Tensor) -> memoryview:
    """A tensor's bytes, as they follow the header."""
    return value.contiguous().view(-1).view(torch.uint8).numpy().data
