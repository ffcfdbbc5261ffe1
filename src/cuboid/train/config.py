"""What a training run is: every key with its default, its meaning and its rule.

The defaults are the embedded run: a small byte-level GPT that learns from the running Python's own library,
on eight ranks, in about two minutes on two cores.
"""

import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from cuboid.data.faults import MAX_BAD
from cuboid.dtypes import SPELLINGS
from cuboid.mesh.cuboid import AXES, EARLIER, Cuboid
from cuboid.model.config import ModelConfig, RopeScaling
from cuboid.model.freeze import Trained
from cuboid.model.presets import PRESETS
from cuboid.step.pipeline import Split, orders
from cuboid.step.schedule import Schedule
from cuboid.train.keys import RenamedKey, assignment, build, flatten, key, keys, toml, value_of, write

#: Sections that decide the result.
DECISIVE = ("seed", "model", "data", "optimizer", "schedule", "precision", "loss", "guard")


@dataclass(frozen=True)
class RopeScalingSection:
    """stretching of the rotary wavelengths"""

    factor: float = key(1.0, "how far; 1: not at all", at_least=1)
    low_freq_factor: float = key(1.0, "wavelengths beyond original_context / this are stretched", above=0)
    high_freq_factor: float = key(4.0, "wavelengths within original_context / this are not", above=0)
    original_context: int = key(8192, "the context the model was first trained on", at_least=1)
    kind: Literal["llama3", "linear"] = key("llama3", "as Llama 3.1 does, or all wavelengths alike")


@dataclass(frozen=True)
class ModelSection:
    """what is trained"""

    preset: str = key("", "a known model, whose sizes the keys below change; cuboid config --presets lists them")
    pretrained: str = key(
        "", "begin with this model and its sizes: a Hugging Face folder, a run or a checkpoint", path=True
    )
    family: Literal["gpt2", "llama"] = key("llama", "kind of Transformer")
    layers: int = key(2, "Transformer blocks", at_least=1, also=("n_layer", "num_layers", "num_hidden_layers"))
    hidden: int = key(128, "width of the residual stream", at_least=1, also=("n_embd", "hidden_size", "d_model"))
    heads: int = key(
        8, "attention heads; y·z must divide them", at_least=1, also=("n_head", "num_heads", "num_attention_heads")
    )
    kv_heads: int = key(0, "heads of keys and values; 0: as many as heads", at_least=0)
    head_dim: int = key(0, "width of a head; 0: hidden / heads", at_least=0)
    ffn: int = key(
        0, "inner width of the MLP; 0: 4·hidden (gpt2), 8/3·hidden (llama)", at_least=0, also=("intermediate_size",)
    )
    vocab: int = key(0, "rows of the embedding; 0: what the tokenizer has", at_least=0, also=("vocab_size",))
    context: int = key(0, "longest sequence; 0: data.seq", at_least=0, also=("block_size", "max_position_embeddings"))
    tied: bool | Literal["auto"] = key("auto", "head and embedding share their weight; auto: what the family does")
    bias: bool | Literal["auto"] = key("auto", "linears have biases; auto: what the family does")
    qkv_bias: bool | Literal["auto"] = key("auto", "queries, keys and values have biases; auto: as bias")
    qk_norm: bool = key(False, "RMSNorm of each head's queries and keys")
    window: int = key(0, "tokens that attention looks back on, which a sequence must not exceed; 0: all", at_least=0)
    dropout: float = key(0.0, "share of the residual stream's elements zeroed in training", at_least=0, below=1)
    norm_eps: float = key(1e-5, "added to the variance in norms", at_least=0)
    init_std: float = key(0.02, "spread of the initial weights", above=0)
    rope_theta: float = key(10000.0, "base of the rotary wavelengths", above=0)
    freeze: str = key("", 'a regular expression: parameters whose names have it ("embed|blocks.0") are not trained')
    rope_scaling: RopeScalingSection = RopeScalingSection()


@dataclass(frozen=True)
class CuboidSection:
    """the block of devices: x·y·z·replicas·pipe ranks"""

    x: int = key(2, "cuts the batch (and the sequence, where the batch is short) and every weight", at_least=1)
    y: int = key(2, "cuts heads, the MLP's inner width, the vocabulary", at_least=1)
    z: int = key(2, "cuts heads and the hidden width", at_least=1)
    replicas: int = key(
        1, "data-parallel replicas of the whole cuboid, each with its own samples", at_least=1, was="cuboid.data"
    )
    order: tuple[str, ...] = key(AXES, "axes from the slowest over ranks to the fastest", spellings=EARLIER)
    others: tuple[str, ...] = key(
        (),
        'cuboids such as "1,2,2" or "1,2,2 replicas=2 pipe=2" for other numbers of ranks that torchrun may start; '
        "else planned",
        between=r";|,(?=\s*\d+x)",  # earlier versions wrote 1x2x2
    )
    pipe: int = key(1, "pipeline stages, each of consecutive blocks on a cuboid (and replicas) of its own", at_least=1)


