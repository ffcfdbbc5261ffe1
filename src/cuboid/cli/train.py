"""`cuboid train`: from text to a checkpoint that loads anywhere."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cuboid.cli.option import CUBOID, LAYOUT, PRESET, SET, option
from cuboid.cli.say import warn
from cuboid.mesh.cuboid import Cuboid
from cuboid.run.cluster import can_make_hosts
from cuboid.run.started import is_first, is_first_of_host, local_ranks, under_torchrun
from cuboid.train.config import TrainConfig, load, missing
from cuboid.train.keys import toml
from cuboid.train.progress import duration

if TYPE_CHECKING:
    from cuboid.emulate.slow_motion import SlowMotion
    from cuboid.train.loop import Outcome
    from cuboid.train.rehearse import Rehearsed


RUN = "Run"


def train(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file; `cuboid config` prints every key. Left out: a small GPT.")
    ] = None,
    overrides: SET = None,
    preset: PRESET = "",
    resume: Annotated[
        Path | None,
        option("Resume this run from its newest good checkpoint, or from this checkpoint, on any cuboid.", RUN),
    ] = None,
    cuboid: CUBOID = "",
    replicas: Annotated[
        int | None, option("Data-parallel replicas of the cuboid.", LAYOUT, 1, otherwise="as configured")
    ] = None,
    pipe: Annotated[
        int | None, option("Pipeline stages, each on a cuboid of its own.", LAYOUT, 1, otherwise="as configured")
    ] = None,
    hardware: Annotated[str, option("For --cuboid auto: a preset, or a file of cuboid calibrate.", LAYOUT)] = "",
    trace: Annotated[
        int | None,
        option(
            "Trace this many steps, after two: trace.json for Perfetto, and timeline.png, one layer's forward and "
            "backward with the schedule off and on.",
            RUN,
            1,
            otherwise="none",
        ),
    ] = None,
    force: Annotated[
        bool, option("Train even if the run is predicted not to fit in memory.", RUN, flag="--force")
    ] = False,
    emulate: Annotated[
        str,
        option("Time a few steps on emulated devices and links, such as v100-edr/2000, and save nothing.", RUN),
    ] = "",
) -> None:
    """Train a language model.

    Without a configuration: a small GPT on the running Python's own library, on 8 ranks of this machine. Ranks are
    forked here; on a cluster torchrun starts them.

    Ctrl-C, SIGTERM or SIGUSR1 finishes the step, saves and exits, with code 75 except for Ctrl-C. A second signal ends
    the run at once. When a rank dies, all ranks are restarted from the newest checkpoint. If logging.folder is set, the
    same command resumes an interrupted run.

    Examples:
      cuboid train --cuboid 2,2,2 --set schedule.steps=50
      cuboid train --preset gpt2-124m --set data.paths=tokens --cuboid auto
      cuboid train --resume runs/NAME --cuboid 1,4,2
      torchrun --nproc-per-node 8 -m cuboid train big.toml
    """
    start = run = None
    of_run = resume is not None and config is None
    overrides, trace = overrides or [], trace or 0
    if resume is not None:
        from cuboid.train.listing import candidates

        start = resume.resolve()
        run = candidates(start)[0].parent.parent
        if of_run:  # the run's own, even if its folder was moved
            own = [f"logging.folder={toml(str(run))}", "model.pretrained="]  # the checkpoint has the weights
            config, overrides = run / "config.toml", own + overrides
    if replicas:
        overrides = [*overrides, f"cuboid.replicas={replicas}"]
    if pipe:
        overrides = [*overrides, f"cuboid.pipe={pipe}"]
    chosen = on_cuboid(load(config, overrides, preset), cuboid, hardware, replicas, pipe)
    if of_run and not any(each.startswith("overlap.split") for each in overrides):
        chosen = without_other_split(chosen)
    if not cuboid and is_first() and (note := note_on_axes(chosen, config, overrides)):
        Console(highlight=False, soft_wrap=True).print(note, markup=False)
    chosen.check()
    if unused := chosen.without_pipe():
        warn(f"not used without a pipe: {', '.join(unused)}; set cuboid.pipe, or leave them out")
    chosen = split_by_time(chosen, hardware)
    if emulate:
        if resume is not None or trace or under_torchrun():
            raise ValueError(
                "--emulate times a few steps and computes no values; leave out --resume, --trace, torchrun"
            )
        from cuboid.emulate.slow_motion import parse

        show_rehearsal(chosen, parse(emulate))
        return
    from cuboid.run.launch import TIMEOUT, launch
    from cuboid.run.restart import keep_running
    from cuboid.run.stop import Stop
    from cuboid.train.begin import check_folder
    from cuboid.train.listing import last_step
    from cuboid.train.loop import train as train_on_rank
    from cuboid.train.tracing import check_steps

    check_steps(trace, 0, chosen.schedule.steps)
    folder = Path(chosen.logging.folder) if chosen.logging.folder else run or default_folder()
    if folder is not None and not under_torchrun():  # there rank 0 checks it, and makes it
        check_folder(chosen, folder, start)
    stop, ranks = Stop(), chosen.cuboid_shape().ranks
    timeout = 2 * chosen.watch.timeout or TIMEOUT  # the watchdog acts first, and reports more
    check_before_start(chosen, ranks, force)
    if chosen.precision.deterministic:
        from cuboid.device import prepare_deterministic

        prepare_deterministic()
    args = [chosen, folder, start, trace, force]
    with stop.listening():
        if under_torchrun():  # its agent restarts ranks
            outcome = launch(train_on_rank, ranks, args, stop, timeout)[0]
        else:
            assert folder is not None
            saved, most = partial(last_step, folder / "checkpoints"), chosen.restart.max_restarts
            names = chosen.rank_names()
            outcome = keep_running(train_on_rank, ranks, args, stop, timeout, most, saved, warn, names)[0]
    if outcome is not None:
        show(outcome)
    if stop.obeyed:
        raise typer.Exit(stop.code)


def on_cuboid(
    config: TrainConfig, cuboid: str, hardware: str, replicas: int | None = None, pipe: int | None = None
) -> TrainConfig:
    """The configuration with the requested cuboid, or one for the number of ranks that torchrun has started. `replicas`
    and `pipe` are what options say: the cuboid's text overrides the configuration, but must agree with options."""
    ranks, why = int(os.environ["WORLD_SIZE"]) if under_torchrun() else config.cuboid_shape().ranks, ""
    if cuboid == "auto":
        from cuboid.train.auto import planned

        config, why = planned(config, ranks, hardware, pipe)
    elif cuboid:
        c = config.cuboid
        replicas = replicas or (None if "replicas" in cuboid else c.replicas)
        k = Cuboid.parse(cuboid, replicas, pipe=pipe or (None if "pipe" in cuboid else c.pipe))
        config = replace(config, cuboid=replace(c, x=k.x, y=k.y, z=k.z, replicas=k.replicas, pipe=k.pipe))
    if hardware and cuboid != "auto":
        raise ValueError(f"--hardware {hardware} is for --cuboid auto; leave it out or give both")
    if under_torchrun() and cuboid != "auto":
        from cuboid.train.auto import for_ranks

        config, why = for_ranks(config, ranks, hardware)
    if why and is_first():
        Console(highlight=False, soft_wrap=True).print(f"plan    {why}", markup=False)
    return config


