"""Text to tokens and back, in memory and in files that are looked at before they are used."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from texts import write
from tokenizers import Tokenizer, models

from cuboid.data import (
    ByteTokenizer,
    Samples,
    TokenFile,
    TokenWriter,
    build,
    digest,
    load,
    load_tokenizer,
    open_corpus,
    text_files,
    tokenise,
    unigram_entropy,
)

BYTES = ByteTokenizer()


# Tokenizers


@pytest.mark.parametrize("text", ["", "plain", "naïve — 漢字 🙂\r\n\ttabs"])
def test_byte_tokenizer_round_trip(text: str) -> None:
    ids = BYTES.encode(text)
    assert ids.tolist() == list(text.encode())
    assert BYTES.decode([*ids.tolist(), BYTES.end]) == text
    assert BYTES.end not in ids


def test_byte_tokenizer_replaces_broken_characters() -> None:
    assert BYTES.decode(list("é".encode())[:1]) == "�"
    assert BYTES.encode("\ud800").tolist() == [ord("?")]


def test_file_tokenizer_builds_and_reopens_corpus(bpe: Path, tmp_path: Path) -> None:
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


def test_load_tokenizer_rejects_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read tokenizer .*missing\.json"):
        load_tokenizer(tmp_path / "missing.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        load_tokenizer(tmp_path)
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="empty vocabulary"):
        load_tokenizer(tmp_path)


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
    some, positions = torch.tensor([4, 5, 6, 7]), torch.arange(9)
    for a, b in zip(Samples(read, 9, 0).read(some, positions), Samples(ids, 9, 0).read(some, positions), strict=True):
        assert a.equal(b)


def test_open_corpus_rejects_bad_token_files(tmp_path: Path) -> None:
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


def test_tokens_beyond_vocab_are_rejected(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "t.bin", 10, "bytes") as writer:
        with pytest.raises(ValueError, match="token 10 is not below vocab=10"):
            writer.append(np.array([3, 10]))
    with pytest.raises(ValueError, match="token 10 is not below vocab=10"):
        unigram_entropy(np.array([3, 10]), 10)


def test_corpus_check_rejects_too_small_vocab(tmp_path: Path) -> None:
    corpus = load([write(tmp_path, a="abc")])
    corpus.check(vocab=256)
    corpus.check(vocab=512)
    with pytest.raises(ValueError, match=r"vocab=255 .* set vocab to at least 256"):
        corpus.check(vocab=255)


def test_unigram_entropy_reads_some_of_a_long_row() -> None:
    """A trillion tokens, of which each million is one token: some are read, from all over it."""

    class Endless:
        def __init__(self) -> None:
            self.read = list[int]()

        def __len__(self) -> int:
            return 1 << 40

        def __getitem__(self, at: slice) -> np.ndarray:
            self.read.append(at.start)
            return np.full(at.stop - at.start, at.start * 64 >> 40)

    tokens = Endless()
    assert unigram_entropy(tokens, 64) == pytest.approx(np.log(16))
    assert tokens.read == [i << 36 for i in range(16)]


def test_unigram_entropy_matches_closed_form() -> None:
    assert unigram_entropy(np.arange(64).repeat(100), 64) == pytest.approx(np.log(64))
    assert unigram_entropy(np.zeros(9, np.uint16), 64) == 0
    assert unigram_entropy(np.array([0, 0, 0, 1]), 2) == pytest.approx(-0.75 * np.log(0.75) - 0.25 * np.log(0.25))
    with pytest.raises(ValueError, match="no tokens"):
        unigram_entropy(np.zeros(0, np.uint16), 64)
