"""What a command says besides its result, on stderr."""

from rich.console import Console
from rich.text import Text

from cuboid.run.started import is_first


def warn(text: str) -> None:
    """Once, where torchrun has started several."""
    if is_first():
        Console(stderr=True, highlight=False).print(Text.assemble(("warning: ", "yellow"), text), soft_wrap=True)
