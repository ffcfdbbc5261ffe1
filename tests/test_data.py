"""Text to batches: nothing is lost, nothing depends on the rank, and every bad input says what to do."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers import decoders as token_decoders
from torch import Tensor
from typer.testing import CliRunner, Result

from cuboid.cli.data import app
from cuboid.data import (
    PADDED_TARGET,
    ByteTokenizer,
    Loader,
    Samples,
    TokenFile,
    TokenWriter,
    build,
    digest,
    load,
    load_tokenizer,
    open_corpus,
    python_stdlib,
    shuffled,
    text_files,
    tokenise,
    unigram_entropy,
)
from cuboid.data import text as text_module
from cuboid.data.text import Document, code, pieces, split
from cuboid.mesh import Axis
from cuboid.parallel import Index, Place
from cuboid.parallel.cuboid import dealt

BYTES = ByteTokenizer()


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.txt").write_bytes(content.encode())
    return folder


def test_code_is_python_without_prose(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text('"""Prose."""\n# more\ndef f(x):\n    """Prose."""\n    if x:  # why\n        return    "a    b"\n')
    (piece,) = code(Document(file, 0, file.stat().st_size))
    assert piece.text == "def f(x):\n\tif x:\n\t\treturn 'a    b'\n"
    file.write_text("no python at all")
    assert [p.text for p in code(Document(file, 0, 16))] == ["no python at all"]


def place(batch: int, seq: int, samples: Tensor, positions: Tensor) -> Place:
    index = Index(positions, samples, torch.arange(0))
    return Place(batch, seq, 0, samples, positions, Axis("x", 1, 0), index, index)


@pytest.fixture
def bpe(tmp_path: Path) -> Path:
    """A small trained tokenizer that asks for all that a stream of text must not have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = token_decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the hat on the cat\n"] * 20, trainer)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=5000)
    path = tmp_path / "a tokenizer" / "tokenizer.json"
    path.parent.mkdir()
    tokenizer.save(str(path))
    return path


# The order


@pytest.mark.parametrize("n", [*range(1, 70), 127, 128, 129, 1000, 4097])
def test_an_epoch_is_a_permutation(n: int) -> None:
    for epoch in (0, 1, 5):
        places = shuffled(torch.arange(n) + epoch * n, n, seed=3)
        assert sorted(places.tolist()) == list(range(n))


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_any_epoch_of_any_seed_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    places = shuffled(torch.arange(n) + epoch * n, n, seed)
    assert sorted(places.tolist()) == list(range(n))


def test_the_order_is_shuffled_and_differs_by_seed_and_epoch() -> None:
    n = 1000
    first = shuffled(torch.arange(n), n, seed=0)
    for other in (torch.arange(n), shuffled(torch.arange(n), n, seed=1), shuffled(torch.arange(n) + n, n, seed=0)):
        assert (first == other).sum() < 10  # one is expected by chance
    assert abs(torch.corrcoef(torch.stack((first.double(), torch.arange(n).double())))[0, 1]) < 0.15


def test_every_place_is_equally_likely() -> None:
    n, epochs = 5, 4000
    places = shuffled(torch.arange(n * epochs), n, seed=0).view(epochs, n)
    counts = torch.stack([torch.bincount(column, minlength=n) for column in places.T])
    assert (counts - epochs / n).abs().max() < 6 * (epochs / n) ** 0.5


def test_the_order_is_what_it_always_was() -> None:
    """A change here changes every run that is resumed."""
    assert shuffled(torch.arange(8), 1000, seed=0).tolist() == [211, 818, 104, 365, 244, 410, 126, 716]


def test_an_index_far_away_costs_no_memory() -> None:
    n = 10**12 + 39
    index = torch.tensor([0, 1, n - 1, n, 10**17])
    assert ((shuffled(index, n, 0) >= 0) & (shuffled(index, n, 0) < n)).all()
    assert shuffled(index[3:4], n, 0).equal(shuffled(index, n, 0)[3:4])


# Samples and what a rank reads of them


def serial(samples: Samples, batch: int, step: int) -> tuple[Tensor, Tensor]:
    return Loader(samples, place(batch, samples.seq, torch.arange(batch), torch.arange(samples.seq)))(step)


