"""Text to token ids and back: bytes, or any tokenizer.json of the `tokenizers` library."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer as _Tokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

FILE = "tokenizer.json"

#: Names of the token that ends a document; the first one that a vocabulary has is used.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<｜end▁of▁sentence｜>")


class Tokenizer(Protocol):
    @property
    def vocab(self) -> int:
        """The number of ids: every id is below it."""

    @property
    def end(self) -> int | None:
        """The id that ends a document, if there is one."""

    @property
    def identity(self) -> str:
        """The same for two tokenizers only if they give the same ids."""

    def encode(self, text: str) -> np.ndarray: ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes several texts, perhaps on all cores."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text, without tokens that stand for none, such as `end`."""

    def save(self, folder: Path) -> None:
        """Saves it where `load_tokenizer` finds it."""


class ByteTokenizer:
    """The bytes of UTF-8. There are 256 ids and no more: 255, a byte that UTF-8 never uses, ends a document.

    >>> [int(i) for i in ByteTokenizer().encode("né")]
    [110, 195, 169]
    """

    vocab = 256
    end = 255
    identity = "bytes"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i != self.end).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """Nothing to save."""


class FileTokenizer:
    """A tokenizer.json. Its templates, padding and truncation are meant for single sentences and not used."""

    def __init__(self, path: Path) -> None:
        try:
            self._json = path.read_text("utf-8")
            self._tokenizer = _Tokenizer.from_str(self._json)
        except OSError as error:
            raise ValueError(f"cannot read tokenizer {path}: {error.strerror}; check the path") from error
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(f"{path} is not a {FILE} of the tokenizers library: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise ValueError(f"tokenizer {path} has an empty vocabulary; train it or choose another")
        self.vocab = max(ids.values()) + 1  # ids may have gaps
        self.end = next((ids[name] for name in END_NAMES if name in ids), None)
        self.identity = f"{FILE} sha256 {hashlib.sha256(self._json.encode()).hexdigest()}"
        self._dtype = np.min_scalar_type(self.vocab - 1)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=self._dtype)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids))

    def save(self, folder: Path) -> None:
        (folder / FILE).write_text(self._json, "utf-8")


def load_tokenizer(path: Path | None = None) -> Tokenizer:
    """The tokenizer.json at `path`, which may be its folder; bytes if there is no path."""
    if path is None:
        return ByteTokenizer()
    return FileTokenizer(path / FILE if path.is_dir() else path)


def learn_tokenizer(texts: Iterable[str], vocab: int, folder: Path) -> FileTokenizer:
    """Trains a byte-pair tokenizer of `vocab` tokens, with all 256 bytes and the end of a document, on `texts`, and
    saves it in `folder`."""
    if vocab <= 257:
        raise ValueError(f"vocab={vocab} leaves no pairs beside 256 bytes and the end of a document; use 258 or more")
    tokenizer = _Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END_NAMES[0]], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    file = folder / FILE
    file.write_text(tokenizer.to_str(), "utf-8")
    return FileTokenizer(file)
