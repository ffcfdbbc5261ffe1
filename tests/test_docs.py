"""Every code block of README.md and docs/ runs: TOML is saved under the name in its first line, others are executed.

A block with a title ("needs GPUs", "needs a network") is only parsed, and one of kind `text` is output.
"""

import ast
import inspect
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest
import typer
from commands import HUNG
from typer.testing import CliRunner

import cuboid
from cuboid.cli import app
from cuboid.train.config import load

ROOT = Path(__file__).parents[1]
DOCS, README = ROOT / "docs", ROOT / "README.md"
BIN = Path(sys.executable).parent
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)
SLOW = ("cluster.md", "emulation.md")
#: Methods whose docstrings have yet to name their arguments.
UNNAMED = ("LayerModule.forward", "Embedding.lookup", "Model.player_of", "Schedule.fuse", "Schedule.stored")
UNNAMED += ("Loss.parts", "Loss.merge", "Loss.gradient")


class CodeBlock(NamedTuple):
    kind: str
    title: str
    text: str


def blocks(path: Path) -> list[CodeBlock]:
    return [each for each in (CodeBlock(*found) for found in BLOCK.findall(path.read_text())) if each.kind != "text"]


def runnable() -> list[Any]:
    """The pages that have blocks."""
    pages = [path for path in (README, *sorted(DOCS.glob("*.md"))) if blocks(path)]
    marks = {True: [pytest.mark.slow], False: []}
    return [pytest.param(path, id=path.name, marks=marks[path.name in SLOW]) for path in pages]


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


def parse_bash(text: str) -> None:
    """Every line of ours has a command that exists and options that it has."""
    for line in text.replace("\\\n", " ").strip().splitlines():
        words = shlex.split(line, comments=True)
        if "cuboid" in words:
            parse_command(typer.main.get_command(app), words[words.index("cuboid") + 1 :], line)


def parse_command(group: Any, words: list[str], line: str) -> None:
    context = group.make_context("cuboid", words[:1], resilient_parsing=True)
    name, command, rest = group.resolve_command(context, words)
    if hasattr(command, "get_command"):
        return parse_command(command, rest, line)
    with command.make_context(name, rest, parent=context):
        pass


RUN = {"toml": run_toml, "python": run_python, "bash": run_bash}
PARSE = {"toml": tomllib.loads, "python": ast.parse, "bash": parse_bash}


@pytest.mark.parametrize("path", runnable())
def test_docs_every_code_block_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kind, title, text in blocks(path):
        (PARSE if title else RUN)[kind](text)


@pytest.mark.parametrize("path", [README, *sorted(DOCS.glob("*.md"))], ids=lambda path: path.name)
def test_docs_commands_in_outputs_parse(path: Path) -> None:
    """A command in a block of output begins with a dollar sign."""
    for kind, _, text in BLOCK.findall(path.read_text()):
        for line in text.splitlines() if kind == "text" else ():
            assert not re.match(r"(cuboid|torchrun) \S", line), f"{line!r}: write a bash block, or a $ before it"
            if line.startswith("$ "):
                parse_bash(line[2:])


def test_readme_example_gives_one_loss(capfd: pytest.CaptureFixture[str]) -> None:
    (example,) = [each.text for each in blocks(README) if each.kind == "python"]
    run_python(example)
    losses = json.loads(capfd.readouterr().out)
    assert len(losses) == 8
    assert len(set(losses)) == 1


def test_readme_plan_shows_where_z_wins() -> None:
    """README has the winner and its advantage over the best cuboid with z = 1."""
    text = README.read_text()
    (line,) = re.findall(r"^```bash\n(cuboid plan .*)\n```$", text, re.M)
    said = CliRunner().invoke(app, [*shlex.split(line)[1:], "--json", "--top", "10000"])
    rows = sorted(json.loads(said.stdout)["plans"], key=lambda row: row["seconds"])
    k = rows[0]["cuboid"]
    flat = next(row for row in rows if row["cuboid"]["z"] == 1)
    ratio = flat["seconds"] / rows[0]["seconds"]
    assert f"({k['x']},{k['y']},{k['z']}) is {ratio:.2f} × as fast as the best cuboid with z = 1" in text


