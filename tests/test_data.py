"""A corpus built, read and described: in memory, in files, by the command."""

from pathlib import Path

import pytest
from texts import write
from typer.testing import CliRunner, Result

from cuboid.cli.data import app
from cuboid.data import (
    ByteTokenizer,
    build,
    load,
    load_tokenizer,
    open_corpus,
    python_stdlib,
    text_files,
    tokenise,
    unigram_entropy,
)

BYTES = ByteTokenizer()


# Building


def test_data_build_matches_memory_and_is_reproducible(tmp_path: Path) -> None:
    source = write(tmp_path / "some text", **{f"f{i}": f"file {i}\n" * (i + 1) for i in range(40)})
    files, done = text_files([source]), []
    built = build(files, tmp_path / "a folder" / "of tokens", BYTES, 0.1, progress=done.append)
    memory = tokenise(files, BYTES, 0.1)
    for ours, theirs in ((built.train, memory.train), (built.val, memory.val)):
        assert ours[:].tolist() == theirs[:].tolist()
        assert len(ours) > 0
    assert sum(done) == sum(file.stat().st_size for file in files)
    assert [part.header.documents for part in (built.train, built.val)] == [36, 4]
    build(files, tmp_path / "again", BYTES, 0.1)
    for name in ("train.bin", "train.json", "val.bin", "val.json"):
        assert (tmp_path / "again" / name).read_bytes() == (built.train.path.parent / name).read_bytes()
    assert load([tmp_path / "again"]).train[:].tolist() == memory.train[:].tolist()
    assert built.digest == memory.digest != tokenise(files[1:], BYTES, 0.1).digest


def test_data_build_overwrites_only_built_tokens(tmp_path: Path) -> None:
    files = text_files([write(tmp_path / "text", a="abc" * 10)])
    out = tmp_path / "out"
    out.mkdir()
    build(files, out, BYTES)
    before = (out / "train.bin").read_bytes()
    with pytest.raises(ValueError, match="holds built tokens already; add --overwrite"):
        build(files, out, BYTES)
    assert (out / "train.bin").read_bytes() == before
    build(files, out, BYTES, 0, overwrite=True)
    assert (out / "train.bin").read_bytes() != before
    (out / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"holds other files \(thesis\.tex\)"):
        build(files, out, BYTES, overwrite=True)
    with pytest.raises(ValueError, match="is a file"):
        build(files, out / "thesis.tex", BYTES, overwrite=True)
    with pytest.raises(ValueError, match="cannot make a folder in"):
        build(files, out / "thesis.tex" / "out", BYTES)
    assert (out / "thesis.tex").read_text() == "precious"


def test_data_build_interrupted_keeps_previous_output(tmp_path: Path) -> None:
    files = text_files([write(tmp_path / "text", a="abc" * 10)])
    build(files, tmp_path / "out", BYTES)
    before = (tmp_path / "out" / "train.bin").read_bytes()

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(files, tmp_path / "out", BYTES, 0, overwrite=True, progress=stop)
    assert (tmp_path / "out" / "train.bin").read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "text"]


def test_data_load_rejects_text_or_tokenizer_with_built_tokens(tmp_path: Path, bpe: Path) -> None:
    source = write(tmp_path / "text", a="abc" * 10)
    build(text_files([source]), tmp_path / "out", BYTES)
    with pytest.raises(ValueError, match="cannot be joined"):
        load([tmp_path / "out", source])
    with pytest.raises(ValueError, match="was built with its own tokenizer"):
        load([tmp_path / "out"], bpe)
    assert load([source], bpe).vocab == load_tokenizer(bpe).vocab


def test_data_load_rejects_text_too_large_for_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuboid.data.corpus._IN_MEMORY", 100)
    with pytest.raises(ValueError, match=r"101 bytes of text are too many .*at most 100.*cuboid data build"):
        load([write(tmp_path, a="a" * 101)])


def test_data_load_defaults_to_python_stdlib() -> None:
    corpus = load()
    assert corpus.vocab == 256
    assert BYTES.decode(corpus.train[:500].tolist()).startswith(python_stdlib()[0].read_text()[:400])
    assert 0.025 < len(corpus.val) / len(corpus.train) < 0.075
    assert 3 < unigram_entropy(corpus.train, 256) < 3.6


# The command


def run(*arguments: object, terminal: bool = False) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"TTY_COMPATIBLE": str(int(terminal))})


def test_data_cli_build_reports_counts(tmp_path: Path, bpe: Path) -> None:
    source, out = write(tmp_path / "text", a="the cat sat on the mat\n" * 50), tmp_path / "the out"
    done = run("build", source, "--out", out, "--tokenizer", bpe, "--val-fraction", 0.2)
    assert done.exit_code == 0, done.output
    corpus = open_corpus(out)
    assert f"{len(corpus.train):,} tokens" in done.output
    assert done.output.startswith("tokenising 1 files, 0.0 MB\n")
    assert f"{1150 / (len(corpus.train) + len(corpus.val)):.2f} bytes per token" in done.output
    assert f"{unigram_entropy(corpus.train, corpus.vocab):.3f} nats" in done.output
    assert isinstance(run("build", source, "--out", out).exception, ValueError)


def test_data_cli_build_reports_bad_bytes_and_rejects_above_limit(tmp_path: Path) -> None:
    bad, out = tmp_path / "bad.txt", tmp_path / "out"
    bad.write_bytes(b"good text\n" * 10_000 + b"\0\xff" * 40)  # beyond the beginning
    done = run("build", bad, "--out", out)
    assert done.exit_code == 0
    assert f"warning: {bad}: 40 zero bytes and 40 undecodable sequences in 100,080 bytes" in done.stderr
    refused = run("build", bad, "--out", tmp_path / "none", "--max-bad", 0.0005)
    assert "At most 0.050% of a file's bytes may be" in str(refused.exception)
    assert not (tmp_path / "none").exists()


def test_data_load_rejects_part_of_built_tokens(tmp_path: Path) -> None:
    build(text_files([write(tmp_path / "text", a="abc" * 100)]), tmp_path / "out", BYTES)
    with pytest.raises(ValueError, match=r"train\.bin is one file of built tokens; give its folder, .*out$"):
        load([tmp_path / "out" / "train.bin"])


def test_data_cli_build_defaults_to_stdlib_with_progress_bar(tmp_path: Path) -> None:
    done = run("build", "--out", tmp_path / "out", terminal=True)
    assert done.exit_code == 0, done.output
    assert "━" in done.output  # a bar
    assert len(open_corpus(tmp_path / "out").train) > 5e6


def test_data_cli_build_has_help_and_requires_out() -> None:
    assert "val-fraction" in run("build", "--help").output
    assert run("build").exit_code == 2