def test_samples_are_the_text_and_targets_the_next_token() -> None:
    text = np.arange(1, 101, dtype=np.uint16)
    samples = Samples(text, seq=7, seed=5)
    assert len(samples) == 14
    tokens, targets = serial(samples, 14, 0)
    assert tokens.dtype == targets.dtype == torch.int64
    assert targets.equal(tokens + 1)
    assert sorted(tokens.flatten().tolist()) == list(range(1, 99))  # every sample once
    assert (tokens[0] - 1 == samples.windows(torch.arange(14)) * 7).all()


@pytest.mark.parametrize(
    ("batch", "seq", "rows", "context", "unit"),
    [
        (6, 12, 3, 1, 1),  # the batch over x
        (6, 12, 1, 3, 6),  # the sequence over x, zigzag
        (4, 10, 2, 2, 12),  # both, and the sequence padded
        (5, 9, 3, 1, 4),  # both padded
    ],
)
def test_the_parts_of_all_ranks_are_the_serial_batch(batch: int, seq: int, rows: int, context: int, unit: int) -> None:
    samples = Samples(np.random.default_rng(0).integers(0, 9999, 611).astype(np.uint16), seq, seed=1)
    padded_seq, padded_batch = -(-seq // unit) * unit, -(-batch // rows) * rows
    for step in (0, 1, 40):  # the last beyond the first epoch
        whole = serial(samples, batch, step)
        joined = [torch.full((padded_seq, padded_batch), -7) for _ in whole]
        for row in range(rows):
            for part in range(context):
                mine = torch.arange(padded_batch).chunk(rows)[row]
                positions = torch.cat(dealt(padded_seq, context, part))
                where = place(batch, seq, mine, positions)
                got = Loader(samples, where)(step)
                for whole_i, fill, joined_i, got_i in zip(whole, (0, PADDED_TARGET), joined, got, strict=True):
                    assert got_i.equal(where.take(whole_i.T, fill))
                    joined_i[positions[:, None], mine] = got_i
        for whole_i, fill, joined_i in zip(whole, (0, PADDED_TARGET), joined, strict=True):
            assert joined_i[:seq, :batch].equal(whole_i)
            assert (joined_i[seq:] == fill).all()
            assert (joined_i[:, batch:] == fill).all()


def test_a_resumed_stream_is_the_tail_of_the_whole() -> None:
    text = np.arange(500, dtype=np.uint16)
    whole = Samples(text, 8, seed=2).read(torch.arange(200), torch.arange(8))
    resumed = Samples(text, 8, seed=2).read(torch.arange(77, 200), torch.arange(8))
    assert resumed.tokens.equal(whole.tokens[:, 77:])
    assert resumed.targets.equal(whole.targets[:, 77:])


def test_two_batches_are_one_of_twice_the_size() -> None:
    samples = Samples(np.arange(500, dtype=np.uint16), 8, seed=2)
    halves = torch.cat((serial(samples, 4, 6)[0], serial(samples, 4, 7)[0]), dim=1)
    assert halves.equal(serial(samples, 8, 3)[0])


def test_validation_is_in_order_and_each_sample_once() -> None:
    samples = Samples(np.arange(1, 25, dtype=np.uint16), 4)
    assert len(samples) == 5
    tokens, targets = (
        torch.cat(parts, dim=1) for parts in zip(*(serial(samples, 3, t) for t in range(2)), strict=True)
    )
    assert tokens.T.flatten().tolist() == [*range(1, 21), 0, 0, 0, 0]
    assert targets.T.flatten().tolist() == [*range(2, 22), *[PADDED_TARGET] * 4]


def test_a_rank_reads_only_its_part() -> None:
    class Watched:
        asked: list[int] = []  # noqa: RUF012  one test's own

        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, index: np.ndarray) -> np.ndarray:
            self.asked += index.flatten().tolist()
            return np.zeros(index.shape, np.uint16)

    tokens = Watched()
    Samples(tokens, 100, seed=0).read(torch.tensor([0, 5]), torch.tensor([3, 4, 90]))
    assert len(tokens.asked) == 2 * 2 * 3
    assert {i % 100 for i in tokens.asked} == {3, 4, 5, 90, 91}


def test_too_little_text() -> None:
    assert len(Samples(np.zeros(17, np.uint16), 16)) == 1
    with pytest.raises(ValueError, match=r"16 tokens but a sample of seq=16 needs 17.*more text or seq of at most 15"):
        Samples(np.zeros(16, np.uint16), 16)
    with pytest.raises(ValueError, match=r"0 tokens .* use more text$"):
        Samples(np.zeros(0, np.uint16), 16)
    with pytest.raises(ValueError, match="seq=0"):
        Samples(np.zeros(9, np.uint16), 0)


