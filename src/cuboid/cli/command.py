"""How every command parses its arguments: flags of earlier versions are accepted with a warning, and each wrong command
line is answered in one or two sentences that lead to a right one."""

import errno
import inspect
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from typer.core import TyperCommand, TyperGroup

from cuboid.cli.say import warn

#: Flags by their earlier names. The value of --data was a number; a text that is given to it is something else.
RENAMED = {"--data": "--replicas", "--devices": "--ranks", "--precision": "--dtype", "--parts": "--sub-batches"}

#: Commands by other names that people type.
COMMANDS = {
    **dict.fromkeys(("run", "fit", "pretrain", "finetune", "fine-tune", "start"), "train"),
    **dict.fromkeys(("generate", "infer", "complete"), "sample"),
    **dict.fromkeys(("evaluate", "perplexity"), "eval"),
    **dict.fromkeys(("benchmark", "compare"), "bench"),
    **dict.fromkeys(("test", "check"), "verify"),
    **dict.fromkeys(("resume", "continue"), "train --resume RUN"),
    **dict.fromkeys(("convert", "load"), "import"),
    **dict.fromkeys(("save",), "export"),
    **dict.fromkeys(("help",), "--help"),
    **dict.fromkeys(("search", "tune", "estimate"), "plan"),
    **dict.fromkeys(("tokenize", "tokenise", "prepare", "preprocess"), "data build"),
}
#: Flags by other names that people type: the first one that the command has is suggested.
FLAGS = {
    **dict.fromkeys(
        ("gpus", "num-gpus", "ngpus", "nproc", "nproc-per-node", "world-size", "processes", "ranks", "devices"),
        ("--ranks", "--cuboid x,y,z (x·y·z ranks)"),
    ),
    **dict.fromkeys(("tp", "tensor-parallel", "tensor-parallel-size"), ("--cuboid 1,TP,1",)),
    **dict.fromkeys(("fsdp", "dp-shard"), ("--cuboid FSDP,1,1",)),
    **dict.fromkeys(("dp", "data-parallel"), ("--replicas",)),
    **dict.fromkeys(("pp", "pipeline-parallel"), ("--pipe",)),
    **dict.fromkeys(("model", "model-name"), ("--preset", "--set model.pretrained=FOLDER")),
    **dict.fromkeys(("checkpoint", "ckpt", "continue"), ("--resume",)),
    **dict.fromkeys(("output", "output-dir", "out-dir", "save-dir", "out"), ("--out", "--set logging.folder=FOLDER")),
    **dict.fromkeys(("text", "dataset", "train-data", "data"), ("--set data.paths=FILE",)),
    **dict.fromkeys(("epochs", "num-train-epochs"), ("--set schedule.steps=N",)),
    **dict.fromkeys(("max-tokens", "max-new-tokens", "length"), ("--tokens",)),
    **dict.fromkeys(("get", "key", "list"), ("--show",)),
    **dict.fromkeys(("fp32", "bf16", "fp16", "amp", "precision"), ("--dtype TYPE", "--set precision.dtype=TYPE")),
    **dict.fromkeys(("fp8", "fp4", "int8"), ("--dtype bf16", "--set precision.dtype=bf16")),
    **dict.fromkeys(("vocab", "vocab-size"), ("--tokenizer FILE, made with the size that you want",)),
    **dict.fromkeys(("cuboid", "layout"), ("--cuboid", "--only 'cuboid 2,2,2'", "--explain")),
}
PIPE = ("pipe", "pp", "pipeline-parallel")
#: What people type for a flag of a command, where none of its own is meant.
INSTEAD = {
    **dict.fromkeys(
        ("sample", "eval", "import", "export"), dict.fromkeys(PIPE, "write it after the sizes: --cuboid 'X,Y,Z pipe=2'")
    ),
    "plan": dict.fromkeys(PIPE, "pipes are ranked with all else; for one, write --explain 'X,Y,Z pipe=2'"),
    "train": {
        **dict.fromkeys(("config", "config-file", "cfg"), "name the file without a flag: cuboid train my.toml"),
        **dict.fromkeys(
            ("nodes", "nnodes", "num-nodes", "hosts", "master-addr", "master-port"),
            "torchrun starts ranks on several hosts: torchrun --nnodes 2 … -m cuboid train …",
        ),
    },
    "demo": dict.fromkeys(("cuboid", "ranks", "gpus"), "to choose a cuboid, write cuboid train --cuboid X,Y,Z"),
}


#: How help names types of values.
KINDS = {int: "N", float: "X", str: "TEXT", Path: "PATH", bool: ""}


class Readable:
    """A mixin: the terminal wraps paragraphs of help, and types of values have short names."""

    help: str | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = unwrapped(kwargs.get("help"))
        for param in self.params:  # type: ignore[attr-defined]
            _name_kind(param)

    def get_help_option(self, ctx: Any) -> Any:
        found = super().get_help_option(ctx)  # type: ignore[misc]
        if found is not None:
            _name_kind(found)
        return found


