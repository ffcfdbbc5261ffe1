"""Options and helpers that the commands of `cuboid bench` share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cuboid.cli.command import one_of
from cuboid.cli.option import option
from cuboid.run.started import under_torchrun

MODEL, MACHINE, RUN, PIPES = "Model and batch", "Ranks and network", "Measurement", "Pipes"

RANKS = Annotated[str, option("Numbers of ranks, such as 8,64.", MACHINE)]
HOSTS = Annotated[int | None, option("Emulated hosts, instead of --ranks.", MACHINE, 1)]
PER_HOST = Annotated[int, option("Ranks on each host.", MACHINE, 1)]
RATE = Annotated[
    str, option("Rate of each host's link, such as 25mbit; several make a sweep; '' is unshaped.", MACHINE)
]
EMULATE = Annotated[
    str,
    option(
        "Time local work instead of doing it, and send real messages over slowed links: paper, a preset of cuboid plan "
        "and a factor (v100-edr/2000), figures (fp32=2e9,stream=1e9,between=50mbit) or a file of cuboid calibrate. All "
        "figures: docs/emulation.md.",
        MACHINE,
    ),
]
LAYERS = Annotated[int, option("Transformer blocks.", MODEL, 1)]
HIDDEN = Annotated[int, option("Width of the residual stream.", MODEL, 1)]
FIRST_HIDDEN = Annotated[int, option("Width of the residual stream, on the fewest ranks.", MODEL, 1)]
HEADS = Annotated[int, option("Attention heads; they must divide --hidden.", MODEL, 1)]
VOCAB = Annotated[int, option("Tokens in the vocabulary.", MODEL, 1)]
BATCH = Annotated[int, option("Sequences per step, over all ranks.", MODEL, 1)]
FIRST_BATCH = Annotated[int, option("Sequences per step, over all ranks, on the fewest ranks.", MODEL, 1)]
SEQ = Annotated[int, option("Tokens per sequence.", MODEL, 1)]
ACTIVATIONS = Annotated[str, option("Cuboids retain gathered activations for backward, or regather them.", MODEL)]
WEIGHTS = Annotated[str, option("Cuboids retain gathered weights for backward, or regather them.", MODEL)]
ROUNDS = Annotated[int, option("Turns of each layout.", RUN, 1)]
STEPS = Annotated[int, option("Steps timed per turn.", RUN, 1)]
ONLY = Annotated[
    list[str] | None,
    option("Only layouts whose name begins with this, such as 'cuboid 2,' or 2-D; may be repeated.", RUN),
]
SMALLER = Annotated[bool, option("Fewer and smaller measurements: rough, in minutes.", RUN, flag="--quick")]
OUT = Annotated[Path, option("Folder for the JSON and the pictures.", RUN)]


def is_given(ctx: typer.Context, name: str) -> bool:
    return getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"


def unless_quick(ctx: typer.Context, name: str, quick: bool, smaller: Any) -> Any:
    """An option's value; with --quick the smaller one, unless the option is given."""
    return smaller if quick and not is_given(ctx, name) else ctx.params[name]


def reject_torchrun(what: str) -> None:
    if under_torchrun():
        raise ValueError(f"bench {what} starts its own ranks; run it without torchrun")


def check_policy(activations: str, weights: str) -> None:
    one_of("--activations", activations, ("regather", "retain"))
    one_of("--weights", weights, ("regather", "retain"))


def make_console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=132)


def whole_numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--ranks {text!r} is not a list of whole numbers; write 8 or 8,16,64")
    return [int(part) for part in parts]
