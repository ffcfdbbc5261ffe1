"""One stretch of the demo's training on one layout: losses of every step, and what a rank holds and sends."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from cuboid.demo.text import TextFacts
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import shard_of
from cuboid.mesh.mesh import Mesh
from cuboid.model.cuboid import CuboidParallel
from cuboid.model.generate import Sampling, generate
from cuboid.model.transformer import Transformer
from cuboid.plan.measure import Memory
from cuboid.run.launch import World
from cuboid.run.watch import watched
from cuboid.train.config import TrainConfig
from cuboid.train.layout import on_cuboid, on_one_device
from cuboid.train.loop import Trainer
from cuboid.train.origin import Origin
from cuboid.train.progress import Progress, StepReport
from cuboid.train.run import RunFolder
from cuboid.train.writer import Writer

#: Of weights and all that is computed. In fp32 rounding alone drives two correct runs 1e-5 apart; in fp64 it does not.
DTYPE = torch.float64


@dataclass(frozen=True)
class Stretch:
    """Training of one layout from step `first` to the last; sizes are of rank 0, in bytes."""

    layout: str
    first: int
    losses: list[float]
    validation: dict[int, float]  # step -> nats per token
    parameters: int
    at_rest: int  # weights, gradients, optimizer state
    peak: int  # tensors alive at the fullest moment of a step
    sent: int  # per step

    @property
    def last(self) -> int:
        return self.first + len(self.losses) - 1


def train_stretch(
    world: World, config: TrainConfig, facts: TextFacts, folder: Path | None, until: int, resume: bool
) -> Stretch | None:
    """Train up to step `until`, from the newest checkpoint in `folder` or from the beginning, and save one there.

    Without a folder: on one device, silently, saving nothing. Every rank calls it; rank 0 has the result.
    """
    with watched(world.rank, world.size, config.watch.timeout) as watch:
        layout = on_one_device if folder is None else on_cuboid
        trainer = Trainer(config, replace(world, watch=watch), layout, DTYPE)
        if folder is not None and resume:
            trainer.resume(folder)
        run = RunFolder.open(folder) if folder is not None and world.rank == 0 else None
        writer = Writer(folder / "checkpoints", trainer.model, 0, False) if folder is not None else None
        first, every = trainer.done + 1, config.logging.eval_every
        losses: list[float] = []
        validation: dict[int, float] = {}
        console = Console(quiet=world.rank != 0 or folder is None, highlight=False)
        with Progress(until, trainer.done, console) as progress:
            while trainer.done < until:
                if trainer.done == until - 1:  # the memory of one step, when all is warm
                    with Memory(trainer.model) as memory:
                        report = _step(trainer)
                else:
                    report = _step(trainer)
                sent = sum(trainer.model.parallel.mesh.ledger.bytes().values())
                progress.update(report)
                losses.append(report.loss)
                row = {"step": report.step, "loss": report.loss}
                if folder is not None and (report.step % every == 0 or report.step == config.schedule.steps):
                    validation[report.step] = row["val_loss"] = trainer.validate()
                    bits = facts.bits_per_byte(row["val_loss"])
                    progress.note(f"step {report.step}: validation {bits:.3f} bits per byte")
                if run is not None:
                    run.log(row)
        if writer is not None:
            writer.save(trainer.done, trainer.optimizer, trainer.state())
        if run is not None:
            run.close()
    shards = [shard_of(parameter) for parameter in trainer.model.parameters()]
    weights = sum(shard.numel() * shard.element_size() for shard in shards)
    name = "one device" if folder is None else str(config.cuboid_shape())
    parameters = sum(shard.numel() for shard in shards)
    found = Stretch(name, first, losses, validation, parameters, 4 * weights, memory.peak + 2 * weights, sent)
    return found if world.rank == 0 else None


def _step(trainer: Trainer) -> StepReport:
    return trainer.step()[0]


def sample_texts(world: World, folder: Path, prompts: list[str], tokens: int) -> list[str]:
    """Texts that continue the prompts, from the newest checkpoint in `folder`, on one process."""
    origin, mesh = Origin.find(folder), Mesh(Cuboid(1, 1, 1), world.rank, world.device)
    model, tokenizer = Transformer(CuboidParallel(origin.config, mesh), None), origin.tokenizer()
    origin.load(model)
    model.eval()
    found = []
    for i, prompt in enumerate(prompts):
        ids = [int(token) for token in tokenizer.encode(prompt)]
        for token in generate(model, ids.copy(), tokens, Sampling(0.5, seed=i), tokenizer.vocab):
            if token == tokenizer.end:
                break
            ids.append(token)
        found.append(tokenizer.decode(ids))
    return found
