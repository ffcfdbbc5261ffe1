"""Which device a rank takes, and by which backend it sends: as seen without any."""

import os
from types import SimpleNamespace
from typing import Any, ClassVar

import namespaces
import numpy as np
import pytest
import torch
from torch import Tensor

import cuboid.verify
from cuboid import device
from cuboid.comm.transport import transport_over
from cuboid.comm.transport.nccl import Nccl
from cuboid.mesh import mesh as meshes
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import Spec
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.run.cluster import Cluster
from cuboid.run.launch import Pool, World


class Piece(Tensor):
    """Notes what is made like it: on its own device."""

    made: ClassVar[list[Any]] = []

    def new_full(self, size: Any, fill_value: Any, **options: Any) -> Tensor:
        self.made.append((size, options))
        return torch.full(size, fill_value)


def test_spec_join_makes_the_whole_where_pieces_lie() -> None:
    whole = Spec((4, 2), (("x",), ())).join([torch.ones(2, 2).as_subclass(Piece)] * 2, Cuboid(2, 1, 1))
    assert torch.equal(whole, torch.ones(4, 2))
    assert Piece.made == [((4, 2), {})]


def test_take_makes_the_ranks_gpu_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert device.take(3) == torch.device("cuda", 3)
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert taken == [3]


def backend(world: World) -> str:
    device.synchronize()  # which nothing without CUDA could
    return f"{world.device} {torch.distributed.get_backend()}"


@pytest.mark.parametrize(("gpus", "lacking"), [((1, 1), 2), ((2, 0), 1), ((0, 2), 1)], ids=str)
def test_launch_with_too_few_gpus_on_a_host_uses_gloo_on_all_and_warns_once(
    gpus: tuple[int, int], lacking: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus[int(os.environ["RANK"])])  # as if of two hosts
    with Pool(2) as pool:
        assert pool.run(backend) == ["cpu gloo"] * 2
    assert capfd.readouterr().err.count(f"{lacking} of 2 ranks are on hosts with fewer GPUs than ranks, so all") == 1


def test_gpus_that_cuda_alone_can_count_are_counted_by_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose CUDA has counted them forks ranks that cannot use CUDA. A rank counts by itself."""
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", os.getpid)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 2)
    assert device.gpu_count() == os.getpid()
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: -1)  # no NVML, or MIG
    monkeypatch.setattr(device, "has_gpu_driver", lambda: False)
    assert device.gpu_count() == os.getpid()
    monkeypatch.setattr(device, "has_gpu_driver", lambda: True)
    assert device.gpu_count() not in (0, os.getpid())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert device.gpu_count() == os.getpid()


@namespaces.needed
def test_ranks_of_emulated_hosts_take_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first of each host would take the same one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(os.environ["CUDA_VISIBLE_DEVICES"]))
    with Cluster(2) as hosts, Pool(2, hosts) as pool:
        assert pool.run(backend) == ["cpu gloo"] * 2
    assert capfd.readouterr().err == ""


def test_gpu_at_hand_is_asked_by_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name=str(os.getpid()), total_memory=7)
    )
    assert device.gpu_at_hand(ranks=2) is None  # they compute on the CPU
    found = device.gpu_at_hand(ranks=1)
    assert found is not None
    assert found[0] != str(os.getpid())
    assert found[1] == 7


class Group:
    """Of two ranks, by NCCL on GPUs and by gloo on CPUs."""

    bound_device_id = torch.device("cuda", 3)

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1

    def _get_backend(self, on: torch.device) -> Any:
        name = "nccl" if on.type == "cuda" else "gloo"
        return SimpleNamespace(name=lambda: name, supports_splitting=on.type == "cuda", options=None)


@pytest.mark.parametrize("name", ["undefined", "cpu:gloo,cuda:nccl"])
def test_transport_is_that_of_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: name)
    group: Any = Group()
    assert isinstance(transport_over(group, device=torch.device("cuda", 0)), Nccl)
    assert not isinstance(transport_over(group), Nccl)


def test_mesh_is_on_the_device_of_its_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """So `from_pretrained(folder, Cuboid(…))` is."""
    assert Mesh(Cuboid()).device == torch.device("cpu")
    world = SimpleNamespace(group=SimpleNamespace(WORLD=Group()), get_backend=lambda group: "undefined")
    monkeypatch.setattr(device, "dist", world)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert Mesh(Cuboid(), alone=True).device == torch.device("cuda", 3)


def test_mesh_splits_the_group_of_its_world_once_for_an_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    world = SimpleNamespace(group=SimpleNamespace(WORLD=Group()), split_group=lambda **options: asked.append(options))
    monkeypatch.setattr(meshes, "dist", world)
    mesh: Any = SimpleNamespace(device=torch.device("cuda", 0), _timeout=lambda: None, _groups=[])
    Mesh._group(mesh, np.array([[1, 0], [2, 3]]))
    assert asked == [{"split_ranks": [[0, 1], [2, 3]], "timeout": None}]


def test_verify_does_not_hold_a_gpu_to_the_attention_kernel_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig("gpt2", layers=1, hidden=8, heads=2, vocab=5, context=4)
    case = cuboid.verify.Case(config, Cuboid(), 2, 4)
    for gpu, demanded in ((False, 4), (True, 2)):
        monkeypatch.setattr(cuboid.verify, "is_gpu", lambda _, gpu=gpu: gpu)
        with Pool(1) as pool:
            report = pool.run(cuboid.verify.verify, case)[0]
        assert [each.predicted for each in report.balance.values()].count(True) == demanded
        assert report.ok
