"""The demo's text: the running Python's library, as tokens of a byte-pair tokenizer trained on it."""

import io
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cuboid import data
from cuboid.data.text import Document, split
from cuboid.run.launch import World


@dataclass(frozen=True)
class TextFacts:
    """The prepared text, and the loss of a simple model on it."""

    files: int  # to train on
    held_out_files: int
    train_tokens: int
    held_out_tokens: int
    held_out_bytes: int
    trigram_bits: float  # bits per held-out byte of a byte 3-gram model

    def bits_per_byte(self, nats_per_token: float) -> float:
        """Converts a loss on the held-out tokens."""
        return nats_per_token / 0.6931471805599453 * self.held_out_tokens / self.held_out_bytes


def prepare(world: World, folder: Path, max_bytes: int, vocab: int, val_fraction: float) -> TextFacts:
    """Build tokens in `folder` / tokens. Training and held-out files are read in full, and in the same way.

    Runs on a separate rank: threads that the tokenizer starts would not survive the fork of other ranks.
    """
    files = data.python_stdlib(max_bytes)
    train, held_out = ([_text(each) for each in part] for part in split(files, val_fraction))
    tokenizer = data.learn_tokenizer(train, vocab, folder)
    corpus = data.build(files, folder / "tokens", tokenizer, val_fraction, read=data.code)
    seen, unseen = ("".join(texts).encode() for texts in (train, held_out))
    return TextFacts(
        len(train), len(held_out), len(corpus.train), len(corpus.val), len(unseen), data.ngram_bits(seen, unseen)
    )


def _text(document: Document) -> str:
    return "".join(piece.text for piece in data.code(document))


def valid_lines(samples: Sequence[str]) -> tuple[int, int]:
    """Returns how many complete lines of the samples Python's `tokenize` accepts, one by one, and how many there
    are."""
    lines = [line.strip() for text in samples for line in text.split("\n")[:-1] if line.strip()]
    return sum(map(_is_valid, lines)), len(lines)


def _is_valid(line: str) -> bool:
    """
    >>> [_is_valid(line) for line in ("x = f(1)", "x = f(1", "x = 'a")]
    [True, False, False]
    """
    try:
        found = list(tokenize.generate_tokens(io.StringIO(line + "\n").readline))
    except (tokenize.TokenError, SyntaxError):
        return False
    return all(token.type != tokenize.ERRORTOKEN for token in found)
