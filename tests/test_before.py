"""A run of before the step had an explicit backward goes on as it would have: configuration, checkpoint, curve."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

from cuboid import Pool, World
from cuboid.train.config import TrainConfig, load
from cuboid.train.keys import RenamedKey
from cuboid.train.loop import Trainer

BEFORE = Path(__file__).parent / "run_0_1"  # 12 steps on 2,2,1, two micro-batches, dropout; the checkpoint of step 6


def resumed(world: World, folder: Path, config: TrainConfig) -> list[tuple[float, float]]:
    """Losses and gradient norms of the steps after the checkpoint's."""
    trainer = Trainer(config, world)
    trainer.resume(folder)
    found = [trainer.step()[0] for _ in range(6)]
    trainer.model.parallel.mesh.close()
    return [(report.loss, report.grad_norm) for report in found]


@pytest.mark.parametrize(
    "changes",
    [[], ["overlap.beside=true"], ["cuboid.x=1", "cuboid.z=2", "overlap.sub_batches=2"]],
    ids=["same", "beside", "z"],
)
def test_run_of_before_resumes_with_the_same_curve(
    changes: list[str], pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    folder = copytree(BEFORE, tmp_path / "run")
    file = folder / "config.toml"
    file.write_text(file.read_text().replace("@", str(folder)))
    with pytest.warns(RenamedKey, match="memory.checkpoint is now called memory.recompute"):
        config = load(file, changes)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    wanted = [(row["loss"], row["grad_norm"]) for row in rows[6:]]
    for found in pool(4).run(resumed, folder, config):
        assert len(found) == len(wanted) == 6
        for pair, other in zip(found, wanted, strict=True):
            assert pair == pytest.approx(other, rel=2e-6)
