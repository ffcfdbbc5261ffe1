"""Wrong command lines that a newcomer would type: each is answered in one or two sentences that lead to a right one,
and none of them loads torch, nor does help."""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import Cuboid
from typer.main import get_command
from typer.testing import CliRunner

from cuboid.cli import app
from cuboid.cli.group import GROUPS

HEAVY = ("torch", "matplotlib", "transformers", "tokenizers", "tensorboard")

#: What is typed, and what the answer must have.
WRONG = [
    ("trian", "did you mean cuboid train?"),
    ("fit", "did you mean cuboid train?"),
    ("--cuboid 2,2,2", "options come after a command, such as cuboid train --cuboid"),
    ("help", "did you mean cuboid --help?"),
    ("train --epochs 3", "write --set schedule.steps=N"),
    ("train --replicas 0", "must be greater than or equal to 1"),
    ("train --gpus 8", "write --cuboid x,y,z"),
    ("train --cubiod 2,2,2", "did you mean --cuboid?"),
    ("train --cuboid 2 2 2", "write sizes with commas, such as --cuboid 2,2,2"),
    ("train --cuboid 8", "write x,y,z such as 2,2,2"),
    ("train --cuboid 1,3,1", "heads=8 cannot be split into y·z=3"),
    ("train --cuboid", "--cuboid needs a value, such as --cuboid 2,2,2"),
    ("train --lr 1e-3", "--set optimizer.lr=VALUE"),
    ("train --batch-size 32", "--set data.batch=VALUE"),
    ("train --dtype bf16", "--set precision.dtype=VALUE"),
    ("train --set lr=1e-3", "did you mean optimizer.lr?"),
    ("train --set optimizer.lr", "write key=value"),
    ("train --set precision.dtype=int8", 'one of "auto", "fp32", "bf16", "fp16"'),
    ("train llama-3-8b", "--preset llama-3-8b"),
    ("train gpt2", "--preset gpt2-124m"),
    ("train Qwen/Qwen3-0.6B", "--preset qwen3-0.6b"),
    ("plan meta-llama/Llama-3-8B", "did you mean llama-3-8b?"),
    ("train text.txt", "--set data.paths=text.txt"),
    ("train --preset gpt5", "There are gpt2-124m"),
    ("train --preset gpt2", 'did you mean "gpt2-124m"?'),
    ("train --config my.toml", "name the file without a flag: cuboid train my.toml"),
    ("train --nodes 2", "torchrun starts ranks on several hosts"),
    ("train --bf16", "write --set precision.dtype=TYPE"),
    ("train --set optimizer.lr=1e-3 data.batch=4", "write --set data.batch=4"),
    ("train --set cuboid=2,2,2", "set its keys, such as cuboid.x"),
    ("train --set schedule.steps=4", "set schedule.warmup to 0 or so"),
    ("train --tp 4", "write --cuboid 1,TP,1"),
    ("train --hardware h100-ndr", "is for --cuboid auto"),
    ("plan", "give a model, or its --layers, --hidden, --heads"),
    ("plan llama3-8b", "llama-3-8b"),
    ("plan llama-3-8b --gpus 64", "write --ranks"),
    ("plan llama-3-8b --explain 2,2,2,2", "write x,y,z such as 2,2,2"),
    (f"checkpoint list {300 * 'a'}", "too long for the name of a file"),
    ("bench", "one of strong, weak, layouts"),
    ("bench speed", "Commands: strong, weak, layouts"),
    ("bench layouts --cuboid 2,2,2", "write --only 'cuboid 2,2,2'"),
    ("bench layouts --rounds few", "--rounds"),
    ("verify --cuboid 2,2,2 --ranks 4", "leave one of them out"),
    ("plan gpt2 --ranks 8", "did you mean gpt2-124m?"),
    ("plan llama-3-8b --ranks 8 --cuboid 2,2,2", "write --explain"),
    ("verify --pipe 3 --ranks 8", "--ranks 8 is not a multiple of --replicas 1 · --pipe 3"),
    ("verify --pipe 3", "layers=2"),
    ("verify --pipeline gpipe", "add --pipe, or leave them out"),
    ("verify --pipe 2 --pipeline gpip", "did you mean gpipe?"),
    ("verify --pipe 2 --split 1;1", "write numbers with commas, such as 3,1"),
    ("eval run --pipe 2", "write it after the sizes: --cuboid 'X,Y,Z pipe=2'"),
    ("import a b --pipe 2", "write it after the sizes: --cuboid 'X,Y,Z pipe=2'"),
    ("plan llama-3-8b --pipe 2", "write --explain 'X,Y,Z pipe=2'"),
    ("verify 2,2,2", "write --cuboid 2,2,2"),
    ("verify --bf16", "write --dtype TYPE"),
    ("verify --dtype fp8", "one of fp64, fp32, bf16"),
    ("sample", "cuboid sample needs RUN: A run folder"),
    ("data text.txt", "cuboid data build text.txt"),
    ("data build text.txt", "cuboid data build needs --out"),
    ("data build text.txt --out tokens --vocab 32000", "write --tokenizer FILE"),
    ("checkpoint delete run", "Commands: list, verify, prune"),
    ("export run", "cuboid export needs OUT"),
    ("config --get optimizer.lr", "write --show"),
    ("sample runs/nope", "There are runs/demo"),
    ("sample Qwen/Qwen3-0.6B", "run hf download Qwen/Qwen3-0.6B"),
    ("eval nowhere", "is not a folder; give a Hugging Face folder, a run or a checkpoint"),
    ("export nowhere out", "is not a folder; give a Hugging Face folder, a run or a checkpoint"),
    ("import nowhere out", "cannot be read: No such file or directory; give a folder of a Hugging Face model"),
    ("checkpoint list nowhere", "has no complete checkpoint; give a run folder"),
    ("train --resume runs", "There are runs/demo"),
    ("train --resume runs/begun", "has no complete checkpoint"),
    ("train --data text.txt", "write --set data.paths=FILE"),
    ("train --precision bf16", "write --set precision.dtype=TYPE"),
    ("train --fp8", "write --set precision.dtype=bf16"),
    ("demo --cuboid 2,2,2", "write cuboid train --cuboid"),
    ("demo --folder runs", "is not empty"),
    ("bench --quick", "options come after one of strong, weak, layouts"),
]


