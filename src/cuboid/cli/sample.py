"""`cuboid sample`: text from a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cuboid.cli.option import ON_CUBOID, option
from cuboid.cli.say import warn
from cuboid.mesh.cuboid import Cuboid

if TYPE_CHECKING:
    from cuboid.model.generate import Sampling
    from cuboid.run.launch import World
    from cuboid.train.origin import Origin


def sample(
    run: Annotated[Path, typer.Argument(help="A run folder, one of its checkpoints, or a Hugging Face folder.")],
    prompt: Annotated[str, option("What the text begins with.")] = "class ",
    tokens: Annotated[int, option("Tokens to add.", None, 1)] = 200,
    temperature: Annotated[float, option("Lower is less varied; 0: always the likeliest token.")] = 0.6,
    top_k: Annotated[int, option("Draw from this many of the likeliest tokens.", otherwise="all")] = 0,
    top_p: Annotated[float, option("Draw from the likeliest tokens whose probabilities add up to this.")] = 1.0,
    seed: Annotated[int, option("Seed of the draws.")] = 0,
    cuboid: ON_CUBOID = "1,1,1",
) -> None:
    """Continue a prompt with a trained model.

    The text is printed as it grows. The same seed gives the same text on every cuboid.

    Examples:
      cuboid sample runs/NAME --prompt 'class '
      cuboid sample runs/NAME --temperature 0.8 --top-k 50 --cuboid 1,2,2
    """
    shape = Cuboid.parse(cuboid)
    from cuboid.train.origin import Origin

    origin = Origin.find(run)
    origin.config.check(shape, shape.x, 1)
    from cuboid.model.generate import Sampling, check_prompt
    from cuboid.run.launch import launch
    from cuboid.train.preflight import check_weights

    sampling = Sampling(temperature, top_k, top_p, seed)
    ids = [int(token) for token in origin.tokenizer().encode(prompt)]
    check_prompt(origin.config, ids)
    if (room := origin.config.longest - len(ids)) < tokens:
        warn(f"the model's context of {origin.config.longest} tokens has room for {room} more, not {tokens}")
    check_weights(origin.config, shape)
    launch(sample_on_rank, shape.ranks, [origin, shape, ids, tokens, sampling])


def sample_on_rank(
    world: World, origin: Origin, cuboid: Cuboid, prompt: list[int], count: int, sampling: Sampling
) -> None:
    """Load, draw, and print from rank 0 as the text grows."""
    from cuboid.mesh.mesh import Mesh
    from cuboid.model.cuboid import CuboidParallel
    from cuboid.model.generate import generate
    from cuboid.model.transformer import Transformer

    mesh, tokenizer = Mesh(cuboid, world.rank, world.device), origin.tokenizer()
    model = Transformer(CuboidParallel(origin.config, mesh), None)
    origin.load(model)
    model.eval()
    ids, shown = list(prompt), ""
    for token in generate(model, prompt, count, sampling, tokenizer.vocab):
        ids.append(token)
        text = tokenizer.decode(ids)
        if world.rank == 0 and not text.endswith("\N{REPLACEMENT CHARACTER}"):  # an incomplete character
            print(text[len(shown) :], end="", flush=True)
            shown = text
    if world.rank == 0:
        print()
