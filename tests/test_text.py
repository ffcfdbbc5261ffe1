"""Files to text: all of it, in order, cut between characters, and every bad source says what to do."""

from pathlib import Path

import pytest
from texts import write

from cuboid.data import (
    ByteTokenizer,
    build,
    faults,
    python_stdlib,
    text_files,
    tokenise,
)
from cuboid.data import text as text_module
from cuboid.data.text import Document, code, pieces, split

BYTES = ByteTokenizer()


def test_code_strips_comments_and_docstrings(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text('"""Prose."""\n# more\ndef f(x):\n    """Prose."""\n    if x:  # why\n        return    "a    b"\n')
    (piece,) = code(Document(file, 0, file.stat().st_size))
    assert piece.text == "def f(x):\n\tif x:\n\t\treturn 'a    b'\n"
    file.write_text("no python at all")
    assert [p.text for p in code(Document(file, 0, 16))] == ["no python at all"]


def test_python_stdlib_is_deterministic_and_grows_at_end() -> None:
    small, large = python_stdlib(500_000), python_stdlib(1_500_000)
    assert small == python_stdlib(500_000)
    assert large[: len(small)] == small
    assert 300_000 < sum(file.stat().st_size for file in small) <= 500_000
    assert not {"test", "tests", "site-packages"} & {part for file in python_stdlib(10**9) for part in file.parts[-3:]}
    with pytest.raises(ValueError, match=r"no \.py file in 1 bytes"):
        python_stdlib(1)


def test_text_files_are_ordered_and_unique(tmp_path: Path) -> None:
    write(tmp_path / "b", inner="i")
    write(tmp_path, z="z", a="a", empty="")
    write(tmp_path / ".hidden", no="n")
    (tmp_path / "data.bin").write_bytes(b"no")
    (tmp_path / "any.name").write_text("yes")
    found = text_files([tmp_path / "z.txt", tmp_path, tmp_path / "any.name"])
    assert [str(file.relative_to(tmp_path)) for file in found] == ["z.txt", "a.txt", "b/inner.txt", "any.name"]


def test_text_files_rejects_bad_sources(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file or folder .*nowhere"):
        text_files([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match=r"has no text files; looked for \.txt"):
        text_files([tmp_path])
    write(tmp_path, a="")
    with pytest.raises(ValueError, match="all are empty"):
        text_files([tmp_path])
    (tmp_path / "b.txt").write_text("wide", "utf-16")
    with pytest.raises(ValueError, match=r"not UTF-8 text: .*b\.txt: 4 zero bytes and 2 undecodable"):
        text_files([tmp_path])


def test_pieces_of_long_document_join_to_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = "".join(f"line {i} — 漢字\r\n" for i in range(200)) + "x" * 300 + "\udcff end"
    path = tmp_path / "long.txt"
    path.write_bytes(content.encode(errors="surrogateescape"))
    monkeypatch.setattr(text_module, "_PIECE", 101)
    found = list(pieces(Document(path, 0, path.stat().st_size)))
    assert "".join(piece.text for piece in found) == content.replace("\udcff", "�")
    assert sum(piece.size for piece in found) == path.stat().st_size
    assert [piece.last for piece in found] == [False] * (len(found) - 1) + [True]
    assert all(piece.text.endswith("\n") for piece in found[:20])
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match="became shorter"):
        list(pieces(Document(path, 0, 10)))


def test_split_keeps_files_whole_if_many(tmp_path: Path) -> None:
    write(tmp_path, **{f"{i:03}": f"{i:03} " * 20 for i in range(100)})
    train, val = split(text_files([tmp_path]), 0.1)
    assert [document.path.stem for document in val] == [f"{i:03}" for i in range(9, 100, 10)]
    assert sorted(train + val) == [Document(file, 0, 80) for file in text_files([tmp_path])]


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.9])
def test_tokenise_splits_one_file_between_characters(tmp_path: Path, fraction: float) -> None:
    text = "漢字🙂" * 50
    files = text_files([write(tmp_path, only=text)])
    corpus = tokenise(files, BYTES, fraction)
    train, val = (BYTES.decode(part[:].tolist()) for part in (corpus.train, corpus.val))
    assert train + val == text
    assert len(val.encode()) / len(text.encode()) == pytest.approx(fraction, abs=0.01)


def test_split_divides_huge_file_among_small_ones(tmp_path: Path) -> None:
    write(tmp_path, a="a" * 10, b="b" * 10_000, c="c" * 10)
    train, val = split(text_files([tmp_path]), 0.1)
    assert [document.path.stem for document in train] == ["a", "b"]
    assert [document.path.stem for document in val] == ["b", "c"]
    assert sum(document.size for document in val) == 1002


def test_split_allows_no_validation_rejects_bad_fraction(tmp_path: Path) -> None:
    files = text_files([write(tmp_path, a="abc")])
    corpus = build(files, tmp_path / "out", BYTES, val_fraction=0)
    assert (corpus.train[:].tolist(), corpus.val[:].tolist()) == ([*b"abc", 255], [])
    for fraction in (-0.1, 1.0):
        with pytest.raises(ValueError, match=f"val_fraction={fraction}"):
            split(files, fraction)


# What is not text


def faulty(folder: Path, zeros: int, undecodable: int, size: int = 100_000) -> Path:
    """Beyond the beginning, and across the border of two blocks; the file's own U+FFFD is none."""
    good = "a\N{REPLACEMENT CHARACTER}é ".encode() * 2000
    path = folder / "faulty.txt"
    path.write_bytes((good + b"\0" * zeros + b"\xff" * undecodable).ljust(size, b"b"))
    return path


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1 << 20])
def test_faults_are_counted_over_whole_file(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_BLOCK", block)
    path = faulty(tmp_path, 5, 3, 15_000)
    assert faults.faults_of(path) == (path, 15_000, 5, 3)
    path.write_bytes("cut \N{REPLACEMENT CHARACTER}".encode()[:-1])
    assert faults.faults_of(path).undecodable == 1


def test_text_files_reports_faults_below_limit_and_rejects_above(tmp_path: Path) -> None:
    told: list[str] = []
    path = faulty(tmp_path, 60, 40)
    assert text_files([path], 0.001, told.append) == [path]
    (said,) = told
    assert said.startswith(f"{path}: 60 zero bytes and 40 undecodable sequences in 100,000 bytes")
    faulty(tmp_path, 60, 41)
    with pytest.raises(ValueError, match=r"not UTF-8 text: .*faulty\.txt: 60 zero bytes and 41 undecodable .*max_bad"):
        text_files([path], 0.001)
    assert text_files([path], 1.0) == [path]
    with pytest.raises(ValueError, match="not UTF-8 text"):
        text_files([write(tmp_path / "good", a="fine"), faulty(tmp_path, 0, 1)], 0.0)
