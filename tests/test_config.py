"""The training configuration: what loads, what is rejected and how, and the presets' sizes."""

import json
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cuboid.cli.config import config as config_command
from cuboid.mesh.cuboid import Cuboid
from cuboid.model.config import ModelConfig, RopeScaling
from cuboid.model.presets import PRESETS
from cuboid.train.config import ModelSection, RopeScalingSection, TrainConfig, load, resolved_toml
from cuboid.train.keys import RenamedKey, keys


def refused(*overrides: str, path: Path | None = None) -> str:
    with pytest.raises(ValueError) as caught:
        load(path, overrides).check()
    return str(caught.value)


def test_config_default_is_valid() -> None:
    config = load()
    assert config == TrainConfig()
    config.check()
    assert config.cuboid_shape() == Cuboid(2, 2, 2)
    model = config.model_config(256)
    assert (model.vocab, model.context) == (256, config.data.seq)


def test_config_model_section_has_every_model_key() -> None:
    assert {f.name for f in fields(ModelSection)} == {f.name for f in fields(ModelConfig)} | {
        "preset",
        "pretrained",
        "freeze",
    }
    assert {f.name for f in fields(RopeScalingSection)} == {f.name for f in fields(RopeScaling)}


def test_config_overrides_take_precedence_over_file(tmp_path: Path) -> None:
    file = tmp_path / "my run.toml"
    file.write_text('seed = 3\n[model]\nhidden = 64\nheads = 4\n[optimizer]\nlr = 1\n[schedule]\ndecay = "linear"\n')
    config = load(file, ["model.hidden=96", "schedule.decay=constant", "data.val_fraction = 0.5"])
    assert (config.seed, config.model.hidden, config.model.heads) == (3, 96, 4)
    assert config.optimizer.lr == 1.0
    assert isinstance(config.optimizer.lr, float)
    assert (config.schedule.decay, config.data.val_fraction) == ("constant", 0.5)
    assert config.model.layers == TrainConfig().model.layers


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("logging.sample_prompt=def f(", "def f("),
        ("logging.sample_prompt=true", "true"),
        ('logging.sample_prompt="a\\nb"', "a\nb"),
        ("logging.sample_prompt=", ""),
        ("logging.sample_prompt=a=b", "a=b"),
    ],
)
def test_config_override_accepts_bare_text(text: str, value: str) -> None:
    assert load(None, [text]).logging.sample_prompt == value


def test_config_override_splits_lists_and_makes_paths_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(None, ["cuboid.order=z,y,x,data", "data.paths=a.txt, b c.txt", 'data.tokenizer="t.json"'])
    assert config.cuboid.order == ("z", "y", "x", "replicas")
    assert config.data.paths == (str(tmp_path / "a.txt"), str(tmp_path / "b c.txt"))
    assert config.data.tokenizer == str(tmp_path / "t.json")
    assert load(None, ['data.paths=["a,b.txt"]']).data.paths == (str(tmp_path / "a,b.txt"),)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.hiden=4", ("model.hiden = 4", "no such key", "did you mean model.hidden?")),
        ("hidden=4", ("hidden = 4", "did you mean model.hidden?")),
        ("optimizer.learning_rate=1", ("optimizer.learning_rate", "did you mean optimizer.lr?")),
        ("training.batch_size=1", ("training.batch_size", "did you mean data.batch?")),
        ("optimiser.lr=1", ("optimiser.lr", "did you mean optimizer.lr?")),
        ("seed", ("--set seed", "key=value")),
        ("cuboid=2,2,2", ("cuboid = 2,2,2", "section", "cuboid.x")),
        ("model.hidden=big", ('model.hidden = "big"', "a whole number, at least 1", str(TrainConfig().model.hidden))),
        ("model.hidden=1.5", ("model.hidden = 1.5", "a whole number")),
        ("model.hidden=true", ("model.hidden = true", "a whole number")),
        ("model.hidden=0", ("model.hidden = 0", "at least 1")),
        ("optimizer.lr=nan", ("optimizer.lr = nan", "above 0")),
        ("optimizer.lr=inf", ("optimizer.lr = inf", "a finite number")),
        ("optimizer.lr=0", ("optimizer.lr = 0", "above 0")),
        ("optimizer.beta1=1", ("optimizer.beta1 = 1", "below 1")),
        ("schedule.min_lr_ratio=2", ("schedule.min_lr_ratio = 2", "at most 1")),
        ("schedule.decay=cosin", ('"cosin"', '"cosine", "linear", "constant"', 'did you mean "cosine"?')),
        ("checkpoint.background=1", ("checkpoint.background = 1", "true, false")),
        ("model.tied=1", ("model.tied = 1", 'true, false, "auto"')),
        ("model.preset=gpt2-125m", ('"gpt2-125m"', 'did you mean "gpt2-124m"?', "llama-3-405b")),
        ("data.batch=7", ("batch = 7", "5", "use 5 or 10")),
        ("schedule.warmup=300", ("schedule.warmup = 300", f"schedule.steps = {TrainConfig().schedule.steps}")),
        ("watch.timeout=0.5", ("watch.timeout = 0.5", "use 1 or more, or 0")),
        ("model.heads=2", ("heads=2", "y·z=4", "use heads 4")),
        ("model.context=64", ("seq=128", "context=64")),
        ("model.context=32", ("seq=128", "context=32", "raise context or shorten seq")),  # rotary positions too
        ("cuboid.order=x,y,z", ("x,y,z", "replicas")),
        ("data.paths=/no/such.txt", ("data.paths", "/no/such.txt", "does not exist")),
    ],
)
def test_config_rejects_bad_overrides(override: str, said: tuple[str, ...]) -> None:
    beside = {"data.batch=7": "data.micro_batches=5", "model.context=64": "model.family=gpt2"}
    message = refused(beside.get(override, "seed=0"), override)
    for part in said:
        assert part in message


