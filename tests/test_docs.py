"""Every code block of README.md and docs/ runs: TOML is saved under the name in its first line, others are executed."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from commands import HUNG
from typer.testing import CliRunner

from cuboid.cli import app

ROOT = Path(__file__).parents[1]
DOCS, README = ROOT / "docs", ROOT / "README.md"
BIN = Path(sys.executable).parent
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    kind: str
    text: str


def blocks(name: str) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall((DOCS / name).read_text())]


def run_toml(text: str) -> None:
    first = re.match(r"# (\w+\.toml)\n", text)
    assert first, "the first line names the file"
    Path(first[1]).write_text(text)


def run_python(text: str) -> None:
    """As a script: what it sends to ranks they find in their own `__main__`."""
    with pytest.MonkeyPatch.context() as patch:
        module = ModuleType("__main__")
        patch.setitem(sys.modules, "__main__", module)
        exec(compile(text, "a block", "exec"), module.__dict__)


def free_port(_: re.Match[str]) -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def run_bash(text: str) -> None:
    for line in text.replace("\\\n", " ").strip().splitlines():
        line = re.sub(r"(?<=--master-port )\d+", free_port, line)
        words = shlex.split(line)
        if words[0] == "cuboid":  # in this process, which spares the seconds that importing torch takes
            result = CliRunner().invoke(app, words[1:])
            assert result.exit_code == 0, (line, result.exception, result.output)
            continue
        nodes = range(2) if "$NODE" in line else range(1)
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        here = [
            subprocess.Popen(
                line,
                shell=True,
                env=os.environ | {"PATH": path, "NODE": str(node), "HOST0": "127.0.0.1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for node in nodes
        ]
        for each in here:
            out, _ = each.communicate(timeout=HUNG)
            assert each.returncode == 0, (line, out)


RUN = {"toml": run_toml, "python": run_python, "bash": run_bash}


@pytest.mark.parametrize(
    "name",
    [
        "quickstart.md",
        "your-own-model.md",
        "training-loop.md",
        "checkpoints.md",
        "pipeline.md",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("cluster.md", "emulation.md")),
    ],
)
def test_docs_every_code_block_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks(name)
    assert found
    for kind, text in found:
        RUN[kind](text)


def test_readme_example_and_command_run(capfd: pytest.CaptureFixture[str]) -> None:
    text = README.read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.S)
    run_python(example)
    losses = json.loads(capfd.readouterr().out)
    assert len(losses) == 8
    assert len(set(losses)) == 1
    (command,) = re.findall(r"^    cuboid (verify --cuboid .*)$", text, re.M)
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, done.output
    assert "The cuboid is exact." in done.stdout


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_docs_have_no_unrun_code_or_broken_links(path: Path) -> None:
    """No block is indented or of a kind that is not run, and links lead somewhere."""
    text = path.read_text()
    outside = BLOCK.sub("", text)
    assert "```" not in outside
    measured = path.name in ("memory.md", "planner.md")  # on a machine of its own, or in equations
    assert measured or not re.search(r"^    \S", outside, re.M)
    for link in re.findall(r"\]\(([^)#:]+)\)", outside):
        assert (DOCS / link).exists(), link
