"""What a training run is: every key with its default, its meaning and its rule.

The defaults train a small byte-level GPT on the library of the running Python, on eight ranks, in about two minutes on
two cores.
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
from cuboid.model.presets import PRESETS, nearest_preset
from cuboid.step.pipeline import Split, orders
from cuboid.step.schedule import Schedule
from cuboid.train.keys import RenamedKey, assignment, build, flatten, key, keys, toml, value_of, write

#: Sections that change the result of a run.
DECISIVE = ("seed", "model", "data", "optimizer", "schedule", "precision", "loss", "guard")


@dataclass(frozen=True)
class RopeScalingSection:
    """stretching of the rotary wavelengths"""

    factor: float = key(1.0, "factor by which rotary wavelengths are stretched; 1: none", at_least=1)
    low_freq_factor: float = key(1.0, "wavelengths above original_context / low_freq_factor are stretched", above=0)
    high_freq_factor: float = key(4.0, "those below original_context / high_freq_factor are not", above=0)
    original_context: int = key(8192, "context length of the original training", at_least=1)
    kind: Literal["llama3", "linear"] = key("llama3", "by wavelength, as in Llama 3.1, or all wavelengths alike")


@dataclass(frozen=True)
class ModelSection:
    """the model"""

    preset: str = key("", "a known model, whose sizes the keys below override; cuboid config --presets lists all")
    pretrained: str = key(
        "", "start from this model and its sizes: a Hugging Face folder, a run or a checkpoint", path=True
    )
    family: Literal["gpt2", "llama"] = key("llama", "kind of Transformer")
    layers: int = key(2, "Transformer blocks", at_least=1, also=("n_layer", "num_layers", "num_hidden_layers"))
    hidden: int = key(128, "width of the residual stream", at_least=1, also=("n_embd", "hidden_size", "d_model"))
    heads: int = key(
        8, "attention heads; y·z must divide them", at_least=1, also=("n_head", "num_heads", "num_attention_heads")
    )
    kv_heads: int = key(0, "heads of keys and values; 0: same as heads", at_least=0)
    head_dim: int = key(0, "width of a head; 0: hidden / heads", at_least=0)
    ffn: int = key(
        0, "inner width of the MLP; 0: 4·hidden (gpt2), 8/3·hidden (llama)", at_least=0, also=("intermediate_size",)
    )
    vocab: int = key(0, "rows of the embedding; 0: the size of the tokenizer", at_least=0, also=("vocab_size",))
    context: int = key(0, "longest sequence; 0: data.seq", at_least=0, also=("block_size", "max_position_embeddings"))
    tied: bool | Literal["auto"] = key("auto", "head and embedding share one weight; auto: as usual for the family")
    bias: bool | Literal["auto"] = key("auto", "linears have biases; auto: as usual for the family")
    qkv_bias: bool | Literal["auto"] = key("auto", "queries, keys and values have biases; auto: same as bias")
    qk_norm: bool = key(False, "RMSNorm of each head's queries and keys")
    window: int = key(0, "tokens that attention looks back on; sequences must not be longer; 0: all", at_least=0)
    dropout: float = key(0.0, "dropout rate of the residual stream in training", at_least=0, below=1)
    norm_eps: float = key(1e-5, "epsilon added to the variance in norms", at_least=0)
    init_std: float = key(0.02, "standard deviation of the initial weights", above=0)
    rope_theta: float = key(10000.0, "base of the rotary wavelengths", above=0)
    freeze: str = key("", 'a regular expression; parameters whose names match ("embed|blocks.0") are not trained')
    rope_scaling: RopeScalingSection = RopeScalingSection()


@dataclass(frozen=True)
class CuboidSection:
    """the block of devices: x·y·z·replicas·pipe ranks"""

    x: int = key(2, "splits the batch (and the sequence, if the batch is short) and every weight", at_least=1)
    y: int = key(2, "splits heads, the MLP's inner width and the vocabulary", at_least=1)
    z: int = key(2, "splits heads and the hidden width", at_least=1)
    replicas: int = key(
        1, "data-parallel replicas of the cuboid, each with its own samples", at_least=1, was="cuboid.data"
    )
    order: tuple[str, ...] = key(AXES, "axes, from the slowest-varying over ranks to the fastest", spellings=EARLIER)
    others: tuple[str, ...] = key(
        (),
        'cuboids for other numbers of ranks that torchrun may start, such as "1,2,2" or "1,2,2 replicas=2 pipe=2"; '
        "others are planned",
        between=r";|,(?=\s*\d+x)",  # earlier versions wrote 1x2x2
    )
    pipe: int = key(1, "pipeline stages: each has consecutive blocks, on its own cuboid and replicas", at_least=1)


@dataclass(frozen=True)
class DataSection:
    """text and batches"""

    paths: tuple[str, ...] = key(
        (), "text files, folders, or output of cuboid data build; empty: this Python's library", path=True
    )
    tokenizer: str = key("", "tokenizer.json of the tokenizers library; empty: bytes", path=True)
    val_fraction: float = key(0.05, "fraction of the tokens held out for validation", at_least=0, below=1)
    max_bytes: int = key(1_500_000, "most bytes to use of the built-in text, Python's library", at_least=1)
    max_bad: float = key(
        MAX_BAD,
        "text files with a larger fraction of zero or non-UTF-8 bytes are rejected",
        at_least=0,
        at_most=1,
    )
    seq: int = key(128, "tokens per sequence", at_least=1, also=("seq_len", "seq_length", "sequence_length"))
    batch: int = key(16, "sequences per step, over all ranks", at_least=1, also=("batch_size", "global_batch_size"))
    micro_batches: int = key(
        1,
        "micro-batches per step, computed one after another (gradient accumulation)",
        at_least=1,
        also=("gradient_accumulation_steps",),
    )
    seed: int = key(0, "seed of the order of samples", at_least=0)


@dataclass(frozen=True)
class OptimizerSection:
    """AdamW"""

    lr: float = key(2e-3, "peak learning rate", above=0, also=("learning_rate", "max_lr"))
    beta1: float = key(0.9, "decay of the running mean of gradients", at_least=0, below=1)
    beta2: float = key(0.95, "decay of the running mean of their squares", at_least=0, below=1)
    eps: float = key(1e-8, "added to the root of the mean square", above=0)
    weight_decay: float = key(0.1, "of weight matrices; norms and biases have none", at_least=0)
    clip: float = key(
        1.0,
        "largest norm of the gradient, which is scaled down to it; 0: no clipping",
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
    min_lr_ratio: float = key(0.1, "last learning rate, as a fraction of the peak", at_least=0, at_most=1)


@dataclass(frozen=True)
class PrecisionSection:
    """number formats"""

    dtype: Literal["auto", "fp32", "bf16", "fp16"] = key(
        "auto",
        "of matmuls and activations, weights at rest are fp32; auto: bf16 if all GPUs have it, else fp32; a resumed "
        "run keeps its own",
        spellings=SPELLINGS,
    )
    loss_scale: float = key(65536.0, "fp16: initial loss scale", above=0)
    growth_interval: int = key(2000, "fp16: steps without overflow after which the scale doubles", at_least=1)
    deterministic: bool = key(False, "bitwise reproducible on GPUs too, but slower; on CPUs every run is")


@dataclass(frozen=True)
class MemorySection:
    """what is kept for backward and what is recomputed"""

    activations: Literal["regather", "retain"] = key(
        "regather", "gathered activations: regather them in backward, or keep them"
    )
    weights: Literal["regather", "retain"] = key(
        "regather", "gathered weights: regather them in backward, or keep them"
    )
    recompute: Literal["none", "selective", "full"] = key(
        "none", "recompute in backward: nothing, attention, or whole blocks", was="memory.checkpoint"
    )
    head_elements: int = key(1 << 24, "most elements of partial logits in memory at a time", at_least=1)


@dataclass(frozen=True)
class OverlapSection:
    """communication that overlaps with computation"""

    prefetch: bool = key(True, "gather the next layer's weights while this one computes")
    sub_batches: int = key(
        0,
        "interleaved sub-batches of a micro-batch: one computes while others communicate; 1: none, 0: by size",
        at_least=0,
        was="overlap.parts",
    )
    chunks: int = key(
        0,
        "chunks of a matmul's tokens: one is multiplied while others travel; 1: none, 0: by size",
        at_least=0,
    )
    compile: bool = key(
        False, "fuse elementwise work with torch.compile; on a GPU always, unless TORCH_COMPILE_DISABLE=1 is set"
    )
    beside: bool = key(False, "run the forward of a micro-batch beside the backward of the one before it")
    pipeline: Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "beside"] = key(
        "1f1b", "with cuboid.pipe: the order of forwards and backwards of micro-batches"
    )
    stages: int = key(0, "with cuboid.pipe: stages of each rank; 0: two if interleaved, else one", at_least=0)
    split: tuple[int, ...] = key((), "with cuboid.pipe: blocks of each stage, first to last; empty: by planned time")


@dataclass(frozen=True)
class LossSection:
    """cross entropy"""

    label_smoothing: float = key(0.0, "fraction of the target spread over the vocabulary", at_least=0, below=1)
    z_loss: float = key(0.0, "weight of the squared log-partition, which keeps logits small", at_least=0)


@dataclass(frozen=True)
class CheckpointSection:
    """checkpoints, in the run folder"""

    every: int = key(0, "steps between checkpoints; 0: only at the end", at_least=0)
    keep: int = key(2, "newest checkpoints to keep; 0: all", at_least=0)
    background: bool = key(True, "write them while training continues")
    attempts: int = key(4, "attempts to write one, for instance to a full disk, before the run stops", at_least=1)
    pause: float = key(10.0, "seconds between attempts", at_least=0)


@dataclass(frozen=True)
class RestartSection:
    """restarts after failures"""

    max_restarts: int = key(
        3,
        "restarts in a row without a new checkpoint between them; 0: never restart",
        at_least=0,
        was="restart.most",
    )


@dataclass(frozen=True)
class WatchSection:
    """the watchdog"""

    timeout: float = key(
        300.0,
        "seconds that ranks wait for a stalled one; then the run ends and names it; 0: forever",
        at_least=0,
        at_most=1e6,
    )


@dataclass(frozen=True)
class GuardSection:
    """abnormal steps"""

    nonfinite: Literal["skip", "stop"] = key("skip", "action if the loss or its gradient is not finite")
    spike: Literal["warn", "skip", "stop"] = key("warn", "action if one of them is far above the last steps'")
    loss_factor: float = key(2.0, "spike: a loss above this multiple of the last steps' median; 0: none", at_least=0)
    norm_factor: float = key(10.0, "spike: a gradient's norm above this multiple of the median; 0: none", at_least=0)
    window: int = key(50, "number of last steps whose median is taken", at_least=1)
    max_skips: int = key(
        10,
        "stop after more skipped steps in a row; fp16's search for its scale does not count",
        at_least=0,
        was="guard.most_skips",
    )
    check_every: int = key(0, "steps between checks for silent corruption; 0: none", at_least=0)


@dataclass(frozen=True)
class LoggingSection:
    """output"""

    folder: str = key("", "run folder; empty: a new one in runs/", path=True)
    every: int = key(1, "steps between metrics", at_least=1)
    eval_every: int = key(50, "steps between validations; 0: only at the end", at_least=0)
    eval_batches: int = key(8, "batches per validation", at_least=1)
    tensorboard: bool = key(True, "write TensorBoard events too")
    sample_tokens: int = key(120, "tokens of the text sampled at the end; 0: none", at_least=0)
    sample_prompt: str = key("class ", "prompt of the sample")


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a run."""

    seed: int = key(0, "seed of initialisation, dropout and sampling", at_least=0)
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
                f"model.vocab = {m.vocab} is less than the tokenizer's {vocab} tokens; use 0, or at least {vocab}"
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
        """The schedule of steps on this cuboid. Keys of the pipeline are left at their defaults without a pipe,
        and blocks are dealt evenly where it has other stages than the run's."""
        o = self.overlap
        stages = o.stages or (2 if o.pipeline == "interleaved" else 1)
        split = o.split if cuboid.pipe == self.cuboid.pipe else ()
        pipeline = ("beside" if o.beside else o.pipeline, stages, split) if cuboid.pipe > 1 else ()
        return Schedule(o.prefetch, sub_batches, chunks, o.compile, o.beside, *pipeline)

    def without_pipe(self) -> list[str]:
        """Keys that are set for a pipe, if neither the cuboid nor one of the others has one."""
        if any(cuboid.pipe > 1 for cuboid in (self.cuboid_shape(), *self.other_cuboids())):
            return []
        default = OverlapSection()
        names = (
            name for name in ("pipeline", "stages", "split") if getattr(self.overlap, name) != getattr(default, name)
        )
        return [f"overlap.{name}" for name in names]

    def rank_names(self) -> list[str]:
        """What errors call the ranks of a pipe: with their places, and their stages there. Empty without a pipe."""
        cuboid, found = self.cuboid_shape(), list[str]()
        stages = range(0, cuboid.pipe * self.schedule_on(cuboid).stages, cuboid.pipe)
        for rank in range(cuboid.ranks if cuboid.pipe > 1 else 0):
            place = cuboid.coordinates(rank)["pipe"]
            here = ", ".join(str(place + first) for first in stages)
            found.append(f"rank {rank} (place {place} of the pipe: stage{'s' * (len(stages) > 1)} {here})")
        return found

    def computed_in(self, usual: str) -> "TrainConfig":
        """The configuration with a definite `precision.dtype`: the `usual` one if it is auto."""
        if self.precision.dtype != "auto":
            return self
        return replace(self, precision=replace(self.precision, dtype=usual))  # type: ignore[arg-type]

    def other_cuboids(self) -> list[Cuboid]:
        """The cuboids to use for other numbers of ranks."""
        return [_other(text, ",".join(self.cuboid.order)) for text in self.cuboid.others]

    def check(self) -> None:
        """Raise ValueError if this cannot run. Nothing has been started or written yet."""
        for name, each in keys(TrainConfig).items():
            each.fit(value_of(self, name))
        data, schedule = self.data, self.schedule
        for cuboid in (self.cuboid_shape(), *self.other_cuboids()):
            self._check_cuboid(cuboid)
        if schedule.warmup > schedule.steps:
            raise ValueError(
                f"schedule.warmup = {schedule.warmup} is more than schedule.steps = {schedule.steps}; "
                f"the learning rate would never reach optimizer.lr; set schedule.warmup to {schedule.steps // 10} or so"
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

    def _check_cuboid(self, cuboid: Cuboid) -> None:
        data = self.data
        count = data.micro_batches * cuboid.replicas
        if data.batch % count:
            near = [n for n in (data.batch // count * count, (data.batch // count + 1) * count) if n]
            raise ValueError(
                f"data.batch = {data.batch} cannot be split into data.micro_batches · cuboid.replicas = {count}; "
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


def _other(text: str, order: str) -> Cuboid:
    """One of `cuboid.others`. Earlier versions wrote 1x2x2x2 for replicas, 1x2x2x1x2 for stages of a pipeline."""
    sizes = text.split("x")
    more = [f"{name}={size.strip()}" for name, size in zip(("replicas", "pipe"), sizes[3:], strict=False)]
    try:
        return Cuboid.parse(" ".join([",".join(sizes[:3]), *more]) if 3 < len(sizes) < 6 else text, order=order)
    except ValueError as error:
        raise ValueError(f"cuboid.others: {error}") from None


def load(path: Path | None = None, overrides: Sequence[str] = (), preset: str = "") -> TrainConfig:
    """Returns the defaults, overridden by the preset or pretrained model, then the file, then each `key=value`. Call
    `check` before a run."""
    given = {"model.preset": preset} if preset else {}
    given |= flatten(TrainConfig, _read(path)) if path else {}
    given |= dict(assignment(TrainConfig, text) for text in overrides)
    known = _preset(given.get("model.preset", "")) | _pretrained(given)
    config: TrainConfig = build(TrainConfig, known | given)
    return config


def missing(path: Path | None, names: Sequence[str]) -> list[str]:
    """Returns those of these keys that the file, if there is one, does not set."""
    given = flatten(TrainConfig, _read(path)) if path else {}
    return [name for name in names if name not in given]


def resolved_toml(config: TrainConfig) -> str:
    """Every key with its value and meaning; loads back as the same configuration."""
    return write(config)


def differences(config: TrainConfig, written: str) -> list[str]:
    """Compares a run folder's config.toml with this run, in all that changes the result: "key = theirs (here ours)".
    Empty if it is this run, on any ranks. A precision of auto equals any: the run's folder has the one it became."""
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
        if "=" in str(path):
            hint = f"; write --set {path}: every key=value has a --set of its own"
        if preset := nearest_preset(str(path), guess=False):
            hint = f"; to train that known model write --preset {preset}"
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
        near = nearest_preset(name)
        hint = f"did you mean {toml(near)}? " if near else ""
        raise ValueError(f"model.preset = {toml(name)} is not known; {hint}There are {', '.join(PRESETS)}")
    return _model_keys(PRESETS[name])


def _pretrained(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the model to start from, and its tokenizer unless the text is tokenised already."""
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
    """A model's keys. Derived values stay derived: ffn, for one, follows a changed hidden."""
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
