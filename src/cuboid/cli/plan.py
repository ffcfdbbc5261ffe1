"""`cuboid plan`: the fastest cuboid, its step time and its memory, predicted without a GPU."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cuboid.cli.option import option
from cuboid.dtypes import COMPUTED, known
from cuboid.mesh.cuboid import Cuboid
from cuboid.model.config import FAMILIES, ModelConfig
from cuboid.model.presets import PRESETS
from cuboid.plan import hardware as machines
from cuboid.plan.source import model as load_model
from cuboid.step.schedule import PIPELINES
from cuboid.train.config import TrainConfig, missing
from cuboid.train.config import load as load_run
from cuboid.train.progress import quantity

if TYPE_CHECKING:
    from cuboid.plan.dry import Comparison
    from cuboid.plan.layer import Choice, Work
    from cuboid.plan.published import Line
    from cuboid.plan.search import Plan, Ranking


CLUSTER, WORK, SIZES, OUTPUT = "Cluster", "Work of a step", "Model sizes", "Output"
OURS = "the configuration's"  # default of an option if the model is a configuration or a run
MODEL = "the model's"


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A preset (cuboid config --presets), a config.json of Hugging Face, or a TOML file or run folder of "
            "cuboid train, with its batch, sequence and precision. Left out: give --layers, --hidden, --heads, …"
        ),
    ] = "",
    ranks: Annotated[int | None, option("Number of devices.", CLUSTER, 1, 1 << 20, otherwise=f"{OURS}, else 8")] = None,
    hardware: Annotated[
        str, option(f"One of {', '.join(machines.PRESETS)}, or a file of cuboid calibrate.", CLUSTER)
    ] = "h100-ndr",
    batch: Annotated[
        int | None, option("Sequences per step, over all devices.", WORK, 1, otherwise=f"{OURS}, else 64")
    ] = None,
    seq: Annotated[
        int | None,
        option("Tokens per sequence.", WORK, 1, otherwise=f"{OURS}, else the model's context, at most 4096"),
    ] = None,
    micro_batches: Annotated[
        int | None, option("Micro-batches per step.", WORK, 1, otherwise=f"{OURS}, else the fastest number")
    ] = None,
    dtype: Annotated[
        str,
        option(
            f"Number format of matmuls and activations: {', '.join(COMPUTED)}.",
            WORK,
            otherwise=f"{OURS}, else what suits the hardware: bf16 on GPUs since Ampere, fp32 on others",
        ),
    ] = "",
    freeze: Annotated[
        str,
        option("A pattern of the parameters that are not trained.", WORK, otherwise=f"{OURS}, else all are trained"),
    ] = "",
    family: Annotated[str, option(f"Without a model: one of {', '.join(FAMILIES)}.", SIZES)] = "gpt2",
    layers: Annotated[int | None, option("Transformer blocks.", SIZES, 1, otherwise=MODEL)] = None,
    hidden: Annotated[int | None, option("Width of the residual stream.", SIZES, 1, otherwise=MODEL)] = None,
    heads: Annotated[int | None, option("Attention heads.", SIZES, 1, otherwise=MODEL)] = None,
    kv_heads: Annotated[
        int | None,
        option("Heads of keys and values.", SIZES, 1, otherwise=f"{MODEL}, else --heads"),
    ] = None,
    ffn: Annotated[
        int | None,
        option("Inner size of the MLP.", SIZES, 1, otherwise=f"{MODEL}, else the family's"),
    ] = None,
    vocab: Annotated[int | None, option("Tokens in the vocabulary.", SIZES, 1, otherwise=MODEL)] = None,
    pipeline: Annotated[
        str,
        option(
            f"The only schedule of pipes to rank: {', '.join(PIPELINES)}.",
            WORK,
            otherwise=f"{OURS}, else 1f1b, interleaved and zero-bubble, whichever is fastest",
        ),
    ] = "",
    explain: Annotated[
        str, option("Explain one cuboid, such as 2,2,2 or '2,2,2 pipe=2'.", OUTPUT, metavar="X,Y,Z")
    ] = "",
    top: Annotated[int, option("Rows of the table.", OUTPUT, 1)] = 10,
    dry: Annotated[
        bool, option("Also run the code of one rank without data, and count.", OUTPUT, flag="--dry-run")
    ] = False,
    plot: Annotated[
        Path | None, option("Also draw the ranking, and a map of devices × batch, into this folder.", OUTPUT)
    ] = None,
    as_json: Annotated[bool, option("Print JSON.", OUTPUT, flag="--json")] = False,
    literature: Annotated[bool, option("Instead: predict published measurements.", OUTPUT, flag="--published")] = False,
    check: Annotated[
        list[Path] | None,
        option(
            "Instead: predict a result of cuboid bench layouts, with --hardware; may be repeated. Exits 1 where a "
            "table misses.",
            OUTPUT,
        ),
    ] = None,
) -> None:
    """Rank every cuboid of a cluster for a model by its predicted step time.

    It tries all x·y·z·replicas·pipe, every order of the axes over nodes, with and without recomputation, gathered
    operands retained or regathered, one or several interleaved sub-batches. The last line is a cuboid train command
    that runs the winner. Predictions come from the equations in docs/planner.md and the hardware's figures; cuboid
    calibrate measures a machine.

    Examples:
      cuboid plan llama-3-8b --ranks 64 --batch 128 --seq 8192
      cuboid plan llama-3-8b --ranks 64 --explain 4,2,2
      cuboid plan big.toml --hardware hardware.json --plot pictures/
    """
    console = Console() if sys.stdout.isatty() else Console(width=220)
    if literature:
        from cuboid.plan.published import published

        show_published(published(), console, as_json)
        return
    hw = machines.load(hardware)
    if check:
        from cuboid.plan import check as checking

        checks = [checking.check(path, hw) for path in check]
        checking.show(checks, console, as_json)
        if not all(each.ok for of_file in checks for each in of_file):
            raise typer.Exit(1)
        return
    seq = seq or 0
    run = configured(model, seq)
    if run is not None:
        ranks, batch = ranks or run.cuboid_shape().ranks, batch or run.data.batch
        seq, micro_batches = run.data.seq, micro_batches or run.data.micro_batches
        dtype, freeze = dtype or run.computed_in("").precision.dtype, freeze or run.model.freeze
        pipeline = pipeline or own_pipeline(run, model)
    search_batches = micro_batches is None
    ranks, batch, micro_batches = ranks or 8, batch or 64, micro_batches or 1
    dtype = known(dtype or hw.usual, COMPUTED)
    base = planned_model(run) if run is not None else load_model(model) if model else None
    config = chosen_model(base, family, layers, hidden, heads, kv_heads, ffn, vocab, seq)
    if batch % micro_batches:
        raise ValueError(f"--batch {batch} cannot be split into --micro-batches {micro_batches}; use a divisor of it")
    length, only = seq or min(config.context, 4096), parse(explain, ranks) if explain else None
    check_pipeline(pipeline, only)
    from cuboid.plan.batches import rank_batches
    from cuboid.plan.explain import nothing_fits
    from cuboid.plan.layer import Work
    from cuboid.plan.plot import draw
    from cuboid.plan.search import rank, timeline

    work = Work(config, batch // micro_batches, length, dtype, micro_batches, freeze)
    if plot is not None:
        make_folder(plot)
    ranking = (rank_batches if search_batches else rank)(hw, work, ranks, only, pipeline)
    work = ranking.work
    if not ranking.plans:
        raise ValueError(nothing_fits(ranking, only))
    counted = None
    first = ranking.plans[0]
    if dry:
        counted = dry_runs(work, first, "gloo" if hw.direct else "nccl")
    if as_json:
        steps = timeline(work, first) if only and first.places else []
        print(json.dumps(export(ranking, counted, steps) | {"train": train_command(ranking, model)}, indent=1))
    else:
        show(ranking, console, top, only)
        console.print("Run it with:", highlight=False)
        console.print(f"  {train_command(ranking, model)}", highlight=False, markup=False, soft_wrap=True)
        if counted is not None:
            show_dry(counted, first, console)
    if plot is not None:
        for path in draw(ranking, plot):
            Console(stderr=as_json).print(str(path.absolute()), soft_wrap=True, highlight=False)
    if counted is not None and not all(each.ok for each in counted):
        raise typer.Exit(1)


def dry_runs(work: Work, plan: Plan, backend: str) -> list[Comparison]:
    """Dry runs of the first rank, or of the first rank of every place of a pipeline."""
    from cuboid.plan.dry import compare, dry_run

    found, cuboid = [], plan.cuboid
    for place in range(cuboid.pipe):
        rank = cuboid.rank(cuboid.coordinates(0) | {"pipe": place})
        lines = compare(dry_run(work, cuboid, plan.choice, rank, backend), plan, work, rank)
        found += [replace(each, what=f"place {place}: {each.what}") for each in lines] if plan.places else lines
    return found


def configured(name: str, seq: int) -> TrainConfig | None:
    """The run that a TOML file or a run folder describes, with sequences of `seq` tokens if that is given."""
    path = Path(name)
    if (path / "config.toml").is_file():
        run = load_run(path / "config.toml", ["model.pretrained="])  # the file has its sizes
    elif path.suffix == ".toml":
        run = load_run(path)
    else:
        return None
    return replace(run, data=replace(run.data, seq=seq or run.data.seq))


def own_pipeline(run: TrainConfig, name: str) -> str:
    """The schedule that the file of a run on a pipe names; empty if it names none."""
    file = Path(name) if Path(name).suffix == ".toml" else Path(name) / "config.toml"
    names = ["overlap.pipeline", "overlap.beside"]
    return run.schedule_on(run.cuboid_shape()).pipeline if run.cuboid.pipe > 1 and missing(file, names) != names else ""


def check_pipeline(pipeline: str, only: Cuboid | None) -> None:
    if pipeline and pipeline not in PIPELINES:
        raise ValueError(f"--pipeline {pipeline} is not one of {', '.join(PIPELINES)}")
    if pipeline and only is not None and only.pipe == 1:
        raise ValueError(
            f"--pipeline {pipeline} is a schedule of pipes, and {only} is none; explain '{only} pipe=2' or so"
        )


def planned_model(run: TrainConfig) -> ModelConfig:
    from cuboid.train.auto import vocab_of

    return run.model_config(vocab_of(run.data))


def chosen_model(
    base: ModelConfig | None,
    family: str,
    layers: int | None,
    hidden: int | None,
    heads: int | None,
    kv_heads: int | None,
    ffn: int | None,
    vocab: int | None,
    seq: int,
) -> ModelConfig:
    given = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, "vocab": vocab}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value}
    if base is not None:
        if {"hidden", "heads"} & changes.keys():  # derive these from the new sizes
            changes = {"head_dim": 0, "ffn": 0, "kv_heads": 0} | changes
        if base.rotary:  # no weight depends on it
            changes["context"] = max(base.context, seq)
        return base.replace(**changes)
    missing = [key for key in ("layers", "hidden", "heads") if key not in changes]
    if missing:
        raise ValueError(f"give a model, or its --{', --'.join(missing)}; cuboid config --presets lists known models")
    return ModelConfig(family, **({"vocab": 50257, "context": seq or 2048} | changes))


def make_folder(path: Path) -> None:
    """Make the folder of --plot, or raise, before planning."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--plot {path} cannot be a folder: {error.strerror}; give another") from None


