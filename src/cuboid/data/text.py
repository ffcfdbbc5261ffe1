"""Sources of text, the choice of validation text, and reading in pieces."""

import ast
import codecs
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cuboid.data.faults import MAX_BAD, check_text

#: Suffixes of text files when a folder is searched. A file that is named itself may have any.
PROSE = (".txt", ".text", ".md", ".rst", ".tex", ".org", ".html", ".xml")
CODE = (".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh")
SUFFIXES = (*PROSE, *CODE)
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_PIECE = 1 << 20  # bytes read at a time


def python_stdlib(max_bytes: int = 8_000_000) -> list[Path]:
    """The running Python's standard library without its tests: text that needs no download.

    Modules before packages, each in order of name, as many full files as fit into `max_bytes`: a larger
    limit only adds files at the end.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files, total = [], 0
    for file in _walk(root, skip=_not_library):
        # _sysconfigdata says how this one Python was compiled
        if file.suffix != ".py" or file.name.startswith("_sysconfigdata") or not file.stat().st_size:
            continue
        total += file.stat().st_size
        if total > max_bytes:
            break
        files.append(file)
    if not files:
        raise ValueError(f"{root}, the standard library, has no .py file in {max_bytes:,} bytes; name text files")
    return files


def text_files(
    paths: Sequence[Path], max_bad: float = MAX_BAD, tell: Callable[[str], object] = lambda _: None
) -> list[Path]:
    """Returns the files among `paths` and the text files in its folders, each once, in a fixed order. Raises ValueError
    if one fails `check_text`."""
    found: dict[Path, Path] = {}
    for path in paths:
        if path.is_dir():
            inside = [file for file in _walk(path, skip=_hidden) if file.suffix.lower() in SUFFIXES]
            if not inside:
                raise ValueError(
                    f"folder {path} has no text files; looked for {' '.join(SUFFIXES)}; "
                    f"name files of other kinds themselves"
                )
        elif path.is_file():
            inside = [path]
        else:
            raise ValueError(f"no file or folder {path}; check the path")
        for file in inside:
            found.setdefault(file.resolve(), file)
    files = [file for file in found.values() if file.stat().st_size]
    if not files:
        raise ValueError(f"no text: {len(found)} files were found and all are empty; name files that hold text")
    check_text(files, max_bad, tell)
    return files


def _walk(root: Path, skip: Callable[[str], bool]) -> Iterator[Path]:
    """Files by name, a folder's own before its subfolders', except those that `skip` rejects."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not skip(name))
        for name in sorted(names):
            file = Path(folder, name)
            if not skip(name) and file.is_file():
                yield file


def _hidden(name: str) -> bool:
    return name.startswith(".")


def _not_library(name: str) -> bool:
    words = name.removesuffix(".py").split("_")
    return name in ("site-packages", "dist-packages", "__pycache__") or "test" in words or "tests" in words


class Document(NamedTuple):
    """A file, or a range of its bytes."""

    path: Path
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def split(files: Sequence[Path], fraction: float) -> tuple[list[Document], list[Document]]:
    """Documents to train on and documents to validate on, the latter about `fraction` of the bytes.

    Every (1/fraction)-th file is for validation. Where that is far from the fraction asked for (files of very
    different sizes), files are chosen by their size. Where no choice of full files comes near it (few files, or one
    much larger than the rest), the end of the text is held out, and the file it begins in is split in two.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"val_fraction={fraction} must be at least 0 and below 1")
    documents = [Document(file, 0, file.stat().st_size) for file in files]
    total = sum(document.size for document in documents)
    by_count = [int((i + 1) * fraction) > int(i * fraction) for i in range(len(documents))]
    for held_out in (by_count, _by_size(documents, fraction)):
        train = [document for document, held in zip(documents, held_out, strict=True) if not held]
        val = [document for document, held in zip(documents, held_out, strict=True) if held]
        apart = abs(sum(document.size for document in val) - fraction * total)
        if apart <= fraction * total / 2 and (train or not documents):
            return train, val
    return _cut(documents, total - int(fraction * total))


def _by_size(documents: Sequence[Document], fraction: float) -> list[bool]:
    """Which documents to hold out so that about `fraction` of the bytes are, all along the list."""
    chosen, owed = [], 0.0
    for document in documents:
        owed += fraction * document.size
        chosen.append(document.size <= 2 * owed)
        owed -= document.size * chosen[-1]
    return chosen


def _cut(documents: Sequence[Document], at: int) -> tuple[list[Document], list[Document]]:
    """Splits documents at byte `at` of all of them."""
    before: list[Document] = []
    after: list[Document] = []
    for path, start, stop in documents:
        middle = _character(path, start + at) if 0 < at < stop - start else stop if at > 0 else start
        before.append(Document(path, start, middle))
        after.append(Document(path, middle, stop))
        at -= stop - start
    return [document for document in before if document.size], [document for document in after if document.size]


def _character(path: Path, at: int) -> int:
    """The first offset from `at` on where a UTF-8 character begins."""
    with path.open("rb") as f:
        f.seek(at)
        following = f.read(4)
    return at + next((i for i, byte in enumerate(following) if byte & 0xC0 != 0x80), len(following))


class Piece(NamedTuple):
    text: str
    size: int  # bytes read for it
    last: bool  # of its document


#: Yields the text of a document.
Reader = Callable[[Document], Iterator[Piece]]


def code(document: Document) -> Iterator[Piece]:
    """A Python file as `ast` writes it: no comments, no docstrings, one layout, tabs as indents. So a small model
    learns the language, not English prose, and need not count spaces."""
    text = document.path.read_bytes()[document.start : document.stop].decode("utf-8", "replace")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # half a file, or one for another Python
        yield from pieces(document)
        return
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    lines = (re.sub("^(?: {4})+", _tabs, line) for line in ast.unparse(tree).splitlines(keepends=True))
    yield Piece("".join(lines) + "\n", document.size, last=True)


def _tabs(indent: re.Match[str]) -> str:
    return "\t" * (len(indent[0]) // 4)


def pieces(document: Document) -> Iterator[Piece]:
    """The text of a document, in pieces that end at ends of lines, so that any length fits into memory.

    Bytes that are not UTF-8 become U+FFFD; ends of lines are unchanged.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    left, rest = document.size, ""
    with document.path.open("rb") as f:
        f.seek(document.start)
        while left:
            raw = f.read(min(left, _PIECE))
            if not raw:
                raise ValueError(f"{document.path} became shorter while it was read; wait until it is complete")
            left -= len(raw)
            text = rest + decoder.decode(raw, final=not left)
            end = (text.rfind("\n") + 1 if left else 0) or len(text)
            rest = text[end:]
            yield Piece(text[:end], len(raw), last=not left)