def test_a_place_of_another_length() -> None:
    samples = Samples(np.zeros(100, np.uint16), 8)
    with pytest.raises(ValueError, match="0 to 9 but samples have 0 to 8"):
        Loader(samples, place(2, 9, torch.arange(2), torch.arange(9)))


# Tokenizers


@pytest.mark.parametrize("text", ["", "plain", "naïve — 漢字 🙂\r\n\ttabs"])
def test_bytes_round_trip(text: str) -> None:
    ids = BYTES.encode(text)
    assert ids.tolist() == list(text.encode())
    assert BYTES.decode([*ids.tolist(), BYTES.end]) == text
    assert BYTES.end not in ids


def test_a_broken_character_still_decodes() -> None:
    assert BYTES.decode(list("é".encode())[:1]) == "�"
    assert BYTES.encode("\ud800").tolist() == [ord("?")]


def test_a_tokenizer_file_end_to_end(bpe: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "text", a="the cat sat on the mat\n" * 40, b="a hat, naïve 漢字\n" * 30)
    tokenizer = load_tokenizer(bpe.parent)
    assert tokenizer.vocab == Tokenizer.from_file(str(bpe)).get_vocab_size()
    assert tokenizer.end == 0
    corpus = build(text_files([source]), tmp_path / "out", tokenizer, val_fraction=0)
    again = open_corpus(tmp_path / "out")
    assert again.tokenizer.identity == tokenizer.identity
    ids = corpus.train[:].tolist()
    assert len(ids) > 300  # neither truncated nor padded
    assert [i for i, token in enumerate(ids) if token == tokenizer.end][-1] == len(ids) - 1
    first = ids.index(0)
    assert again.tokenizer.decode(ids[:first]) == "the cat sat on the mat\n" * 40
    assert again.tokenizer.decode(ids[first + 1 :]) == "a hat, naïve 漢字\n" * 30
    assert len(ids) < 0.7 * len(tokenizer.decode(ids).encode())
    in_memory = tokenise(text_files([source]), tokenizer, val_fraction=0)
    assert in_memory.train[:].tolist() == ids


def test_bad_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read tokenizer .*missing\.json"):
        load_tokenizer(tmp_path / "missing.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        load_tokenizer(tmp_path)
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="empty vocabulary"):
        load_tokenizer(tmp_path)


# Text


def test_the_standard_library_is_deterministic_and_grows_at_its_end() -> None:
    small, large = python_stdlib(500_000), python_stdlib(1_500_000)
    assert small == python_stdlib(500_000)
    assert large[: len(small)] == small
    assert 300_000 < sum(file.stat().st_size for file in small) <= 500_000
    assert not {"test", "tests", "site-packages"} & {part for file in python_stdlib(10**9) for part in file.parts[-3:]}
    with pytest.raises(ValueError, match=r"no \.py file in 1 bytes"):
        python_stdlib(1)


def test_folders_are_searched_in_order_and_files_taken_once(tmp_path: Path) -> None:
    write(tmp_path / "b", inner="i")
    write(tmp_path, z="z", a="a", empty="")
    write(tmp_path / ".hidden", no="n")
    (tmp_path / "data.bin").write_bytes(b"no")
    (tmp_path / "any.name").write_text("yes")
    found = text_files([tmp_path / "z.txt", tmp_path, tmp_path / "any.name"])
    assert [str(file.relative_to(tmp_path)) for file in found] == ["z.txt", "a.txt", "b/inner.txt", "any.name"]


