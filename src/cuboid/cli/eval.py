"""`cuboid eval`: how well a model predicts a text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cuboid.cli.bar import bar
from cuboid.cli.convert import rank_console
from cuboid.cli.option import JSON, ON_CUBOID, option
from cuboid.cli.say import warn
from cuboid.data.faults import MAX_BAD
from cuboid.dtypes import COMPUTED, known
from cuboid.mesh.cuboid import Cuboid
from cuboid.train.config import load

if TYPE_CHECKING:
    from cuboid.data import Corpus, Tokens
    from cuboid.model.evaluate import Evaluation
    from cuboid.run.launch import World
    from cuboid.train.origin import Origin


def eval_(
    model: Annotated[Path, typer.Argument(help="A Hugging Face folder, a run folder, or a checkpoint.")],
    text: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Text files or folders; a folder of cuboid data build or one of its .bin files; or the TOML of a run, "
            "for its validation split. Left out: the validation split of the run itself."
        ),
    ] = None,
    seq: Annotated[
        int | None,
        option("Tokens per window.", None, 1, otherwise="the model's context, at most 1024"),
    ] = None,
    batch: Annotated[int, option("Windows at a time, over all ranks.", None, 1)] = 8,
    dtype: Annotated[str, option(f"Number format of matmuls and activations: {', '.join(COMPUTED)}.")] = "fp32",
    cuboid: ON_CUBOID = "1,1,1",
    max_bad: Annotated[
        float, option("Share of a text file's bytes that may be zero or not UTF-8.", None, 0, 1)
    ] = MAX_BAD,
    as_json: JSON = False,
) -> None:
    """Print the perplexity of a model on a text.

    The text is split into windows that do not overlap; a token is predicted from those before it in its window. A
    folder of built tokens gives its validation split or, if that is empty, its training split.

    Examples:
      cuboid eval runs/NAME
      cuboid eval runs/NAME book.txt --seq 512
    """
    shape, dtype = Cuboid.parse(cuboid), known(dtype, COMPUTED)
    from cuboid.train.origin import Origin

    origin = Origin.find(model)
    seq = seq or min(1024, origin.config.longest)
    origin.config.check(shape, batch, seq)
    from cuboid.run.launch import launch
    from cuboid.train.preflight import check_weights

    tokens = tokens_of(origin, text, max_bad) if text else held_out(origin)
    check_weights(origin.config, shape)
    found = launch(eval_on_rank, shape.ranks, [origin, tokens, seq, batch, dtype, shape, as_json])[0]
    if found is None:
        return
    if as_json:
        typer.echo(json.dumps({"perplexity": found.perplexity, "nats": found.nats, "tokens": found.tokens}))
    else:
        typer.echo(f"perplexity {found.perplexity:.4f}, {found.nats:.4f} nats per token, {found.tokens:,} tokens")


def tokens_of(origin: Origin, text: list[Path], max_bad: float) -> Tokens:
    """The tokens of `text`: text files and folders, or one source of another kind."""
    from cuboid.data import is_built, is_token_file, open_corpus, text_files, tokenise
    from cuboid.train.loop import corpus_of

    others = [path for path in text if is_built(path) or is_token_file(path) or path.suffix == ".toml"]
    if not others:
        return checked(origin, tokenise(text_files(text, max_bad, warn), origin.tokenizer(), val_fraction=0.0)).train
    (source,) = others[:1]
    if len(text) > 1:
        raise ValueError(f"{source} holds more than text and cannot be joined with other sources; give it alone")
    if source.suffix == ".toml":
        return validation(checked(origin, corpus_of(load(source), warn), source), source)
    corpus = checked(origin, open_corpus(source if source.is_dir() else source.parent), source)
    if source.is_file():
        return corpus.train if source.stem == "train" else corpus.val
    return corpus.val if len(corpus.val) > 1 else corpus.train


def held_out(origin: Origin) -> Tokens:
    """The validation split of a run. Raises if its text has changed."""
    from cuboid.train.listing import inspect, newest
    from cuboid.train.loop import corpus_of

    config = origin.run / "config.toml" if origin.run is not None else None
    if config is None or not config.is_file():
        raise ValueError(f"{origin.path} is no run with a configuration, so it has no text; name text files")
    run, own = load(config, ["model.pretrained="]), origin.tokenizer_file
    if run.data.tokenizer and own is not None:  # the run's copy, which moves with its folder
        run = replace(run, data=replace(run.data, tokenizer=str(own)))
    corpus = corpus_of(run, warn)
    _, state = inspect(newest(origin.path))
    if state["data"]["digest"] != corpus.digest:
        raise ValueError(f"the text that {config} names has changed since the run; name the text to evaluate")
    return validation(checked(origin, corpus, config), config)


def checked(origin: Origin, corpus: Corpus, source: Path | None = None) -> Corpus:
    """Returns the corpus. Raises if it was built with another tokenizer than the model's."""
    own = origin.tokenizer_file
    if own is not None and origin.tokenizer().identity != corpus.tokenizer.identity:
        raise ValueError(
            f"the tokens of {source} were built with another tokenizer than {own}; build them with that one"
        )
    corpus.check(origin.config.vocab)
    return corpus


def validation(corpus: Corpus, source: Path) -> Tokens:
    if len(corpus.val) < 2:
        raise ValueError(f"{source} keeps no text for validation (data.val_fraction); name the text to evaluate")
    return corpus.val


def eval_on_rank(
    world: World, origin: Origin, tokens: Tokens, seq: int, batch: int, dtype: str, cuboid: Cuboid, quiet: bool
) -> Evaluation | None:
    from cuboid.mesh.mesh import Mesh
    from cuboid.model.cuboid import COMPUTE, CuboidParallel
    from cuboid.model.evaluate import evaluate
    from cuboid.model.transformer import Transformer

    mesh, console = Mesh(cuboid, world.rank, world.device), rank_console(world)
    console.quiet = console.quiet or quiet
    model = Transformer(CuboidParallel(origin.config, mesh, dtype=COMPUTE[dtype]), None)
    origin.load(model)
    with bar(console, f"reading {len(tokens) - 1:,} tokens", len(tokens) - 1, size=False) as advance:
        found = evaluate(model, tokens, seq, batch, advance)
    return found if world.rank == 0 else None
