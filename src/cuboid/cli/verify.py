"""`cuboid verify`: is the cuboid's step the serial one's, on this machine?"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from cuboid.cli.command import one_of
from cuboid.dtypes import VERIFIED, known
from cuboid.mesh.cuboid import AXES, Cuboid, factorisations
from cuboid.model.config import FAMILIES, ModelConfig
from cuboid.run.started import under_torchrun
from cuboid.step.schedule import Schedule
from cuboid.train.config import CuboidSection, LossSection, MemorySection, OverlapSection, TrainConfig

if TYPE_CHECKING:
    from cuboid.verify import Case, Report


def verify(
    cuboid: Annotated[str, typer.Option(help="x,y,z; the most even block of --ranks if left out.")] = "",
    replicas: Annotated[int, typer.Option(help="Data-parallel replicas of the whole block.")] = 1,
    pipe: Annotated[int, typer.Option(help="Stages of a pipeline, each on such blocks of its own.", min=1)] = 1,
    ranks: Annotated[
        int, typer.Option(help="Ranks in all: x·y·z·replicas·pipe. 8 if neither this nor --cuboid is given.")
    ] = 0,
    order: Annotated[str, typer.Option(help="Axes from slowest over ranks to fastest.")] = ",".join(AXES),
    family: Annotated[str, typer.Option(help=f"One of {', '.join(FAMILIES)}.")] = "gpt2",
    layers: Annotated[int, typer.Option()] = 2,
    hidden: Annotated[int, typer.Option()] = 96,
    heads: Annotated[int, typer.Option()] = 24,
    kv_heads: Annotated[int, typer.Option(help="Heads of keys and values; 0: as many as heads.")] = 0,
    ffn: Annotated[int, typer.Option(help="MLP inner size; 0: what the family does.")] = 0,
    vocab: Annotated[int, typer.Option()] = 500,
    seq: Annotated[int, typer.Option(help="Tokens a sequence.")] = 48,
    batch: Annotated[int, typer.Option(help="Sequences in all.")] = 8,
    tied: Annotated[bool | None, typer.Option(help="Head tied to the embedding; the family's way if left out.")] = None,
    bias: Annotated[bool | None, typer.Option(help="Biases; the family's way if left out.")] = None,
    dropout: Annotated[float, typer.Option(help="Drop this share, the same elements on every cuboid.")] = 0.1,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(VERIFIED)}.")] = "fp64",
    activations: Annotated[
        str, typer.Option(help="regather or retain gathered activations for backward.")
    ] = "regather",
    weights: Annotated[str, typer.Option(help="regather or retain gathered weights for backward.")] = "regather",
    recompute: Annotated[
        str, typer.Option(help="none, selective (attention) or full (each block) in backward.")
    ] = "none",
    prefetch: Annotated[bool, typer.Option(help="Gather the next layer's weights while this one computes.")] = True,
    sub_batches: Annotated[int, typer.Option(help="Interleaved sub-batches.", min=1)] = 1,
    chunks: Annotated[int, typer.Option(help="Chunks of a matmul's tokens.", min=1)] = 1,
    freeze: Annotated[str, typer.Option(help="A pattern of the parameters that are not trained.")] = "",
    label_smoothing: Annotated[float, typer.Option()] = 0.0,
    z_loss: Annotated[float, typer.Option()] = 0.0,
    seed: Annotated[int, typer.Option()] = 0,
    steps: Annotated[
        int, typer.Option(help="Train both for this many steps instead and compare the losses.", min=0)
    ] = 0,
    kills: Annotated[
        int, typer.Option(help="Train twice instead, once with this many ranks killed, and compare every bit.", min=0)
    ] = 0,
    plot: Annotated[Path, typer.Option(help="Where --steps draws the two curves.")] = Path("verify.png"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Run a model on a cuboid and serially; compare loss, logits, every gradient, bytes, FLOPs and memory.

    Exits 0 if all agree, 1 if anything does not. Rank 0 holds the whole model, so keep it small. Ranks are forked
    here; on a cluster start it with torchrun: torchrun --nproc-per-node 8 -m cuboid verify --cuboid 2,2,2
    """
    shape = Cuboid.parse(cuboid, replicas, order, pipe) if cuboid else most_even(ranks or 8 * replicas, replicas, pipe)
    if ranks and ranks != shape.ranks:
        raise ValueError(
            f"--ranks {ranks} is not x·y·z·replicas·pipe = {shape.ranks} of cuboid {shape}; leave one of them out"
        )
    dtype = known(dtype, VERIFIED)
    config = ModelConfig(
        family, layers, hidden, heads, vocab, seq, kv_heads, ffn=ffn, tied=tied, bias=bias, dropout=dropout
    )
    one_of("--activations", activations, ("regather", "retain"))
    one_of("--weights", weights, ("regather", "retain"))
    one_of("--recompute", recompute, ("none", "selective", "full"))
    config.check(shape, batch, seq)
    from cuboid.layers.loss import Loss
    from cuboid.model.cuboid import Policy
    from cuboid.run.launch import launch
    from cuboid.verify import Case
    from cuboid.verify import verify as verify_on_rank

    policy = Policy(activations, weights)  # type: ignore[arg-type]  # it checks them itself
    loss = Loss(label_smoothing=label_smoothing, z_loss=z_loss)
    schedule = Schedule(prefetch, sub_batches, chunks)
    case = Case(config, shape, batch, seq, dtype, policy, loss, recompute, seed, schedule, freeze)  # type: ignore[arg-type]
    console = Console(stderr=as_json)
    if steps:
        compare_curves(console, case, steps, plot, as_json)
        return
    if kills:
        kill_ranks(console, case, kills, as_json)
        return
    results = launch(verify_on_rank, shape.ranks, [case])
    report = results[0]
    if report is None:  # a rank other than 0 under torchrun
        return
    if as_json:
        print(json.dumps({"cuboid": shape.sizes, "config": vars(config), **report.export()}, indent=2, default=vars))
    else:
        show(console, case, report)
    if not report.ok:
        raise typer.Exit(1)


