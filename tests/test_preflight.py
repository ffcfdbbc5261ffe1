"""Before ranks start: what is planned not to fit is rejected, with what would; what fits runs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import Cuboid as Command
from tiny import on, sets, settings, tiny, write_text

from cuboid.cli.train import check_before_start, on_cuboid, split_by_time, without_other_split
from cuboid.device import _left_by_groups, free_memory
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import shard_of
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import CuboidParallel
from cuboid.model.transformer import Transformer
from cuboid.plan.hardware import PRESETS
from cuboid.plan.layer import Choice, Work
from cuboid.plan.search import predict
from cuboid.run.launch import Pool, World
from cuboid.train import preflight
from cuboid.train.auto import planned_split
from cuboid.train.config import load
from cuboid.train.preflight import check_weights

ONE_STEP = ("schedule.steps=1", "schedule.warmup=0", "logging.sample_tokens=0", *on("2,1,1"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch):
    """Sets what this host has free."""

    def be(size: float) -> None:
        monkeypatch.setattr(preflight, "free_memory", lambda *_: size)

    return be


def test_preflight_runs_below_a_limit_and_rejects_above(text: Path, cuboid: Command, limit) -> None:
    peak = 2 * preflight.need(tiny(text, *ONE_STEP), apart=False).peak
    limit(peak / 0.9)
    assert (said := cuboid("train", *sets(settings(text, *ONE_STEP)))).code == 0, said.err
    limit(peak / 1.1)
    said = cuboid("train", *sets(settings(text, *ONE_STEP)))
    assert said.code == 2
    assert said.out == ""  # no rank was started
    for words in ("a rank needs", "the 2 ranks of this host need", "are free", "--force starts it regardless"):
        assert words in said.err
    said = cuboid("train", "--force", *sets(settings(text, *ONE_STEP)))
    assert said.code == 0
    assert "warning: the run does not fit" in said.err


def test_preflight_has_the_planners_figures() -> None:
    config = load(None, ["model.dropout=0.1", "data.micro_batches=2", "memory.recompute=selective"])
    work = Work(config.model_config(256), 8, 128, "fp32", 2)
    plan = predict(PRESETS["cpu"], work, config.cuboid_shape(), Choice("selective"))
    assert preflight.need(config, apart=False).by_kind == plan.memory


BIG = ["data.batch=64", "data.seq=512", "cuboid.replicas=2"]


@pytest.mark.parametrize("share", [0.9, 0.3, 0.2])
def test_preflight_remedy_is_the_smallest_that_fits(share: float, limit) -> None:
    config = load(None, BIG, "gpt2-124m")
    ranks = config.cuboid_shape().ranks
    free = share * ranks * preflight.need(config, False).peak
    limit(free)
    with pytest.raises(ValueError, match="the run does not fit") as error:
        preflight.check(config, ranks)
    advice = str(error.value).split("are free; ")[1].split(" would fit")[0]
    words = (
        advice.replace("--replicas ", "--set cuboid.replicas=").replace("--cuboid ", "--set --cuboid=").split(" --set ")
    )
    changes = [word.removeprefix("--set ") for word in words]
    for before in (changes[:-1], changes):
        others = [change for change in before if not change.startswith("--cuboid")]
        for change in before:
            if change.startswith("--cuboid="):
                others += [f"cuboid.{axis}={n}" for axis, n in zip("xyz", change[9:].split(","), strict=True)]
        fits = ranks * preflight.need(load(None, [*BIG, *others], "gpt2-124m"), False).peak <= free
        assert fits == (before is changes), (advice, before)


ON_PIPE = (*on("1,2,1,1,2"), "model.layers=8", "model.hidden=128", "data.seq=64")


def test_preflight_changes_keep_the_ranks_of_a_pipe() -> None:
    config = load(None, [*ON_PIPE, "model.vocab=256", "data.micro_batches=8"])
    found = dict(preflight.changes(config))
    assert "--cuboid 1,1,2" in found
    assert {changed.cuboid_shape().ranks for changed in found.values()} == {4}


def test_preflight_advises_micro_batches_that_the_schedule_allows() -> None:
    few = ("model.vocab=256", "data.batch=30", "data.micro_batches=2", "overlap.pipeline=interleaved")
    config = load(None, [*ON_PIPE, *few])
    assert [changed.data.micro_batches for _, changed in preflight._in_micro_batches(config)] == [3, 6, 10, 30]
    assert preflight.remedy(config, 4, 1, False).startswith("no recomputation, micro-batches or other cuboid")


def weights_of(world: World, config: ModelConfig, cuboid: Cuboid) -> int:
    mesh = Mesh(cuboid, world.rank)
    model = Transformer(CuboidParallel(config, mesh))
    mesh.close()
    return sum(shard_of(each).nbytes for each in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_check_weights_counts_the_fullest_places_of_a_pipe(
    tied: bool, limit, monkeypatch: pytest.MonkeyPatch, pool: Callable[[int], Pool]
) -> None:
    config, cuboid = (
        ModelConfig("gpt2", layers=5, hidden=16, heads=4, vocab=64, context=8, tied=tied),
        Cuboid(2, pipe=2),
    )
    held = pool(4).run(weights_of, config, cuboid)
    for local, size in ((2, 2 * max(held)), (4, sum(held))):
        monkeypatch.setattr(preflight, "local_ranks", lambda _, local=local: local)
        limit(size / 1.04)
        check_weights(config, cuboid)
        limit(size / 1.06)
        with pytest.raises(ValueError, match="does not fit"):
            check_weights(config, cuboid)


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_preflight_looks_at_the_host_unless_each_rank_gets_a_gpu(
    gpus: int, text: Path, limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(1000)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = tiny(text, *ONE_STEP)
    for check, words in (
        (check_before_start, (config, 2, False)),
        (check_weights, (config.model_config(256), Cuboid(2))),
    ):
        if gpus == 2:
            check(*words)
        else:
            with pytest.raises(ValueError, match="does not fit"):
                check(*words)


def test_preflight_rejects_a_model_beyond_any_change(cuboid: Command, limit) -> None:
    limit(16e9)
    said = cuboid("train", "--preset", "llama-3-8b", "--set", "cuboid.x=8")
    assert said.code == 2
    assert said.out.startswith("cuboid  x=8 as given, y=2 and z=2 by default: 8,2,2, 32 ranks; --cuboid 8,1,1")
    assert "no recomputation, micro-batches or other cuboid of as many ranks is enough" in said.err
    assert "use a smaller model or at least" in said.err
    assert said.err.count("\n") == 2  # and that ranks share cores


def test_train_says_which_axes_are_defaults(text: Path, cuboid: Command, tmp_path: Path, limit) -> None:
    limit(1000)  # rejected, once that is said
    assert cuboid("train", *sets([*settings(text), "cuboid.x=1"])).out.startswith(
        "cuboid  x=1 as given, y=2 and z=2 by default: 1,2,2, 4 ranks; --cuboid 1,1,1 gives all three"
    )
    limit(1e12)
    (tmp_path / "some.toml").write_text("[cuboid]\ny = 1\nz = 1\n")
    for words in (["some.toml", "--set", "cuboid.x=1"], ["--cuboid", "1,1,1"], sets(on("1,1,1"))):
        said = cuboid("train", *words, *sets([*settings(text), "schedule.steps=1", "schedule.warmup=0"]))
        assert said.code == 0, said.err
        assert "by default" not in said.out


def test_train_warns_once_of_ranks_that_share_cores() -> None:
    assert preflight.crowd(1) == ""
    assert "4096 ranks share" in preflight.crowd(4096)


def test_train_warns_of_a_pipe_with_fewer_micro_batches_than_places(text: Path) -> None:
    def said(*changes: str) -> str:
        return preflight.idle_places(tiny(text, *on("1,1,1,1,4"), "model.layers=8", *changes))

    few = "2 micro-batches on a pipe of 4 places: about 60% of a step is idle; use --set data.micro_batches=4, or"
    assert said("data.micro_batches=2").startswith(few)
    assert "45% of a step is idle" in said("data.micro_batches=2", "overlap.pipeline=zero-bubble")
    assert "1 micro-batch on" in said("overlap.pipeline=interleaved")
    assert "use a larger data.batch" in said("data.batch=2")
    assert said("data.micro_batches=4") == ""


def test_train_cuboid_overrides_the_configuration_but_not_options() -> None:
    config = load(None, ["cuboid.pipe=4", "cuboid.replicas=2"])
    assert on_cuboid(config, "1,1,1 pipe=2", "").cuboid_shape() == Cuboid(replicas=2, pipe=2)
    assert on_cuboid(config, "1,1,1", "", pipe=4).cuboid_shape() == Cuboid(replicas=2, pipe=4)
    with pytest.raises(ValueError, match="has pipe=2, and pipe=4 is given too"):
        on_cuboid(config, "1,1,1 pipe=2", "", pipe=4)


def test_train_warns_of_keys_of_a_pipe_without_one(text: Path, cuboid: Command, limit) -> None:
    limit(1000)  # rejected, once that is said
    more = ("overlap.pipeline=gpipe", "overlap.split=1,1")
    said = cuboid("train", *sets(settings(text, *ONE_STEP, *more))).err
    assert said.startswith("warning: not used without a pipe: overlap.pipeline, overlap.split; set cuboid.pipe")
    for pipe in ("cuboid.pipe=2", "cuboid.others=2,1,1 pipe=2"):
        assert load(None, [*ONE_STEP, *more, pipe]).without_pipe() == []


def test_train_splits_blocks_by_planned_time_and_records_it(text: Path, cuboid: Command, tmp_path: Path) -> None:
    """The head of a large vocabulary takes as long as several blocks. A resumed run keeps the split on a pipe of as
    many stages, and gets another one on others."""
    pipe = [*ONE_STEP, *on("1,1,1,1,2"), "model.layers=6", "model.vocab=20000", "data.micro_batches=2"]
    said = cuboid("train", *sets(settings(text, *pipe, f"logging.folder={tmp_path / 'run'}")))
    assert said.code == 0, said.err
    written = load(tmp_path / "run" / "config.toml")
    first, last = written.overlap.split
    assert first > last
    assert f"split   {first} + {last} blocks, by planned time" in said.out
    assert without_other_split(written) == written
    other = without_other_split(load(tmp_path / "run" / "config.toml", ["cuboid.pipe=3"]))
    assert sum(planned_split(other, "cpu")) == 6
    assert split_by_time(written, "") == written


def test_eval_rejects_weights_beyond_memory(text: Path, cuboid: Command, limit, tmp_path: Path) -> None:
    limit(1e12)
    changes = settings(text, *ONE_STEP, f"logging.folder={tmp_path / 'run'}")
    assert cuboid("train", *sets(changes)).code == 0
    limit(1000)
    for words in (("eval", tmp_path / "run", "--seq", "16"), ("sample", tmp_path / "run")):
        said = cuboid(*words)
        assert said.code == 2
        assert "the model does not fit: its weights are" in said.err


def test_preflight_looks_at_a_ranks_gpu(text: Path, limit) -> None:
    config, world = tiny(text, *ONE_STEP), World(0, 2, torch.device("cuda", 0), 2)
    peak = preflight.need(config, apart=True, gpu=True).peak
    limit(peak / 0.9)
    preflight.check_device(world, config)
    limit(peak / 1.1)
    with pytest.raises(ValueError, match="a GPU has"):
        preflight.check_device(world, config)


def test_free_memory_keeps_to_control_groups(tmp_path: Path) -> None:
    groups, root = tmp_path / "cgroup", tmp_path / "fs"

    def put(folder: Path, **files: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name.replace("_", ".", 1)).write_text(f"{value}\n")

    put(root / "job", memory_max=1000, memory_current=700, memory_stat="inactive_file 200\nactive_file 50\nanon 450")
    put(root / "job" / "rank", memory_max="max", memory_current=10, memory_stat="inactive_file 0")
    groups.write_text("0::/job/rank\n")
    assert list(_left_by_groups(groups, root)) == [550]
    put(root / "memory" / "a", memory_limit_in_bytes=100, memory_usage_in_bytes=90, memory_stat="total_active_file 5")
    groups.write_text("5:devices:/\n4:memory:/a\n0::/\n")
    assert list(_left_by_groups(groups, root)) == [15]
    assert list(_left_by_groups(tmp_path / "none", root)) == []
    assert free_memory() > 0
