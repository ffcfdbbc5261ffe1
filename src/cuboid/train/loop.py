"""The training loop of one rank."""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from cuboid import data
from cuboid.comm.collectives import from_all, from_first
from cuboid.device import be_deterministic, is_gpu, peak_memory
from cuboid.layers.loss import Loss
from cuboid.layers.randomness import Keys, key_of
from cuboid.mesh.layout import shard_of
from cuboid.mesh.place import Index
from cuboid.model.config import ModelConfig
from cuboid.model.freeze import matching, parameter_names
from cuboid.model.generate import Sampling, generate
from cuboid.model.module import declared
from cuboid.model.nn import evaluating
from cuboid.model.parallel import Parallel
from cuboid.model.transformer import Transformer
from cuboid.run.launch import World
from cuboid.run.watch import watched
from cuboid.step.runner import At
from cuboid.train import checkpoint
from cuboid.train.agree import check
from cuboid.train.begin import beginning, check_folder, is_begun
from cuboid.train.config import TrainConfig, resolved_toml
from cuboid.train.garbage import collected_by_hand
from cuboid.train.guard import Guard
from cuboid.train.keys import toml
from cuboid.train.layout import on_cuboid
from cuboid.train.optimizer import LossScale, adamw, apply, learning_rate
from cuboid.train.origin import Origin
from cuboid.train.plot import plot_run
from cuboid.train.precision import settled
from cuboid.train.preflight import check_device
from cuboid.train.progress import Progress, StepReport, quantity
from cuboid.train.run import RunFolder
from cuboid.train.trace import Trace, draw_layer
from cuboid.train.trace import save as save_trace
from cuboid.train.tracing import WARM, Recorder, check_steps, unscheduled
from cuboid.train.use import Use
from cuboid.train.writer import Writer, forget


@dataclass
class Outcome:
    """The result of a run."""

    folder: str
    steps: int  # done
    of: int  # planned
    loss: float
    val_loss: float
    unigram: float
    sample: str
    prompt: str  # of the sample
    seconds: float

    @property
    def finished(self) -> bool:
        return self.steps >= self.of


def corpus_of(config: TrainConfig, tell: Callable[[str], object] = lambda _: None) -> data.Corpus:
    """Loads or tokenises the run's text, and reports faults in its files to `tell`."""
    d = config.data
    tokenizer = Path(d.tokenizer) if d.tokenizer else None
    if not d.paths:
        files = data.python_stdlib(d.max_bytes)
        return data.tokenise(files, data.load_tokenizer(tokenizer), d.val_fraction, data.code)
    return data.load([Path(path) for path in d.paths], tokenizer, d.val_fraction, d.max_bad, tell)


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


