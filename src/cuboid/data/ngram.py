"""A byte n-gram model: the baseline that a language model must beat on the same text."""

import numpy as np


def ngram_bits(train: bytes, held_out: bytes, n: int = 3) -> float:
    """Bits per byte of `held_out` under a model that predicts a byte from the n - 1 bytes before it.

    Probabilities are counts in `train`, interpolated with those of shorter contexts (Witten-Bell): shorter contexts
    weigh more if a context was followed by many different bytes.

    >>> round(ngram_bits(b"ab" * 500, b"ab" * 20), 3)
    0.003
    """
    if n < 1 or len(held_out) < n:
        raise ValueError(f"n={n} with {len(held_out)} held-out bytes; use at least 1, and at least n bytes")
    probability = np.full(len(held_out) - n + 1, 1 / 256)
    for length in range(1, n + 1):
        counts = np.bincount(_codes(train, length), minlength=256**length)
        followers = counts.reshape(-1, 256)
        total, kinds = followers.sum(1), np.maximum((followers > 0).sum(1), 1)
        codes = _codes(held_out, length)[n - length :]
        context = codes // 256
        weight = kinds[context]
        probability = (counts[codes] + weight * probability) / (total[context] + weight)
    return float(-np.log2(probability).mean())


def _codes(text: bytes, length: int) -> np.ndarray:
    """Each run of `length` bytes as one number."""
    values = np.frombuffer(text, np.uint8).astype(np.int64)
    codes = np.zeros(max(len(values) - length + 1, 0), np.int64)
    for i in range(length):
        codes = codes * 256 + values[i : i + len(codes)]
    return codes