@dataclass(frozen=True)
class DataSection:
    """what it learns from"""

    paths: tuple[str, ...] = key(
        (), "text files, folders, or what cuboid data build made; empty: this Python's library", path=True
    )
    tokenizer: str = key("", "tokenizer.json of the tokenizers library; empty: bytes", path=True)
    val_fraction: float = key(0.05, "share of the tokens held out for validation", at_least=0, below=1)
    max_bytes: int = key(1_500_000, "most of the built-in text, Python's own library, to take", at_least=1)
    max_bad: float = key(
        MAX_BAD, "share of a text file's bytes that may be zero or not UTF-8; more is rejected", at_least=0, at_most=1
    )
    seq: int = key(128, "tokens in a sequence", at_least=1, also=("seq_len", "seq_length", "sequence_length"))
    batch: int = key(16, "sequences in a step, over all ranks", at_least=1, also=("batch_size", "global_batch_size"))
    micro_batches: int = key(
        1,
        "a step's batch is computed in this many micro-batches, one after another",
        at_least=1,
        also=("gradient_accumulation_steps",),
    )
    seed: int = key(0, "order of the samples", at_least=0)


@dataclass(frozen=True)
class OptimizerSection:
    """AdamW"""

    lr: float = key(2e-3, "highest learning rate", above=0, also=("learning_rate", "max_lr"))
    beta1: float = key(0.9, "decay of the running mean of gradients", at_least=0, below=1)
    beta2: float = key(0.95, "decay of the running mean of their squares", at_least=0, below=1)
    eps: float = key(1e-8, "added to the root of the mean square", above=0)
    weight_decay: float = key(0.1, "of weight matrices; norms and biases are spared", at_least=0)
    clip: float = key(
        1.0,
        "gradients of a larger norm are scaled down to it; 0: never",
        at_least=0,
        also=("grad_clip", "max_grad_norm"),
    )


@dataclass(frozen=True)
class ScheduleSection:
    """steps and learning rate"""

    steps: int = key(200, "optimizer steps", at_least=1, also=("max_steps", "train_steps", "max_iters"))
    warmup: int = key(
        20, "steps in which the learning rate rises from 0", at_least=0, also=("warmup_steps", "warmup_iters")
    )
    decay: Literal["cosine", "linear", "constant"] = key("cosine", "how the learning rate falls afterwards")
    min_lr_ratio: float = key(0.1, "the last learning rate, as a share of the highest", at_least=0, at_most=1)


@dataclass(frozen=True)
class PrecisionSection:
    """number formats"""

    dtype: Literal["auto", "fp32", "bf16", "fp16"] = key(
        "auto",
        "of matmuls and activations, weights at rest are fp32; auto: bf16 on GPUs that have it, else fp32; a resumed "
        "run keeps its own",
        spellings=SPELLINGS,
    )
    loss_scale: float = key(65536.0, "fp16: what the loss is multiplied by at first", above=0)
    growth_interval: int = key(2000, "fp16: steps without overflow until the scale doubles", at_least=1)
    deterministic: bool = key(False, "the same bits in every run on GPUs too, if more slowly; on CPUs they always are")


@dataclass(frozen=True)
class MemorySection:
    """what is kept for backward, and what is recomputed"""

    activations: Literal["regather", "retain"] = key("regather", "activations gathered for a matmul")
    weights: Literal["regather", "retain"] = key("regather", "weights gathered for a matmul")
    recompute: Literal["none", "selective", "full"] = key(
        "none", "in backward: nothing, attention, or whole blocks", was="memory.checkpoint"
    )
    head_elements: int = key(1 << 24, "most elements of partial logits alive at a time", at_least=1)


