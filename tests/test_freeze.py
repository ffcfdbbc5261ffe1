"""Runs with frozen parameters: the same curve on every cuboid, no moments, resumed anywhere, thawed when asked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tiny import Cuboid, curve, furthest, on, ranks_of, sets, settings, tiny, write_text
from torch import Tensor

from cuboid.model.module import declared
from cuboid.run.launch import Pool, World
from cuboid.train.config import TrainConfig
from cuboid.train.loop import Trainer
from cuboid.train.writer import Writer

Pools = Callable[[int], Pool]
LAYERS, FREEZE = "model.layers=2", r"model.freeze=embed|blocks\.0"
SAME = 1e-5


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.mark.parametrize("cuboid", ["2,2,1", "1,1,2,2"])
def test_frozen_run_has_serials_curve(cuboid: str, text: Path, pool: Pools) -> None:
    wanted = pool(1).run(curve, tiny(text, LAYERS, FREEZE, *on("1,1,1")), 4, True)[0]
    trained = pool(1).run(curve, tiny(text, LAYERS, *on("1,1,1")), 4, True)[0]
    config = tiny(text, LAYERS, FREEZE, *on(cuboid), "guard.check_every=2")
    for found in pool(ranks_of(config)).run(curve, config, 4):
        assert furthest(found, wanted) < SAME < furthest(found, trained)


def steps(world: World, config: TrainConfig, folder: Path, resume: Path | None, until: int) -> dict[str, Any]:
    trainer = Trainer(config, world)
    said = trainer.resume(resume) if resume is not None else ""
    writer = Writer(folder, trainer.model, 0, False)
    before = {name: p.detach().clone() for name, p, _ in declared(trainer.model)}
    losses = [trainer.step()[0].loss for _ in range(until - trainer.done)]
    writer.save(trainer.done, trainer.optimizer, trainer.state())
    writer.wait()
    names = {p: name for name, p, _ in declared(trainer.model)}
    found: dict[str, Any] = {
        "losses": losses,
        "said": said,
        "moved": {name for name, p, _ in declared(trainer.model) if not p.equal(before[name])},
        "updates": {names[p]: int(_step(each)) for p, each in trainer.optimizer.state.items()},
    }
    trainer.model.parallel.mesh.close()
    dist.destroy_process_group(writer._axis.group)
    return found


def _step(state: dict[str, Tensor]) -> Tensor:
    return state["step"]


def test_frozen_run_resumes_anywhere_and_thaws(text: Path, pool: Pools, tmp_path: Path) -> None:
    def run(shape: str, freeze: str, resume: str, until: int) -> dict[str, Any]:
        config = tiny(text, LAYERS, freeze, *on(shape))
        folder = tmp_path / f"{shape} {freeze[-3:]} {until}"
        done: list[dict[str, Any]] = pool(4).run(steps, config, folder, tmp_path / resume if resume else None, until)
        return done[0] | {"moved": set().union(*(each["moved"] for each in done))}

    straight = run("2,2,1", FREEZE, "", 4)
    assert not any(name.startswith(("embed", "blocks.0")) for name in straight["moved"] | straight["updates"].keys())
    first = run("2,2,1", FREEZE, "", 2)
    again = run("1,2,2", FREEZE, "2,2,1 \\.0 2", 4)
    assert first["losses"] + again["losses"] == pytest.approx(straight["losses"], rel=1e-5)
    assert again["said"] == ""

    thawed = run("2,1,2", "model.freeze=embed", "2,2,1 \\.0 2", 4)
    assert thawed["losses"][0] == pytest.approx(straight["losses"][2], rel=1e-5)
    assert thawed["said"].startswith(
        'model.freeze changed from "embed|blocks\\\\.0" to "embed": 16 tensors newly trained'
    )
    assert thawed["said"].endswith("0 tensors newly frozen")
    assert {name: thawed["updates"][name] for name in ("blocks.0.norm1.weight", "blocks.1.norm1.weight")} == {
        "blocks.0.norm1.weight": 2,
        "blocks.1.norm1.weight": 4,
    }
    later = run("2,2,1", "model.freeze=embed", "2,1,2 bed 4", 5)  # each parameter's own count of updates is kept
    assert later["updates"] == {name: count + 1 for name, count in thawed["updates"].items()}
    assert later["said"] == ""


def test_train_freeze_is_checked_before_ranks_start(cuboid: Cuboid, text: Path) -> None:
    for change, said in (
        ("model.freeze=embedd", "model.freeze='embedd': 'embedd' is in no parameter's name; did you mean embed"),
        ("model.freeze=.", "leaves nothing to train"),
    ):
        found = cuboid("train", *sets([*settings(text), *on("1,1,1"), change]))
        assert found.code == 2
        assert said in found.err


def test_train_freeze_is_shown(cuboid: Cuboid, text: Path) -> None:
    changes = settings(text, *on("1,1,1"), "schedule.steps=1", "schedule.warmup=0", "model.freeze=embed")
    found = cuboid("train", *sets(changes))
    assert found.code == 0, found.err
    assert 'frozen  8,192 parameters in 1 tensor, by "embed"' in found.out
