"""`cuboid bench`: compares 1-D, 2-D, 2.5-D, PyTorch's own and 3-D on one model, batch and machine."""

import typer

from cuboid.cli.bench.pipes import groups, pipeline
from cuboid.cli.bench.scaling import layouts, strong, weak
from cuboid.cli.bench.single import accuracy, cpu, emulation, overlap
from cuboid.cli.command import Command, CommandGroup

app = typer.Typer(name="bench", cls=CommandGroup, add_completion=False)
for command in (strong, weak, layouts, overlap, emulation, cpu, accuracy, pipeline, groups):
    app.command(cls=Command)(command)


@app.callback()
def bench() -> None:
    """Time cuboids against other parallelisms on the same ranks.

    Layouts take turns, round after round; medians and quartiles of step, bytes and memory are shown; everything goes to
    JSON, PNG and SVG. With --rate the ranks run on emulated hosts with shaped links (needs root); without, on this
    machine's loopback. With --emulate their devices are emulated too, so that many ranks can share a core; see
    docs/emulation.md.

    Examples:
      cuboid bench layouts --quick
      cuboid bench strong --rate 25mbit --only 'cuboid 2,'
      torchrun … -m cuboid bench layouts --ranks 64
    """
