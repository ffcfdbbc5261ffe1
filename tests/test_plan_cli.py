"""`cuboid plan`, `cuboid calibrate` and `cuboid train --cuboid auto` as a person uses them."""

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import settings, write_text
from typer.testing import CliRunner

from cuboid.cli import app
from cuboid.data import ByteTokenizer, build
from cuboid.mesh.cuboid import Cuboid
from cuboid.model.config import ModelConfig
from cuboid.plan import hardware
from cuboid.plan.calibrate import Calibration, across_hosts, calibrate
from cuboid.plan.calibrate.fitting import fit, fit_links, fit_matmuls
from cuboid.plan.calibrate.timing import Bench, Sample, Scale, Settings, time_matmuls, time_processor
from cuboid.plan.layer import Work
from cuboid.plan.search import Ranking, rank
from cuboid.run.launch import World
from cuboid.train import auto
from cuboid.train.auto import for_ranks, planned
from cuboid.train.config import load, resolved_toml

SMALL = ["--layers", "2", "--hidden", "64", "--heads", "8", "--vocab", "100", "--batch", "16", "--seq", "64"]
ON_CPU = [*SMALL, "--ranks", "8", "--hardware", "cpu", "--dtype", "fp32"]


def run(*words: object) -> str:
    result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_plan_cli_prints_ranking_table() -> None:
    said = run("plan", *ON_CPU)
    for words in ("Fastest first", "candidates ranked in", "FSDP×TP", "tokens/s", "MFU", "its limit is"):
        assert words in said


def test_plan_cli_piped_table_is_not_truncated() -> None:
    """Small models have the longest figures; a plan that is two corners has both names."""
    small = ["--layers", "4", "--hidden", "256", "--heads", "8", "--vocab", "1000", "--seq", "128", "--batch", "64"]
    said = run("plan", *small, "--ranks", "8", "--micro-batches", "8")
    assert "…" not in said
    assert all(f"│ {name} " in said for name in ("FSDP", "TP+SP", "FSDP×TP", "cube"))


def test_plan_cli_check_exits_nonzero_on_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(__file__).parent.parent / "benchmarks" / "planner"
    words = ["plan", "--hardware", folder / "machine.json", "--check", folder / "hidden-512" / "layouts.json"]
    assert "MISSES" not in run(*words)
    monkeypatch.setattr("cuboid.plan.check.MOST_ERROR", 0.01)
    result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exit_code == 1
    assert "MISSES" in result.stdout


def test_plan_cli_exports_published_as_json() -> None:
    assert len(json.loads(run("plan", "--published", "--json"))) == 10


def test_plan_cli_one_device_has_no_corner_plans() -> None:
    said = run("plan", *SMALL, "--ranks", "1", "--hardware", "cpu", "--dtype", "fp32")
    assert "1 device of cpu" in said
    assert "Well-known layouts" not in said
    assert "Its limit is" in said


def test_plan_cli_json_lists_every_cuboid_and_dry_run() -> None:
    found = json.loads(run("plan", *ON_CPU, "--json", "--dry-run"))
    assert len([plan for plan in found["plans"] if plan["cuboid"]["pipe"] == 1]) == 20  # products x·y·z·replicas of 8
    assert found["ranking_seconds"] > 0
    first = found["plans"][0]
    assert first["seconds"] == min(plan["seconds"] for plan in found["plans"])
    assert set(first["memory"]) == {"parameters", "gradients", "optimizer", "activations", "buffers"}
    assert set(found["corners"]) == {"FSDP", "TP+SP", "FSDP×TP", "cube"}
    assert all(each["ok"] for each in found["dry_run"] if each["exact"])


def test_plan_cli_takes_toml_or_run_with_its_sizes(tmp_path: Path) -> None:
    changes = ["precision.dtype=bf16", "data.micro_batches=2", "cuboid.x=1", "cuboid.y=2", "cuboid.z=2"]
    config = load(None, settings(write_text(tmp_path), *changes))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(resolved_toml(config))
    for source in (tmp_path / "run", tmp_path / "run" / "config.toml"):
        found = json.loads(run("plan", source, "--hardware", "cpu", "--json"))
        assert (found["batch"], found["seq"], found["dtype"], found["ranks"]) == (8, 16, "bf16", 4)
        assert found["model"] == asdict(config.model_config(256))
    found = json.loads(run("plan", source, "--hardware", "cpu", "--json", "--batch", 16, "--seq", 32, "--ranks", 2))
    assert (found["batch"], found["seq"], found["dtype"], found["ranks"]) == (16, 32, "bf16", 2)