def without_other_split(config: TrainConfig) -> TrainConfig:
    """A resumed run's configuration without the split of its earlier pipe, if that had another number of stages."""
    stages = config.cuboid.pipe * config.schedule_on(config.cuboid_shape()).stages
    split = config.overlap.split if len(config.overlap.split) == stages else ()
    return replace(config, overlap=replace(config.overlap, split=split))


def split_by_time(config: TrainConfig, hardware: str) -> TrainConfig:
    """The configuration with the blocks of a pipe split by planned time, unless it says how."""
    if config.cuboid.pipe == 1 or config.overlap.split:
        return config
    from cuboid.train.auto import planned_split

    split = planned_split(config, hardware)
    if split and is_first():
        blocks = " + ".join(map(str, split))
        said = f"split   {blocks} blocks, by planned time; overlap.split = {list(split)} keeps them"
        Console(highlight=False, soft_wrap=True).print(said, markup=False)
    return replace(config, overlap=replace(config.overlap, split=split))


def note_on_axes(config: TrainConfig, file: Path | None, overrides: list[str]) -> str:
    """A note if the command line sets some axes of the cuboid and the others have defaults; else empty."""
    axes, names = ("x", "y", "z"), [change.partition("=")[0].strip() for change in overrides]
    given = [axis for axis in axes if f"cuboid.{axis}" in names]
    left = [name for name in missing(file, [f"cuboid.{axis}" for axis in axes]) if name not in names]
    if not given or not left:
        return ""
    k = config.cuboid_shape()
    sizes = {axis: getattr(k, axis) for axis in axes}
    alone = ",".join(str(sizes[axis] if axis in given else 1) for axis in axes)
    defaults = " and ".join(f"{name[-1]}={sizes[name[-1]]}" for name in left)
    typed = ", ".join(f"{axis}={sizes[axis]}" for axis in given)
    return f"cuboid  {typed} as given, {defaults} by default: {k}, {k.ranks} ranks; --cuboid {alone} gives all three"