def test_bad_sources(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file or folder .*nowhere"):
        text_files([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match=r"has no text files; looked for \.txt"):
        text_files([tmp_path])
    write(tmp_path, a="")
    with pytest.raises(ValueError, match="all are empty"):
        text_files([tmp_path])
    (tmp_path / "b.txt").write_text("wide", "utf-16")
    with pytest.raises(ValueError, match=r"b\.txt is not UTF-8 text"):
        text_files([tmp_path])


def test_long_documents_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_many_files_are_split_whole(tmp_path: Path) -> None:
    write(tmp_path, **{f"{i:03}": f"{i:03} " * 20 for i in range(100)})
    train, val = split(text_files([tmp_path]), 0.1)
    assert [document.path.stem for document in val] == [f"{i:03}" for i in range(9, 100, 10)]
    assert sorted(train + val) == [Document(file, 0, 80) for file in text_files([tmp_path])]


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.9])
def test_one_file_is_cut_between_characters(tmp_path: Path, fraction: float) -> None:
    text = "漢字🙂" * 50
    files = text_files([write(tmp_path, only=text)])
    corpus = tokenise(files, BYTES, fraction)
    train, val = (BYTES.decode(part[:].tolist()) for part in (corpus.train, corpus.val))
    assert train + val == text
    assert len(val.encode()) / len(text.encode()) == pytest.approx(fraction, abs=0.01)


def test_one_huge_file_among_small_ones_is_cut(tmp_path: Path) -> None:
    write(tmp_path, a="a" * 10, b="b" * 10_000, c="c" * 10)
    train, val = split(text_files([tmp_path]), 0.1)
    assert [document.path.stem for document in train] == ["a", "b"]
    assert [document.path.stem for document in val] == ["b", "c"]
    assert sum(document.size for document in val) == 1002


def test_no_validation_and_bad_fractions(tmp_path: Path) -> None:
    files = text_files([write(tmp_path, a="abc")])
    corpus = build(files, tmp_path / "out", BYTES, val_fraction=0)
    assert (corpus.train[:].tolist(), corpus.val[:].tolist()) == ([*b"abc", 255], [])
    for fraction in (-0.1, 1.0):
        with pytest.raises(ValueError, match=f"val_fraction={fraction}"):
            split(files, fraction)


# Token files


@pytest.mark.parametrize(("vocab", "dtype", "size"), [(256, "uint16", 2), (65536, "uint16", 2), (65537, "uint32", 4)])
def test_token_file_round_trip(tmp_path: Path, vocab: int, dtype: str, size: int) -> None:
    ids = np.random.default_rng(0).integers(0, vocab, 1000)
    ids[0] = vocab - 1
    path = tmp_path / "t.bin"
    with TokenWriter(path, vocab, "bytes") as writer:
        writer.append(ids[:300])
        writer.append(ids[300:])
        writer.close(documents=2)
    read = TokenFile(path)
    assert (read.header.dtype, read.header.documents, len(read)) == (dtype, 2, 1000)
    assert path.stat().st_size == 1000 * size
    assert read[:].tolist() == ids.tolist()
    assert read.header.digest == digest(read, vocab) == digest(ids, vocab) != digest(ids[::-1], vocab)
    assert path.read_bytes()[:size] == (vocab - 1).to_bytes(size, "little")
    for a, b in zip(serial(Samples(read, 9, 0), 4, 1), serial(Samples(ids, 9, 0), 4, 1), strict=True):
        assert a.equal(b)


def test_bad_token_files(tmp_path: Path) -> None:
    build(text_files([write(tmp_path / "text", a="abc" * 100)]), tmp_path / "out", BYTES)
    path, header = tmp_path / "out" / "train.bin", tmp_path / "out" / "train.json"
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    with pytest.raises(ValueError, match=r"train\.bin has 571 bytes but its header says 286 tokens of uint16, 572"):
        open_corpus(tmp_path / "out")
    path.unlink()
    with pytest.raises(ValueError, match=r"no token file .*train\.bin; make one with"):
        open_corpus(tmp_path / "out")
    path.write_bytes(good)
    fields = json.loads(header.read_text())
    for change, message in (
        ({"format": "other"}, r"format 'other'"),
        ({"dtype": "float32"}, r"dtype 'float32'"),
        ({"more": 1}, r"train\.json is not the header"),
        ({"vocab": 300}, r"vocab 300, but the one in its folder is bytes, vocab 256"),
        ({"tokenizer": "tokenizer.json sha256 0"}, r"put the right tokenizer\.json back"),
    ):
        header.write_text(json.dumps(fields | change))
        with pytest.raises(ValueError, match=message):
            open_corpus(tmp_path / "out")
    header.write_text("{")
    with pytest.raises(ValueError, match=r"train\.json is not the header"):
        open_corpus(tmp_path / "out")
    header.unlink()
    with pytest.raises(ValueError, match=r"no token file .*train\.json"):
        open_corpus(tmp_path / "out")


