"""Counts what is not text in files, zero bytes and bytes that are not UTF-8, before any of them is used."""

import codecs
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

MAX_BAD = 0.001  # of a file's bytes
_BLOCK = 1 << 20  # bytes read at a time
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Faults(NamedTuple):
    path: Path
    size: int  # bytes
    zeros: int
    undecodable: int  # sequences, each of which is read as one U+FFFD

    @property
    def share(self) -> float:
        return (self.zeros + self.undecodable) / max(self.size, 1)

    def __str__(self) -> str:
        counts = (self.zeros, "zero byte"), (self.undecodable, "undecodable sequence")
        said = " and ".join(f"{count:,} {what}{'s' * (count > 1)}" for count, what in counts if count)
        return f"{self.path}: {said} in {self.size:,} bytes"


def faults_of(file: Path) -> Faults:
    """Counts the faults of a file that is not empty. U+FFFD in the file itself is not a fault."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    size = zeros = replaced = 0
    own, end = _REPLACEMENT.encode(), b""
    try:
        with file.open("rb") as f:
            while block := f.read(_BLOCK):
                size, zeros = size + len(block), zeros + block.count(0)
                replaced += decoder.decode(block).count(_REPLACEMENT) - (end + block).count(own)
                end = (end + block)[-2:]  # shorter than U+FFFD, so never counted twice
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}; check its permissions") from error
    return Faults(file, size, zeros, replaced + decoder.decode(b"", final=True).count(_REPLACEMENT))


def check_text(files: Sequence[Path], max_bad: float = MAX_BAD, tell: Callable[[str], object] = lambda _: None) -> None:
    """Raise ValueError if faults exceed the share `max_bad` of a file's bytes; report other files' faults to `tell`."""
    found = [each for each in map(faults_of, files) if each.zeros or each.undecodable]
    bad = [each for each in found if each.share > max_bad]
    if bad:
        more = f", and {len(bad) - 3} more files" if len(bad) > 3 else ""
        raise ValueError(
            f"not UTF-8 text: {'; '.join(map(str, bad[:3]))}{more}. At most {max_bad:.3%} of a file's bytes may be: "
            "convert it (iconv -t utf-8), leave it out, or raise data.max_bad (--max-bad)"
        )
    for each in found:
        tell(f"{each}; undecodable sequences are read as U+FFFD")
