"""Commands on pretended devices and on the CPU, as JSON for test_values.py: `values.py WHAT FOLDER`, of verify, train,
doctor, calibrate, bench, steps and planted."""

import messages  # noqa: F401, I001  before torch

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor

import emulated
import pretend
from tape import Tape
from cuboid.cli import app
from cuboid.doctor import trials
from cuboid.layers.attend import Attend
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import shard_of
from cuboid.model.config import ModelConfig
from cuboid.model.hf.load import from_pretrained
from cuboid.plan.calibrate import timing
from cuboid.run.errors import RankError
from cuboid.run.launch import World, launch
from cuboid.train.config import load
from cuboid.train.loop import Trainer

MODEL = ("family=gpt2", "layers=2", "hidden=32", "heads=4", "ffn=48", "context=16", "dropout=0.1")
OTHERS = (
    *("data.seq=16", "data.batch=8", "data.val_fraction=0.1", "optimizer.lr=0.01", "schedule.warmup=2"),
    *("logging.eval_batches=1", "logging.sample_tokens=2", "logging.tensorboard=false"),
    *("overlap.sub_batches=2", "precision.dtype=fp32"),
)


def settings(folder: Path, *more: str) -> list[str]:
    text = folder / "text.txt"
    text.write_text(" ".join(f"{i * i} is {i} times {i};" for i in range(300)))
    return [*(f"model.{each}" for each in MODEL), *OTHERS, f"data.paths={text}", *more]


def cuboid(*words: Any) -> str:
    """What a command prints."""
    stdout = os.dup(1)
    with TemporaryFile("w+") as said:
        os.dup2(said.fileno(), 1)  # ranks print too
        try:
            code = app([str(word) for word in words], prog_name="cuboid", standalone_mode=False)
            sys.stdout.flush()
        finally:
            os.dup2(stdout, 1)
        said.seek(0)
        text = said.read()
    assert not code, f"{words}: {code}\n{text}"
    return text


def trained(folder: Path, kind: str) -> dict[str, Any]:
    """A run, gone on with on another cuboid and traced, and what is made of it."""
    sets = settings(folder, "checkpoint.every=2", "checkpoint.keep=0", "schedule.steps=5", "logging.eval_every=0")
    run = folder / f"{kind} run"
    words = [word for each in [*sets, f"logging.folder={run}"] for word in ("--set", each)]
    cuboid("train", "--cuboid", "2,1,1", *words)
    lines = (run / "metrics.jsonl").read_text()
    said = cuboid("sample", run, "--cuboid", "1,2,1", "--prompt", "4 is ", "--tokens", 3, "--temperature", 0)
    cuboid("train", "--cuboid", "1,1,2", "--resume", run / "checkpoints" / "step-00000002", "--trace", 1)
    again = (run / "metrics.jsonl").read_text()
    (folder / "short.txt").write_text("16 is 4 times 4; 25 is 5 times 5;")
    evaluated = cuboid("eval", run, folder / "short.txt", "--cuboid", "1,2,1", "--json")
    cuboid("export", run, folder / f"{kind} model", "--cuboid", "1,1,2")
    traced = json.loads((run / "trace.json").read_text())["traceEvents"]
    return {
        "said": said,
        "first": [losses(line) for line in lines.splitlines()],
        "again": [losses(line) for line in again.splitlines()],
        "evaluated": json.loads(evaluated),
        "loaded": launch(loaded, 2, [folder / f"{kind} model"])[0],
        "lanes": sorted({each["name"] for each in traced if each["ph"] == "X"}),
        "lengths": [each["dur"] for each in traced if each["ph"] == "X"],
    }


def losses(line: str) -> list[float]:
    row = json.loads(line)
    return [row[name] for name in ("step", "loss", "grad_norm", "val_loss") if name in row]


def loaded(world: World, folder: Path) -> tuple[str, float]:
    """Where a model of `from_pretrained` is, and the sum of its weights' absolute values."""
    model = from_pretrained(folder, Cuboid(2, 1, 1))
    total = sum(float(shard_of(p).abs().sum()) for p in model.parameters())
    return next(iter(model.parameters())).device.type, total


def verified(folder: Path, kind: str) -> Any:
    return json.loads(cuboid("verify", "--cuboid", "2,1,2", "--json"))


def doctored(folder: Path, kind: str) -> Any:
    timing.BUSY, trials.SIZES["gpu"], trials.compile_fault = 0.001, trials.SIZES["cpu"], lambda device: ""
    sets = settings(folder, "precision.dtype=auto", f"logging.folder={folder / 'run'}")
    return json.loads(
        cuboid("doctor", "--cuboid", "2,1,1", "--json", *(word for each in sets for word in ("--set", each)))
    )