def test_config_rejects_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[modell]\nhidden = 3\n")
    assert "did you mean" in (message := refused(path=tmp_path / "mime.toml"))
    assert str(tmp_path / "mine.toml") in message
    assert "cuboid config --show" in refused(path=tmp_path / "other")
    assert "modell: there is no such section; did you mean model?" in refused(path=tmp_path / "mine.toml")
    assert "cannot be read" in refused(path=tmp_path)
    (tmp_path / "bad.toml").write_text("seed = \n")
    assert "line 1" in refused(path=tmp_path / "bad.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert "is not TOML" in refused(path=tmp_path / "binary.toml")
    (tmp_path / "flat.toml").write_text("model = 3\n")
    assert "model is a section" in refused(path=tmp_path / "flat.toml")


def test_config_check_rejects_values_set_in_python() -> None:
    config = TrainConfig()
    with pytest.raises(ValueError, match=r"optimizer\.lr = -1"):
        replace(config, optimizer=replace(config.optimizer, lr=-1)).check()


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.preset=llama-3-405b", "model.layers=2"],
        ["model.preset=llama-3.2-1b", "model.tied=false", "data.paths=a b,c", "optimizer.lr=3e-4"],
        ['logging.sample_prompt="\\"\\\\ \\u007f é 😀 \\n\\t\\u0001"', "data.max_bytes=3"],
    ],
)
def test_config_resolved_toml_round_trips(overrides: list[str], tmp_path: Path) -> None:
    config = load(None, overrides)
    file = tmp_path / "config.toml"
    file.write_text(resolved_toml(config), "utf-8")
    assert load(file) == config
    assert load(file).model_config(256) == config.model_config(256)


PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
}
ROUGHLY = {"gpt3-1.3b": 1.3e9, "gpt3-6.7b": 6.7e9, "gpt3-13b": 13e9, "gpt3-175b": 175e9}


def test_presets_have_published_sizes() -> None:
    assert set(PRESETS) == set(PUBLISHED) | set(ROUGHLY)
    for name, parameters in PUBLISHED.items():
        assert PRESETS[name].parameters == parameters, name
    for name, about in ROUGHLY.items():
        assert PRESETS[name].parameters == pytest.approx(about, rel=0.02), name


@pytest.mark.parametrize("name", PRESETS)
def test_config_preset_gives_its_model(name: str) -> None:
    assert load(preset=name).model_config(256) == PRESETS[name]
    assert load(None, [f"model.preset={name}"]) == load(preset=name)


