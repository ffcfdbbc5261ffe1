"""Texts and a tokenizer, written for a test."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers import decoders as token_decoders


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.txt").write_bytes(content.encode())
    return folder


def write_tokenizer(folder: Path) -> Path:
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
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path