def calibrated(folder: Path, kind: str) -> dict[str, Any]:
    """At a small scale: a GPU's takes a GPU."""
    model = ModelConfig("gpt2", layers=1, hidden=64, heads=4, vocab=64, context=32)
    small = timing.Scale(
        model, 64, "fp32", messages=(1 << 10, 1 << 14, 1 << 18), stream=1 << 16, side=64, beside=1 << 12
    )
    timing.ON_GPU, timing.ON_CPU, timing.BUSY = small, small, 0.001
    cuboid("calibrate", folder / f"{kind}.json", "--ranks", 2)
    return json.loads((folder / f"{kind}.json").read_text())


def benched(folder: Path, kind: str) -> list[Any]:
    """Our layouts side by side. PyTorch's own resize storages, which pretended devices cannot."""
    sizes = {"ranks": 2, "layers": 1, "hidden": 32, "heads": 4, "vocab": 32, "batch": 4, "seq": 8}
    words = [word for name, value in {**sizes, "rounds": 1, "steps": 1}.items() for word in (f"--{name}", value)]
    cuboid("bench", "layouts", *words, "--only", "1-D", "--only", "cuboid", "--out", folder / f"{kind} bench")
    (path,) = (folder / f"{kind} bench").glob("*.json")
    rows: list[Any] = json.loads(path.read_text())["rows"]
    return rows


def steps(world: World, changes: list[str], planted: str = "") -> dict[str, Any]:
    """Three steps: what the host waits for in forward and backward of each, and in all; and what the last does
    otherwise than a CUDA graph of the one before would."""
    attend = Attend._attend

    def faulty(*args: Any) -> Tensor:
        Y = attend(*args)
        if planted == "a host's tensor":
            return Y + torch.zeros(Y.shape[-1])
        return Y * float(Y.isfinite().all()) if planted == "a value read back" else Y * (trainer.done + 1)

    if planted not in ("", "a new tensor"):
        Attend._attend = faulty  # type: ignore[method-assign]
    trainer, waits, tapes = Trainer(load(None, changes), world), list[Any](), list[Tape]()
    if planted == "a new tensor":
        trainer.batches.prefetch = lambda steps: None  # type: ignore[method-assign]
    play = trainer.model.play

    def played(*args: Any, **options: Any) -> Any:
        before = len(pretend.waits)
        with Tape() as tape:
            out = play(*args, **options)
        tapes.append(tape)
        inside.extend(pretend.waits[before:])
        return out

    trainer.model.play = played  # type: ignore[method-assign]
    for _ in range(3):
        inside: list[pretend.Wait] = []
        pretend.waits.clear()
        trainer.step()
        both = inside, pretend.waits
        waits.append([[f"{each.what} at {each.where}" for each in found if not each.alone] for found in both])
    _, one, two = tapes
    scales = [float(trainer.factor), trainer.scale.scale]
    return {"waits": waits, "calls": len(one.calls), "otherwise": one.differences(two), "scales": scales}


def stepped(folder: Path, kind: str) -> dict[str, Any]:
    """Of each rank of each cuboid. The scale of fp16's loss changes in each step."""
    fp16 = "precision.dtype=fp16", "precision.loss_scale=8", "precision.growth_interval=1"
    more = {
        "2,1,1,1": ["precision.dtype=bf16"],
        "1,1,2,1": ["data.micro_batches=2", "memory.recompute=full", *fp16],
        "1,1,1,2": ["data.micro_batches=2"],
    }
    found: dict[str, Any] = {}
    for each, changes in more.items():
        sizes = [f"cuboid.{axis}={size}" for axis, size in zip(("x", "y", "z", "pipe"), each.split(","), strict=True)]
        ranks = launch(steps, 2, [settings(folder, "schedule.steps=5", *sizes, *changes)])
        found |= {f"{each}, rank {rank}": seen for rank, seen in enumerate(ranks)}
    return found


def planted(folder: Path, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    sizes = settings(folder, "schedule.steps=5", "cuboid.x=1", "cuboid.y=1", "cuboid.z=1")
    for fault in ("a host's tensor", "a value read back", "a number of the step", "a new tensor"):
        try:
            found[fault] = launch(steps, 1, [sizes, fault])[0]
        except RankError as error:
            found[fault] = str(error).splitlines()
    return found


COMMANDS: dict[str, Callable[[Path, str], Any]] = {
    "verify": verified,
    "train": trained,
    "doctor": doctored,
    "calibrate": calibrated,
    "bench": benched,
    "steps": stepped,
    "planted": planted,
}

if __name__ == "__main__":
    command, at = COMMANDS[sys.argv[1]], Path(sys.argv[2])
    found = {"cuda": command(at, "cuda")}
    if sys.argv[1] in ("verify", "train", "calibrate"):
        emulated.DEVICES = 0
        found["cpu"] = command(at, "cpu")
    print(json.dumps(found))