class Trainer:
    """Model, optimizer and position in the data of one rank; `step` takes one step. `dtype`: of the weights at rest."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        layout: Callable[[TrainConfig, ModelConfig, World], Parallel] = on_cuboid,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config = config = settled(config, world)[0]
        if config.precision.deterministic:
            be_deterministic(world.device)
        self.corpus = corpus_of(config, warn if world.rank == 0 else lambda _: None)
        parallel, d = layout(config, config.model_config(self.corpus.vocab), world), config.data
        self.place = parallel.place(d.batch // d.micro_batches, d.seq)
        s, b, features = self.place.residual
        # Of each micro-batch in the step's batch: by it, micro-batches drop out what the unsplit batch would.
        inside = [Index(s, i * self.place.batch + b, features) for i in range(d.micro_batches)]
        self.places = [replace(self.place, residual=each) for each in inside]
        self.origin = Origin.find(Path(config.model.pretrained)) if config.model.pretrained else None
        seed = config.seed if self.origin is None else None
        self.model = Transformer(parallel, seed, dtype, config.memory.recompute)
        self.corpus.check(self.model.config.vocab)
        if self.origin is not None:
            self.origin.load(self.model)
        self.model.freeze(config.model.freeze)
        self.optimizer = adamw(self.model, config.optimizer)
        self.fresh: dict[str, int] = {}  # of parameters unfrozen since: the updates before their moments began
        self.loss = Loss(label_smoothing=config.loss.label_smoothing, z_loss=config.loss.z_loss)
        fp16 = config.precision.dtype == "fp16"
        self.scale = LossScale(config.precision.loss_scale, config.precision.growth_interval) if fp16 else LossScale()
        # What changes from step to step, besides the batches: written before a step, which reads it on the device.
        self.factor = torch.ones((), dtype=torch.float64, device=world.device)  # of the loss
        self.keys = Keys(0, world.device) if self.model.config.dropout else None
        self.guard, self.watch = Guard(config.guard), world.watch
        self.done = self.updates = 0
        self.use = Use.of(config, self.model, self.optimizer)
        self.recorder: Recorder | None = None  # of the steps that are traced
        self.batches = data.Loader(data.Samples(self.corpus.train, d.seq, d.seed), self.place)
        most = config.logging.eval_batches * self.place.batch
        self.held_out = data.Samples(self.corpus.val, d.seq, most=most) if len(self.corpus.val) > d.seq else None

    def step(self, stop: bool = False) -> tuple[StepReport, bool]:
        """Takes one optimizer step. Returns its report, and whether any rank was asked to stop."""
        config, ledger = self.config, self.model.parallel.mesh.ledger
        ledger.reset()
        if self.watch is not None:
            self.watch.step = self.done + 1
        start, count = time.perf_counter(), config.data.micro_batches
        losses = self.model.play(self.micro_batches(self.done, range(count)), scale=self.factor.fill_(self.scale.scale))
        total = torch.stack(losses).mean()
        if self.done + 1 < config.schedule.steps:  # while the device is at work, and before the host waits for it
            self.batches.prefetch(range((self.done + 1) * count, (self.done + 2) * count))
        self._begin("optimizer")
        lr = learning_rate(self.done, config.schedule, config.optimizer.lr)
        clip, optimizer = config.optimizer.clip, self.optimizer
        applied = apply(self.model, optimizer, self.scale, self.guard, total, clip, lr, self.done + 1, stop)
        self.done += 1
        self.updates += not applied.skipped
        if config.guard.check_every and self.done % config.guard.check_every == 0:
            check(self.model, optimizer, self.done, config.guard.check_every)
        seconds = time.perf_counter() - start
        self._begin("")
        report = StepReport(
            step=self.done,
            loss=applied.loss,
            grad_norm=applied.norm,
            lr=lr,
            tokens_per_s=config.data.batch * config.data.seq / seconds,
            exposed=ledger.exposed() / seconds,
            memory_bytes=peak_memory(self.place.positions.device),
            skipped=applied.skipped,
            spike=self.guard.spike,
            skips=self.guard.skips,
            tokens=self.done * config.data.batch * config.data.seq,
            wall_time=time.time(),
        )
        return self.use.told(report, seconds), applied.stop

    def micro_batches(self, step: int, which: Iterable[int]) -> list[tuple[Tensor, At]]:
        """The tokens of these micro-batches of a step, and what layers know of them."""
        config, found = self.config, []
        if self.keys is not None:
            self.keys.write(key_of(config.seed, f"dropout.{step}"))
        for i in which:
            tokens, targets = self.batches(step * config.data.micro_batches + i)
            found.append((tokens, At(self.places[i], targets, self.loss, self.keys)))
        return found

    def _begin(self, phase: str) -> None:
        if self.recorder is not None:
            self.recorder.begin(phase)

    def trace_unscheduled(self) -> Trace:
        """Traces the last micro-batch again with the schedule off, in a model whose gradients are discarded; after a
        first time that warms up."""
        last, model = self.config.data.micro_batches - 1, unscheduled(self.model)
        ((tokens, at),) = self.micro_batches(self.done - 1, [last])
        context = replace(at.place.context, ledger=model.parallel.mesh.ledger, overlap=False)
        at = replace(at, place=replace(at.place, context=context))
        for _ in range(2):
            self.recorder = recorder = Recorder(model)
            model.play([(tokens, at)])
            self._begin("")
        self.recorder = None
        return recorder.end()

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss over `logging.eval_batches` batches of samples spread over the held-out text."""
        if self.held_out is None:
            return float("nan")
        batches, rows = data.Loader(self.held_out, self.place), self.place.batch
        total = count = 0.0
        for i in range(-(-len(self.held_out) // rows)):
            real = min(rows, len(self.held_out) - i * rows)
            tokens, targets = batches(i)
            with evaluating(self.model):
                total += real * float(self.model(tokens, targets, self.place))
            count += real
        return total / count

    def sample(self) -> str:
        """Returns a continuation of the configured prompt, with the prompt."""
        log, tokenizer = self.config.logging, self.corpus.tokenizer
        prompt = [int(token) for token in tokenizer.encode(log.sample_prompt)] or [0]
        prompt = prompt[: self.model.config.context - 1]
        if not prompt:  # a context of one token has no room for a next
            return ""
        sampling = Sampling(seed=self.config.seed)
        with evaluating(self.model):
            tokens = list(generate(self.model, prompt, log.sample_tokens, sampling, tokenizer.vocab))
        return tokenizer.decode(prompt + tokens)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors. Steps and seeds determine samples and randomness."""
        return {
            "model": asdict(self.model.config),
            "updates": self.updates,
            "freeze": self.config.model.freeze,
            "precision": self.config.precision.dtype,
            "fresh": self.fresh,
            "scale": asdict(self.scale),
            "guard": self.guard.state(),
            "data": {"digest": self.corpus.digest, **self.order(), "samples": self.done * self.config.data.batch},
            "cuboid": self.model.parallel.mesh.cuboid.sizes,
            "seed": self.config.seed,
        }

    def order(self) -> dict[str, int]:
        """The keys that decide, with the text, which samples a step sees."""
        d = self.config.data
        return {"batch": d.batch, "seq": d.seq, "seed": d.seed}

    def resume(self, given: Path) -> str:
        """Loads the newest good checkpoint of a run, or the given one. Returns a line on what changed, or ""."""

        def check(path: Path, state: Mapping[str, Any]) -> None:
            checkpoint.check_model(path, state, asdict(self.model.config))
            check_data(path, state, self)

        state = checkpoint.load(given, self.model, self.optimizer, check)
        self.done, self.updates, self.fresh = state["step"], state["updates"], state["fresh"]
        if self.scale.interval and state["scale"]["interval"]:
            self.scale.scale, self.scale.good = state["scale"]["scale"], state["scale"]["good"]
        if "guard" in state:
            self.guard.load(state["guard"])
        return thawed(state.get("freeze", ""), self)


def check_data(path: Path, state: Mapping[str, Any], trainer: Trainer) -> None:
    if state["data"] is None:
        raise ValueError(f"{path} was imported: there is no training to resume; start from it with model.pretrained")
    if state["data"]["digest"] != trainer.corpus.digest:
        raise ValueError(f"{path} was trained on other text; give the same data, or start a new run")
    for name, here in trainer.order().items():
        if state["data"][name] != here:
            raise ValueError(
                f"{path} was trained with data.{name} = {state['data'][name]}; data.{name} = {here} would repeat or "
                "skip samples; keep the earlier value, or start a new run"
            )


def thawed(before: str, trainer: Trainer) -> str:
    """Says what changes if other parameters are frozen now than in the checkpoint."""
    now, names = trainer.config.model.freeze, parameter_names(trainer.model.config)
    if now == before:
        return ""
    was, frozen = matching(before, names), matching(now, names)
    return (
        f"model.freeze changed from {toml(before)} to {toml(now)}: {_tensors(was - frozen)} newly trained, with zero "
        f"moments; {_tensors(frozen - was)} newly frozen"
    )


def _tensors(names: Collection[object]) -> str:
    return f"{len(names)} tensor{'s' * (len(names) != 1)}"


def introduction(trainer: Trainer, folder: Path, changed: str = "", precision_why: str = "") -> str:
    c, d, cuboid = trainer.model.config, trainer.config.data, trainer.model.parallel.mesh.cuboid
    held = sum(shard_of(p).numel() for p in trainer.model.parameters())
    frozen, here = trainer.model.frozen, [d.spec for _, p, d in declared(trainer.model) if not p.requires_grad]
    text = ", ".join(d.paths) or "Python's own library"
    precision = trainer.config.precision.dtype + (f" ({precision_why})" if precision_why else "")
    layers = f"{c.layers} layer{'s' * (c.layers != 1)}"
    lines = [
        f"model   {c.family}, {layers}, hidden {c.hidden}, {c.heads} heads: {c.parameters:,} parameters, "
        f"{held:,} on rank 0",
        f"cuboid  {cuboid}, {cuboid.ranks} ranks, {precision}{pipeline_of(trainer)}",
        f"data    {len(trainer.corpus.train):,} tokens of {text}; {d.batch} × {d.seq} tokens per step",
        f"memory  {memory_of(trainer)}",
        f"run     {folder}",
    ]
    if frozen:
        count = f"{sum(prod(spec.shape) for spec in here):,} parameters in " if cuboid.pipe == 1 else ""
        lines.insert(1, f"frozen  {count}{_tensors(frozen)}, by {toml(trainer.config.model.freeze)}")
    if trainer.done:
        lines.append(f"resumed after step {trainer.done}")
    if changed:
        lines.append(changed)
    return "\n".join(lines)


def memory_of(trainer: Trainer) -> str:
    """What does not change during a run. Steps show the peak."""
    use = trainer.use
    kinds = {"weights": use.weights, "gradients": use.gradients, "optimizer state": use.optimizer}
    gpu = is_gpu(trainer.model.parallel.mesh.device)
    peak = "the peak of its GPU" if gpu else "the peak of its process, PyTorch included"
    return " + ".join(f"{quantity(n)}B {name}" for name, n in kinds.items()) + f" on rank 0; step lines show {peak}"


def pipeline_of(trainer: Trainer) -> str:
    split, schedule = trainer.model.split, trainer.model.parallel.schedule
    blocks = " + ".join(map(str, split.blocks))
    return f"; {schedule.pipeline}, stages of {blocks} layers" if split.pipe > 1 else ""


def open_folder(trainer: Trainer, folder: Path, resume: Path | None) -> RunFolder | None:
    """Opens or creates the run folder on rank 0, which writes there; others get None. An error of rank 0 is raised by
    all ranks, so that none is left waiting."""
    mesh, run, rejected = trainer.model.parallel.mesh, None, None
    if mesh.rank == 0:
        try:
            run = _open_folder(trainer, folder, resume)
        except ValueError as error:
            rejected = error
    if (rejected := from_first(rejected, mesh.world)) is not None:
        raise rejected
    return run


def _open_folder(trainer: Trainer, folder: Path, resume: Path | None) -> RunFolder:
    config = trainer.config
    text, events = resolved_toml(config), config.logging.tensorboard
    check_folder(config, folder, resume)
    begun = is_begun(config, folder, resume)
    if begun:
        run = RunFolder.open(folder, events)
        run.lock()
        forget(run.checkpoints, trainer.done)
        run.rewind(trainer.done)
        run.keep_config(text)
    else:
        run = RunFolder.create(folder, text, events)
    if not begun or resume is None:
        trainer.corpus.tokenizer.save(run.path)
        if trainer.origin is not None:
            trainer.origin.remember(run.path)
    return run


def keep_trace(trainer: Trainer, recorder: Recorder, folder: Path) -> None:
    """Writes all ranks' traces to trace.json, and a layer of rank 0, with the schedule off and on, to timeline.png."""
    mesh = trainer.model.parallel.mesh
    traces, off = from_all(recorder.end(), mesh.world), trainer.trace_unscheduled()
    if mesh.rank == 0:
        save_trace(traces, folder / "trace.json")
        count = len(trainer.place.sub_batches(trainer.model.parallel.schedule.sub_batches))
        title = f"Layer {recorder.layer + 1} of {trainer.model.config.layers}, rank 0 of {mesh.cuboid}"
        if count > 1:
            title += f". On: from the first of {count} sub-batches to the last, with other layers' between"
        draw_layer({"schedule off": off, "schedule on": traces[0]}, title, folder / "timeline.png")


def train(
    world: World, config: TrainConfig, folder: Path | None, resume: Path | None, trace: int = 0, force: bool = False
) -> Outcome | None:
    """`run_on_rank` under the watchdog."""
    with watched(world.rank, world.size, config.watch.timeout, config.rank_names()) as watch:
        return run_on_rank(replace(world, watch=watch), config, folder, resume, trace, force)


def run_on_rank(
    world: World, config: TrainConfig, folder: Path | None, resume: Path | None, trace: int, force: bool
) -> Outcome | None:
    """Trains, on every rank. Rank 0 writes, prints and returns the outcome. After a warm-up `trace` steps are traced.
    Raises ValueError if the run does not fit into the rank's GPU, unless `force`."""
    config, why = settled(config, world, folder, resume)
    if not force:
        check_device(world, config)
    trainer, asked_for = Trainer(config, world), resume
    folder, resume = from_first(beginning(world, config, folder, resume), trainer.model.parallel.mesh.world)
    changed = trainer.resume(resume) if resume is not None else ""
    if resume == asked_for and not world.attempt:  # must not end a run that is restarted
        check_steps(trace, trainer.done, config.schedule.steps)
    run = open_folder(trainer, folder, resume)
    c = config.checkpoint
    writer = Writer(folder / "checkpoints", trainer.model, c.keep, c.background, c.attempts, c.pause)
    began, log, total = time.perf_counter(), config.logging, config.schedule.steps
    value, last, report = float("nan"), 0, None
    console = Console(quiet=world.rank != 0)
    console.print(introduction(trainer, folder, changed, why), highlight=False, markup=False, soft_wrap=True)
    with Progress(total, trainer.done, console) as progress, collected_by_hand() as collect:
        stop = False
        first = trainer.done
        while trainer.done < total and not stop:
            if trace and trainer.done == first + WARM:
                trainer.recorder = Recorder(trainer.model)
            asked = world.stop is not None and world.stop.asked
            report, stop = trainer.step(asked or writer.failed)
            if world.stop is not None:
                world.stop.begin()
            if trainer.recorder is not None and trainer.done == first + WARM + trace:
                keep_trace(trainer, trainer.recorder, folder)
            progress.update(report)
            if trainer.guard.message:
                progress.note(trainer.guard.message)
            metrics: dict[str, float] = {}
            if report.step % log.every == 0 or report.step == total:
                metrics = asdict(report)
            if (log.eval_every and report.step % log.eval_every == 0) or report.step == total:
                value, last = trainer.validate(), report.step
                seen = {"step": report.step, "tokens": report.tokens, "wall_time": report.wall_time}
                metrics |= seen | {"val_loss": value}
                progress.note(f"step {report.step}: validation loss {value:.4f}")
            if run is not None and metrics:
                run.log(metrics)
            if (c.every and report.step % c.every == 0) or stop or report.step == total:
                if run is not None:
                    run.sync()
                writer.save(report.step, trainer.optimizer, trainer.state())
            collect(report.step)
    writer.wait()
    if world.stop is not None and trainer.done < total:
        world.stop.obey()
    if trainer.recorder is not None:  # stopped
        keep_trace(trainer, trainer.recorder, folder)
    if trace and trainer.done <= first + WARM:
        console.print(f"no trace: {trainer.done - first} steps were run, and tracing begins after {WARM}")
    if world.watch is not None:
        world.watch.step = 0
    if last != trainer.done and not stop:
        value = trainer.validate()
    text = trainer.sample() if log.sample_tokens and not stop else ""
    if run is None:
        return None
    unigram = data.unigram_entropy(trainer.corpus.train, trainer.corpus.vocab)
    plot_run(run.metrics(), run.plot, unigram)
    run.close()
    loss = report.loss if report is not None else float("nan")
    seconds = time.perf_counter() - began
    return Outcome(str(folder), trainer.done, total, loss, value, unigram, text, log.sample_prompt, seconds)
