"""Warnings of a command, on stderr."""

from rich.console import Console
from rich.text import Text

from cuboid.run.started import is_first


def warn(text: str) -> None:
    """Print a warning, under torchrun on one rank only."""
    if is_first():
        Console(stderr=True, highlight=False).print(Text.assemble(("warning: ", "yellow"), text), soft_wrap=True)