def check_before_start(config: TrainConfig, ranks: int, force: bool) -> None:
    """Check this host's memory and cores before ranks start. Ranks check GPUs themselves, because a process that has
    used one cannot fork."""
    from cuboid.device import gpus_for
    from cuboid.train.preflight import check as check_host
    from cuboid.train.preflight import crowd, idle_places

    if idle := idle_places(config):
        warn(idle)
    local = local_ranks(ranks)
    if gpus_for(local) or not is_first_of_host():
        return
    if crowded := crowd(local):
        warn(crowded)
    try:
        check_host(config, local)
    except ValueError as error:
        if not force:
            raise
        warn(str(error))


def show_rehearsal(config: TrainConfig, slow: SlowMotion) -> None:
    from cuboid.train.rehearse import rehearse

    config = config.computed_in(slow.hardware.usual)
    console, hosts = Console(highlight=False, markup=False, soft_wrap=True), can_make_hosts()
    where = "" if hosts else "; no hosts can be made here, so links are this machine's loopback"
    how = f"Local work, in {config.precision.dtype}, is timed, not done: there is no loss, and nothing is saved."
    console.print(f"{slow}{where}\n{how}")

    def tell(step: Rehearsed) -> None:
        shares = f"busy {step.busy / step.seconds:.0%}  exposed {step.exposed / step.seconds:.0%}"
        console.print(f"step {step.seconds:.3g} s  {shares}  CPU {step.cpu_share:.0%} of the cores")

    rehearse(config, slow, hosts, tell)


def default_folder() -> Path | None:
    """The folder of a run that sets none. Ranks that torchrun restarts must find it, so it is named by torchrun's run
    id; without an id, rank 0 names it by the time."""
    from cuboid.train.run import fresh_path

    if not under_torchrun():
        return fresh_path()
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if name != "none":
        return Path("runs", "torchrun-" + re.sub(r"[^\w.-]", "-", name)).absolute()
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        raise ValueError(
            "ranks that torchrun restarts would not find their run; set logging.folder, or torchrun's --rdzv-id"
        )
    return None


def started_as(*words: str) -> str:
    """A cuboid command line that starts ranks as this command was started."""
    if not under_torchrun():
        return shlex.join(["cuboid", *words])
    hosts, ranks = os.environ.get("GROUP_WORLD_SIZE", "1"), os.environ.get("LOCAL_WORLD_SIZE", "1")
    where = f"--standalone --nproc-per-node {ranks}" if hosts == "1" else f"--nnodes {hosts} --nproc-per-node {ranks} …"
    return f"torchrun {where} -m {shlex.join(['cuboid', *words])}"


def listed(files: list[tuple[str, Path]]) -> str:
    return "".join(f"  {what:<11}{path}\n" for what, path in files)


def show(outcome: Outcome) -> None:
    from cuboid.train.listing import complete

    console, folder = Console(highlight=False, markup=False, soft_wrap=True), Path(outcome.folder)
    traces = [("trace", folder / "trace.json"), ("timeline", folder / "timeline.png")]
    traces = [(what, path) for what, path in traces if path.exists()]
    if not outcome.finished:
        console.print(
            f"\nStopped after step {outcome.steps} of {outcome.of}; all is saved. Resume with:\n"
            f"  {started_as('train', '--resume', outcome.folder)}"
        )
        console.print(listed(traces), end="")
        return
    if outcome.sample:
        console.rule("a sample", align="left")
        console.print(outcome.sample)
        console.rule()
    console.print(
        f"{outcome.steps} steps in {duration(outcome.seconds)}. Validation loss {outcome.val_loss:.4f} nats per token "
        f"(token frequencies alone: {outcome.unigram:.4f})"
    )
    files = [
        ("plot", folder / "plot.png"),
        *traces,
        ("metrics", folder / "metrics.jsonl"),
        *(("checkpoint", newest) for newest in complete(folder / "checkpoints")[-1:]),
        ("config", folder / "config.toml"),
    ]
    console.print(listed(files), end="")
    prompt = ["--prompt", outcome.prompt] if outcome.prompt else []
    console.print(f"More text: {shlex.join(['cuboid', 'sample', outcome.folder, *prompt])}")