def test_plan_cli_explains_one_cuboid_and_plots(tmp_path: Path) -> None:
    said = run("plan", *ON_CPU, "--explain", "2,2,2", "--plot", tmp_path)
    assert "Communication" in said
    assert "orders of magnitude of eight ranks" in said  # where the figures are from
    assert {path.name for path in tmp_path.iterdir()} == {"plan.png", "plan.svg", "plan-map.png", "plan-map.svg"}
    labels = (tmp_path / "plan.svg").read_text()
    assert "<!-- GB per device, which has" in labels  # too much for the axis
    assert "<!-- a device's memory" not in labels


PIPE = [*SMALL, "--layers", "4", "--ranks", "4", "--hardware", "cpu", "--dtype", "fp32", "--micro-batches", "4"]


@pytest.mark.parametrize("pipeline", ["gpipe", "beside"])
def test_plan_cli_explains_plots_and_counts_any_schedule_by_name(pipeline: str, tmp_path: Path) -> None:
    words = [*PIPE, "--explain", "1,2,1 pipe=2", "--pipeline", pipeline]
    said = run("plan", *words, "--plot", tmp_path, "--dry-run")
    assert f"Places of the pipe: {pipeline}" in said
    assert f"overlap.pipeline={pipeline}" in said
    assert (tmp_path / "plan-pipeline.png").exists()
    (row,) = [line for line in said.splitlines() if line.startswith("│ pipe ")]
    calls, sent, in_flight = [cell.strip() for cell in row.split("│")[2:5]]
    moves = 4 * 2  # one message to send and one to receive, for each
    assert (calls, sent) == (
        str(moves),
        "131kB",
    )  # 4 × 64 tokens of 64 elements in a micro-batch, of which y sends half
    assert 0 < float(in_flight.removesuffix(" s")) < 1


def test_plan_cli_takes_schedule_that_a_toml_names(tmp_path: Path) -> None:
    file = tmp_path / "pipe.toml"
    base = "[model]\nlayers = 4\n[cuboid]\nx = 1\ny = 1\nz = 1\npipe = 2\n[data]\nmicro_batches = 8\n[overlap]\n"

    def planned_for(overlap: str, *more: str) -> set[str]:
        file.write_text(base + overlap)
        found = json.loads(run("plan", file, "--hardware", "cpu", "--explain", "1,1,1 pipe=2", "--json", *more))
        return {plan["pipeline"] for plan in found["plans"]}

    assert planned_for("") == {"zero-bubble"}  # the fastest
    assert planned_for('pipeline = "gpipe"\n') == planned_for("", "--pipeline", "gpipe") == {"gpipe"}
    assert planned_for("beside = true\n") == {"beside"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["llama-9"], "neither a preset nor a config.json"),
        ([], "give a model, or its --layers, --hidden, --heads"),
        ([*ON_CPU, "--explain", "1,2,2,2"], "three sizes"),
        ([*ON_CPU, "--explain", "2,2,1"], "not --ranks 8"),
        ([*ON_CPU, "--explain", "1,1,8", "--heads", "4"], "heads=4 cannot be split into y·z=8"),
        (
            [*ON_CPU, "--batch", "15", "--explain", "4,1,1 replicas=2"],
            "batch=15 cannot be split over replicas=2; use batch 14 or 16",
        ),
        ([*PIPE, "--pipeline", "2f2b"], "--pipeline 2f2b is not one of gpipe, 1f1b"),
        ([*PIPE, "--pipeline", "gpipe", "--explain", "2,2,1"], "schedule of pipes, and 2,2,1 is none"),
        ([*PIPE, "--pipeline", "interleaved", "--explain", "1,1,1 pipe=4"], "4 blocks cannot be split into 8 stages"),
        ([*ON_CPU, "--hardware", "tpu"], "neither a preset nor a file"),
        ([*ON_CPU, "--dtype", "fp8"], "fp8"),
        (["llama-3-405b", "--ranks", "32", "--batch", "1"], "128 devices would"),
        (["llama-3-8b", "--explain", "1,1,1 replicas=8", "--batch", "64"], "of 8 devices 2,2,1 replicas=2 would fit"),
        ([*ON_CPU, "--plot", "/proc/nowhere"], "--plot /proc/nowhere cannot be a folder"),
        ([*ON_CPU, "--check", "nowhere.json"], "not a result of cuboid bench layouts"),
    ],
)
def test_plan_cli_rejects_bad_input(words: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["plan", *words])
    assert isinstance(result.exception, ValueError)
    assert says in str(result.exception)