def compare_curves(console: Console, case: Case, steps: int, plot: Path, as_json: bool) -> None:
    """Train on Python's own library and draw both losses."""
    from cuboid.run.launch import launch
    from cuboid.train.compare import curves, draw
    from cuboid.verify import DTYPES

    config = training(case, steps)
    config.check()
    storage, _, _ = DTYPES[case.dtype]
    tolerance = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 5e-2}[case.dtype]
    found = launch(curves, case.cuboid.ranks, [config, storage])[0]
    if found is None:
        return
    draw(found, f"cuboid {case.cuboid}", plot)
    ok = found.difference <= tolerance
    if as_json:
        print(json.dumps({"ok": ok, "difference": found.difference, "tolerance": tolerance, **vars(found)}, indent=2))
    else:
        console.print(
            f"{steps} steps, {case.dtype}: loss {found.serial[0]:.4f} → {found.serial[-1]:.4f}", highlight=False
        )
        verdict = "[green]at most[/]" if ok else "[red]MISMATCH[/]: more than"
        console.print(
            f"At every step the cuboid's loss is serial's to {found.difference:.1e}; {verdict} {tolerance:g}."
        )
        console.print(f"Both curves: {plot.absolute()}", soft_wrap=True, highlight=False)
    if not ok:
        raise typer.Exit(1)


def kill_ranks(console: Console, case: Case, kills: int, as_json: bool) -> None:
    """Train on Python's own library with ranks dying, and hold what is left against a run without."""
    from cuboid.train.kills import MOMENTS, survive

    if under_torchrun():
        raise ValueError("--kills starts runs of its own on this machine; call it without torchrun")
    with TemporaryDirectory(prefix="cuboid-kills-") as folder:
        found = survive(training(case, 1), kills, case.seed, Path(folder), partial(console.print, highlight=False))
    if as_json:
        print(json.dumps({"ok": found.ok, **asdict(found)}, indent=2))
    else:
        table = Table("killed", "times", "steps taken again")
        for moment in MOMENTS:
            of = [kill for kill in found.kills if kill.moment == moment]
            table.add_row(moment, str(len(of)), str(sum(kill.repeated for kill in of)))
        console.print(table)
        verdict = "[bold green]are the same to the bit[/]" if found.ok else "[bold red]MISMATCH[/] in "
        console.print(
            f"Parameters and optimizer state, {found.tensors} tensors, every step's loss and gradient norm {verdict}"
            + ", ".join(found.different),
            highlight=False,
        )
    if not found.ok:
        raise typer.Exit(1)


def training(case: Case, steps: int) -> TrainConfig:
    """The case as a training run."""
    c, k, s, default = case.config, case.cuboid, case.schedule, TrainConfig()
    names = ("family", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "context", "tied", "bias", "dropout")
    return replace(
        default,
        seed=case.seed,
        model=replace(default.model, freeze=case.freeze, **{name: getattr(c, name) for name in names}),
        cuboid=CuboidSection(k.x, k.y, k.z, k.replicas, k.order, pipe=k.pipe),
        data=replace(default.data, seq=case.seq, batch=case.batch),
        schedule=replace(default.schedule, steps=steps, warmup=min(steps, default.schedule.warmup)),
        precision=replace(default.precision, dtype="bf16" if case.dtype == "bf16" else "fp32"),
        memory=MemorySection(case.policy.activations, case.policy.weights, case.recompute, case.policy.head_elements),
        overlap=OverlapSection(s.prefetch, s.sub_batches, s.chunks),
        loss=LossSection(case.loss.label_smoothing, case.loss.z_loss),
    )


