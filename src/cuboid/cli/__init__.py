"""The command line, one file per command. Bad input exits with code 2 and one clear message."""

import os
import sys
import warnings
from typing import Annotated, TextIO

import typer
from rich.console import Console
from rich.text import Text

from cuboid import __version__
from cuboid.cli.command import explain
from cuboid.cli.group import Commands
from cuboid.cli.say import warn
from cuboid.run.errors import RankError, RunError
from cuboid.run.started import is_first_of_host
from cuboid.train.keys import RenamedKey

app = typer.Typer(
    name="cuboid",
    cls=Commands,
    help="Train Transformers too big for one device on any x × y × z block of devices.",
    epilog="Begin with: cuboid demo, cuboid train, cuboid plan llama-3-8b --ranks 64, cuboid config.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


@app.callback(invoke_without_command=True)
def options(
    ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        print(f"cuboid {__version__}")
    elif ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main() -> None:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its warnings of lost connections have C++ stack traces
    warnings.simplefilter("default", RenamedKey)
    warnings.showwarning = _show
    try:
        sys.exit(app(prog_name="cuboid", standalone_mode=False) or 0)
    except (ValueError, typer.TyperException) as error:
        if is_first_of_host():  # under torchrun every rank finds the same fault; one reports it
            print_error(error if isinstance(error, ValueError) else explain(error))
        sys.exit(2)
    except RunError as error:
        if is_first_of_host():
            print_error(error)
        sys.exit(1)
    except RankError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a renamed key in one line, other warnings as Python does."""
    if issubclass(category, RenamedKey):
        warn(str(message))
    else:
        (file or sys.stderr).write(warnings.formatwarning(message, category, filename, lineno, line))


def print_error(error: Exception | str) -> None:
    Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