def test_calibrate_fit_recovers_known_factors() -> None:
    x = np.array([1.0, 2.0, 5.0, 9.0])
    factors, error = fit([np.ones(4), x, -x], list(3 + 2 * x))
    assert factors == pytest.approx([3, 2, 0])
    assert error == pytest.approx(0)
    # 8 bytes of a group of two, all in one node, at 4 bytes a second after 1 s
    samples = [Sample("all_gather", Cuboid(1, 2, 1), size, 1 + size / 2 / 4) for size in (8, 80, 800)]
    link, error = fit_links(samples, "all_gather", 8, True, 1e9, crossing=False)
    assert link is not None
    assert (link.base + link.hop, link.bandwidth) == (pytest.approx(1), pytest.approx(4))


def test_calibrate_matmul_fit_uses_flops_alone_if_noisy() -> None:
    shapes = [(1, 1, 1), (2, 1, 1), (1, 1, 2), (2, 1, 2)]
    factors, error = fit_matmuls(shapes, [3 * 2 * m * n * k + 5 * 2 * m * n + 7 for m, n, k in shapes])
    assert factors == pytest.approx([3, 5, 7])
    assert error == pytest.approx(0)
    # twice the FLOPs in half the time: f = Σr / Σr² has the least Σ (f·r - 1)²; r = FLOPs / seconds = 1, 1, 4, 4
    factors, error = fit_matmuls(shapes, [2, 4, 1, 2])
    assert factors == pytest.approx([10 / 34, 0, 0])
    assert error == pytest.approx((12 / 17 + 3 / 17) / 2)


def test_calibrate_measures_usable_hardware(pool) -> None:
    """On two ranks, of a tiny model: figures that a plan can use, and the fits' errors."""
    small = ModelConfig("gpt2", layers=1, hidden=64, heads=4, vocab=64, context=32)
    found, none = pool(2).run(calibrate, Settings(small, 64), "here")
    assert none is None
    assert {"matmuls", "all_gather inside", "reduce_scatter inside", "one real layer"} <= found.errors.keys()
    assert found.seconds > 0
    assert found.hardware.rate["fp32"] > 0
    assert 0 <= found.hardware.slowdown <= 1
    assert set(found.hardware.inside) == set(hardware.KINDS)
    assert not found.hardware.across
    assert found.hardware.source["across"].startswith("not measured: 2 ranks, 2 per node; calibrate with torchrun")


def counted(world: World) -> tuple[int, int, float]:
    """Calls of a work that takes a thousandth of a second of a pretended GPU's time, once it is waited for."""
    bench, calls, device = Bench(replace(world, device=torch.device("cuda", 0))), [0], [0.0]

    def work() -> None:
        calls[0] += 1

    def now() -> float:
        device[0] = max(device[0], 0.001 * calls[0])
        return device[0]

    bench.now = now  # type: ignore[method-assign]
    seconds = bench.seconds(work, repeats=2)
    on_gpu, calls[0] = calls[0], 0
    bench.world = world
    bench.seconds(work, repeats=2)
    return on_gpu, calls[0], seconds


def test_calibrate_times_many_calls_between_waits_on_gpu(pool) -> None:
    """20 in 20 ms, twice, after two that warm up and are timed; on a CPU each by itself."""
    assert pool(2).run(counted) == [(2 + 2 * 20, 1 + 2, pytest.approx(0.001))] * 2


