"""`cuboid doctor`: every verdict from planted facts and measurements, and the command itself on small ranks."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import Cuboid as Command
from tiny import on, sets, settings, write_text

from cuboid import doctor
from cuboid.doctor import checks, examine, failed, hardware_of, sent_by
from cuboid.doctor.facts import Facts
from cuboid.doctor.finding import Finding
from cuboid.doctor.trials import Connected, compiler, exactness, links, small_model, small_run, training
from cuboid.mesh.cuboid import Cuboid
from cuboid.run.errors import RankError
from cuboid.run.launch import World
from cuboid.train.compare import Curves
from cuboid.train.config import load
from cuboid.train.preflight import Need
from cuboid.verify import Balance, Report

SOFTWARE = {"cuboid": "0.1.0", "torch": "2.13.0", "Python": "3.12.1"}
CPU = Facts(0, "a", SOFTWARE, "CPU", False, 0, False, 8, 16e9)
GPU = Facts(0, "a", SOFTWARE | {"CUDA": "13.0", "NCCL": "2.29"}, "H100", True, 4, True, 64, 80e9)


def world(like: Facts, hosts: str = "aaaa", **changes: object) -> list[Facts]:
    """A rank on each of these hosts; changes are of the last."""
    found = [replace(like, rank=rank, host=host) for rank, host in enumerate(hosts)]
    return [*found[:-1], replace(found[-1], **changes)]  # type: ignore[arg-type]


def expect(found: Finding, status: str, *words: str) -> None:
    assert found.status == status, found
    assert bool(found.remedy) or status == "ok", "each fault has a remedy"
    for word in words:
        assert word in f"{found.said} → {found.remedy}", found


# What follows from facts


def test_versions_must_be_alike() -> None:
    expect(checks.versions(world(CPU)), "ok", "torch 2.13.0, Python 3.12.1 on all 4 ranks")
    older = world(CPU, software=SOFTWARE | {"torch": "2.12.0"})
    expect(checks.versions(older), "error", "torch 2.13.0 on ranks 0, 1, 2, 2.12.0 on rank 3", "install the same")
    expect(checks.versions(world(CPU, software=SOFTWARE | {"Python": "3.11.2"})), "warning", "Python")
    expect(checks.versions(world(GPU, software=SOFTWARE)), "error", "NCCL 2.29 on ranks 0, 1, 2, none on rank 3")


def test_devices_are_enough_and_of_one_kind() -> None:
    expect(checks.devices(world(GPU), "bf16"), "ok", "4 × H100, one for each rank")
    expect(checks.devices(world(GPU), "fp32"), "warning", "matmuls in fp32", "precision.dtype=bf16")
    expect(checks.devices(world(GPU, device="A100"), "bf16"), "warning", "3 × H100, 1 × A100", "slowest")
    expect(checks.devices(world(GPU, "aa"), "bf16"), "ok", "GPUs without a rank: 2 of a", "--nproc-per-node")
    expect(checks.devices(world(CPU), "fp32"), "ok", "4 × CPU; no GPU")
    expect(checks.devices(world(replace(CPU, cores=2)), "fp32"), "warning", "4 ranks on 2 cores of a")
    expect(checks.devices(world(replace(CPU, driver=True)), "fp32"), "warning", "GPUs on a", "PyTorch for CUDA")
    few = checks.devices([*world(replace(CPU, gpus=4), "aa"), *world(CPU, "bb")], "fp32")
    expect(few, "warning", "4 × CPU, with 2 ranks and 4 GPUs on a, 2 ranks and 0 GPUs on b", "no more ranks on a host")


def test_topology_names_hosts_and_axes() -> None:
    cuboid, sent = Cuboid(2, 2, 1), {"x": 10, "y": 100}
    expect(checks.topology(world(CPU), cuboid, sent), "ok", "a: ranks 0 to 3")
    two = checks.topology(world(CPU, "aabb"), cuboid, sent)
    expect(two, "ok", "a: ranks 0, 1; b: ranks 2, 3", "inside a host y, between hosts x")
    assert two.figures["across"] == ["x"]
    swapped = checks.topology(world(CPU, "aabb"), replace(cuboid, order=("replicas", "z", "y", "x")), sent)
    expect(swapped, "warning", "sends 100B in a step", 'cuboid.order=["pipe", "replicas", "z", "x", "y"]', "sends 10B")
    expect(checks.topology(world(CPU, "abab"), cuboid, sent), "error", "not consecutive", "host by host")
    expect(checks.topology(world(CPU, "aaab"), cuboid, sent), "warning", "different numbers of ranks")


def test_topology_suggested_order_is_one_that_config_takes() -> None:
    config = load(None, ['cuboid.order=["pipe", "replicas", "z", "x", "y"]'])
    assert config.cuboid_shape().order == ("pipe", "replicas", "z", "x", "y")


@pytest.mark.parametrize("each", checks.HURTFUL, ids=lambda each: each.name)
def test_settings_that_hurt_are_named_where_they_matter(each: checks.Hurtful) -> None:
    hurting = {each.name: (each.values or ("LL",))[0].upper()}
    hosts = "aabb" if "hosts" in each.where else "aaaa"
    like = replace(GPU if "gpu" in each.where else CPU, environment=hurting)
    (found,) = checks.settings(world(like, hosts))
    expect(found, each.status, f"{each.name}={hurting[each.name]} on ranks 0 to 3", each.why, each.name)
    harmless = {each.name: "0"} if each.values else {}
    assert [each.status for each in checks.settings(world(replace(like, environment=harmless), hosts))] == ["ok"]
    if "hosts" in each.where:
        assert checks.settings(world(like))[0].status == "ok"
    if "gpu" in each.where:
        assert checks.settings(world(replace(CPU, environment=hurting), hosts))[0].status == "ok"


def test_settings_must_agree_between_ranks() -> None:
    (found,) = checks.settings(world(CPU, environment={"TORCH_GLOO_LAZY_INIT": "0"}))
    expect(found, "warning", "TORCH_GLOO_LAZY_INIT differs between ranks: 0, unset", "alike")
    assert checks.settings(world(CPU, environment={"GLOO_SOCKET_IFNAME": "eth1"}))[0].status == "ok"
    pinned = world(replace(GPU, environment={"NCCL_ALGO": "^NVLS"}))
    assert [checks.settings(pinned, wanted)[0].status for wanted in (False, True)] == ["warning", "ok"]


def test_memory_is_held_against_fullest_device_or_host() -> None:
    need = Need({"parameters": int(1e9), "optimizer": int(2e9)})
    expect(checks.memory(world(CPU), need, "do this"), "ok", "needs 12GB at its peak, 16GB are free on a, for 4 ranks")
    crowded = world(CPU, "aaaaa")
    expect(checks.memory(crowded, need, "do this"), "warning", "15GB", "that is close")
    expect(checks.memory(world(CPU, "aaaaaab"), need, "do this"), "error", "18GB", "do this")
    expect(checks.memory(world(GPU), need, "do this"), "ok", "3GB")
    expect(checks.memory(world(GPU, free=2e9), need, "do this"), "error", "2GB are free on rank 3's GPU", "do this")


def test_storage_is_writable_shared_and_large_enough() -> None:
    both = {"a": True, "b": True}
    expect(checks.storage("/runs", both, 9e9, 1e9), "ok", "9GB free, a checkpoint takes 1GB")
    expect(checks.storage("/runs", both, 2e9, 1e9), "warning", "room for three")
    expect(checks.storage("/runs", both, 5e8, 1e9), "error", "500MB free", "larger disk")
    expect(
        checks.storage("/runs", both | {"b": False}, 9e9, 1e9), "error", "a different folder on b", "all hosts share"
    )
    expect(checks.storage("/runs", both, 9e9, 1e9, "Read-only file system"), "error", "Read-only", "logging.folder")


# What follows from trials


def lines(*seconds: float) -> list[Connected]:
    return [Connected((2 * i, 2 * i + 1), 1e-3, each) for i, each in enumerate(seconds)]


def test_links_are_held_against_calibration_and_each_other() -> None:
    size = 4_000_000
    ok = links("y", lines(0.02, 0.021), size, False, 0.0, "")
    expect(ok, "ok", "axis y, 2 ranks inside a host: 95.2MB/s, 1 ms for a small message")
    expect(links("y", lines(0.02, 0.07, 0.02), size, True, 0.0, ""), "warning", "ranks 2, 3 take 3.5 ×", "cable")
    expect(links("x", lines(0.02, 0.02), size, True, 0.015, "here.json's"), "ok", "between hosts", "75% of here.json's")
    expect(
        links("x", lines(0.02, 0.05), size, True, 0.015, "here.json's"), "warning", "30% of here.json's", "calibrate"
    )


def test_compile_names_ranks_on_which_it_fails() -> None:
    expect(compiler(["", ""]), "ok", "2 ranks")
    found = compiler(["", "InductorError: Failed to find C compiler"])
    expect(found, "warning", "rank 1", "Failed to find C compiler")
    assert "python3-dev" in found.remedy


def test_exactness_tells_values_from_formulas() -> None:
    good = Report({"loss": 0.0, "d a": 2e-16}, 1e-9)
    expect(exactness(good, Cuboid(2)), "ok", "1 gradients", "one device's to 2e-16")
    off = replace(good, errors={"loss": 0.0, "d a": 1e-3})
    expect(
        exactness(off, Cuboid(2, 1, 1, 2)), "error", "d a is 1.0e-03 off", "verify --cuboid 2,1,1 --replicas 2 shows"
    )
    expect(exactness(replace(good, traffic_predicted=False), Cuboid(2)), "warning", "bytes sent are not the formulas'")
    uneven = replace(good, balance={"FLOPs": Balance(1, 1, 1, False)})
    expect(exactness(uneven, Cuboid(2)), "warning", "FLOPs are not the formulas'", "plans may be off")


@pytest.mark.parametrize(
    ("cuboid", "status"), [([2.0, 1.001], "ok"), ([2.0, 1.1], "error"), ([2.0, math.nan], "error")]
)
def test_training_is_held_against_one_device(cuboid: list[float], status: str) -> None:
    expect(training(Curves([2.0, 1.0005], cuboid), "fp32"), status, "loss 2.000 → 1.000")


@pytest.mark.parametrize("sizes", ["1,1,1", "2,3,2", "1,4,2,2", "2,1,2,1,2", "4,1,1,1,3"])
def test_small_model_and_run_fit_any_cuboid(sizes: str) -> None:
    config = load(None, [*on(sizes), "precision.dtype=bf16"])
    model, batch, seq = small_model(config.cuboid_shape())
    model.check(config.cuboid_shape(), batch, seq)
    run = small_run(config)
    run.check()
    assert run.precision.dtype == "bf16"


def test_sent_by_has_every_axis() -> None:
    assert set(sent_by(load(None, [*on("2,2,2,2"), "precision.dtype=bf16"]))) == {"x", "y", "z", "replicas"}


def test_hardware_of_is_that_of_the_ranks_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host with GPUs a rank may have none: gloo is not held against an H100."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    names = {0: "NVIDIA H100 80GB HBM3", 1: "Own make"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    found = [hardware_of("", device) for device in (torch.device("cpu"), *(torch.device("cuda", i) for i in names))]
    assert [each and each.name for each in found] == [None, "h100-ndr", None]
    given = hardware_of("a100-hdr", torch.device("cpu"))
    assert given is not None
    assert given.name == "a100-hdr"


# The command


def test_examine_ends_with_the_stage_that_fails() -> None:
    told, good = list[Finding](), Finding("links", "ok", "fine")

    def ask(stage: str) -> list[Finding]:
        if stage == "exactness":
            raise RankError("rank 3 failed\n  at once\nKeyError: 7")
        return [good]

    found, error = examine(ask, told.append)
    assert found == told
    assert isinstance(error, RankError)
    assert found[:-1] == [good] * 4
    expect(found[-1], "error", "rank 3 failed … KeyError: 7", "not tried: training")
    assert found[-1].check == "exactness"
    assert examine(lambda _: [good], told.append) == ([good] * len(doctor.STAGES), None)
    expect(failed("links", TimeoutError(), []), "error", "TimeoutError")
    refused = failed("machine", ValueError("there is no eth9; set another"), ["links"])
    assert (refused.said, refused.remedy) == ("there is no eth9; not tried: links", "set another")
    apart = failed("storage", RankError("rank 1 could not connect to the others; set GLOO_SOCKET_IFNAME"), [])
    assert (apart.said, apart.remedy) == ("rank 1 could not connect to the others", "set GLOO_SOCKET_IFNAME")


def test_doctor_cli_finds_this_machine_ready(tmp_path: Path, cuboid: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    changes = sets(settings(write_text(tmp_path), "cuboid.replicas=2"))
    said = cuboid("doctor", "--cuboid", "1,2,1", "--json", *changes)
    assert said.code == 0, (said.out, said.err)
    found = json.loads(said.out)
    assert found["ok"]
    assert found["errors"] == 0
    by_check = {each["check"]: each for each in found["findings"]}
    assert list(by_check) == [
        *("versions", "devices", "topology", "settings", "memory", "storage", "compile", "links", "exactness"),
        "training",
    ]
    axes = [each["figures"].get("axis") for each in found["findings"] if each["check"] == "links"]
    assert axes == ["replicas", "y", None]  # in the order of the axes, then what is said of all
    assert by_check["exactness"]["figures"]["worst"] < 1e-9
    assert len(by_check["training"]["figures"]["cuboid"]) == 20
    assert [path.name for path in tmp_path.iterdir()] == ["text 0.txt"]  # nothing is written


def stumble(world: World, config: object, hardware: str) -> list[Finding]:
    if world.rank == 1:
        raise KeyError("planted")
    return []


def test_doctor_cli_reports_a_rank_that_fails(cuboid: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """As text: what was found before it, the error with its rank, and exit code 1."""
    stages: dict[str, Callable[..., list[Finding]]] = {
        "machine": lambda *_: [Finding("versions", "warning", "some are old", "install new ones")],
        "links": stumble,
        "training": stumble,
    }
    monkeypatch.setattr(doctor, "STAGES", stages)
    said = cuboid("doctor", "--cuboid", "2,1,1")
    assert said.code == 1
    first, remedy, *rest = said.out.splitlines()
    assert first == "warning versions  some are old"
    assert remedy == f"{' ' * 18}→ install new ones"
    assert rest[0].startswith("error   links     rank 1 failed")
    assert "KeyError: 'planted'" in said.out
    assert "not tried: training" in " ".join(said.out.split())
    assert rest[-1].startswith("Not ready to train: 1 error, 1 warning; ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--cuboid", "3,1"], "3,1"),
        (["--set", "model.hiden=3"], "model.hidden"),
        (["--hardware", "h10-ndr"], "did you mean h100-ndr"),
        (["missing.toml"], "does not exist"),
    ],
)
def test_doctor_cli_rejects_bad_arguments(words: list[str], expected: str, cuboid: Command) -> None:
    said = cuboid("doctor", *words)
    assert said.code == 2
    assert expected in said.err
    assert said.out == ""
