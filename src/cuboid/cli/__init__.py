"""The command line. Every command is one file here; bad input ends it with exit code 2 and one clear message."""

import sys
from typing import Annotated

import typer
from rich.console import Console

from cuboid import __version__
from cuboid.cli.verify import verify

app = typer.Typer(
    name="cuboid",
    help="Train Transformers too big for one device on any x × y × z block of devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(verify)


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"cuboid {__version__}")


def main() -> None:
    try:
        app()
    except ValueError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, markup=True)
        sys.exit(2)