def test_calibrate_multiplies_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal ones draw less power, so that a GPU's clock is higher than in training."""
    bench, spread = Bench(World(0, 1, torch.device("cpu"), 1)), list[float]()
    monkeypatch.setattr(bench, "computing", lambda work: spread.append(work().std().item()) or 1.0)
    small = ModelConfig("gpt2", layers=1, hidden=32, heads=4, vocab=64, context=8)
    time_matmuls(bench, Scale.of(torch.device("cpu"), Settings(small, 8)))
    assert spread
    assert min(spread) > 1


def test_calibrate_scale_suits_device_and_keeps_what_is_asked() -> None:
    gpu, cpu = (Scale.of(torch.device(kind), Settings()) for kind in ("cuda", "cpu"))
    assert (gpu.precision, cpu.precision) == ("bf16", "fp32")
    assert max(gpu.messages) == 1 << 30
    assert gpu.model.hidden * gpu.tokens >= 1 << 24
    assert gpu.stream > 100 << 20  # no cache holds it
    asked = Scale.of(torch.device("cuda"), Settings(tokens=64, precision="fp32"))
    assert (asked.tokens, asked.precision, asked.model) == (64, "fp32", gpu.model)
    with pytest.raises(ValueError, match="precision 'fp8' is not one of"):
        Settings(precision="fp8")