def test_config_preset_can_be_overridden() -> None:
    config = load(None, ["model.hidden=512", "model.heads=8", "model.preset=gpt2-124m"])
    model = config.model_config(256)
    assert (model.hidden, model.ffn, model.kv_heads, model.head_dim) == (512, 2048, 8, 64)
    assert (model.layers, model.vocab) == (12, 50257)
    with pytest.raises(ValueError, match="50300"):
        config.model_config(50300)


@pytest.fixture
def run() -> typer.Typer:
    app = typer.Typer()
    app.command()(config_command)
    return app


def test_config_cli_show_prints_every_key_with_help(run: typer.Typer) -> None:
    result = CliRunner().invoke(run, ["--show"])
    assert result.exit_code == 0
    assert tomllib.loads(result.stdout)["optimizer"]["lr"] == TrainConfig().optimizer.lr
    for key in keys(TrainConfig).values():
        assert key.rule.help in result.stdout
    as_json = json.loads(CliRunner().invoke(run, ["--json"]).stdout)
    assert set(as_json) == set(keys(TrainConfig))
    assert as_json["model.hidden"]["default"] == TrainConfig().model.hidden


def test_config_cli_resolves_file_and_overrides(run: typer.Typer, tmp_path: Path) -> None:
    file = tmp_path / "a b.toml"
    file.write_text("[model]\nheads = 4\n")
    result = CliRunner().invoke(run, [str(file), "--set", "model.layers=3"])
    assert tomllib.loads(result.stdout)["model"]["heads"] == 4
    assert tomllib.loads(result.stdout)["model"]["layers"] == 3
    bad = CliRunner().invoke(run, [str(file), "--set", "cuboid.z=3"])
    assert isinstance(bad.exception, ValueError)
    assert "y·z=6" in str(bad.exception)


def test_config_cli_lists_and_shows_presets(run: typer.Typer) -> None:
    table = CliRunner().invoke(run, ["--presets"]).stdout
    assert all(name in table for name in PRESETS)
    assert "175B" in table
    rows = json.loads(CliRunner().invoke(run, ["--presets", "--json"]).stdout)
    assert rows["llama-3-8b"]["parameters"] == PUBLISHED["llama-3-8b"]
    shown = CliRunner().invoke(run, ["--preset", "gpt2-1.5b"])  # 25 heads do not fit the default cuboid: shown still
    assert shown.exit_code == 0
    assert tomllib.loads(shown.stdout)["model"]["heads"] == 25


def test_config_reads_earlier_names_with_one_warning(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text('[cuboid]\ndata = 2\norder = ["data", "x", "y", "z"]\n[memory]\ncheckpoint = "full"\n')
    with pytest.warns(RenamedKey) as warned:
        config = load(file)
    assert [str(each.message) for each in warned] == [
        "cuboid.data is now called cuboid.replicas, memory.checkpoint is now called memory.recompute; earlier names "
        "are still read"
    ]
    assert (config.cuboid.replicas, config.memory.recompute) == (2, "full")
    assert config.cuboid_shape().order == ("pipe", "replicas", "x", "y", "z")
    with pytest.warns(RenamedKey, match="restart.most is now called restart.max_restarts"):
        assert load(None, ["restart.most=7"]).restart.max_restarts == 7


def test_config_rejects_key_under_both_names(tmp_path: Path) -> None:
    file = tmp_path / "both.toml"
    file.write_text('[memory]\ncheckpoint = "full"\nrecompute = "none"\n')
    with pytest.raises(ValueError, match=r"memory.recompute is given twice, once by its earlier name"):
        load(file)


@pytest.mark.parametrize(("typed", "dtype"), [("float32", "fp32"), ("bfloat16", "bf16"), ("half", "fp16")])
def test_config_reads_other_spellings_of_dtype(typed: str, dtype: str) -> None:
    assert load(None, [f"precision.dtype={typed}"]).precision.dtype == dtype


def test_config_reads_other_cuboids_as_written_now_and_before() -> None:
    now = load(None, ["cuboid.others=1,2,2; 2,1,1 replicas=2 pipe=2"]).other_cuboids()
    assert now == [Cuboid(1, 2, 2), Cuboid(2, 1, 1, replicas=2, pipe=2)]
    assert load(None, ["cuboid.others=1x2x2, 2x1x1x2x2"]).other_cuboids() == now