def most_even(ranks: int, replicas: int, pipe: int = 1) -> Cuboid:
    """The block of ranks/(replicas·pipe) devices nearest to a cube."""
    if replicas < 1 or ranks < 1 or ranks % (replicas * pipe):
        raise ValueError(
            f"--ranks {ranks} is not a multiple of --replicas {replicas}"
            + (
                f" · --pipe {pipe}; choose ranks = x·y·z·replicas·pipe"
                if pipe > 1
                else "; choose ranks = x·y·z·replicas"
            )
        )
    best = min(factorisations(ranks // replicas // pipe), key=lambda c: (max(c.x, c.y, c.z), c.z, c.y))
    return Cuboid(best.x, best.y, best.z, replicas, pipe=pipe)


def show(console: Console, case: Case, report: Report) -> None:
    c = case.config
    console.print(
        f"{c.family}: {c.layers} layers, hidden {c.hidden}, {c.heads} heads ({c.kv_heads} of keys), ffn {c.ffn}, "
        f"vocab {c.vocab}, {c.parameters:,} parameters; batch {case.batch} × {case.seq}; {case.dtype}\n"
        f"cuboid {case.cuboid} on {case.cuboid.ranks} ranks against serial: "
        f"loss {report.loss:.6f}, gradient norm {report.gradient_norm:.6f}",
        highlight=False,
    )
    errors = Table("tensor", "relative error", title=f"Values (at most {report.tolerance:g})", title_justify="left")
    for name, error in worst_of_each(report.errors).items():
        style = "red" if error > report.tolerance else ""
        errors.add_row(name, f"{error:.1e}", style=style)
    console.print(errors)
    traffic = Table(
        "axis, collective",
        "calls",
        "bytes",
        "formula",
        title="Sent by rank 0 in a step",
        title_justify="left",
    )
    for name, entry in sorted(report.traffic.items()):
        style = "red" if entry["bytes"] != entry["predicted"] else ""
        traffic.add_row(name, str(entry["calls"]), f"{entry['bytes']:,}", f"{entry['predicted']:,}", style=style)
    console.print(traffic)
    said = "equal the formula's" if report.traffic_predicted else "[red]differ from the formula's[/]"
    console.print(f"On every rank, calls and bytes {said}.", highlight=False)
    balance = Table(
        "of a rank",
        "serial / P",
        "mean",
        "max / mean",
        "max / share",
        "formula",
        title="Balance",
        title_justify="left",
    )
    for name, b in report.balance.items():
        agrees = {True: "equal", False: "[red]differs[/]", None: ""}[b.predicted]
        balance.add_row(
            name,
            f"{b.share:,.0f}",
            f"{b.mean:,.0f}",
            f"{b.largest / b.mean:.4f}",
            f"{b.largest / b.share:.4f}",
            agrees,
        )
    console.print(balance)
    console.print("Norms and biases are replicated over the axis they are not cut by: the rest is one P-th, no more.")
    peak = Table("alive at the peak, rank 0", "bytes", title="Memory, AdamW's moments aside", title_justify="left")
    for kind, size in described(report.peak).items():
        peak.add_row(kind, f"{size:,}")
    console.print(peak)
    console.print("[bold green]The cuboid is exact.[/]" if report.ok else "[bold red]MISMATCH[/]: see the red rows.")


#: What the modules of this package make for a moment.
TRANSIENTS = {
    "comm.collectives": "gathered operands, buffers in flight",
    "step.weights": "gathered weights, their gradients",
    "layers.product": "partial products",
    "layers.head": "the head's chunk of logits",
    "layers.loss": "the head's chunk of logits",
}


def described(peak: dict[str, int]) -> dict[str, int]:
    """What stays at rest first, then what is alive for a moment, largest first."""
    rest = {kind: peak.get(kind, 0) for kind in ("parameters", "gradients", "saved activations")}
    moment: dict[str, int] = {}
    for kind, size in peak.items():
        if kind not in rest:
            name = TRANSIENTS.get(kind, "norms, attention, activations")
            moment[name] = moment.get(name, 0) + size
    return rest | dict(sorted(moment.items(), key=lambda item: -item[1]))


def worst_of_each(errors: dict[str, float]) -> dict[str, float]:
    """One row for the same parameter of all layers."""
    worst: dict[str, float] = {}
    for name, error in errors.items():
        row = re.sub(r"blocks\.\d+\.", "blocks.*.", name)
        worst[row] = max(error, worst.get(row, 0.0))
    return worst
