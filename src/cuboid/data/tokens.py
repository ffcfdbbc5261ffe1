"""A long sequence of token ids: in memory, or in a memory-mapped file.

A token file is two files: `name.bin`, the ids as little-endian uint16 (uint32 if the vocabulary is larger than 65,536),
and `name.json`, its `Header`. The header is written last: without it the file is incomplete.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

_FORMAT = "cuboid tokens, version 1"
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_CHUNK = 1 << 20
_SAMPLED = 16  # most chunks that are read for frequencies alone


class Tokens(Protocol):
    """Token ids: a numpy array of one dim, or a `TokenFile`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> np.ndarray:
        """The ids at a slice or at an array of indices."""


@dataclass(frozen=True)
class Header:
    dtype: str
    count: int  # tokens
    vocab: int  # every id is below it
    documents: int
    tokenizer: str  # its identity
    digest: str  # of the ids
    format: str = _FORMAT


def dtype_for(vocab: int) -> str:
    return "uint16" if vocab <= 1 << 16 else "uint32"


class TokenFile:
    """The tokens of a file. They are read when they are asked for; ranks on one machine share the memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = _read_header(path)
        dtype = _DTYPES[self.header.dtype]
        size, said = path.stat().st_size, self.header.count * dtype.itemsize
        if size != said:
            raise ValueError(
                f"{path} has {size:,} bytes but its header says {self.header.count:,} tokens of "
                f"{self.header.dtype}, {said:,} bytes; it was truncated or changed: build it again"
            )
        # an empty file cannot be mapped
        self._ids = np.asarray(np.memmap(path, dtype, mode="r")) if size else np.empty(0, dtype)

    def __len__(self) -> int:
        return self.header.count

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._ids[index]


def is_token_file(path: Path) -> bool:
    """Whether a file is one, judged by its name and its header's."""
    return path.suffix == ".bin" and path.is_file() and path.with_suffix(".json").is_file()


def _read_header(path: Path) -> Header:
    beside = path.with_suffix(".json")
    for file in (path, beside):
        if not file.is_file():
            raise ValueError(f"no token file {file}; make one with `cuboid data build`")
    try:
        header = Header(**json.loads(beside.read_text("utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{beside} is not the header of a token file: {error}; build it again") from error
    if header.format != _FORMAT or header.dtype not in _DTYPES:
        raise ValueError(
            f"{beside} has format {header.format!r}, dtype {header.dtype!r}; this version reads {_FORMAT!r} "
            f"of {' or '.join(_DTYPES)}: build it again"
        )
    return header


class TokenWriter:
    """Writes a token file piece by piece; `close` completes it."""

    def __init__(self, path: Path, vocab: int, tokenizer: str) -> None:
        self.path, self.vocab, self.tokenizer, self.count = path, vocab, tokenizer, 0
        self._dtype = dtype_for(vocab)
        self._file = path.open("wb")
        self._hash = hashlib.blake2b(digest_size=16)

    def append(self, ids: np.ndarray) -> None:
        if ids.size and int(ids.max()) >= self.vocab:
            raise ValueError(f"token {int(ids.max())} is not below vocab={self.vocab}; give the tokenizer's own vocab")
        content = ids.astype(_DTYPES[self._dtype]).tobytes()
        self._hash.update(content)
        self._file.write(content)
        self.count += len(ids)

    def close(self, documents: int) -> Header:
        self._file.close()
        header = Header(self._dtype, self.count, self.vocab, documents, self.tokenizer, self._hash.hexdigest())
        self.path.with_suffix(".json").write_text(json.dumps(asdict(header), indent=2) + "\n", "utf-8")
        return header

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()


def _chunks(tokens: Tokens) -> Iterator[np.ndarray]:
    for start in range(0, len(tokens), _CHUNK):
        yield tokens[start : start + _CHUNK]


def digest(tokens: Tokens, vocab: int) -> str:
    """Digest of the tokens, as in a header: it differs if a file was changed, or for other data."""
    h = hashlib.blake2b(digest_size=16)
    for chunk in _chunks(tokens):
        h.update(chunk.astype(_DTYPES[dtype_for(vocab)]).tobytes())
    return h.hexdigest()


def unigram_entropy(tokens: Tokens, vocab: int) -> float:
    """Entropy of the tokens' frequencies, in nats per token: the loss of a model that ignores context. Of a long
    sequence only `_SAMPLED` chunks, spread over it, are read.

    >>> round(unigram_entropy(np.array([0, 1, 2, 3]), 4), 4)  # ln 4
    1.3863
    """
    if not len(tokens):
        raise ValueError("no tokens have no entropy; give at least one")
    counts = np.zeros(vocab, dtype=np.int64)
    starts = range(0, len(tokens), _CHUNK)
    taken = min(len(starts), _SAMPLED)
    for start in (starts[i * len(starts) // taken] for i in range(taken)):
        found = np.bincount(tokens[start : start + _CHUNK], minlength=vocab)
        if len(found) > vocab:
            raise ValueError(f"token {len(found) - 1} is not below vocab={vocab}; give the tokenizer's own vocab")
        counts += found
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())
