"""Options that several commands share."""

from typing import Annotated, Any

import typer


def option(
    words: str,
    panel: str | None = None,
    least: float | None = None,
    most: float | None = None,
    *,
    flag: str = "",
    otherwise: str = "",
    metavar: str | None = None,
) -> Any:
    """An option's metadata, for `Annotated`. `otherwise` describes the default if its value does not."""
    names = [flag] if flag else []
    return typer.Option(
        *names,
        help=words,
        rich_help_panel=panel,
        min=least,
        max=most,
        metavar=metavar,
        show_default=otherwise or True,
    )


SET = Annotated[
    list[str] | None, option("Set a configuration key; may be repeated.", flag="--set", metavar="KEY=VALUE")
]
PRESET = Annotated[str, option("Begin with the sizes of a known model; cuboid config --presets lists them.")]
JSON = Annotated[bool, option("Print JSON.", flag="--json")]
LAYOUT = "Ranks"  # the panel of options that set the cuboid
CUBOID = Annotated[
    str,
    option(
        "x,y,z, such as 2,2,2 or '1,2,2 replicas=2 pipe=2'; or auto: the fastest of cuboid plan for the configured "
        "number of ranks.",
        LAYOUT,
        otherwise="as configured",
        metavar="X,Y,Z",
    ),
]
#: For commands that run on one process by default.
ON_CUBOID = Annotated[
    str, option("x,y,z to run on, such as 1,2,2 or '1,2,2 replicas=2 pipe=2'; 1,1,1 is one process.", metavar="X,Y,Z")
]