def test_tokens_beyond_the_vocabulary(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "t.bin", 10, "bytes") as writer:
        with pytest.raises(ValueError, match="token 10 is not below vocab=10"):
            writer.append(np.array([3, 10]))
    with pytest.raises(ValueError, match="token 10 is not below vocab=10"):
        unigram_entropy(np.array([3, 10]), 10)


def test_a_model_needs_the_whole_vocabulary(tmp_path: Path) -> None:
    corpus = load([write(tmp_path, a="abc")])
    corpus.check(vocab=256)
    corpus.check(vocab=512)
    with pytest.raises(ValueError, match=r"vocab=255 .* set vocab to at least 256"):
        corpus.check(vocab=255)


def test_unigram_entropy() -> None:
    assert unigram_entropy(np.arange(64).repeat(100), 64) == pytest.approx(np.log(64))
    assert unigram_entropy(np.zeros(9, np.uint16), 64) == 0
    assert unigram_entropy(np.array([0, 0, 0, 1]), 2) == pytest.approx(-0.75 * np.log(0.75) - 0.25 * np.log(0.25))
    with pytest.raises(ValueError, match="no tokens"):
        unigram_entropy(np.zeros(0, np.uint16), 64)


# Building


def test_build_is_what_memory_has_and_repeats(tmp_path: Path) -> None:
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


def test_only_what_was_built_is_replaced(tmp_path: Path) -> None:
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


def test_a_build_that_fails_leaves_nothing_and_harms_nothing(tmp_path: Path) -> None:
    files = text_files([write(tmp_path / "text", a="abc" * 10)])
    build(files, tmp_path / "out", BYTES)
    before = (tmp_path / "out" / "train.bin").read_bytes()

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(files, tmp_path / "out", BYTES, 0, overwrite=True, progress=stop)
    assert (tmp_path / "out" / "train.bin").read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "text"]


def test_load_takes_built_tokens_alone(tmp_path: Path, bpe: Path) -> None:
    source = write(tmp_path / "text", a="abc" * 10)
    build(text_files([source]), tmp_path / "out", BYTES)
    with pytest.raises(ValueError, match="cannot be joined"):
        load([tmp_path / "out", source])
    with pytest.raises(ValueError, match="tokenizer of its own"):
        load([tmp_path / "out"], bpe)
    assert load([source], bpe).vocab == load_tokenizer(bpe).vocab


def test_too_much_text_for_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuboid.data.corpus._IN_MEMORY", 100)
    with pytest.raises(ValueError, match=r"101 bytes of text are too many .*at most 100.*cuboid data build"):
        load([write(tmp_path, a="a" * 101)])


def test_without_sources_the_default_is_python_itself() -> None:
    corpus = load()
    assert corpus.vocab == 256
    assert BYTES.decode(corpus.train[:500].tolist()).startswith(python_stdlib()[0].read_text()[:400])
    assert 0.025 < len(corpus.val) / len(corpus.train) < 0.075
    assert 3 < unigram_entropy(corpus.train, 256) < 3.6


# The command


def run(*arguments: object, terminal: bool = False) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"TTY_COMPATIBLE": str(int(terminal))})


def test_cli(tmp_path: Path, bpe: Path) -> None:
    source, out = write(tmp_path / "text", a="the cat sat on the mat\n" * 50), tmp_path / "the out"
    done = run("build", source, "--out", out, "--tokenizer", bpe, "--val-fraction", 0.2)
    assert done.exit_code == 0, done.output
    corpus = open_corpus(out)
    assert f"{len(corpus.train):,} tokens" in done.output
    assert done.output.startswith("tokenising 1 files, 0.0 MB\n")
    assert f"{1150 / (len(corpus.train) + len(corpus.val)):.2f} bytes per token" in done.output
    assert f"{unigram_entropy(corpus.train, corpus.vocab):.3f} nats" in done.output
    assert isinstance(run("build", source, "--out", out).exception, ValueError)


def test_cli_without_sources_on_a_terminal(tmp_path: Path) -> None:
    done = run("build", "--out", tmp_path / "out", terminal=True)
    assert done.exit_code == 0, done.output
    assert "━" in done.output  # a bar
    assert len(open_corpus(tmp_path / "out").train) > 5e6


def test_cli_help_and_what_is_required() -> None:
    assert "val-fraction" in run("build", "--help").output
    assert run("build").exit_code == 2
