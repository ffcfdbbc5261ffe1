"""`cuboid eval`: how well a model predicts a text."""

import json
from pathlib import Path
from typing import Annotated

import typer

from cuboid.cli.bar import bar
from cuboid.cli.convert import CUBOID, talk
from cuboid.data import Corpus, Tokens, open_corpus, text_files, tokenise
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.mesh import Mesh
from cuboid.model.cuboid import COMPUTE, CuboidParallel
from cuboid.model.evaluate import Evaluation, evaluate
from cuboid.model.transformer import Transformer
from cuboid.run.launch import World, launch
from cuboid.train.origin import Origin


def eval_(
    model: Annotated[Path, typer.Argument(help="A Hugging Face folder, a run folder, or a checkpoint.")],
    text: Annotated[list[Path], typer.Argument(help="Text files or folders, or what cuboid data build made.")],
    seq: Annotated[int, typer.Option(help="Tokens in a window; the model's longest, at most 1024, if 0.", min=0)] = 0,
    batch: Annotated[int, typer.Option(help="Windows at a time, over all ranks.", min=1)] = 8,
    dtype: Annotated[str, typer.Option(help=f"Of products and activations: {', '.join(COMPUTE)}.")] = "fp32",
    cuboid: CUBOID = "1,1,1",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the perplexity of a model on text or token files.

    The text is cut into windows that do not overlap; a token is predicted from those before it in its window. Of built
    token files the validation part is taken, unless it is empty.
    """
    origin, shape = Origin.find(model), Cuboid.parse(cuboid)
    if dtype not in COMPUTE:
        raise ValueError(f"--dtype {dtype} is not one of {', '.join(COMPUTE)}")
    seq = seq or min(1024, origin.config.longest or origin.config.context)
    origin.config.check(shape, batch, seq)
    corpus = corpus_of(origin, text)
    corpus.check(origin.config.vocab)
    tokens = corpus.val if len(corpus.val) > 1 else corpus.train
    found = launch(eval_on_rank, shape.ranks, [origin, tokens, seq, batch, dtype, shape, as_json])[0]
    if found is None:
        return
    if as_json:
        typer.echo(json.dumps({"perplexity": found.perplexity, "nats": found.nats, "tokens": found.tokens}))
    else:
        typer.echo(f"perplexity {found.perplexity:.4f}, {found.nats:.4f} nats a token, {found.tokens:,} tokens")


def corpus_of(origin: Origin, text: list[Path]) -> Corpus:
    built = [path for path in text if (path / "train.json").is_file()]
    if not built:
        return tokenise(text_files(text), origin.tokenizer(), val_fraction=0.0)
    if len(text) > 1:
        raise ValueError(f"{built[0]} holds built tokens and cannot be joined with other sources; give it alone")
    corpus = open_corpus(built[0])
    own = origin.tokenizer_file
    if own is not None and origin.tokenizer().identity != corpus.tokenizer.identity:
        raise ValueError(f"{built[0]} was built with another tokenizer than {own}; build it with that one")
    return corpus


def eval_on_rank(
    world: World, origin: Origin, tokens: Tokens, seq: int, batch: int, dtype: str, cuboid: Cuboid, quiet: bool
) -> Evaluation | None:
    mesh, console = Mesh(cuboid, world.rank, world.device), talk(world)
    console.quiet = console.quiet or quiet
    model = Transformer(CuboidParallel(origin.config, mesh, dtype=COMPUTE[dtype]), None)
    origin.load(model)
    with bar(console, f"reading {len(tokens) - 1:,} tokens", len(tokens) - 1, size=False) as advance:
        found = evaluate(model, tokens, seq, batch, advance)
    return found if world.rank == 0 else None
