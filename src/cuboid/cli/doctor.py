"""`cuboid doctor`: is this machine ready to train, and as fast as it should be?"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from cuboid.cli.option import CUBOID, JSON, LAYOUT, PRESET, SET, option
from cuboid.cli.train import on_cuboid
from cuboid.plan.hardware import load as load_hardware
from cuboid.run.errors import RunError
from cuboid.run.started import under_torchrun
from cuboid.train.config import TrainConfig, load

if TYPE_CHECKING:
    from cuboid.doctor.finding import Finding
    from cuboid.run.launch import World

INDENT = 18  # columns of the status and the name of the check
STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(help="The TOML file of a run, as cuboid train takes it. Left out: cuboid train's small GPT."),
    ] = None,
    overrides: SET = None,
    preset: PRESET = "",
    cuboid: CUBOID = "",
    hardware: Annotated[str, option("What links should reach: a file of cuboid calibrate, or a preset.", LAYOUT)] = "",
    as_json: JSON = False,
) -> None:
    """Check whether this machine or cluster is ready to train.

    It checks versions, devices, which ranks share a host, settings that slow training down, memory for the
    configured model, space for checkpoints, the compiler, the links of each axis, and twenty steps of a small model
    against one device. Each line is ok, a warning or an error, with what to do about it. Nothing is written. Exits 1
    if there is an error.

    Examples:
      cuboid doctor
      cuboid doctor big.toml --cuboid 2,2,2
      torchrun --nproc-per-node 8 -m cuboid doctor big.toml
    """
    from cuboid.device import prepare_deterministic
    from cuboid.doctor import examine, on_rank
    from cuboid.run.launch import Pool, launch

    chosen = on_cuboid(load(config, overrides or [], preset), cuboid, hardware if cuboid == "auto" else "")
    chosen.check()
    if chosen.precision.deterministic:
        prepare_deterministic()
    if hardware:
        load_hardware(hardware)  # raises before ranks start
    ranks, console = chosen.cuboid_shape().ranks, Console(highlight=False, stderr=as_json)
    if under_torchrun():
        (ready,) = launch(on_all_stages, ranks, [chosen, hardware, as_json])
    else:
        began = time.monotonic()
        with Pool(ranks) as pool:
            found, _ = examine(
                lambda stage: pool.run(on_rank, stage, chosen, hardware)[0], lambda each: show(each, console, as_json)
            )
        ready = conclude(found, time.monotonic() - began, console, as_json)
    if not ready:
        raise typer.Exit(1)


def on_all_stages(world: World, config: TrainConfig, hardware: str, as_json: bool) -> bool:
    """Run all stages on a rank of torchrun; rank 0 prints."""
    from cuboid.doctor import examine, on_rank

    console, began = Console(highlight=False, quiet=world.rank != 0, stderr=as_json), time.monotonic()
    found, error = examine(
        lambda stage: on_rank(world, stage, config, hardware), lambda each: show(each, console, as_json)
    )
    ready = conclude(found, time.monotonic() - began, console, as_json) if world.rank == 0 else True
    if error is not None:  # the rank that raised it reports it; a RunError, because no argument is wrong
        raise RunError(str(error)) if isinstance(error, ValueError) else error
    return ready


def show(found: Finding, console: Console, as_json: bool) -> None:
    if as_json:
        return
    text = Text.assemble((f"{found.status:<8}", STYLES[found.status]), f"{found.check:<10}")
    said = [(line, "") for line in wrap(found.said, max(console.width - INDENT, 40))]
    said += [(line, "bold") for line in wrap(f"→ {found.remedy}", max(console.width - INDENT, 40)) if found.remedy]
    for i, (line, style) in enumerate(said):
        text.append(" " * INDENT * (i > 0) + line + "\n" * (i < len(said) - 1), style)
    console.print(text, soft_wrap=True)
    console.file.flush()  # the next check may end this process


def conclude(found: list[Finding], seconds: float, console: Console, as_json: bool) -> bool:
    """Print the last line. Returns whether the machine is ready to train."""
    errors, warnings = (sum(each.status == status for each in found) for status in ("error", "warning"))
    if as_json:
        counts = {"ok": not errors, "errors": errors, "warnings": warnings, "seconds": round(seconds, 1)}
        print(json.dumps({**counts, "findings": [asdict(each) for each in found]}, indent=1))
    else:
        ready = "Not ready to train" if errors else "Ready to train"
        console.print(
            f"{ready}: {errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}; {seconds:.0f} s."
        )
    return not errors