def parse(text: str, ranks: int) -> Cuboid:
    cuboid = Cuboid.parse(text)
    if cuboid.ranks != ranks:
        raise ValueError(f"--explain {text} has x·y·z·replicas·pipe = {cuboid.ranks} ranks, not --ranks {ranks}")
    return cuboid


def train_command(ranking: Ranking, source: str) -> str:
    """A command line that trains the model on the fastest plan. `source` is what the model was read from."""
    w, c, best = ranking.work, ranking.work.config, ranking.plans[0]
    k, choice, words = best.cuboid, best.choice, ["cuboid", "train"]
    if ranking.hardware.name in machines.PRESETS and ranking.hardware.name != "cpu":
        hosts = -(-ranking.devices // ranking.hardware.node)
        words = ["torchrun", "--nproc-per-node", str(min(ranking.devices, ranking.hardware.node))]
        words += ["--nnodes", str(hosts), "-m", "cuboid", "train"]
    path = Path(source)
    if path.suffix == ".toml" or (path / "config.toml").is_file():
        words.append(source if path.suffix == ".toml" else str(path / "config.toml"))
    elif source in PRESETS:
        words += ["--preset", source]
    words += ["--cuboid", f"{k.x},{k.y},{k.z}", "--replicas", str(k.replicas), "--pipe", str(k.pipe)]
    values: dict[str, Any] = {"cuboid.order": ",".join(k.order)}
    if "--preset" not in words or PRESETS[source] != c:
        sizes = ("family", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
        values |= {f"model.{name}": getattr(c, name) for name in sizes}
    values |= {"data.batch": w.batch * w.micro_batches, "data.micro_batches": w.micro_batches, "data.seq": w.seq}
    values |= {"precision.dtype": w.precision, "memory.recompute": choice.recompute}
    values |= {"memory.activations": choice.policy.activations, "memory.weights": choice.policy.weights}
    values |= {"overlap.sub_batches": 0 if choice.schedule.sub_batches > 1 else 1, "overlap.chunks": 1}
    if k.pipe > 1:
        s = choice.schedule
        values |= {"overlap.pipeline": s.pipeline, "overlap.stages": s.stages, "overlap.split": list(s.split)}
        values["overlap.beside"] = False
    values |= {"model.freeze": w.freeze} if w.freeze else {}
    return shlex.join([*words, *(word for name, value in values.items() for word in ("--set", f"{name}={value}"))])


def described(choice: Choice) -> str:
    kept = {("regather", "regather"): "–", ("retain", "regather"): "X", ("regather", "retain"): "W"}
    policy = kept.get((choice.policy.activations, choice.policy.weights), "X W")
    count = choice.schedule.sub_batches
    return f"{choice.recompute}, {policy}{f', {count} sub-batches' if count > 1 else ''}"


def inner(cuboid: Cuboid) -> str:
    """The axes from the slowest over ranks to the fastest."""
    return " ".join(axis for axis in cuboid.order if cuboid.sizes[axis] > 1) or "–"


def show(ranking: Ranking, console: Console, top: int, only: Cuboid | None) -> None:
    from cuboid.plan.explain import corner, why

    w, hw, c = ranking.work, ranking.hardware, ranking.work.config
    devices = f"{ranking.devices} device{'s' * (ranking.devices > 1)}"
    console.print(
        f"{c.family}, {c.layers} layers, hidden {c.hidden}, {c.heads} heads: {quantity(c.parameters)} parameters; "
        f"{devices} of {escape(hw.name)}, {hw.node} per node; {w.micro_batches} × {w.batch} × {w.seq} tokens, "
        f"{w.precision}; {ranking.considered} candidates ranked in {ranking.seconds:.2g} s",
        highlight=False,
        soft_wrap=True,
    )
    first = [("", plan) for plan in ranking.plans[:top]]
    console.print(_table(ranking, first, "Fastest first" if only is None else "Its fastest order and choice"))
    if only is None and ranking.devices > 1:
        console.print(
            _table(ranking, [(name, plan) for name, plan in ranking.corners.items() if plan], "Well-known layouts")
        )
        for name, plan in ranking.corners.items():
            if plan is None:
                console.print(corner(ranking, name), highlight=False)
        console.print(why(ranking), highlight=False, soft_wrap=True)
    else:
        _explain(ranking, console)


def _table(ranking: Ranking, plans: Sequence[tuple[str, Plan]], title: str) -> Table:
    """A table of plans; it has a column for names if there are any."""
    from cuboid.plan.explain import gigabytes

    named = any(name for name, _ in plans)
    columns = ["layout"] if named else []
    columns += ["cuboid x,y,z", "axes, slow → fast", "recompute, kept", "step", "tokens/s", "MFU"]
    columns += ["exposed", "memory", "of which, GB"]
    table = Table(*columns, title=title, title_justify="left")
    for column in table.columns[-6:]:
        column.justify = "right"
    for name, plan in plans:
        held = "+".join(f"{size / 1e9:.3g}" for size in plan.memory.values())
        waits = " ".join(
            f"{axis} {s / plan.seconds:.0%}" for axis, s in plan.exposed.items() if s > 0.005 * plan.seconds
        )
        cells = [name] if named else []
        choice = described(plan.choice) + (f", {plan.choice.schedule.pipeline}" if plan.places else "")
        choice += f", {plan.micro_batches} micro-batches" * (plan.micro_batches > 1)
        cells += [str(plan.cuboid), inner(plan.cuboid), choice, f"{plan.seconds:.4g} s"]
        cells += [quantity(ranking.tokens_per_second(plan)), f"{ranking.mfu(plan):.1%}", waits or "–"]
        table.add_row(*cells, gigabytes(plan.peak), held)
    table.caption = (
        "kept: activations X, weights W that stay gathered for backward; exposed: share of the step that waits for "
        "communication, by axis;\nmemory: peak per rank; of which: parameters + gradients + optimizer + activations + "
        "buffers"
    )
    table.caption_justify = "left"
    return table


def _explain(ranking: Ranking, console: Console) -> None:
    from cuboid.plan.explain import limit

    plan = ranking.plans[0]
    table = Table("part", "seconds", "of the step", title=f"{plan.cuboid}", title_justify="left")
    for name, seconds in sorted(plan.compute.items(), key=lambda part: -part[1]):
        table.add_row(name, f"{seconds:.4g}", f"{seconds / plan.seconds:.1%}")
    traffic = Table("axis", "calls", "sent", "in flight", "waited", title="Communication", title_justify="left")
    for axis, seconds in plan.in_flight.items():
        if plan.calls[axis]:
            cells = str(plan.calls[axis]), f"{quantity(plan.sent[axis])}B", f"{seconds:.4g} s"
            traffic.add_row(axis, *cells, f"{plan.exposed[axis]:.4g} s")
    console.print(table)
    console.print(traffic)
    if plan.places:
        console.print(_places(plan))
    console.print(f"Its limit is {limit(plan)}.", highlight=False)
    figures = Table("figures", "from", title=f"Hardware {escape(ranking.hardware.name)}", title_justify="left")
    for names, source in ranking.hardware.source.items():
        figures.add_row(escape(names), escape(source))
    console.print(figures)


def _places(plan: Plan) -> Table:
    from cuboid.plan.explain import gigabytes

    title = f"Places of the pipe: {plan.choice.schedule.pipeline}, {plan.bubble:.1%} of the step idle"
    columns = ["place", "blocks", "forward", "backward", "idle per step", "memory", "of which"]
    table = Table(*columns, title=title, title_justify="left")
    for i, each in enumerate(plan.places):
        cells = " + ".join(map(str, each.blocks)), f"{each.forward:.4g} s", f"{each.backward:.4g} s"
        held = "+".join(f"{size / 1e9:.3g}" for size in each.memory.values())
        table.add_row(str(i), *cells, f"{each.idle:.4g} s", gigabytes(each.peak), held)
    return table


def show_dry(counted: Sequence[Comparison], plan: Plan, console: Console) -> None:
    table = Table("rank 0", "counted", "planned", "", title=f"Dry run of {plan.cuboid}", title_justify="left")
    for each in counted:
        verdict = ("equal" if each.exact else f"{each.planned / each.counted - 1:+.1%}") if each.ok else "DIFFERS"
        table.add_row(each.what, f"{each.counted:,}", f"{each.planned:,}", verdict)
    console.print(table)


def show_published(lines: Sequence[Line], console: Console, as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(line) | {"error": line.error, "ok": bool(line.ok)} for line in lines], indent=1))
        return
    table = Table("what", "published", "predicted", "error", "allowed", "assumptions", title_justify="left")
    for line in lines:
        error = f"{line.error:+.0%}" + ("" if line.ok else " MISSES")
        cells = f"{line.published:g} {line.unit}", f"{line.predicted:.3g} {line.unit}", error, f"±{line.allowed:.0%}"
        table.add_row(line.what, *cells, line.assumptions)
    console.print(table)