@pytest.mark.parametrize("path", [README, *sorted(DOCS.glob("*.md"))], ids=lambda path: path.name)
def test_docs_have_no_unmarked_code_or_broken_links(path: Path) -> None:
    """All code is in blocks of a known kind, and links lead somewhere."""
    text = path.read_text()
    outside = BLOCK.sub("", text)
    assert "```" not in outside
    assert {each[0] for each in BLOCK.findall(text)} <= {*RUN, "text"}
    for link in re.findall(r"\]\(([^)#:]+)\)", outside):
        assert (path.parent / link).exists(), link


def test_benchmarks_are_made_by_commands_that_exist() -> None:
    commands = re.findall(r"`(cuboid bench [^`]+)`", (ROOT / "benchmarks" / "README.md").read_text())
    assert len(commands) > 5
    for command in commands:
        if "--help" not in command:
            parse_bash(command)


def test_benchmarks_are_made_by_the_commands_of_the_table() -> None:
    """Those that their JSON names, wherever they were written to."""
    folder, found = ROOT / "benchmarks", 0
    for file, command in re.findall(r"^\| `(\S+)\.\*` \| `([^`]+)`", (folder / "README.md").read_text(), re.MULTILINE):
        made_by = json.loads((folder / f"{file}.json").read_text())["command"]
        plain = re.sub(r" --out \S+", "", made_by).replace("(", "").replace(")", "")
        assert command.replace('"', "") == plain, file
        found += 1
    assert found > 6


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 200


def test_examples_toml_are_valid(tmp_path: Path) -> None:
    files = sorted((ROOT / "examples").glob("*.toml"))
    assert files
    for file in files:
        load(file).check()


def test_site_builds_without_warnings(tmp_path: Path) -> None:
    """mkdocs checks internal links, anchors and the API's docstrings; warnings are errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=HUNG)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {page.stem for page in (tmp_path / "site").glob("*.html")}
    assert {page.stem for page in DOCS.glob("*.md")} <= pages
    assert "memory.recompute" in (tmp_path / "site" / "configuration.html").read_text()
    assert "--resume" in (tmp_path / "site" / "cli.html").read_text()


def public_functions(found: Any) -> Iterator[tuple[str, Any]]:
    """A function, or a class and its own public methods and properties, by name."""
    yield "", found
    for name, value in vars(found).items() if isinstance(found, type) else ():
        if not name.startswith("_") and isinstance(value, FunctionType | property | classmethod | staticmethod):
            yield name, getattr(found, name)


def raises_value_error(code: Any) -> bool:
    """Whether its own body does; for a class, the body of `__init__` and `__post_init__`."""
    if isinstance(code, type):
        return any(raises_value_error(vars(code)[each]) for each in ("__init__", "__post_init__") if each in vars(code))
    try:
        tree = ast.parse(dedent(inspect.getsource(code.fget if isinstance(code, property) else code)))
    except OSError:  # made by dataclass
        return False
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    return any(isinstance(each, ast.Call) and ast.unparse(each.func) == "ValueError" for each in raised)


@pytest.mark.parametrize("name", cuboid.__all__)
def test_public_names_are_documented(name: str) -> None:
    """A docstring, also of every method, with every argument in it and what it raises; and a place on the API page."""
    found = getattr(cuboid, name)
    assert f"::: cuboid.{name}\n" in (DOCS / "api.md").read_text()
    is_protocol = isinstance(found, type) and getattr(found, "_is_protocol", False)
    for method, code in public_functions(found):
        where = f"{name}.{method}" if method else name
        if method and found is not cuboid.Parallel and hasattr(cuboid.Parallel, method):
            continue  # documented there
        text = inspect.getdoc(code) or ""
        assert text, f"{where} has no docstring"
        if raises_value_error(code):
            assert re.search(r"\bRaises?\b", text), f"{where} does not say what it raises"
        if isinstance(code, property) or where in UNNAMED or (is_protocol and not method):
            continue
        for each in inspect.signature(code).parameters:
            said = re.search(rf"^\s+{each}: " + rf"|`{each}`" * bool(method), text, re.M)
            assert said or each.startswith("_") or each == "self", f"{where} does not say what {each} is"


@pytest.mark.parametrize("page", [README, DOCS / "index.md"], ids=lambda page: page.name)
def test_first_screen_says_what_has_run_on_gpus(page: Path) -> None:
    """To be changed with the pages, when something has."""
    first = " ".join(page.read_text().splitlines()[:24])
    assert "Nothing has run on real GPUs yet" in first
    assert re.search(r"tested on CPU ranks .*gloo", first)
