"""Commands on pretended devices: the CPU's numbers, and the host waits for a device once a step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Emulate = Callable[..., Any]


def test_gpu_verify_finds_the_cuboid_exact(emulate: Emulate, tmp_path: Path) -> None:
    found = emulate("values.py", "verify", str(tmp_path))
    gpu, cpu = found["cuda"], found["cpu"]
    assert gpu["ok"]
    assert max(gpu["errors"].values()) < 1e-12
    for name in ("loss", "gradient_norm"):
        assert gpu[name] == pytest.approx(cpu[name], rel=1e-12)
    assert gpu["traffic"] == cpu["traffic"]


def test_gpu_run_is_the_cpus(emulate: Emulate, tmp_path: Path) -> None:
    """Trained, resumed on another cuboid, sampled from, evaluated, exported and loaded."""
    found = emulate("values.py", "train", str(tmp_path))
    gpu, cpu = found["cuda"], found["cpu"]
    assert len(gpu["first"]) == len(gpu["again"]) == 5
    for run in ("first", "again"):
        assert [*map(pytest.approx, cpu[run])] == gpu[run]
    assert gpu["said"] == cpu["said"] != ""
    assert gpu["evaluated"] == pytest.approx(cpu["evaluated"])
    assert (gpu["loaded"][0], cpu["loaded"][0]) == ("cuda", "cpu")
    assert gpu["loaded"][1] == pytest.approx(cpu["loaded"][1])
    assert gpu["lanes"] == cpu["lanes"]
    assert min(gpu["lengths"]) >= 0


def test_gpu_doctor_compares_links_with_the_gpus_preset(emulate: Emulate, tmp_path: Path) -> None:
    found = emulate("values.py", "doctor", str(tmp_path))["cuda"]
    assert found["ok"]
    said = {each["check"]: each["said"] for each in found["findings"]}
    assert said["devices"].startswith("2 × NVIDIA H100 80GB HBM3; GPUs without a rank: 6 of ")
    assert said["links"].endswith("% of h100-ndr's")
    assert said["training"].startswith("20 steps of a small model in bf16")
    assert [each["check"] for each in found["findings"] if each["status"] == "error"] == []


def test_gpu_calibration_measures_what_the_cpus_does(emulate: Emulate, tmp_path: Path) -> None:
    """Operations apart, of which emulated devices are made: they emulate with a CPU's."""
    found = emulate("values.py", "calibrate", str(tmp_path))
    gpu, cpu = found["cuda"], found["cpu"]
    assert gpu.keys() == cpu.keys()
    for name in ("peak", "rate", "inside", "across"):
        assert gpu[name].keys() == cpu[name].keys(), name
    assert all(rate > 0 for rate in gpu["rate"].values())
    assert gpu["inside"]
    assert all(link["bandwidth"] > 0 for link in gpu["inside"].values())


@pytest.mark.slow
def test_gpu_bench_finds_one_loss_and_the_formulas_bytes(emulate: Emulate, tmp_path: Path) -> None:
    rows = emulate("values.py", "bench", str(tmp_path))["cuda"]
    assert len(rows) >= 4
    for row in rows:
        assert row["bytes_equal_formula"], row["layout"]
        assert row["loss"] == pytest.approx(rows[0]["loss"]), row["layout"]
        assert row["spread"]["step"]["median"] > 0, row["layout"]


def test_gpu_step_waits_for_its_device_once_and_repeats_itself(emulate: Emulate, tmp_path: Path) -> None:
    """A CUDA graph of one step's forward and backward would compute the next."""
    ranks = emulate("values.py", "steps", str(tmp_path))["cuda"]
    assert len(ranks) == 3 * 2
    for cuboid, found in ranks.items():
        for inside, whole in found["waits"]:
            assert inside == [], cuboid
            assert len(whole) <= 1, (cuboid, whole)
        assert found["calls"] > 200, cuboid
        assert found["otherwise"] == [], cuboid
        before, after = found["scales"]
        assert after == 2 * before or not cuboid.startswith("1,1,2,1")  # what is not a graph's has changed


def test_gpu_faults_are_noticed(emulate: Emulate, tmp_path: Path) -> None:
    found = emulate("values.py", "planted", str(tmp_path))["cuda"]
    assert "Expected all tensors to be on the same device" in found["a host's tensor"][-1]
    assert found["a value read back"]["waits"][0][0]
    assert "aten.mul.Tensor" in found["a number of the step"]["otherwise"][0]
    assert "lies elsewhere" in found["a new tensor"]["otherwise"][0]
