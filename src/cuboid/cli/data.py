"""`cuboid data`: make token files."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cuboid.cli.bar import bar
from cuboid.cli.command import Command, CommandGroup
from cuboid.cli.option import option
from cuboid.cli.say import warn
from cuboid.data.faults import MAX_BAD
from cuboid.train.config import DataSection

app = typer.Typer(name="data", cls=CommandGroup, add_completion=False)


@app.callback()
def data() -> None:
    """Prepare text for training."""


@app.command(cls=Command)
def build(
    out: Annotated[Path, option("Folder to make: train.bin, val.bin, their headers and tokenizer.json.")],
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[SOURCE]...",
            help="Text files, and folders to search for them. Left out: the running Python's standard library.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        option("A tokenizer.json of the tokenizers library.", otherwise="bytes, a vocabulary of 256"),
    ] = None,
    val_fraction: Annotated[float, option("Share of the text kept for validation.")] = DataSection.val_fraction,
    max_bad: Annotated[
        float, option("Share of a file's bytes that may be zero or not UTF-8; more is rejected.", None, 0, 1)
    ] = MAX_BAD,
    overwrite: Annotated[bool, option("Replace a folder built before.", flag="--overwrite")] = False,
) -> None:
    """Turn text into token files that training maps into memory.

    Each file is a document; an end-of-text token follows it if the tokenizer has one. The order is fixed, so the same
    text and tokenizer always give the same files. Zero bytes and bytes that are not UTF-8 are counted over each file
    first, and reported.

    Examples:
      cuboid data build book.txt articles --out tokens
      cuboid train --set data.paths=tokens
    """
    from cuboid.data import build as build_corpus
    from cuboid.data import load_tokenizer, python_stdlib, text_files, unigram_entropy

    console = Console(highlight=False, markup=False, soft_wrap=True)
    files = text_files(sources, max_bad, warn) if sources else python_stdlib()
    size = sum(file.stat().st_size for file in files)
    with bar(console, f"tokenising {len(files):,} files, {size / 1e6:,.1f} MB", size) as advance:
        corpus = build_corpus(files, out, load_tokenizer(tokenizer), val_fraction, overwrite, advance)
    for name, tokens in (("train", corpus.train), ("val", corpus.val)):
        console.print(f"{name:5} {len(tokens):>15,} tokens")
    if len(corpus.train):
        total = len(corpus.train) + len(corpus.val)
        nats = unigram_entropy(corpus.train, corpus.vocab)
        console.print(f"vocab {corpus.vocab:,}, {size / total:.2f} bytes per token")
        console.print(f"unigram entropy {nats:.3f} nats per token; the loss of a trained model is below it")
    console.print(f"wrote {out}")
