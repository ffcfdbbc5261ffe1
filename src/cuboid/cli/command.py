"""How every command reads its words: flags of earlier versions are still read, with a warning."""

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

from cuboid.cli.say import warn

#: Flags by their names in earlier versions.
RENAMED = {"--data": "--replicas", "--devices": "--ranks", "--precision": "--dtype", "--parts": "--sub-batches"}


class Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {flag for param in self.params for flag in param.opts}
        return super().parse_args(ctx, [_current(word, known) for word in args])


def _current(word: str, known: Sequence[str] | set[str]) -> str:
    """A word by its name of today, if it is a flag that has another and this command takes that one."""
    flag, equals, value = word.partition("=")
    now = RENAMED.get(flag)
    if now is None or flag in known or now not in known:
        return word
    warn(f"{flag} is now called {now}; please use the new name")
    return now + equals + value
