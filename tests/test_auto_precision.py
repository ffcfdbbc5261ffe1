"""The precision of a run that sets none: by the device, or as the run began."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import Cuboid, on, sets, settings, write_text

from cuboid import device
from cuboid.plan.hardware import PRESETS
from cuboid.run import launch
from cuboid.run.launch import Pool, World
from cuboid.train import preflight
from cuboid.train.config import TrainConfig, load, resolved_toml
from cuboid.train.precision import settled

CPU, OLD = (World(0, 1, torch.device(*where), 1) for where in (("cpu",), ("cuda", 0)))
GPU = replace(OLD, bf16=True)
BEFORE = Path(__file__).parent / "run_0_1"  # its checkpoints do not say what they were computed in


def chosen(*asked: object) -> tuple[str, str]:
    config, why = settled(*asked)  # type: ignore[arg-type]
    return config.precision.dtype, why


def test_auto_precision_is_the_default_and_goes_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    default = load(None)
    assert default.precision.dtype == "auto"
    assert chosen(default, CPU) == ("fp32", "the default on CPUs")
    for world, expected in ((GPU, ("bf16", "the default on GPUs")), (OLD, ("fp32", "a GPU has no bf16"))):
        dtype, why = chosen(default, world)
        assert (dtype, why.partition(";")[0]) == expected
        assert chosen(load(None, ["precision.dtype=fp16"]), world) == ("fp16", "")


def test_bf16_is_computed_fast_since_ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    for generation, expected in ((9, True), (7, False)):
        properties = SimpleNamespace(major=generation)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=properties: found)
        assert device.computes_bf16(GPU.device) is expected
    assert not device.computes_bf16(CPU.device)


@pytest.mark.parametrize(("generations", "expected"), [((8, 7), "fp32"), ((8, 9), "bf16")], ids=str)
def test_auto_precision_is_one_for_all_ranks(
    generations: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of hosts with different GPUs: in others, ranks would send unequal messages."""
    where = "get_device_properties", lambda _: SimpleNamespace(major=generations[int(os.environ["RANK"])])
    monkeypatch.setattr(torch.cuda, *where)
    monkeypatch.setattr(launch, "_all_on_gpus", lambda *_: True)
    monkeypatch.setattr(launch, "take", lambda local: GPU.device)
    monkeypatch.setattr(launch.dist, "init_process_group", lambda *_, **__: None)  # no NCCL here
    monkeypatch.setattr(launch, "group_options", lambda *_: None)
    with Pool(2) as ranks:
        assert [config.precision.dtype for config, _ in ranks.run(precision)] == [expected] * 2


def precision(world: World) -> tuple[TrainConfig, str]:
    return settled(TrainConfig(), world)


def test_auto_precision_of_plans_is_the_hardwares() -> None:
    assert {name: each.usual for name, each in PRESETS.items()} == {
        "v100-edr": "fp32",
        "a100-hdr": "bf16",
        "h100-ndr": "bf16",
        "cpu": "fp32",
    }


def test_auto_precision_of_a_planned_toml_is_the_hardwares(cuboid: Cuboid, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[cuboid]\nz = 1\n")
    for hardware, dtype in (("h100-ndr", "bf16"), ("cpu", "fp32")):
        said = cuboid("plan", file, "--hardware", hardware, "--json")
        assert said.code == 0, said.err
        assert json.loads(said.out)["dtype"] == dtype
        assert f"precision.dtype={dtype}" in json.loads(said.out)["train"]


def test_preflight_plans_a_gpu_in_bf16() -> None:
    def kept(gpu: bool, *more: str) -> int:
        return preflight.need(load(None, more), apart=True, gpu=gpu).by_kind["activations"]

    assert kept(True) == kept(True, "precision.dtype=bf16") < kept(True, "precision.dtype=fp32")
    assert kept(False) == kept(False, "precision.dtype=fp32")


def run(cuboid: Cuboid, config: list[str], *words: object) -> str:
    said = cuboid("train", *words, *sets(config))
    assert said.code == 0, said.err
    return said.out


def test_auto_precision_is_said_recorded_and_kept(cuboid: Cuboid, tmp_path: Path) -> None:
    def config(dtype: str, steps: int, name: str = "run") -> list[str]:
        more = f"precision.dtype={dtype}", f"logging.folder={tmp_path / name}", f"schedule.steps={steps}"
        return settings(write_text(tmp_path), *on("1,1,1"), "schedule.warmup=0", *more)

    assert "cuboid  1,1,1, 1 ranks, fp32 (the default on CPUs)\n" in run(cuboid, config("auto", 1, "other"))
    assert load(tmp_path / "other" / "config.toml").precision.dtype == "fp32"
    assert "cuboid  1,1,1, 1 ranks, bf16\n" in run(cuboid, config("bf16", 1))
    (state,) = (tmp_path / "run" / "checkpoints").glob("*/state.json")
    assert json.loads(state.read_text())["precision"] == "bf16"
    again = run(cuboid, config("auto", 1))  # the same command, as if it had been broken off
    assert "bf16 (as it began)\n" in again
    assert "resumed after step 1" in again
    state.parent.rename(tmp_path / "step-00000001")  # without its run
    asked = load(None, config("auto", 2, "new"))
    assert chosen(asked, CPU, tmp_path / "new", tmp_path / "step-00000001") == ("bf16", "as it began")


def test_auto_precision_of_an_earlier_versions_checkpoint_is_fp32() -> None:
    assert chosen(load(None), GPU, None, BEFORE / "checkpoints" / "step-00000006") == ("fp32", "as it began")


def test_auto_precision_of_a_run_that_has_only_begun_is_kept(tmp_path: Path) -> None:
    """As in a folder whose run ended before its first checkpoint."""
    for written, expected in (("bf16", ("bf16", "as it began")), ("auto", ("fp32", "the default on CPUs"))):
        (tmp_path / "config.toml").write_text(resolved_toml(load(None, [f"precision.dtype={written}"])))
        assert chosen(TrainConfig(), CPU, tmp_path) == expected
        assert chosen(load(None, ["precision.dtype=fp16"]), CPU, tmp_path) == ("fp16", "")


def test_auto_precision_where_nothing_can_be_read_is_the_devices(tmp_path: Path) -> None:
    assert chosen(TrainConfig(), CPU, None, tmp_path) == ("fp32", "the default on CPUs")
