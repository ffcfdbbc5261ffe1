"""`cuboid verify`: does a cuboid's step equal that of one device, on this machine?"""

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
from cuboid.cli.option import option
from cuboid.dtypes import VERIFIED, known
from cuboid.mesh.cuboid import AXES, Cuboid, factorisations
from cuboid.model.config import FAMILIES, ModelConfig
from cuboid.run.started import under_torchrun
from cuboid.step.schedule import PIPELINES, Schedule
from cuboid.train.config import CuboidSection, LossSection, MemorySection, OverlapSection, TrainConfig

if TYPE_CHECKING:
    from cuboid.verify import Case, Report


RANKS, MODEL, STEP, CHECK = "Ranks", "Model and batch", "How a step runs", "What is compared"
FAMILY = "the family's"


def verify(
    cuboid: Annotated[
        str, option("x,y,z, such as 2,2,2.", RANKS, otherwise="the most even block of --ranks", metavar="X,Y,Z")
    ] = "",
    replicas: Annotated[int | None, option("Data-parallel replicas of the cuboid.", RANKS, 1, otherwise="1")] = None,
    pipe: Annotated[
        int | None, option("Pipeline stages, each on a cuboid of its own.", RANKS, 1, otherwise="1")
    ] = None,
    ranks: Annotated[
        int | None,
        option("Ranks in all: x·y·z·replicas·pipe.", RANKS, 1, otherwise="8·replicas·pipe, or as --cuboid has"),
    ] = None,
    order: Annotated[str, option("Axes from slowest over ranks to fastest.", RANKS)] = ",".join(AXES),
    family: Annotated[str, option(f"One of {', '.join(FAMILIES)}.", MODEL)] = "gpt2",
    layers: Annotated[int, option("Transformer blocks.", MODEL)] = 2,
    hidden: Annotated[int, option("Width of the residual stream.", MODEL)] = 96,
    heads: Annotated[int, option("Attention heads.", MODEL)] = 24,
    kv_heads: Annotated[int | None, option("Heads of keys and values.", MODEL, otherwise="as many as --heads")] = None,
    ffn: Annotated[int | None, option("Inner size of the MLP.", MODEL, otherwise=FAMILY)] = None,
    vocab: Annotated[int, option("Tokens in the vocabulary.", MODEL)] = 500,
    seq: Annotated[int, option("Tokens per sequence.", MODEL)] = 48,
    batch: Annotated[int, option("Sequences per step, over all ranks.", MODEL)] = 8,
    tied: Annotated[bool | None, option("The head's weight is the embedding's.", MODEL, otherwise=FAMILY)] = None,
    bias: Annotated[bool | None, option("Linears have biases.", MODEL, otherwise=FAMILY)] = None,
    dropout: Annotated[float, option("Share dropped: the same elements on every cuboid.", MODEL)] = 0.1,
    label_smoothing: Annotated[float, option("Share of each target spread over the vocabulary.", MODEL)] = 0.0,
    z_loss: Annotated[float, option("Weight of the squared log of the softmax's denominator.", MODEL)] = 0.0,
    freeze: Annotated[
        str, option("A pattern of the parameters that are not trained.", MODEL, otherwise="all are trained")
    ] = "",
    seed: Annotated[int, option("Seed of weights, batch and dropout.", MODEL)] = 0,
    dtype: Annotated[str, option(f"One of {', '.join(VERIFIED)}.", STEP)] = "fp64",
    activations: Annotated[str, option("regather or retain gathered activations for backward.", STEP)] = "regather",
    weights: Annotated[str, option("regather or retain gathered weights for backward.", STEP)] = "regather",
    recompute: Annotated[str, option("none, selective (attention) or full (each block) in backward.", STEP)] = "none",
    prefetch: Annotated[bool, option("Gather the next layer's weights while this one computes.", STEP)] = True,
    sub_batches: Annotated[int, option("Interleaved sub-batches.", STEP, 1)] = 1,
    chunks: Annotated[int, option("Chunks of a matmul's tokens.", STEP, 1)] = 1,
    micro_batches: Annotated[int, option("Micro-batches that the batch is split into.", STEP, 1)] = 1,
    pipeline: Annotated[
        str, option(f"The schedule of a pipe: {', '.join(PIPELINES)}.", STEP, otherwise=PIPELINES[1])
    ] = "",
    split: Annotated[
        str, option("Blocks of each stage of a pipe, such as 3,1.", STEP, otherwise="evenly", metavar="N,N,…")
    ] = "",
    steps: Annotated[
        int | None,
        option("Instead: train both for this many steps and compare the losses.", CHECK, 1, otherwise="one step"),
    ] = None,
    kills: Annotated[
        int | None,
        option(
            "Instead: train twice, once with this many ranks killed, and compare every bit.",
            CHECK,
            1,
            otherwise="none",
        ),
    ] = None,
    plot: Annotated[Path, option("Where --steps draws the two loss curves.", CHECK)] = Path("verify.png"),
    as_json: Annotated[bool, option("Print the report as JSON.", CHECK, flag="--json")] = False,
) -> None:
    """Compare a model on a cuboid with the same on one device.

    It compares loss, logits, every gradient, bytes, FLOPs and memory. Exits 0 if all agree, 1 if anything does not.
    Rank 0 holds the unsharded model, so keep it small. Ranks are forked here; on a cluster torchrun starts them.

    Examples:
      cuboid verify --cuboid 2,2,2
      cuboid verify --cuboid 1,2,2 --family llama --dtype bf16
      cuboid verify --cuboid 1,2,1 --pipe 2 --pipeline zero-bubble --micro-batches 4
      cuboid verify --cuboid 2,2,2 --steps 50
      torchrun --nproc-per-node 8 -m cuboid verify --cuboid 2,2,2
    """
    if cuboid:
        shape = Cuboid.parse(cuboid, replicas, order, pipe)
    else:
        each = (replicas or 1) * (pipe or 1)
        shape = most_even(ranks or 8 * each, replicas or 1, pipe or 1)
    if ranks and ranks != shape.ranks:
        raise ValueError(
            f"--ranks {ranks} is not x·y·z·replicas·pipe = {shape.ranks} of cuboid {shape}; leave one of them out"
        )
    dtype = known(dtype, VERIFIED)
    config = ModelConfig(
        family, layers, hidden, heads, vocab, seq, kv_heads or 0, ffn=ffn or 0, tied=tied, bias=bias, dropout=dropout
    )
    one_of("--activations", activations, ("regather", "retain"))
    one_of("--weights", weights, ("regather", "retain"))
    one_of("--recompute", recompute, ("none", "selective", "full"))
    config.check(shape, batch, seq)
    if shape.pipe == 1 and (pipeline or split):
        raise ValueError(
            f"--pipeline and --split are of a pipe, and cuboid {shape} has none; add --pipe, or leave them out"
        )
    if pipeline:
        one_of("--pipeline", pipeline, PIPELINES)
    if not re.fullmatch(r"(\d+(,\d+)*)?", split):
        raise ValueError(f"--split {split} is not blocks of each stage; write numbers with commas, such as 3,1")
    from cuboid.layers.loss import Loss
    from cuboid.model.cuboid import Policy
    from cuboid.run.launch import launch
    from cuboid.verify import Case
    from cuboid.verify import verify as verify_on_rank

    policy = Policy(activations, weights)  # type: ignore[arg-type]  # Policy checks them
    loss = Loss(label_smoothing=label_smoothing, z_loss=z_loss)
    schedule = Schedule(
        prefetch,
        sub_batches,
        chunks,
        pipeline=pipeline or PIPELINES[1],
        stages=2 if pipeline == "interleaved" else 1,
        split=tuple(map(int, split.split(","))) if split else (),
    )
    of = config, shape, batch, seq, dtype, policy, loss, recompute, seed, schedule, freeze, micro_batches
    case = Case(*of)  # type: ignore[arg-type]
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
    """Train both on Python's standard library and draw their losses."""
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
        verdict = "[green]allowed[/]" if ok else "[red]MISMATCH[/]: more than"
        console.print(
            f"Largest relative difference of the losses of a step: {found.difference:.1e}; {verdict} {tolerance:g}."
        )
        console.print(f"Both curves: {plot.absolute()}", soft_wrap=True, highlight=False)
    if not ok:
        raise typer.Exit(1)