def export(
    ranking: Ranking, counted: Sequence[Comparison] | None, timeline: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    from cuboid.plan.explain import why

    def row(plan: Plan) -> dict[str, Any]:
        return {
            "cuboid": plan.cuboid.sizes,
            "order": plan.cuboid.order,
            "recompute": plan.choice.recompute,
            "activations": plan.choice.policy.activations,
            "weights": plan.choice.policy.weights,
            "micro_batches": plan.micro_batches,
            "sub_batches": plan.choice.schedule.sub_batches,
            "pipeline": plan.choice.schedule.pipeline if plan.places else None,
            "stages": plan.choice.schedule.stages,
            "split": plan.choice.schedule.split,
            "bubble": plan.bubble,
            "places": [asdict(place) | {"peak": place.peak} for place in plan.places],
            "seconds": plan.seconds,
            "tokens_per_second": ranking.tokens_per_second(plan),
            "mfu": ranking.mfu(plan),
            "memory": plan.memory,
            "peak": plan.peak,
            "calls": plan.calls,
            "bytes": plan.sent,
            "exposed": plan.exposed,
            "compute": plan.compute,
        }

    found: dict[str, Any] = {
        "model": asdict(ranking.work.config),
        "hardware": ranking.hardware.name,
        "sources": ranking.hardware.source,
        "ranks": ranking.devices,
        "batch": ranking.work.batch * ranking.work.micro_batches,
        "seq": ranking.work.seq,
        "dtype": ranking.work.precision,
        "candidates": ranking.considered,
        "ranking_seconds": ranking.seconds,
        "why": why(ranking),
        "plans": [row(plan) for plan in ranking.plans],
        "corners": {name: row(plan) if plan else None for name, plan in ranking.corners.items()},
    }
    if timeline:
        found["timeline"] = timeline
    if counted is not None:
        found["dry_run"] = [asdict(each) | {"ok": each.ok} for each in counted]
    return found
