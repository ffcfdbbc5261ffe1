"""`cuboid import`, `export`, `eval`, and training that begins with a Hugging Face folder."""

import json
import shutil
from math import exp
from pathlib import Path
from typing import Any

import pretrained
import pytest
import tokenizers
import torch
import transformers
from click.testing import Result
from tiny import on, write_text
from typer.testing import CliRunner

from cuboid.cli import app
from cuboid.model.evaluate import windows

LETTERS = "abcdefgh "


def cuboid(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def done(*words: object) -> str:
    result = cuboid(*words)
    assert result.exit_code == 0, (result.exception, result.output)
    return result.stdout


def refused(*words: object) -> str:
    result = cuboid(*words)
    assert isinstance(result.exception, ValueError), result.output
    return str(result.exception)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bf16, in several files, with a tokenizer of letters."""
    path = pretrained.make("qwen3", tmp_path_factory.mktemp("a") / "model", torch.bfloat16, "20KB")
    vocab = {letter: i for i, letter in enumerate(LETTERS)} | {"<|endoftext|>": len(LETTERS)}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [])).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


def perplexity(folder: Path, text: str, seq: int) -> float:
    """As `transformers` has it."""
    model, tokens = pretrained.load(folder), [LETTERS.index(letter) for letter in text] + [len(LETTERS)]
    total = 0.0
    for inputs, targets, count in windows(torch.tensor(tokens).numpy(), seq, 8):
        with torch.no_grad(), pretrained.wide():
            logits = model(inputs).logits
        total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item() * count
    return exp(total / (len(tokens) - 1))


@pytest.mark.parametrize("grid", ["1,1,1", "2,1,2"])
def test_import_export_cli_round_trip_is_byte_identical(grid: str, folder: Path, tmp_path: Path) -> None:
    done("import", folder, tmp_path / "run", "--cuboid", grid)
    done("export", tmp_path / "run", tmp_path / "out", "--cuboid", "1,2,1")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert contents(tmp_path / "out") == contents(folder)


def test_export_cli_converts_dtype(folder: Path, tmp_path: Path) -> None:
    done("import", folder, tmp_path / "run")
    done("export", tmp_path / "run", tmp_path / "out", "--dtype", "fp32")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    a, b = pretrained.load(tmp_path / "out"), pretrained.load(folder)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_eval_cli_perplexity_matches_transformers(folder: Path, text: Path, tmp_path: Path) -> None:
    wanted = perplexity(folder, text.read_text(), 24)
    done(
        "data",
        "build",
        text,
        "--tokenizer",
        folder / "tokenizer.json",
        "--out",
        tmp_path / "built",
        "--val-fraction",
        0,
    )
    done("import", folder, tmp_path / "run")
    for model, source, grid in (
        (folder, text, "1,1,1"),
        (folder, tmp_path / "built", "2,2,2"),
        (tmp_path / "run", text, "1,2,1"),
    ):
        found = json.loads(done("eval", model, source, "--seq", 24, "--cuboid", grid, "--json"))
        assert found["perplexity"] == pytest.approx(wanted, rel=1e-5)
        assert found["tokens"] == len(text.read_text())


def train(run: Path, settings: dict[str, Any], grid: str) -> None:
    """A short run, kept in `run`."""
    log = {"folder": run, "sample_prompt": "abc", "sample_tokens": 4, "tensorboard": "false"}
    settings = {**settings, "schedule.warmup": 0, **{f"logging.{key}": value for key, value in log.items()}}
    sets = [f"{key}={value}" for key, value in settings.items()] + on(grid)
    done("train", *(word for each in sets for word in ("--set", each)))


def test_train_cli_fine_tunes_pretrained_folder_and_exports(folder: Path, text: Path, tmp_path: Path) -> None:
    """The first loss is the model's own; the trained model is the same in `transformers`."""
    run, out = tmp_path / "run", tmp_path / "out"
    settings: dict[str, Any] = {
        "model.pretrained": folder,
        "data.tokenizer": shutil.copy(folder / "tokenizer.json", tmp_path),
        "data.paths": text,
        "data.seq": 24,
        "data.batch": 4,
        "optimizer.lr": 0.01,
        "schedule.steps": 3,
    }
    train(run, settings, "2,1,2")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] > lines[-1]["loss"] > 0
    moved = shutil.move(folder, folder.with_name("moved"))  # a run needs its origin no more
    try:
        done("train", "--resume", run, "--set", "schedule.steps=4")
    finally:
        shutil.move(moved, folder)
    done("export", run, out, "--dtype", "fp32", "--cuboid", "1,2,1")
    assert set(contents(out)) == set(contents(folder))
    wanted = perplexity(out, text.read_text(), 24)
    assert wanted < perplexity(folder, text.read_text(), 24)
    for model in (run, out):
        found = json.loads(done("eval", model, text, "--seq", 24, "--json"))
        assert found["perplexity"] == pytest.approx(wanted, rel=1e-5)
    assert transformers.AutoTokenizer.from_pretrained(out).encode("abc") == [0, 1, 2]


def test_export_cli_writes_run_trained_from_scratch(text: Path, folder: Path, tmp_path: Path) -> None:
    """From nothing but a configuration, tokenizer included; and a further run begins with it."""
    run, out = tmp_path / "run", tmp_path / "out"
    settings: dict[str, Any] = {
        "model.family": "gpt2",
        "model.layers": 1,
        "model.hidden": 32,
        "model.heads": 4,
        "model.context": 32,
        "data.paths": text,
        "data.tokenizer": folder / "tokenizer.json",
        "data.seq": 16,
        "schedule.steps": 1,
    }
    train(run, settings, "1,1,1")
    done("export", run, out)
    found = json.loads(done("eval", run, text, "--seq", 16, "--json"))["perplexity"]
    assert found == pytest.approx(perplexity(out, text.read_text(), 16), rel=1e-5)
    sets = [f"model.pretrained={run}", "data.seq=16", *on("1,1,1")]
    shown = done("config", *(word for each in sets for word in ("--set", each)))
    assert f'tokenizer = "{run}/tokenizer.json"' in shown
    assert "hidden = 32" in shown


def test_convert_cli_rejects_bad_input(folder: Path, text: Path, tmp_path: Path) -> None:
    done("import", folder, tmp_path / "run")
    assert "not an empty folder" in refused("import", folder, tmp_path / "run")
    assert "not empty; name a new one" in refused("export", tmp_path / "run", folder)
    assert "--dtype int8" in refused("export", tmp_path / "run", tmp_path / "x", "--dtype", "int8")
    assert "y·z=5" in refused("import", folder, tmp_path / "x", "--cuboid", "1,5,1")
    assert "is not a folder" in refused("eval", tmp_path / "nowhere", text)
    hub = "run hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B and give that"
    assert hub in refused("train", "--set", "model.pretrained=meta-llama/Llama-3.2-1B")
    assert "hf download" not in refused("train", "--set", f"model.pretrained={tmp_path / 'a' / 'b'}")
    assert "has no complete checkpoint" in refused("export", tmp_path, tmp_path / "x")
    both = ["--set", f"model.pretrained={folder}", "--set", "model.preset=gpt2-124m"]
    assert "both say what the model is" in refused("train", *both)
    bare = shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    assert "has no tokenizer.json" in refused("eval", bare, text)
    resume = ["train", "--resume", tmp_path / "run", "--set", f"data.paths={text}"]
    assert "config.toml does not exist" in refused(*resume)
    assert not (tmp_path / "x").exists()