@dataclass(frozen=True)
class OverlapSection:
    """communication that overlaps with computation"""

    prefetch: bool = key(True, "gather the next layer's weights while this one computes")
    sub_batches: int = key(
        0,
        "interleaved sub-batches of a micro-batch: one computes while others communicate; 1: none, 0: chosen by size",
        at_least=0,
        was="overlap.parts",
    )
    chunks: int = key(
        0, "of a matmul's tokens: one is multiplied while others are sent; 1: none, 0: chosen by size", at_least=0
    )
    compile: bool = key(False, "fuse elementwise work with torch.compile")
    beside: bool = key(False, "run the forward of a micro-batch beside the backward of the one before it")
    pipeline: Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "beside"] = key(
        "1f1b", "with cuboid.pipe: the order of forwards and backwards of micro-batches"
    )
    stages: int = key(0, "with cuboid.pipe: stages of each rank; 0: two if interleaved, else one", at_least=0)
    split: tuple[int, ...] = key((), "with cuboid.pipe: blocks of each stage, first to last; empty: evenly")


@dataclass(frozen=True)
class LossSection:
    """cross entropy"""

    label_smoothing: float = key(0.0, "share of the target spread over the vocabulary", at_least=0, below=1)
    z_loss: float = key(0.0, "weight of the squared log-partition, which keeps logits small", at_least=0)


@dataclass(frozen=True)
class CheckpointSection:
    """checkpoints, in the run folder"""

    every: int = key(0, "steps between checkpoints; 0: only at the end", at_least=0)
    keep: int = key(2, "how many to keep, the newest; 0: all", at_least=0)
    background: bool = key(True, "write them while training goes on")
    attempts: int = key(4, "times to try to write one, on a full disk say, before the run stops", at_least=1)
    pause: float = key(10.0, "seconds from one attempt to the next", at_least=0)


@dataclass(frozen=True)
class RestartSection:
    """failed ranks are restarted"""

    max_restarts: int = key(
        3,
        "times in a row that all ranks are restarted without a new checkpoint; 0: never",
        at_least=0,
        was="restart.most",
    )


@dataclass(frozen=True)
class WatchSection:
    """ranks that stall"""

    timeout: float = key(
        300.0, "seconds until a stalled rank ends all, with a message naming it; 0: never", at_least=0, at_most=1e6
    )


@dataclass(frozen=True)
class GuardSection:
    """steps that go wrong"""

    nonfinite: Literal["skip", "stop"] = key("skip", "what to do if the loss or its gradient is not finite")
    spike: Literal["warn", "skip", "stop"] = key("warn", "what to do if one of them is far above the last steps'")
    loss_factor: float = key(2.0, "a spike: a loss so many times the median of the last steps; 0: none is", at_least=0)
    norm_factor: float = key(10.0, "a spike: a gradient's norm so many times the median; 0: none is", at_least=0)
    window: int = key(50, "how many steps the median is of", at_least=1)
    max_skips: int = key(
        10,
        "stop after more skipped steps in a row, fp16's search for its scale aside",
        at_least=0,
        was="guard.most_skips",
    )
    check_every: int = key(0, "steps between checks for silent corruption; 0: none", at_least=0)


