"""Tokens to train and validate on, and their tokenizer: made in memory, or built once into a folder.

Both ways give the same tokens. A folder holds train.bin, val.bin, their headers, and a copy of the tokenizer.json if
there is one. It is written under another name and renamed when it is complete.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from cuboid.data.faults import MAX_BAD
from cuboid.data.text import Document, Piece, Reader, pieces, python_stdlib, split, text_files
from cuboid.data.tokenizer import FILE, Tokenizer, load_tokenizer
from cuboid.data.tokens import TokenFile, Tokens, TokenWriter, digest, dtype_for, is_token_file

_SPLITS = ("train", "val")
_FILES = frozenset([FILE, *(f"{split}.{suffix}" for split in _SPLITS for suffix in ("bin", "json"))])
_TOGETHER = 4 << 20  # bytes of text encoded at a time
_IN_MEMORY = 256 << 20  # most bytes of text that every rank tokenises

VAL_FRACTION = 0.05


@dataclass(frozen=True)
class Corpus:
    tokenizer: Tokenizer
    train: Tokens
    val: Tokens

    @property
    def vocab(self) -> int:
        return self.tokenizer.vocab

    @cached_property
    def digest(self) -> str:
        """Digest of the training tokens, by which a resumed run checks that its data is the same."""
        return self.train.header.digest if isinstance(self.train, TokenFile) else digest(self.train, self.vocab)

    def check(self, vocab: int) -> None:
        """Raise ValueError if a model of `vocab` tokens cannot read this."""
        if vocab < self.vocab:
            raise ValueError(
                f"the model has vocab={vocab} but the tokens come from a vocabulary of {self.vocab}; "
                f"set vocab to at least {self.vocab} or use another tokenizer"
            )


def is_built(source: Path) -> bool:
    """Whether it is a folder that `build` made."""
    return (source / "train.json").is_file()


def load(
    sources: Sequence[Path] = (),
    tokenizer: Path | None = None,
    val_fraction: float = VAL_FRACTION,
    max_bad: float = MAX_BAD,
    tell: Callable[[str], object] = lambda _: None,
) -> Corpus:
    """Loads a run's tokens: of a built folder, of text to tokenise now (checked by `check_text`), or without sources of
    Python's own library."""
    built = [source for source in sources if is_built(source)]
    if not built:
        for source in sources:
            if is_token_file(source):
                raise ValueError(f"{source} is one file of built tokens; give its folder, {source.parent}")
        files = text_files(sources, max_bad, tell) if sources else python_stdlib()
        return tokenise(files, load_tokenizer(tokenizer), val_fraction)
    if len(sources) > 1:
        raise ValueError(
            f"{built[0]} holds built tokens and cannot be joined with other sources; build one folder of all"
        )
    if tokenizer is not None:
        raise ValueError(f"{built[0]} was built with its own tokenizer; leave {tokenizer} out or build it again")
    return open_corpus(built[0])


def open_corpus(folder: Path) -> Corpus:
    """A folder that `build` made."""
    train, val = (TokenFile(folder / f"{split}.bin") for split in _SPLITS)
    saved = folder / FILE
    tokenizer = load_tokenizer(saved if saved.is_file() else None)
    for file in (train, val):
        if (file.header.tokenizer, file.header.vocab) != (tokenizer.identity, tokenizer.vocab):
            raise ValueError(
                f"{file.path} was built with tokenizer {file.header.tokenizer}, vocab {file.header.vocab}, "
                f"but the one in its folder is {tokenizer.identity}, vocab {tokenizer.vocab}; "
                f"put the right {FILE} back or build it again"
            )
    return Corpus(tokenizer, train, val)


def tokenise(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    val_fraction: float = VAL_FRACTION,
    read: Reader = pieces,
) -> Corpus:
    """Tokenises small text in memory, on one core: the library's threads do not survive a fork."""
    size = sum(file.stat().st_size for file in files)
    if size > _IN_MEMORY:
        raise ValueError(
            f"{size:,} bytes of text are too many to tokenise in every rank (at most {_IN_MEMORY:,}); "
            f"run `cuboid data build` once and train on its folder"
        )
    train, val = (
        [_ended(piece, tokenizer.encode(piece.text), tokenizer) for each in documents for piece in read(each)]
        for documents in split(files, val_fraction)
    )
    return Corpus(tokenizer, _joined(train, tokenizer.vocab), _joined(val, tokenizer.vocab))


def _joined(arrays: Sequence[np.ndarray], vocab: int) -> np.ndarray:
    dtype = np.dtype(dtype_for(vocab))
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="same_kind")


def build(
    files: Sequence[Path],
    out: Path,
    tokenizer: Tokenizer,
    val_fraction: float = VAL_FRACTION,
    overwrite: bool = False,
    progress: Callable[[int], object] = lambda size: None,
    read: Reader = pieces,
) -> Corpus:
    """Tokenise `files`, whose text `read` yields, into the folder `out`. `progress` is called with the number of
    further bytes of text that are done."""
    _check_out(out, overwrite)
    place = out.resolve()
    aside, old = (place.with_name(f".{place.name}.{os.getpid()}.{what}") for what in ("new", "old"))
    try:
        aside.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"cannot make a folder in {place.parent}: {error.strerror}; name another") from error
    try:
        tokenizer.save(aside)
        for name, documents in zip(_SPLITS, split(files, val_fraction), strict=True):
            with TokenWriter(aside / f"{name}.bin", tokenizer.vocab, tokenizer.identity) as writer:
                for group in _groups(documents, read):
                    encoded = tokenizer.encode_batch([piece.text for piece in group])
                    for piece, ids in zip(group, encoded, strict=True):
                        writer.append(_ended(piece, ids, tokenizer))
                    progress(sum(piece.size for piece in group))
                writer.close(len(documents))
        if place.exists():
            place.rename(old)
        aside.rename(place)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    return open_corpus(out)


def _check_out(out: Path, overwrite: bool) -> None:
    """Raise ValueError if `out` may not be replaced: only folders that `build` made are."""
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"{out} is a file; name a folder to build in")
    inside = sorted(file.name for file in out.iterdir())
    others = [name for name in inside if name not in _FILES]
    if others:
        raise ValueError(f"folder {out} holds other files ({', '.join(others[:3])}); name a new one to build in")
    if inside and not overwrite:
        raise ValueError(f"folder {out} holds built tokens already; add --overwrite to build again, or name another")


def _groups(documents: Sequence[Document], read: Reader) -> Iterator[list[Piece]]:
    """Groups pieces so that each group is worth sharing among the cores."""
    group: list[Piece] = []
    size = 0
    for document in documents:
        for piece in read(document):
            group.append(piece)
            size += piece.size
            if size >= _TOGETHER:
                yield group
                group, size = [], 0
    if group:
        yield group


def _ended(piece: Piece, ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    if not piece.last or tokenizer.end is None:
        return ids
    return np.append(ids, ids.dtype.type(tokenizer.end))
