"""`cuboid config`: every key of a training run, with its value and meaning."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from cuboid.cli.option import JSON, PRESET, SET, option
from cuboid.model.presets import PRESETS
from cuboid.train.config import TrainConfig, load, resolved_toml
from cuboid.train.keys import keys, value_of
from cuboid.train.progress import quantity


def config(
    file: Annotated[Path | None, typer.Argument(help="A TOML file of a run. Left out: the defaults.")] = None,
    overrides: SET = None,
    show: Annotated[bool, option("Print every key; this is the default.", flag="--show")] = False,
    preset: PRESET = "",
    presets: Annotated[bool, option("List the known models instead.", flag="--presets")] = False,
    as_json: JSON = False,
) -> None:
    """Print every key of a training run with its value and meaning, as TOML.

    cuboid train takes the output as its configuration. A file and --set are checked as cuboid train checks them: exit
    code 2 and the reason if they cannot run.

    Examples:
      cuboid config > mine.toml
      cuboid config mine.toml --set optimizer.lr=1e-3
      cuboid config --presets
    """
    if presets:
        list_presets(as_json)
        return
    chosen = load(file, overrides or (), preset)
    if file or overrides:
        chosen.check()
    if as_json:
        typer.echo(json.dumps(described(chosen), indent=2, ensure_ascii=False))
    else:
        typer.echo(resolved_toml(chosen), nl=False)


def described(chosen: TrainConfig) -> dict[str, dict[str, object]]:
    return {
        name: {
            "value": value_of(chosen, name),
            "default": each.default,
            "rule": each.rule_text,
            "help": each.rule.help,
        }
        for name, each in keys(TrainConfig).items()
    }


def list_presets(as_json: bool) -> None:
    columns = ("family", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "context")
    if as_json:
        rows = {
            name: {"parameters": model.parameters, **{column: getattr(model, column) for column in columns}}
            for name, model in PRESETS.items()
        }
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("preset", box=None, pad_edge=False)
    for column in ("params", *columns[1:]):
        table.add_column(column.replace("_", " "), justify="right", no_wrap=True)
    for name, model in PRESETS.items():
        size = quantity(model.parameters).replace("G", "B")
        table.add_row(name, size, *(str(getattr(model, column)) for column in columns[1:]))
    Console().print(table)