@dataclass(frozen=True)
class LoggingSection:
    """what is written and shown"""

    folder: str = key("", "run folder; empty: a new one in runs/", path=True)
    every: int = key(1, "steps between lines of metrics", at_least=1)
    eval_every: int = key(50, "steps between validations; 0: only at the end", at_least=0)
    eval_batches: int = key(8, "batches in a validation", at_least=1)
    tensorboard: bool = key(True, "write TensorBoard events too")
    sample_tokens: int = key(120, "length of the text sampled at the end; 0: none", at_least=0)
    sample_prompt: str = key("class ", "what the sample continues")


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run."""

    seed: int = key(0, "of initialisation, dropout and sampling", at_least=0)
    model: ModelSection = ModelSection()
    cuboid: CuboidSection = CuboidSection()
    data: DataSection = DataSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    precision: PrecisionSection = PrecisionSection()
    memory: MemorySection = MemorySection()
    overlap: OverlapSection = OverlapSection()
    loss: LossSection = LossSection()
    checkpoint: CheckpointSection = CheckpointSection()
    restart: RestartSection = RestartSection()
    watch: WatchSection = WatchSection()
    guard: GuardSection = GuardSection()
    logging: LoggingSection = LoggingSection()

    def model_config(self, vocab: int) -> ModelConfig:
        """The model, for a tokenizer of `vocab` tokens."""
        m, scaling = self.model, self.model.rope_scaling
        if m.vocab and m.vocab < vocab:
            raise ValueError(
                f"model.vocab = {m.vocab} is less than the tokenizer's {vocab} tokens; use 0 or more of them"
            )
        values = {each.name: getattr(m, each.name) for each in fields(ModelConfig)}
        values["vocab"] = m.vocab or vocab
        values["context"] = m.context or self.data.seq
        for name in ("tied", "bias", "qkv_bias"):
            values[name] = None if values[name] == "auto" else values[name]
        values["rope_scaling"] = None
        if scaling.factor > 1:
            values["rope_scaling"] = RopeScaling(*(getattr(scaling, each.name) for each in fields(RopeScaling)))
        return ModelConfig(**values)

    def cuboid_shape(self) -> Cuboid:
        c = self.cuboid
        return Cuboid(c.x, c.y, c.z, c.replicas, c.order, pipe=c.pipe)

    def schedule_on(self, cuboid: Cuboid, sub_batches: int = 1, chunks: int = 1) -> Schedule:
        """What overlaps with what. Without a pipe nothing is said of it."""
        o = self.overlap
        stages = o.stages or (2 if o.pipeline == "interleaved" else 1)
        pipeline = ("beside" if o.beside else o.pipeline, stages, o.split) if cuboid.pipe > 1 else ()
        return Schedule(o.prefetch, sub_batches, chunks, o.compile, o.beside, *pipeline)

    def computed_in(self, usual: str) -> "TrainConfig":
        """With `precision.dtype` made definite: the `usual` one if it is auto."""
        if self.precision.dtype != "auto":
            return self
        return replace(self, precision=replace(self.precision, dtype=usual))  # type: ignore[arg-type]

    def other_cuboids(self) -> list[Cuboid]:
        """For other numbers of ranks."""
        return [_other(text, ",".join(self.cuboid.order)) for text in self.cuboid.others]

    def check(self) -> None:
        """Raise if this cannot run, from what can be known before anything is started or written."""
        for name, each in keys(TrainConfig).items():
            each.fit(value_of(self, name))
        data, schedule = self.data, self.schedule
        for cuboid in (self.cuboid_shape(), *self.other_cuboids()):
            self._check_cuts(cuboid)
        if schedule.warmup > schedule.steps:
            raise ValueError(
                f"schedule.warmup = {schedule.warmup} is more than schedule.steps = {schedule.steps}; "
                "the learning rate would never reach optimizer.lr; use a shorter warmup"
            )
        if 0 < self.watch.timeout < 1:
            raise ValueError(
                f"watch.timeout = {self.watch.timeout:g} would end ranks that are merely busy; use 1 or more, or 0"
            )
        for name, path in [
            *(("data.paths", path) for path in data.paths),
            ("data.tokenizer", data.tokenizer),
        ]:
            if path and not Path(path).exists():
                raise ValueError(f"{name}: {path} does not exist{_nearest_file(Path(path))}")

    def _check_cuts(self, cuboid: Cuboid) -> None:
        data = self.data
        parts = data.micro_batches * cuboid.replicas
        if data.batch % parts:
            near = [n for n in (data.batch // parts * parts, (data.batch // parts + 1) * parts) if n]
            raise ValueError(
                f"data.batch = {data.batch} cannot be cut into data.micro_batches · cuboid.replicas = {parts}; "
                f"use {' or '.join(map(str, near))}"
            )
        model, schedule = self.model_config(self.model.vocab or 1), self.schedule_on(cuboid)
        model.check(cuboid, data.batch // data.micro_batches, data.seq)
        Split.of(model.layers, cuboid.pipe, schedule)
        orders(schedule, cuboid.pipe, data.micro_batches)
        try:
            trained = Trained(model, self.model.freeze)
        except ValueError as error:
            raise ValueError(f"model.{error}") from None
        if trained.nothing:
            raise ValueError(f"model.freeze = {toml(self.model.freeze)} leaves nothing to train; freeze less")
        if self.model.freeze and cuboid.pipe > 1:
            raise ValueError(f"model.freeze with cuboid.pipe = {cuboid.pipe} is not supported; use pipe = 1")


def _other(text: str, order: str) -> Cuboid:
    """One of `cuboid.others`. Earlier versions wrote 1x2x2x2 for replicas, 1x2x2x1x2 for stages of a pipeline."""
    sizes = text.split("x")
    more = [f"{name}={size.strip()}" for name, size in zip(("replicas", "pipe"), sizes[3:], strict=False)]
    try:
        return Cuboid.parse(" ".join([",".join(sizes[:3]), *more]) if 3 < len(sizes) < 6 else text, order=order)
    except ValueError as error:
        raise ValueError(f"cuboid.others: {error}") from None


def load(path: Path | None = None, overrides: Sequence[str] = (), preset: str = "") -> TrainConfig:
    """The defaults, changed by the preset or the model to begin with, the file, and each `key=value`. Call `check`
    before a run."""
    given = {"model.preset": preset} if preset else {}
    given |= flatten(TrainConfig, _read(path)) if path else {}
    given |= dict(assignment(TrainConfig, text) for text in overrides)
    known = _preset(given.get("model.preset", "")) | _pretrained(given)
    config: TrainConfig = build(TrainConfig, known | given)
    return config


def missing(path: Path | None, names: Sequence[str]) -> list[str]:
    """Which of these keys a file, if there is one, does not give."""
    given = flatten(TrainConfig, _read(path)) if path else {}
    return [name for name in names if name not in given]


def resolved_toml(config: TrainConfig) -> str:
    """Every key with its value and meaning; loads back as the same configuration."""
    return write(config)


def differences(config: TrainConfig, written: str) -> list[str]:
    """Where a run folder's config.toml is not this run's, in what decides the result: "key = theirs (here ours)".
    Empty: it is this run's, on whatever ranks. A precision of auto is any: the run's folder says which it came to."""
    try:
        with warnings.catch_warnings(action="ignore", category=RenamedKey):
            theirs = flatten(TrainConfig, tomllib.loads(written))
    except ValueError as error:
        return [f"a config.toml that cannot be read ({error})"]
    found = []
    for name, each in keys(TrainConfig).items():
        there, here = theirs.get(name, each.default), value_of(config, name)
        any_will_do = name == "precision.dtype" and here == "auto"
        if name.partition(".")[0] in DECISIVE and there != here and not any_will_do:
            found.append(f"{name} = {toml(there)} (here {toml(here)})")
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        hint = _nearest_file(path) or "; cuboid config --show prints one to begin with"
        if str(path) in PRESETS:
            hint = f"; to train that known model write --preset {path}"
        raise ValueError(f"config file {path} does not exist{hint}") from None
    except OSError as error:
        raise ValueError(f"config file {path} cannot be read: {error.strerror}; give a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = "compare with cuboid config --show"
        if path.suffix != ".toml":
            hint = f"to train on a text write --set data.paths={path}"
        raise ValueError(f"config file {path} is not TOML: {error}; {hint}") from None


def _nearest_file(path: Path) -> str:
    folder = path.parent
    near = get_close_matches(path.name, [each.name for each in folder.iterdir()], 1) if folder.is_dir() else []
    return f"; did you mean {folder / near[0]}?" if near else ""


def _preset(name: str) -> dict[str, Any]:
    if not name:
        return {}
    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, 1)
        hint = f"did you mean {toml(near[0])}? " if near else ""
        raise ValueError(f"model.preset = {toml(name)} is not known; {hint}There are {', '.join(PRESETS)}")
    return _model_keys(PRESETS[name])


def _pretrained(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the model to begin with, and its tokenizer where the text is still to be tokenised."""
    if not given.get("model.pretrained"):
        return {}
    if given.get("model.preset"):
        raise ValueError(
            f"model.preset = {toml(given['model.preset'])} and model.pretrained = {toml(given['model.pretrained'])} "
            "both say what the model is; give one of them"
        )
    from cuboid.train.origin import Origin  # here: it brings torch, which most configurations are read without

    origin = Origin.find(Path(given["model.pretrained"]))
    values = _model_keys(origin.config)
    built = any((Path(path) / "train.json").is_file() for path in given.get("data.paths", ()))
    if origin.tokenizer_file is not None and not built:
        values["data.tokenizer"] = str(origin.tokenizer_file)
    return values


def _model_keys(model: ModelConfig) -> dict[str, Any]:
    """A model's keys. What follows from other keys is left to follow: a changed hidden has its own ffn."""
    values = {f"model.{each.name}": getattr(model, each.name) for each in fields(ModelConfig)}
    for word, blank, written in [(w, 0, 0) for w in ("kv_heads", "head_dim", "ffn")] + [
        (w, None, "auto") for w in ("tied", "bias", "qkv_bias")
    ]:
        if model.replace(**{word: blank}) == model:
            values[f"model.{word}"] = written
    scaling = values.pop("model.rope_scaling")
    if scaling:
        values |= {f"model.rope_scaling.{each.name}": getattr(scaling, each.name) for each in fields(RopeScaling)}
    return values