def kill_ranks(console: Console, case: Case, kills: int, as_json: bool) -> None:
    """Train on Python's standard library while ranks are killed, and compare with a run without kills."""
    from cuboid.train.kills import MOMENTS, survive

    if under_torchrun():
        raise ValueError("--kills starts its own runs on this machine; call it without torchrun")
    with TemporaryDirectory(prefix="cuboid-kills-") as folder:
        found = survive(training(case, 1), kills, case.seed, Path(folder), partial(console.print, highlight=False))
    if as_json:
        print(json.dumps({"ok": found.ok, **asdict(found)}, indent=2))
    else:
        table = Table("killed", "times", "steps repeated")
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
        data=replace(default.data, seq=case.seq, batch=case.batch, micro_batches=case.micro_batches),
        schedule=replace(default.schedule, steps=steps, warmup=min(steps, default.schedule.warmup)),
        precision=replace(default.precision, dtype="bf16" if case.dtype == "bf16" else "fp32"),
        memory=MemorySection(case.policy.activations, case.policy.weights, case.recompute, case.policy.head_elements),
        overlap=OverlapSection(
            s.prefetch,
            s.sub_batches,
            s.chunks,
            pipeline=s.pipeline,  # type: ignore[arg-type]
            stages=s.stages,
            split=s.split,
        ),
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
        f"cuboid {case.cuboid} on {case.cuboid.ranks} ranks against one device: "
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
        title="Sent by rank 0 per step",
        title_justify="left",
    )
    for name, entry in sorted(report.traffic.items()):
        style = "red" if entry["bytes"] != entry["predicted"] else ""
        traffic.add_row(name, str(entry["calls"]), f"{entry['bytes']:,}", f"{entry['predicted']:,}", style=style)
    console.print(traffic)
    verdict = "equal the formula's" if report.traffic_predicted else "[red]differ from the formula's[/]"
    console.print(f"On every rank, calls and bytes {verdict}.", highlight=False)
    balance = Table(
        "per rank",
        "one device / P",
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
    console.print(shared(case))
    peak = Table("alive at the peak, rank 0", "bytes", title="Memory, AdamW's moments aside", title_justify="left")
    for kind, size in described(report.peak).items():
        peak.add_row(kind, f"{size:,}")
    console.print(peak)
    console.print("[bold green]The cuboid is exact.[/]" if report.ok else "[bold red]MISMATCH[/]: see the red rows.")


def shared(case: Case) -> str:
    """What is not 1/P on every rank."""
    some = "Norms and biases are replicated over axes that do not split them"
    if case.cuboid.pipe == 1:
        return f"{some}; everything else is 1/P."
    if case.config.tied:
        some += ", the tied embedding is at both ends of the pipe"
    return f"{some}; everything else is of one place of the pipe, split evenly over its ranks."


#: Transient tensors, by the module that makes them.
TRANSIENTS = {
    "comm.collectives": "gathered operands, buffers in flight",
    "step.weights": "gathered weights, their gradients",
    "layers.product": "partial sums of matmuls",
    "layers.head": "the head's chunk of logits",
    "layers.loss": "the head's chunk of logits",
}


def described(peak: dict[str, int]) -> dict[str, int]:
    """Tensors at rest first, then transient ones, largest first."""
    rest = {kind: peak.get(kind, 0) for kind in ("parameters", "gradients", "saved activations")}
    transient: dict[str, int] = {}
    for kind, size in peak.items():
        if kind not in rest:
            name = TRANSIENTS.get(kind, "norms, attention, activations")
            transient[name] = transient.get(name, 0) + size
    return rest | dict(sorted(transient.items(), key=lambda item: -item[1]))


def worst_of_each(errors: dict[str, float]) -> dict[str, float]:
    """The worst error of each parameter, over all layers."""
    worst: dict[str, float] = {}
    for name, error in errors.items():
        row = re.sub(r"blocks\.\d+\.", "blocks.*.", name)
        worst[row] = max(error, worst.get(row, 0.0))
    return worst
