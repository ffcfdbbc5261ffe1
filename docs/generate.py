"""Fills the reference pages in when the site is built: every command with its options, every configuration key."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from typing import Any

import typer

from cuboid.cli import app
from cuboid.train.config import TrainConfig
from cuboid.train.keys import keys, toml, value_of


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls it for every page."""
    if "<!-- commands -->" in markdown:
        markdown = markdown.replace("<!-- commands -->", commands())
    if "<!-- keys -->" in markdown:
        markdown = markdown.replace("<!-- keys -->", sections())
    return markdown


def commands() -> str:
    return "\n".join(_command(typer.main.get_command(app), "cuboid"))


def _command(command: Any, name: str) -> list[str]:
    text, _, examples = (command.help or "").partition("\n\nExample")
    lines = [f"## `{name}`", "", _prose(text), ""]
    if examples:
        lines += ["```text", *(line.strip() for line in examples.split("\n")[1:]), "```", ""]
    options = [each for each in command.params if not getattr(each, "hidden", False)]
    if options and name != "cuboid":
        lines += ["| argument or option | default | meaning |", "|---|---|---|"]
        lines += [_row(each) for each in options]
        lines.append("")
    for child, found in getattr(command, "commands", {}).items():
        lines += _command(found, f"{name} {child}")
    return lines


def _row(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts] if parameter.param_type_name == "option" else [parameter.name]
    shown = " ".join(f"`{name}`" for name in names)
    said = getattr(parameter, "show_default", None)
    default = parameter.default
    empty = default in (None, "", ()) or default is False or callable(default) or "Sentinel" in type(default).__name__
    meant = said if isinstance(said, str) else "" if empty else f"`{default}`"
    return f"| {shown} | {meant} | {_cell(getattr(parameter, 'help', '') or '')} |"


def sections() -> str:
    """A table per section of TrainConfig."""
    lines, described = [], keys(TrainConfig)
    defaults = TrainConfig()
    for prefix, cls in _sections(TrainConfig):
        title = f"[{prefix}]" if prefix else "top level"
        lines += [f"## `{title}`", "", _prose(inspect.cleandoc(cls.__doc__ or "")).capitalize().rstrip(".") + ".", ""]
        lines += ["| key | default | meaning |", "|---|---|---|"]
        for field in fields(cls):
            name = f"{prefix}.{field.name}" if prefix else field.name
            if name in described:
                lines.append(f"| `{name}` | `{toml(value_of(defaults, name))}` | {_cell(described[name].rule.help)} |")
        lines.append("")
    return "\n".join(lines)


def _sections(cls: Any, prefix: str = "") -> list[tuple[str, Any]]:
    found = [(prefix, cls)]
    for field in fields(cls):
        if is_dataclass(field.default):
            found += _sections(type(field.default), f"{prefix}.{field.name}" if prefix else field.name)
    return found


def _cell(text: str) -> str:
    return _prose(text).replace("|", "\\|").replace("\n", " ")


def _prose(text: str) -> str:
    """Help as Markdown: paragraphs stay, angle brackets and stars are not markup."""
    text = re.sub(r"(?<!\n)\n(?![\n ])", " ", text.replace("\f", ""))
    return re.sub(r"([<>*_])", r"\\\1", text)
