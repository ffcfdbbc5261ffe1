"""Whatever a configuration, a hardware file, a model or a command line holds, it runs or is rejected: no traceback, no
hang.
"""

import json
import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any
from unittest.mock import patch

from commands import HUNG
from counts import count
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.main import get_command
from typer.testing import CliRunner

from cuboid.cli import app
from cuboid.model.config import ModelConfig
from cuboid.plan.hardware import PRESETS
from cuboid.plan.hardware import load as load_hardware
from cuboid.plan.layer import Work
from cuboid.plan.search import rank
from cuboid.plan.source import NAMES
from cuboid.plan.source import model as load_model
from cuboid.train.config import TrainConfig, load, resolved_toml
from cuboid.train.keys import keys, toml

SMALL = ModelConfig(layers=2, hidden=64, heads=8, vocab=100, context=64)

often = settings(max_examples=count("fuzzed inputs of each kind"), suppress_health_check=list(HealthCheck))


class Began(Exception):
    """Input was taken, and work would begin."""


def began(*args: Any, **options: Any) -> None:
    raise Began


@contextmanager
def no_work() -> Iterator[None]:
    """Neither ranks nor hosts are started, and what takes too long is interrupted."""

    def too_long(signum: int, frame: FrameType | None) -> None:
        raise AssertionError("it hangs")

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(int(HUNG))
    try:
        with patch("cuboid.run.launch.Pool.__init__", began), patch("cuboid.run.cluster.Cluster.__init__", began):
            yield
    finally:
        signal.alarm(0)


@contextmanager
def somewhere() -> Iterator[Path]:
    """A working directory with a text, a file of noise and a folder that is empty."""
    before = Path.cwd()
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("To be, or not to be\n" * 99)
        (folder / "noise").write_bytes(bytes(range(256)) * 9)
        (folder / "empty").mkdir()
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)


# Configurations

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
numbers = st.one_of(
    st.integers(-3, 9),
    st.integers(),
    st.sampled_from([2**31, 2**63, 10**30, 10**400]),
    st.floats(width=64),
)
scalars = st.one_of(st.booleans(), numbers, texts)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=4)
names = st.one_of(st.sampled_from(sorted(keys(TrainConfig))), texts)


def refused_or_fine(text: bytes) -> None:
    with somewhere() as folder, no_work():
        (folder / "run.toml").write_bytes(text)
        with suppress(ValueError):
            config = load(folder / "run.toml")
            config.check()
            resolved_toml(config)


@often
@given(st.dictionaries(names, values, max_size=4))
def test_config_accepts_or_rejects_any_value(changes: dict[str, Any]) -> None:
    lines = [f"{name} = {toml(value)}" for name, value in changes.items()]
    refused_or_fine("\n".join(lines).encode())


@often
@given(st.data())
def test_config_accepts_or_rejects_corrupted_files(data: st.DataObject) -> None:
    text = bytearray(resolved_toml(TrainConfig()).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=6))
    refused_or_fine(bytes(text))


@often
@given(st.binary(max_size=60))
def test_config_accepts_or_rejects_arbitrary_bytes(content: bytes) -> None:
    refused_or_fine(content)


# Hardware files and models, of which plans are made

CPU = PRESETS["cpu"].export() | {"tile": [1, 1], "attention": [0.5, 0.4]}  # as JSON has pairs
LLAMA = dict.fromkeys(NAMES["llama"][1], 8) | {"model_type": "llama", "tie_word_embeddings": None}


def places(found: Any) -> Iterator[tuple[Any, Any]]:
    """Every table or list in it with each of its keys."""
    for key in found if isinstance(found, dict) else range(len(found)) if isinstance(found, list) else ():
        yield found, key
        yield from places(found[key])


@st.composite
def altered(draw: st.DrawFn, good: dict[str, Any]) -> dict[str, Any]:
    """With a few values of any kind, at any depth."""
    found = deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        table, key = draw(st.sampled_from(list(places(found))))
        table[key] = draw(st.none() | values | st.dictionaries(texts, values, max_size=2))
    return found


@often
@given(altered(CPU), st.sampled_from([1, 8, 16]))
def test_planner_accepts_or_rejects_any_hardware(figures: dict[str, Any], devices: int) -> None:
    with somewhere() as folder, no_work():
        (folder / "mine.json").write_text(json.dumps(figures))
        with suppress(ValueError):
            ranking = rank(load_hardware("mine.json"), Work(SMALL, 16, 64, "fp32"), devices)
            assert all(0 < plan.seconds < math.inf for plan in (*ranking.plans, *ranking.too_large))


@often
@given(altered(LLAMA))
def test_planner_accepts_or_rejects_any_model(sizes: dict[str, Any]) -> None:
    with somewhere() as folder, no_work():
        (folder / "config.json").write_text(json.dumps(sizes))
        with suppress(ValueError):
            rank(PRESETS["cpu"], Work(load_model("config.json"), 16, 64, "fp32"), 8)


# Command lines


@cache
def commands() -> dict[tuple[str, ...], Any]:
    """Every command by the words that name it."""

    def walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        if hasattr(command, "commands"):
            for name, each in command.commands.items():
                yield from walk(each, (*words, name))
        else:
            yield words, command

    found = dict(walk(get_command(app), ()))
    assert {("train",), ("bench", "layouts")} <= found.keys()
    return found


PLAUSIBLE = [
    *("8", "2,2,2", "1,1,1", "auto", "0", "-1", "3", "64", "4096", "1e9", "1000000007", "99999999999999999999"),
    *("text.txt", "noise", "empty", "nowhere", "", "/", "/dev/null", "..", "~"),
    *("gpt2", "gpt2-1.5b", "llama", "a100-hdr", "bf16", "fp64"),
    *("layouts", "strong", "100mbit", "x=1", "model.hidden=24", "replicas=3"),
]
words = st.one_of(st.sampled_from(PLAUSIBLE), texts, numbers.map(str))


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    name = draw(st.sampled_from(sorted(commands())))
    command, line = commands()[name], list(name)
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            line += draw(st.lists(words, min_size=0 if not parameter.required else 1, max_size=1))
        elif draw(st.integers(0, 3)) == 0:
            option = draw(st.sampled_from(parameter.opts))
            line += [option] if getattr(parameter, "is_flag", False) else [option, draw(words)]
    return line + draw(st.lists(words, max_size=1))


@often
@given(command_lines())
def test_cli_accepts_or_rejects_any_command_line(line: list[str]) -> None:
    with somewhere(), no_work():
        done = CliRunner().invoke(app, line)
    if not isinstance(done.exception, Began | ValueError | SystemExit | None):
        raise AssertionError(f"cuboid {' '.join(line)}") from done.exception
    assert done.exit_code in (0, 1, 2), line
    assert "Traceback" not in done.output
