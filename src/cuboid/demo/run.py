"""The demo from end to end: prepare, train on a cuboid and on one device, resume on another cuboid, sample."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cuboid.demo.curve import Stretch, sample_texts, train_stretch
from cuboid.demo.text import TextFacts, prepare, valid_lines
from cuboid.mesh.cuboid import Cuboid
from cuboid.run.launch import Pool, launch
from cuboid.train.config import CuboidSection, TrainConfig, load, resolved_toml
from cuboid.train.keys import toml
from cuboid.train.plot import plot_curves
from cuboid.train.run import RunFolder

#: How far the losses may be apart at any step.
TOLERANCE = 1e-5
PROMPTS = ("class ", "def ", "import ", "if ", "for ", "return ")
FIRST, SECOND = Cuboid(2, 2, 2), Cuboid(1, 4, 2)


@dataclass(frozen=True)
class DemoSize:
    """The size of the demo. The defaults take a few minutes on two cores."""

    steps: int = 240
    layers: int = 2
    hidden: int = 128
    batch: int = 16
    vocab: int = 1024
    text_bytes: int = 3_000_000
    sample_tokens: int = 120
    first: Cuboid = FIRST
    second: Cuboid = SECOND


@dataclass(frozen=True)
class DemoResult:
    """The results of the demo; demo.json has them too."""

    facts: TextFacts
    alone: Stretch
    stretches: list[Stretch]  # of the cuboids
    samples: list[str]

    @property
    def losses(self) -> list[float]:
        """The loss of every step on the cuboids."""
        return [loss for stretch in self.stretches for loss in stretch.losses]

    def apart(self, stretch: Stretch) -> float:
        """The largest difference to one device's loss at any step of a stretch; infinite where one is not a number."""
        alone = self.alone.losses[stretch.first - 1 : stretch.last]
        found = [abs(a - b) for a, b in zip(alone, stretch.losses, strict=True)]
        return max(each if each == each else float("inf") for each in found)

    @property
    def difference(self) -> float:
        return max(map(self.apart, self.stretches))

    @property
    def bits_per_byte(self) -> dict[int, float]:
        """Bits per byte of the held-out text, by step."""
        return {
            step: self.facts.bits_per_byte(nats) for each in self.stretches for step, nats in each.validation.items()
        }

    @property
    def valid_lines(self) -> tuple[int, int]:
        return valid_lines(self.samples)


def configuration(folder: Path, size: DemoSize) -> TrainConfig:
    """The demo's training as any other: its file is `folder` / config.toml."""
    return load(
        None,
        [
            f"data.paths=[{toml(str(folder / 'tokens'))}]",
            f"data.batch={size.batch}",
            f"model.layers={size.layers}",
            f"model.hidden={size.hidden}",
            "model.tied=true",
            "optimizer.lr=4e-3",
            f"schedule.steps={size.steps}",
            f"schedule.warmup={size.steps // 10}",
            "precision.dtype=fp32",  # for cuboid train, when it resumes the run; the demo computes in `curve.DTYPE`
            f"logging.folder={toml(str(folder))}",
            f"logging.eval_every={max(size.steps // 6, 1)}",
            "logging.eval_batches=8",  # of samples spread over the held-out text
        ],
    )


def run_demo(folder: Path, size: DemoSize, tell: Callable[[str], object]) -> DemoResult:
    """Run the demo and write a run folder: checkpoints, curves.png, demo.json. `tell` is called with what comes next.

    Raises ValueError if the folder is not empty.
    """
    config = configuration(folder, size)
    RunFolder.create(folder, resolved_toml(config)).close()
    tell("1/4  The text: Python's own library, and a byte-pair tokenizer learnt from it")
    facts = launch(prepare, 1, [folder, size.text_bytes, size.vocab, 0.08])[0]
    config = _on(config, size.first)
    config.check()
    middle = size.steps // 2
    with Pool(1) as device, ThreadPoolExecutor(1) as thread:  # one device computes beside the cuboids
        alone = thread.submit(device.run, train_stretch, config, facts, None, size.steps, False)
        tell(f"2/4  {size.first}, {size.first.ranks} ranks, up to step {middle}; beside it the same on one device")
        stretches = launch(train_stretch, size.first.ranks, [config, facts, folder, middle, False])[:1]
        tell(f"3/4  Resumed on {size.second}, {size.second.ranks} ranks, from the checkpoint of {size.first}")
        other = _on(config, size.second)
        stretches += launch(train_stretch, size.second.ranks, [other, facts, folder, size.steps, True])[:1]
        serial = alone.result()[0]
    tell("4/4  Text from the last checkpoint, on one process")
    samples = launch(sample_texts, 1, [folder, list(PROMPTS), size.sample_tokens])[0]
    found = DemoResult(facts, serial, stretches, samples)
    _keep(folder, found)
    return found


def _on(config: TrainConfig, k: Cuboid) -> TrainConfig:
    return replace(config, cuboid=CuboidSection(k.x, k.y, k.z))


def _keep(folder: Path, found: DemoResult) -> None:
    summary = {"difference": found.difference, "bits_per_byte": found.bits_per_byte, "valid_lines": found.valid_lines}
    (folder / "demo.json").write_text(json.dumps(summary | asdict(found), indent=1) + "\n", "utf-8")
    first, second = found.stretches
    name = f"{first.layout}, resumed on {second.layout} after step {first.last}"
    plot_curves({"one device": found.alone.losses, name: found.losses}, folder / "curves.png", "The demo's two runs")
