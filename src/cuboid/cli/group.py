"""The list of commands. A command's module is imported when the command is typed, so that help, completion and wrong
command lines stay fast."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand

from cuboid.cli.command import Command, CommandGroup

#: Per group: each command's name, its module:function, and its summary.
GROUPS = {
    "Begin": {
        "demo": ("demo:demo", "Train one small model on one device and on two cuboids, and compare every step."),
        "doctor": ("doctor:doctor", "Check whether this machine or cluster is ready to train."),
    },
    "Train": {
        "train": ("train:train", "Train a language model."),
        "plan": ("plan:plan", "Rank every cuboid of a cluster for a model by its predicted step time."),
        "config": ("config:config", "Print every key of a training run with its value and meaning, as TOML."),
        "data": ("data:app", "Prepare text for training."),
        "checkpoint": ("checkpoint:app", "List, verify and prune the checkpoints of a run."),
    },
    "Use a model": {
        "sample": ("sample:sample", "Continue a prompt with a trained model."),
        "eval": ("eval:eval_", "Print the perplexity of a model on a text."),
        "import": ("convert:import_", "Turn a Hugging Face folder into a checkpoint that loads on any cuboid."),
        "export": ("convert:export", "Write a trained model as a Hugging Face folder."),
    },
    "Measure": {
        "verify": (
            "verify:verify",
            "Compare a model on a cuboid with the same on one device.",
        ),
        "calibrate": ("calibrate:calibrate", "Measure this machine or cluster for cuboid plan."),
        "bench": ("bench:app", "Time cuboids against other parallelisms on the same ranks."),
    },
}
HOMES = {name: home for group in GROUPS.values() for name, (home, _) in group.items()}


class Imported(Mapping[str, Any]):
    """Commands by name, imported when they are looked up."""

    def __getitem__(self, name: str) -> Any:
        module, attribute = HOMES[name].split(":")
        found, alone = getattr(import_module(f"cuboid.cli.{module}"), attribute), typer.Typer(add_completion=False)
        if not isinstance(found, typer.Typer):
            alone.command(name, cls=Command)(found)
            found = alone
        command = typer.main.get_command(found)
        command.name = name
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(HOMES)

    def __len__(self) -> int:
        return len(HOMES)


class Commands(CommandGroup):
    """Lists all commands by name and summary, and imports only the one that is called."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.commands = Imported()  # type: ignore[assignment]  # read only
        self._summaries = {
            name: TyperCommand(name, help=summary, rich_help_panel=group)
            for group, commands in GROUPS.items()
            for name, (_, summary) in commands.items()
        }

    def list_commands(self, ctx: Any) -> list[str]:
        return list(HOMES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The name and the summary of a command, for lists."""
        return self._summaries.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, self.commands[name] if name else None, rest
