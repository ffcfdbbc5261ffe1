"""Training on a pipeline of cuboids: the curve of one device, checkpoints, Hugging Face folders, samples."""

from collections.abc import Callable
from pathlib import Path

import pretrained
import pytest
import torch
from test_checkpoint import Run, stretch
from test_generate import GPT2, GREEDY, LLAMA, PROMPT, tokens_of, without_cache
from test_hf import rewritten
from test_watch import AMPLE, LIMIT, steps
from tiny import Curve, curve, furthest, losses, on, ranks_of, tiny, write_text

from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import shard_of
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import CuboidParallel
from cuboid.model.hf.folder import FILE
from cuboid.model.transformer import Transformer
from cuboid.run.errors import RankError
from cuboid.run.launch import Pool, World
from cuboid.run.watch import Stalled
from cuboid.train.agree import Corrupted, check
from cuboid.train.checkpoint import newest
from cuboid.train.compare import curves
from cuboid.train.config import TrainConfig
from cuboid.train.loop import Trainer

Pools = Callable[[int], Pool]
STEPS, SAME = 8, 1e-5
DEEP = ("model.layers=4", "model.dropout=0.1")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def reference(text: Path, pool: Pools) -> Curve:
    """The curve on one device."""
    found: Curve = pool(1).run(curve, tiny(text, *on("1,1,1"), *DEEP), STEPS, True)[0]
    return found


def curve_of(pool: Pools, config: TrainConfig, steps: int = STEPS) -> Curve:
    every: list[Curve] = pool(ranks_of(config)).run(curve, config, steps)
    assert all(each == every[0] for each in every)
    return every[0]


@pytest.mark.parametrize(
    ("cuboid", "changes"),
    [
        ("1,2,1,1,2", "data.micro_batches=4"),
        ("2,1,1,1,2", "data.micro_batches=4 overlap.pipeline=interleaved memory.recompute=full"),
        ("1,1,1,2,3", "data.micro_batches=4 overlap.pipeline=zero-bubble overlap.split=2,1,1"),
        ("1,1,2,1,4", "data.micro_batches=2 overlap.beside=true overlap.sub_batches=2"),
    ],
)
def test_trainer_loss_curve_is_same_on_a_pipe(
    cuboid: str, changes: str, text: Path, reference: Curve, pool: Pools
) -> None:
    assert furthest(curve_of(pool, tiny(text, *on(cuboid), *DEEP, *changes.split())), reference) < SAME


@pytest.mark.slow
@pytest.mark.parametrize("cuboid", ["1,2,1,1,2", "1,1,1,1,4"])
def test_trainer_curve_of_100_steps_is_same_on_a_pipe(cuboid: str, text: Path, pool: Pools) -> None:
    more = (*DEEP, "data.micro_batches=4", "schedule.steps=100")
    wanted = curve_of(pool, tiny(text, *on("1,1,1"), *more), 100)
    assert furthest(losses(curve_of(pool, tiny(text, *on(cuboid), *more), 100)), losses(wanted)) < 1e-4
    assert wanted[-1][0] < wanted[0][0]


@pytest.mark.slow
def test_trainer_curve_of_100_steps_in_fp64_is_same_on_a_zero_bubble_pipe(text: Path, pool: Pools) -> None:
    more = ("data.micro_batches=4", "schedule.steps=100", "overlap.pipeline=zero-bubble")
    found = pool(2).run(curves, tiny(text, *on("1,1,1,1,2"), *DEEP, *more), torch.float64, True)[0]
    assert found.difference < 1e-9
    assert found.serial[-1] < found.serial[0]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_trainer_low_precision_on_a_pipe_stays_within_rounding(
    dtype: str, text: Path, reference: Curve, pool: Pools
) -> None:
    """The scale of fp16 is one decision of all ranks: at first it is too large, and all skip."""
    more = (f"precision.dtype={dtype}", "data.micro_batches=4", "precision.loss_scale=16777216")
    config = tiny(text, *on("1,2,1,1,2"), *DEEP, *more)
    found, *others = (losses(each) for each in pool(ranks_of(config)).run(curve, config, STEPS))
    assert all(each == found for each in others)
    if dtype == "bf16":
        assert 1e-6 < furthest(found, losses(reference)) < 2.0**-8
    assert found[-1] < found[0]


def test_checkpoint_moves_between_cuboids_and_pipes(text: Path, tmp_path: Path, pool: Pools) -> None:
    (straight, _), *_ = pool(1).run(stretch, tiny(text, *on("1,1,1"), *DEEP), tmp_path / "straight", None, 8)
    found, resume = list[float](), None
    for i, cuboid in enumerate(["2,2,2", "1,2,2,1,2", "4,1,1", "1,1,1,1,3"]):
        config = tiny(text, *on(cuboid), *DEEP, "data.micro_batches=2")
        found += pool(ranks_of(config)).run(stretch, config, tmp_path / "moved", resume, 2 * (i + 1))[0][0]
        resume = newest(tmp_path / "moved")
    assert furthest(found, straight) < SAME


