"""Steps on pretended devices, watched for what NCCL's streams forbid: between the launch of a collective and its wait,
reading what it writes, or writing what it reads or writes. Likewise for a checkpoint's copies, which have a stream of
their own, and the steps after them. As JSON for test_races.py: `races.py steps`, `planted` or `checkpoint FOLDER`."""

import messages  # noqa: I001  before torch

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import pretend
from cuboid.comm.flight import Launched
from cuboid.comm.transport.nccl import Nccl
from cuboid.device import HostCopies
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import CuboidParallel, Policy
from cuboid.model.transformer import Transformer
from cuboid.run.errors import RankError
from cuboid.run.launch import World, launch
from cuboid.step.runner import At
from cuboid.step.schedule import Schedule
from cuboid.train.config import load
from cuboid.train.loop import Trainer
from cuboid.train.writer import Writer
from values import settings


COPY = "a copy to the host"


class Race(RuntimeError):
    pass


class Span(NamedTuple):
    """Of a tensor in memory, its last byte excluded."""

    start: int
    stop: int

    def meets(self, other: "Span") -> bool:
        return self.start < other.stop and other.start < self.stop


def span(x: Tensor) -> Span:
    if not x.numel():
        return Span(0, 0)
    length = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return Span(x.data_ptr(), x.data_ptr() + length * x.element_size())