class Command(Readable, TyperCommand):
    """A command that accepts earlier names of its flags, and rejects paths that no file can have."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {flag for param in self.params for flag in param.opts}
        current = [_current(word, after, known) for word, after in zip(args, [*args[1:], ""], strict=False)]
        rest = super().parse_args(ctx, current)
        for value in ctx.params.values():
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, Path):
                    _check_length(each)
        return rest


class CommandGroup(Readable, TyperGroup):
    """A command with subcommands."""


def _check_length(path: Path) -> None:
    try:
        path.lstat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ValueError(f"{str(path)[:40]}… is too long for the name of a file; give a shorter one") from None


def _name_kind(param: Any) -> None:
    if param.param_type_name == "option" and param.metavar is None:
        kind = getattr(getattr(param, "type_descriptor", None), "annotation", None)
        param.metavar = KINDS.get((*get_args(kind), kind)[0])


def unwrapped(text: str | None) -> str:
    """Help as paragraphs of one line each, which a terminal wraps at its own width. Indented lines stay as they are.

    >>> print(unwrapped("One\\nline.\\n\\nExamples:\\n  cuboid train"))
    One line.
    <BLANKLINE>
    Examples:
      cuboid train
    """
    return re.sub(r"(?<!\n)\n(?![\n ])", " ", inspect.cleandoc(text or ""))


def one_of(flag: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        near = get_close_matches(value, choices, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{flag} {value} is not one of {', '.join(choices)}{hint}")


def _current(word: str, after: str, known: set[str]) -> str:
    """The current name of a renamed flag of this command; any other word as it is. `after` is the next word."""
    flag, equals, value = word.partition("=")
    now = RENAMED.get(flag)
    if now is None or flag in known or now not in known:
        return word
    if flag == "--data" and not (value if equals else after).isdigit():
        return word
    warn(f"{flag} is now called {now}; please use the new name")
    return now + equals + value


def explain(error: Any) -> str:
    """What is wrong with a command line, and what to write instead. The error's attributes tell its kind."""
    ctx, message = getattr(error, "ctx", None), error.format_message().rstrip(".")
    if ctx is None and hasattr(error, "option_name"):
        return _lacks_value(error.option_name)
    if ctx is None:
        return str(message)
    path, command = ctx.command_path, ctx.command
    see = f"{path} --help lists all"
    flags = [flag for param in command.params for flag in param.opts if flag.startswith("--")]
    if hasattr(error, "possibilities"):
        hint = _flag_hint(error.option_name, flags, path)
        if ctx.parent is None and not hint:
            hint = f"options come after a command, such as cuboid train {error.option_name} …"
        elif ctx.parent is not None and hasattr(command, "list_commands"):
            names = command.list_commands(ctx)
            hint = f"options come after one of {', '.join(names)}; {path} {names[0]} --help lists its own"
        return f"{path} has no option {error.option_name}; {hint or see}"
    if hasattr(error, "option_name"):
        return _lacks_value(error.option_name)
    if hasattr(error, "param_type"):  # something is missing
        what = error.param.opts[0] if error.param.opts[0].startswith("-") else error.param.name.upper()
        return f"{path} needs {what}: {(error.param.help or '').rstrip('.')}. {path} --help shows how"
    if hasattr(error, "param"):
        what = error.param.opts[0] if error.param.opts[0].startswith("-") else error.param.name.upper()
        rule = error.message.rstrip(".").replace("Input should be", "it must be")
        return f"{what}: {rule}; {path} --help shows what it takes"
    if hasattr(command, "list_commands"):
        names = command.list_commands(ctx)
        typed = re.search(r"No such command '(.*?)'", message)
        if typed is None:
            return f"{path} needs a command after it: one of {', '.join(names)}"
        near = get_close_matches(typed[1], names, 1)
        hint = f"{path} {near[0] if near else COMMANDS.get(typed[1], '')}" if near or typed[1] in COMMANDS else ""
        if not hint and ctx.parent is not None and Path(typed[1]).exists():  # a file where a command belongs
            hint = f"{path} {names[0]} {typed[1]}"
        rest = f"; did you mean {hint}?" if hint else "."
        return f"{path} has no command {typed[1]!r}{rest} Commands: {', '.join(names)}"
    if extra := re.search(r"extra arguments?(?:\(s\))? \((.*)\)", message):
        if re.fullmatch(r"[\d ]+", extra[1]):
            return f"{path} does not take {extra[1]!r} here; write sizes with commas, such as --cuboid 2,2,2"
        if re.fullmatch(r"\d+(,\d+)+", extra[1]) and "--cuboid" in flags:
            return f"{path} does not take {extra[1]!r} here; write --cuboid {extra[1]}"
        return f"{path} does not take {extra[1]!r} here; quote a text with spaces, and see {path} --help"
    return f"{message}; {see}"


def _lacks_value(flag: str) -> str:
    example = {"--cuboid": "2,2,2", "--set": "optimizer.lr=1e-3", "--resume": "runs/NAME"}.get(flag)
    return f"{flag} needs a value" + (f", such as {flag} {example}" if example else "")


def _flag_hint(typed: str, flags: Sequence[str], path: str) -> str:
    """What to write instead of a flag that a command does not have."""
    word = typed.lstrip("-").lower()
    for ours in FLAGS.get(word, ()):
        if ours.split()[0] in flags:
            return f"write {ours}"
    if instead := INSTEAD.get(path.rpartition(" ")[2], {}).get(word):
        return instead
    if near := get_close_matches(typed, flags, 1, 0.75):
        return f"did you mean {near[0]}?"
    if "--set" in flags:
        from cuboid.train.config import TrainConfig
        from cuboid.train.keys import keys

        name = word.replace("-", "_")
        for key, each in keys(TrainConfig).items():
            if name in (key.rpartition(".")[2], *each.rule.also):
                return f"set the key {key}: --set {key}=VALUE"
    near = get_close_matches(word, [flag.lstrip("-") for flag in flags], 1, 0.6)
    return f"did you mean --{near[0]}? {path} --help lists all" if near else ""
