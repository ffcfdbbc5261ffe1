"""Options, and those that several commands have."""

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
    """An option's metadata, for `Annotated`. `otherwise` says what holds if it is left out, where the default
    value does not say it by itself."""
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
LAYOUT = "Ranks"  # panel of the options that say on which cuboid
CUBOID = Annotated[
    str,
    option(
        "x,y,z, such as 2,2,2; or auto: what cuboid plan finds fastest for as many ranks as configured.",
        LAYOUT,
        otherwise="as configured",
        metavar="X,Y,Z",
    ),
]
#: Of commands that run on one process unless told otherwise.
ON_CUBOID = Annotated[str, option("x,y,z to run on; 1,1,1 is one process.", metavar="X,Y,Z")]