def make_files(folder: Path) -> None:
    """A text, a run with what looks like a checkpoint, and one without."""
    (folder / "text.txt").write_text("some text\n")
    (folder / "runs" / "demo" / "checkpoints" / "step-00000001").mkdir(parents=True)
    (folder / "runs" / "begun").mkdir()


@pytest.mark.parametrize(("typed", "answer"), WRONG, ids=[typed for typed, _ in WRONG])
def test_wrong_command_is_answered_with_a_right_one(typed: str, answer: str, cuboid: Cuboid, tmp_path: Path) -> None:
    make_files(tmp_path)
    said = cuboid(*typed.split())
    assert said.code == 2, said
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert answer in said.err, said.err
    assert len(said.err.replace("did you mean", "").split(". ")) <= 2


def test_missing_run_is_not_looked_for_on_the_hub(cuboid: Cuboid) -> None:
    assert cuboid("sample", "runs/nope").err.endswith("give a Hugging Face folder, a run or a checkpoint\n")


HELP = ["--help", "-h", "--version", "train --help", "train -h", "bench layouts --help"]
LIGHT = [*HELP, *(typed for typed, _ in WRONG)]


def test_help_and_wrong_commands_load_nothing_heavy(tmp_path: Path) -> None:
    """All in one process: what one loads is loaded."""
    make_files(tmp_path)
    code = f"""
import sys
from cuboid.cli import main
for typed in {LIGHT!r}:
    sys.argv = ["cuboid", *typed.split()]
    try:
        main()
    except SystemExit:
        pass
    found = [name for name in {HEAVY!r} if name in sys.modules]
    assert not found, (typed, found)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def commands() -> Iterator[tuple[str, Any]]:
    """Every command by the words that name it."""
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        yield f"cuboid {name}", command
        for child, found in getattr(command, "commands", {}).items():
            yield f"cuboid {name} {child}", found


def test_help_groups_and_explains_every_option() -> None:
    """Defaults are shown as they are, or in words where a value stands for something else."""
    for name, command in commands():
        for param in command.params:
            assert param.help, (name, param.name)
            assert (
                param.default not in (0, -1)
                or param.name == "seed"
                or isinstance(param.show_default, str)
                or (isinstance(param.default, float | bool))
            ), (name, param.name)


def test_help_has_examples_that_parse() -> None:
    """Those of ours, and those that torchrun starts."""
    for name, command in commands():
        lines = [line.strip() for line in command.help.partition("\n\nExample")[2].splitlines()[1:]]
        assert lines or hasattr(command, "commands") or name.startswith(("cuboid bench", "cuboid checkpoint")), name
        for line in lines:
            words = shlex.split(line.partition(" > ")[0])
            words = words[words.index("cuboid") + 1 :]
            group = get_command(app)
            context = group.make_context("cuboid", words, resilient_parsing=True)
            found, child, rest = group.resolve_command(context, words)  # type: ignore[attr-defined]
            with child.make_context(found, rest, parent=context):
                pass


def test_help_indents_examples() -> None:
    shown = 0
    for words, _ in commands():
        lines = CliRunner().invoke(app, [*words.split()[1:], "--help"]).output.splitlines()
        start = next((i for i, line in enumerate(lines) if line.strip() == "Examples:"), None)
        if start is not None:
            shown += 1
            assert lines[start + 1].startswith("   "), words
    assert shown > 10


def test_list_of_commands_knows_what_each_does() -> None:
    """It is written apart from the commands, which are imported when they are called."""
    for name, (_, summary) in (item for group in GROUPS.values() for item in group.items()):
        assert get_command(app).commands[name].help.startswith(summary), name  # type: ignore[attr-defined]