def check_ranks(world: World, config: TrainConfig, flipped: int) -> str:
    trainer = Trainer(config, world)
    trainer.step()
    table = trainer.model.embed
    if world.rank == flipped and table is not None:
        shard_of(table.weight).view(-1)[3] += 1
    try:
        check(trainer.model, trainer.optimizer, 1, 1)
    except Corrupted as error:
        return str(error)
    finally:
        trainer.model.parallel.mesh.close()
    return ""


def test_agree_check_compares_a_tied_table_of_the_first_stage_and_the_last(text: Path, pool: Pools) -> None:
    config = tiny(text, *on("1,2,1,1,3"), *DEEP, "data.micro_batches=2")
    assert set(pool(6).run(check_ranks, config, -1)) == {""}
    (said,) = set(pool(6).run(check_ranks, config, 1))
    assert "copies of embed.weight differ between ranks 1, 5" in said


@pytest.mark.parametrize(("config", "cuboid"), [(GPT2, Cuboid(1, 2, 1, pipe=2)), (LLAMA, Cuboid(1, 1, 2, 1, pipe=2))])
def test_generate_on_a_pipe_matches_one_device(config: ModelConfig, cuboid: Cuboid, pool: Pools) -> None:
    wanted = without_cache(config, 8)
    for found in pool(cuboid.ranks).run(tokens_of, config, cuboid, PROMPT, 8, GREEDY):
        assert found == wanted


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_save_pretrained_from_a_pipe_writes_the_same_bytes(name: str, tmp_path: Path, pool: Pools) -> None:
    folder, out = tmp_path / name, tmp_path / "out"
    pretrained.make(name, folder)
    pool(4).run(rewritten, folder, Cuboid(1, 2, 1, pipe=2), out, None, 1 << 30)
    assert (out / FILE).read_bytes() == (folder / FILE).read_bytes()


def refused(world: World) -> str:
    mesh = Mesh(Cuboid(pipe=2), world.rank)
    parallel = CuboidParallel(GPT2, mesh)
    model, place = Transformer(parallel), parallel.place(1, 4)
    ids = torch.zeros(4, 1, dtype=torch.long)
    with torch.no_grad():
        assert model(ids, ids, place).isfinite()
    try:
        model(ids, ids, place)
    except ValueError as error:
        return str(error)
    finally:
        mesh.close()
    return ""


def test_model_on_a_pipe_says_how_to_train_it(pool: Pools) -> None:
    assert all("train with `model.play(" in said for said in pool(2).run(refused))


@pytest.mark.parametrize(
    ("how", "said"), [("killed", "was killed by SIGKILL"), ("forward", r"failed\n(?s:.*)KeyError: 'the cause'")]
)
def test_watch_names_stage_that_dies_or_fails(how: str, said: str, text: Path) -> None:
    more = ("data.micro_batches=2", "overlap.pipeline=interleaved")
    config = tiny(text, *on("1,2,1,1,2"), *DEEP, *more)
    with pytest.raises(RankError, match=rf"^rank 2 \(place 1 of the pipe: stages 1, 3\) {said}"):
        Pool(4, names=config.rank_names()).run(steps, config, AMPLE, 2, how)


def test_frozen_run_on_a_pipe_has_serials_curve_and_moves(text: Path, tmp_path: Path, pool: Pools) -> None:
    """All of the first stage is frozen, where the run has two."""
    more = (*DEEP, "data.micro_batches=2", "model.freeze=embed|positions|blocks.0|blocks.1|^norm")
    (straight, _), *_ = pool(1).run(stretch, tiny(text, *on("1,1,1"), *more), tmp_path / "straight", None, 6)
    found, resume = list[float](), None
    for i, cuboid in enumerate(["1,2,1,1,2", "2,1,1", "1,1,1,1,3"]):
        config = tiny(text, *on(cuboid), *more)
        found += pool(ranks_of(config)).run(stretch, config, tmp_path / "moved", resume, 2 * (i + 1))[0][0]
        resume = newest(tmp_path / "moved")
    assert furthest(found, straight) < SAME


def test_watch_names_stage_that_stalls(text: Path) -> None:
    config = tiny(text, *on("1,1,1,1,2"), *DEEP, "data.micro_batches=2")
    said = r"rank 0 \(place 0 of the pipe: stage 0\) did not arrive: it is at test_watch\.py"
    with pytest.raises(Stalled, match=said) as caught:
        Pool(2).run(steps, config, LIMIT, 0, "busy")
    assert "axis pipe forward, collective 5: rank 1 waits for rank 0 with forward of micro-batch 0" in str(caught.value)


def held(world: World, config: TrainConfig) -> list[str]:
    run = Run(world, config, Path())
    names = [name for name, _ in run.trainer.model.named_parameters()]
    run.close()
    return names


def test_rank_of_a_pipe_holds_its_own_stages_alone(text: Path, pool: Pools) -> None:
    config = tiny(text, *on("1,1,1,1,2"), *DEEP, "data.micro_batches=4", "overlap.pipeline=interleaved")
    first, last = ({".".join(name.split(".")[:2]) for name in names} for names in pool(2).run(held, config))
    assert first == {"embed.weight", "positions.weight", "blocks.0", "blocks.2"}
    assert last == {"embed.weight", "blocks.1", "blocks.3", "norm.weight", "norm.bias"}
