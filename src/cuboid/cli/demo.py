"""`cuboid demo`: what Cuboid does, in a few minutes on two cores."""

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from cuboid.cli.option import option

if TYPE_CHECKING:  # torch is imported when the demo begins
    from cuboid.demo.run import DemoResult


def demo(
    folder: Annotated[Path | None, option("Run folder to make.", otherwise="a new one in runs/")] = None,
    steps: Annotated[int, option("Steps to train.", None, 2)] = 240,
) -> None:
    """Train one small model on one device and on two cuboids, and compare every step.

    The model learns from the running Python's standard library; nothing is downloaded. It is trained on cuboid
    (2,2,2), 8 ranks of this machine, stopped half way and resumed on (1,4,2), and on one device. Exits 1 if the losses
    of any step differ by 1e-5.

    Examples:
      cuboid demo
      cuboid demo --steps 60 --folder runs/demo
    """
    from cuboid.train.run import check_free, fresh_path

    folder = (folder or fresh_path().with_name(f"demo-{fresh_path().name}")).absolute()
    check_free(folder)
    from cuboid.demo.run import TOLERANCE, DemoSize, run_demo

    console = Console(highlight=False, markup=False, soft_wrap=True)
    found = run_demo(folder, DemoSize(steps), lambda text: console.print(text, style="bold"))
    show(console, found, folder)
    if not found.difference < TOLERANCE:
        raise typer.Exit(1)


def show(console: Console, found: "DemoResult", folder: Path) -> None:
    from cuboid.demo.run import TOLERANCE
    from cuboid.train.progress import quantity

    facts, first, second = found.facts, *found.stretches
    for text in found.samples[:2]:
        console.rule("sample", align="left")
        console.print(text.expandtabs(4))
    console.rule()
    good, lines = found.valid_lines
    console.print(f"{good} of {lines} complete lines of {len(found.samples)} samples pass Python's tokenize.")
    bits = list(found.bits_per_byte.values())
    console.print(
        f"Validation on samples from all of {facts.held_out_files} held-out files, {quantity(facts.held_out_bytes)}B: "
        f"{bits[0]:.3f} → {bits[-1]:.3f} bits per byte; a byte 3-gram model of the same files: {facts.trigram_bits:.3f}"
    )
    console.print(table(found))
    ok = found.difference < TOLERANCE
    console.print(
        f"Largest difference in loss to one device at any step: {found.difference:.1e} "
        f"({'below' if ok else 'NOT below'} {TOLERANCE:g}), in fp64, resumed after step {first.last}"
    )
    console.print(f"  curves     {folder / 'curves.png'}\n  figures    {folder / 'demo.json'}")
    console.print(
        f"Next{activation()}:\n"
        f"  cuboid sample {folder} --prompt 'class '\n"
        f"  cuboid train --resume {folder} --cuboid 8,1,1 --set schedule.steps={2 * second.last}\n"
        f"  cuboid plan llama-3-8b --ranks 64 --hardware h100-ndr --batch 128 --seq 8192"
    )


def activation() -> str:
    """What to do before the commands of "Next", if the shell would not find them."""
    script = Path(sys.prefix) / "bin" / "activate"
    if shutil.which("cuboid") is not None or sys.prefix == sys.base_prefix or not script.is_file():
        return ""
    near = script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script
    return f", after `. {shlex.quote(str(near))}`"


def table(found: "DemoResult") -> Table:
    """What a rank holds and sends on each layout."""
    from cuboid.train.progress import quantity

    grid = Table(title="per rank", title_justify="left")
    stretches = [found.alone, *found.stretches]
    for name in ("", *(each.layout for each in stretches)):
        grid.add_column(name, justify="right" if name else "left")

    def row(name: str, *cells: str) -> None:
        grid.add_row(name, *cells)

    row("steps", *(f"{each.first}–{each.last}" for each in stretches))
    row("parameters", *(f"{each.parameters:,}" for each in stretches))
    row("weights, gradients, optimizer", *(f"{quantity(each.at_rest)}B" for each in stretches))
    row("peak in a step, activations included", *(f"{quantity(each.peak)}B" for each in stretches))
    row("sent per step", *(f"{quantity(each.sent)}B" for each in stretches))
    row("largest difference in loss", "–", *(f"{found.apart(each):.1e}" for each in found.stretches))
    return grid