class Detector:
    """Of one rank."""

    def __init__(self) -> None:
        self.flying: dict[int, tuple[messages.Message, list[Span], list[Span]]] = {}
        self.launched = 0
        messages.launched.append(self.launch)
        messages.awaited.append(self.land)
        pretend.watchers.append(self.see)
        pretend.held.append(self.hold)
        self.copied = 0

    def launch(self, message: messages.Message) -> None:
        self.see(message.kind, message.reads, message.writes)
        self.launched += 1
        self.flying[id(message)] = message, [*map(span, message.reads)], [*map(span, message.writes)]

    def hold(self) -> None:
        """The copies beside are complete before what follows."""
        self.flying = {i: each for i, each in self.flying.items() if each[0].kind != COPY}

    def land(self, message: messages.Message) -> None:
        self.flying.pop(id(message), None)

    def see(self, name: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        if pretend.beside:
            self.copied += 1
            message = messages.Message(COPY, reads, writes)
            self.flying[id(message)] = message, [*map(span, reads)], [*map(span, writes)]
            return
        if not self.flying:
            return
        ours = [(span(x), "reads") for x in reads] + [(span(x), "writes") for x in writes]
        for message, inputs, outputs in self.flying.values():
            taken = [(each, "output") for each in outputs] + [(each, "input") for each in inputs]
            for here, does in ours:
                for there, kind in taken:
                    if here.meets(there) and (kind == "output" or does == "writes"):
                        raise Race(
                            f"{name} at {pretend.where()} {does} an {kind} of {message.kind}, launched at "
                            f"{message.at}, before its wait"
                        )


GPT2 = ModelConfig("gpt2", layers=2, hidden=32, heads=4, vocab=37, context=16, dropout=0.1)
LLAMA = ModelConfig("llama", layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=37, context=16, qk_norm=True)

#: Model, cuboid, batch and options: every axis and schedule, on four ranks where two axes take turns.
CASES: dict[str, tuple[ModelConfig, Cuboid, int, dict[str, Any]]] = {
    "bf16": (LLAMA, Cuboid(2, 1, 1), 4, {"dtype": torch.bfloat16}),
    "prefetch": (GPT2, Cuboid(1, 1, 2), 4, {"schedule": Schedule()}),
    "no prefetch": (LLAMA, Cuboid(2, 1, 1), 4, {"schedule": Schedule(prefetch=False)}),
    "two sub-batches": (
        LLAMA,
        Cuboid(2, 1, 2),
        8,
        {"schedule": Schedule(sub_batches=2), "dtype": torch.bfloat16},
    ),
    "four sub-batches": (GPT2, Cuboid(1, 2, 2), 8, {"schedule": Schedule(sub_batches=4)}),
    "chunks": (GPT2, Cuboid(1, 2, 1), 4, {"schedule": Schedule(chunks=2)}),
    "recomputed": (LLAMA, Cuboid(2, 1, 2), 8, {"schedule": Schedule(sub_batches=2), "recompute": "full"}),
    "attention recomputed": (LLAMA, Cuboid(1, 2, 1), 4, {"recompute": "selective"}),
    "retained": (GPT2, Cuboid(1, 1, 2), 4, {"policy": Policy("retain", "retain")}),
    "sequence": (LLAMA, Cuboid(2, 1, 1), 1, {}),
    "replicas, beside": (GPT2, Cuboid(1, 2, 1, replicas=2), 8, {"schedule": Schedule(beside=True), "several": 2}),
    "pipe": (GPT2, Cuboid(2, 1, 1, pipe=2), 4, {"several": 3}),
}


def step(world: World, name: str, planted: str = "") -> int:
    """The number of messages that a rank of a case launches, forward and backward, twice."""
    config, cuboid, batch, options = CASES[name]
    options = {"schedule": Schedule(), "recompute": "none", "policy": Policy(), "several": 1, "dtype": None} | options
    mesh = Mesh(cuboid, world.rank, world.device)
    parallel = CuboidParallel(config, mesh, options["policy"], options["dtype"], options["schedule"])
    model = Transformer(parallel, 0, recompute=options["recompute"])
    place = parallel.place(batch, 16)
    ids = torch.ones(len(place.positions), len(place.samples), dtype=torch.long, device=world.device)
    at = At(place, ids, seed=1 if config.dropout else None)
    plant(planted)
    detector = Detector()
    for _ in range(2):
        model.play([(ids, at)] * options["several"])
    assert not detector.flying
    return detector.launched


def checkpointed(world: World, changes: list[str], folder: Path, planted: str) -> int:
    """The number of copies of a checkpoint, after which two steps follow."""
    trainer = Trainer(load(None, changes), world)
    writer = Writer(folder, trainer.model, keep=0, background=True)
    plant(planted)
    detector = Detector()
    trainer.step()
    writer.save(1, trainer.optimizer, trainer.state())
    for _ in range(2):
        trainer.step()
    writer.wait()
    return detector.copied


def plant(fault: str) -> None:
    """From here on, on this rank."""
    if fault == "a wait removed":
        Launched.wait = lambda self: self._result()  # type: ignore[method-assign]
    elif fault == "an input written":
        gather = Nccl.all_gather

        def written(self: Any, x: Tensor, whole: Tensor) -> Any:
            works = gather(self, x, whole)
            x.add_(0)
            return works

        Nccl.all_gather = written  # type: ignore[method-assign]
    elif fault == "an output read":
        scatter = Nccl.reduce_scatter

        def read(self: Any, xs: Any, dtype: torch.dtype) -> Any:
            works, land = scatter(self, xs, dtype)
            land()
            return works, land

        Nccl.reduce_scatter = read  # type: ignore[method-assign]
    elif fault == "a step not held":
        HostCopies.hold = lambda self: None  # type: ignore[method-assign]


FAULTS = ("a wait removed", "an input written", "an output read")


def said(run: Callable[..., Any], ranks: int, *args: Any) -> Any:
    try:
        return launch(run, ranks, args)
    except RankError as error:
        return str(error)


if __name__ == "__main__":
    if sys.argv[1] == "steps":
        found = {name: said(step, cuboid.ranks, name) for name, (_, cuboid, *_) in CASES.items()}
    elif sys.argv[1] == "checkpoint":
        folder = Path(sys.argv[2])
        changes = settings(folder, "schedule.steps=5", "cuboid.x=2", "cuboid.y=1", "cuboid.z=1")
        found = {fault: said(checkpointed, 2, changes, folder / fault, fault) for fault in ("", "a step not held")}
    else:
        found = {fault: said(step, 2, "bf16", fault) for fault in FAULTS}
    print(json.dumps(found))
