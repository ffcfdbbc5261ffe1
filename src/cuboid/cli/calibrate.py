"""`cuboid calibrate`: what this machine or cluster can do, for `cuboid plan`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from cuboid.cli.option import JSON, option
from cuboid.dtypes import COMPUTED, known
from cuboid.plan.source import model as load_model
from cuboid.train.progress import quantity

if TYPE_CHECKING:
    from cuboid.plan.calibrate import Calibration


def calibrate(
    out: Annotated[Path, typer.Argument(help="The hardware file to write.")] = Path("hardware.json"),
    ranks: Annotated[int, option("Ranks to start here; under torchrun: as many as it started.", None, 1)] = 8,
    model: Annotated[
        str, option("Time matmuls of this model's shapes: a preset or a config.json.", otherwise="common shapes")
    ] = "",
    tokens: Annotated[
        int | None,
        option("Tokens per rank in a matmul, 64 or more.", None, 0, otherwise="512 on a CPU, 8192 on a GPU"),
    ] = None,
    dtype: Annotated[str, option(f"One of {', '.join(COMPUTED)}.", otherwise="fp32 on a CPU, bf16 on a GPU")] = "",
    as_json: JSON = False,
) -> None:
    """Measure this machine or cluster for cuboid plan.

    It measures matmuls, copies, attention, every collective at every axis size with all groups at once, compute that
    overlaps with communication, and a real layer. cuboid plan --hardware takes the file.

    Examples:
      cuboid calibrate mine.json --ranks 8
      torchrun --nproc-per-node 8 -m cuboid calibrate mine.json --ranks 8
    """
    tokens = tokens or 0
    dtype = known(dtype, COMPUTED) if dtype else ""
    from cuboid.plan.calibrate import across_hosts
    from cuboid.plan.calibrate import calibrate as calibrate_on_rank
    from cuboid.plan.calibrate.timing import Settings
    from cuboid.run.launch import launch

    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ValueError(f"{out} cannot be written: give a file in a folder that exists")
    if 0 < tokens < 64:
        raise ValueError(f"--tokens {tokens} are too few to time; use 64 or more, or 0 for what suits the device")
    settings = Settings(load_model(model).replace(layers=1) if model else None, tokens, dtype)
    found = launch(calibrate_on_rank, ranks, [settings, out.stem])[0]
    if found is None:  # a rank other than 0 under torchrun
        return
    found = across_hosts(found, ranks)
    found.hardware.save(out)
    if as_json:
        print(json.dumps(asdict(found), indent=1))
    else:
        show(found, Console(), out)


def show(found: Calibration, console: Console, out: Path) -> None:
    hw = found.hardware
    table = Table("collective", "where", "per call", "per round", "bandwidth", "fit error", title_justify="left")
    for where, links in (("inside", hw.inside), ("across", hw.across)):
        for kind, link in links.items():
            times = f"{link.base * 1e6:.3g} µs", f"{link.hop * 1e6:.3g} µs", f"{quantity(link.bandwidth)}B/s"
            table.add_row(kind, where, *times, f"{found.errors[f'{kind} {where}']:.0%}")
    (precision, rate), (forward, backward) = next(iter(hw.rate.items())), hw.attention
    console.print(
        f"Matmuls {quantity(rate)}FLOP/s in {precision} (fit error {found.errors['matmuls']:.0%}), attention "
        f"{forward:.0%} and {backward:.0%} of it, elementwise {quantity(hw.stream)}B/s, an operation "
        f"{hw.launch * 1e6:.3g} µs; compute loses {hw.slowdown:.0%} while something is in flight; real layers to "
        f"{found.errors['one real layer']:.0%}.",
        highlight=False,
    )
    if table.rows:
        console.print(table)
    for where in ("inside", "across"):
        if not getattr(hw, where):
            console.print(f"Links {where} nodes: {hw.source[where]}.", soft_wrap=True, highlight=False)
    console.print(f"{found.seconds:.0f} s. {out.absolute()}", soft_wrap=True, highlight=False, markup=False)