def test_calibrate_cli_one_rank_leaves_links_unmeasured(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    said = run("calibrate", path, "--ranks", 1, "--tokens", 64)
    for where in ("inside", "across"):
        assert f"Links {where} nodes: not measured: 1 ranks, 1 per node" in said
    one = hardware.load(str(path))
    assert one.inside == one.across == {}
    words = [*SMALL, "--dtype", "fp32", "--hardware", str(path)]
    assert "not measured" in run("plan", *words, "--ranks", 1)
    assert "not measured" in json.loads(run("plan", *words, "--ranks", 1, "--json"))["sources"]["across"]
    refused = CliRunner().invoke(app, ["plan", *words, "--ranks", "64"])
    assert "64 devices needs links across nodes of 1" in str(refused.exception)


def share(world: World) -> float:
    return time_processor(Bench(world), cores=1, calls=2)


def test_calibrate_processor_share_is_same_on_all_ranks(pool) -> None:
    """All ranks find the same share of the cores' time."""
    one, other = pool(2).run(share)
    assert one == other
    assert 0 < one <= 1


def test_calibrate_across_hosts_keeps_links_without_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Calibration(replace(hardware.PRESETS["cpu"], cores=0))
    assert across_hosts(own, 2) is own
    monkeypatch.setattr("cuboid.plan.calibrate.Cluster", refused)
    shared = Calibration(hardware.PRESETS["cpu"])
    assert across_hosts(shared, 2) is shared


def refused(*_: object) -> None:
    raise ValueError("hosts need root")


@pytest.mark.slow
def test_plan_cli_plot_skips_unmeasured_links(tmp_path: Path) -> None:
    path = tmp_path / "near.json"
    replace(hardware.PRESETS["cpu"], name="[/b]", across={}, source={"[/i]": "[/u]"}).save(path)  # no markup of ours
    assert "plan-map.png" in run("plan", *ON_CPU, "--hardware", path, "--plot", tmp_path)
    assert "[/u]" in run("plan", *ON_CPU, "--hardware", path, "--explain", "2,2,2")


def test_auto_plan_takes_vocab_from_built_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the planner too, of as many ranks as are wanted or as there are."""
    build([write_text(tmp_path)], tmp_path / "built", ByteTokenizer())
    for part in ("train", "val"):
        header = tmp_path / "built" / f"{part}.json"
        header.write_text(json.dumps(json.loads(header.read_text()) | {"vocab": 3000}))
    config, seen = load(None, settings(tmp_path / "built")), []

    def ranked(hw: hardware.Hardware, work: Work, devices: int) -> Ranking:
        seen.append(work.config.vocab)
        return rank(hw, work, devices)

    monkeypatch.setattr(auto, "rank", ranked)
    planned(config, 8, "cpu")
    for_ranks(config, 4, "cpu")
    assert seen == [3000, 3000]


def test_auto_plan_keeps_to_the_pipe_that_is_asked_for(tmp_path: Path) -> None:
    config = load(None, settings(write_text(tmp_path), "model.layers=4", "data.micro_batches=4"))
    for pipe in (1, 2, 4):
        chosen, why = planned(config, 8, "cpu", pipe)
        assert (chosen.cuboid.pipe, chosen.cuboid_shape().ranks) == (pipe, 8)
        assert f"{chosen.cuboid_shape()} is the fastest of" in why
        chosen.check()
    with pytest.raises(ValueError, match=r"--pipe 3 with --cuboid auto.* which divide the 8 ranks"):
        planned(config, 8, "cpu", 3)
    with pytest.raises(ValueError, match=r"use --set data.micro_batches=8 or more, another pipe"):
        planned(config, 8, "cpu", 8)


def test_auto_plan_keeps_settings_it_does_not_choose(tmp_path: Path) -> None:
    config = load(None, settings(write_text(tmp_path), "overlap.compile=true"))
    assert planned(config, 8, "cpu")[0].overlap.compile


def seen_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    gpu = SimpleNamespace(name=name, total_memory=40 * 2**30)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: gpu)


def test_auto_plan_guesses_hardware_from_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(None, settings(write_text(tmp_path)))
    assert "Hardware: the preset cpu, as PyTorch sees no GPU." in planned(config, 8, "")[1]
    assert "Hardware" not in planned(config, 8, "cpu")[1]
    seen_gpu("NVIDIA A100-SXM4-40GB", monkeypatch)
    assert "Hardware: the preset cpu, as there are fewer GPUs than ranks." in planned(config, 8, "")[1]
    found, said = auto.guessed_hardware(("NVIDIA A100-SXM4-40GB", 40 * 2**30))
    assert (found.name, found.memory) == ("a100-hdr", 40e9)  # 95% of 40 · 2³⁰, whole GB
    assert said == "Hardware: the preset a100-hdr, as the GPU is 'NVIDIA A100-SXM4-40GB'."
    for name in ("NVIDIA RTX A1000", "NVIDIA GeForce RTX 4090"):
        seen_gpu(name, monkeypatch)
        with pytest.raises(ValueError, match=f"the GPU is '{name}', and .* --hardware .* cuboid calibrate"):
            planned(config, 1, "")


def test_auto_plan_picks_cuboid_by_hardware(tmp_path: Path) -> None:
    config = load(None, settings(write_text(tmp_path)))
    chosen, why = planned(config, 8, "cpu")
    assert chosen.cuboid_shape().ranks == 8
    assert str(chosen.cuboid_shape()) in why
    chosen.check()
    path = tmp_path / "slow.json"
    slow = hardware.every_kind(hardware.Link(1.0, 1.0, 1.0))
    replace(hardware.PRESETS["cpu"], inside=slow, across=slow).save(path)
    other, _ = planned(config, 8, str(path))
    assert other.cuboid_shape() != chosen.cuboid_shape()  # calls cost so much that few and small ones win


def test_plan_cli_ends_with_a_command_that_trains_its_winner() -> None:
    found = json.loads(run("plan", *ON_CPU, "--json"))
    words, best = shlex.split(found["train"]), found["plans"][0]
    assert words[:2] == ["cuboid", "train"]
    config = load(None, [words[i + 1] for i, word in enumerate(words) if word == "--set"])
    k = Cuboid.parse(words[words.index("--cuboid") + 1], int(words[words.index("--replicas") + 1]))
    assert k.sizes == best["cuboid"]
    assert config.cuboid.order == tuple(best["order"])
    assert (config.memory.recompute, config.memory.weights) == (best["recompute"], best["weights"])
    config = replace(config, cuboid=replace(config.cuboid, x=k.x, y=k.y, z=k.z, replicas=k.replicas))
    config.check()
    assert (config.data.batch, config.data.seq) == (found["batch"], found["seq"])
