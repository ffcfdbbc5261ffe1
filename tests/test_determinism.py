"""What docs/determinism.md says: which bits are the same where."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import curve, furthest, on, ranks_of, tiny, write_text
from torch.utils._python_dispatch import TorchDispatchMode

from cuboid.device import be_deterministic, prepare_deterministic
from cuboid.run.launch import Pool, World
from cuboid.train.config import TrainConfig
from cuboid.train.loop import Trainer

Pools = Callable[[int], Pool]
BASE = ("model.dropout=0.1", "data.micro_batches=2", *on("2,1,2"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


def curve_of(pool: Pools, text: Path, *changes: str) -> list[tuple[float, float]]:
    config = tiny(text, *BASE, *changes)
    found = pool(ranks_of(config)).run(curve, config, 3)
    assert all(each == found[0] for each in found), "loss and norm are the same on all ranks"
    result: list[tuple[float, float]] = found[0]
    return result


#: What changes where or when something is computed or kept, and not what.
HARMLESS = (
    "overlap.prefetch=false",
    "memory.recompute=full",
    "memory.recompute=selective",
    "memory.activations=retain",
    "memory.weights=retain",
    "precision.deterministic=true",
)


def test_runs_are_same_to_the_bit_on_one_cuboid(pool: Pools, text: Path) -> None:
    first = curve_of(pool, text)
    assert curve_of(pool, text) == first
    for change in HARMLESS:
        assert curve_of(pool, text, change) == first, change


def test_runs_differ_by_rounding_on_other_cuboids_and_schedules(pool: Pools, text: Path) -> None:
    first = curve_of(pool, text)
    for change in ("overlap.sub_batches=2", "cuboid.order=z,y,x,replicas", "cuboid.z=1"):
        assert furthest(curve_of(pool, text, change), first) < 1e-5, change


# On a GPU, where nothing of this has run


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As they are before and after."""
    cuda, names = torch.backends.cuda, ("bf16", "fp16")
    before = [getattr(cuda.matmul, f"allow_{name}_reduced_precision_reduction") for name in names]
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    yield
    torch.use_deterministic_algorithms(False)
    cuda.enable_mem_efficient_sdp(True)
    cuda.enable_cudnn_sdp(True)
    for name, value in zip(names, before, strict=True):
        setattr(cuda.matmul, f"allow_{name}_reduced_precision_reduction", value)


def state() -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return (
        torch.are_deterministic_algorithms_enabled(),
        not cuda.mem_efficient_sdp_enabled(),
        not cuda.cudnn_sdp_enabled(),
        not cuda.matmul.allow_bf16_reduced_precision_reduction,
        not cuda.matmul.allow_fp16_reduced_precision_reduction,
        not torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )


def test_be_deterministic_sets_flags_for_a_gpu_alone(flags: None) -> None:
    before = state()
    assert not any(before)
    be_deterministic(torch.device("cpu"))
    assert state() == before
    be_deterministic(torch.device("cuda", 0))
    assert all(state())


def test_prepare_deterministic_keeps_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setenv("NCCL_ALGO", "")
    monkeypatch.delenv("NCCL_ALGO")
    prepare_deterministic()
    assert {"NVLS", "NVLSTree"} < set(os.environ["NCCL_ALGO"].removeprefix("^").split(","))  # switches add in these
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    prepare_deterministic()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["NCCL_ALGO"] == "Ring"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.add(str(func.overloadpacket).removeprefix("aten.").strip("_").lower())
        return func(*args, **(kwargs or {}))


def operations(world: World, config: TrainConfig) -> set[str]:
    trainer = Trainer(config, world)
    with Names() as names:
        trainer.step()
    return names.found


def undetermined() -> set[str]:
    """The operations that PyTorch, by its own account, cannot make deterministic on a GPU."""
    said = torch.use_deterministic_algorithms.__doc__ or ""
    listed = said[said.index("will throw a", said.index("will act")) : said.index("In addition, several")]
    return {name.rpartition(".")[2].strip("_").lower() for name in re.findall(r"`torch\.([\w.]+)`", listed)}


def test_step_has_no_operation_that_a_gpu_cannot_make_deterministic(pool: Pools, text: Path) -> None:
    unsafe = undetermined()
    assert {"cumsum", "put", "nllloss"} <= unsafe
    for family in ("gpt2", "llama"):
        config = tiny(text, *on("1,1,1"), f"model.family={family}", "model.dropout=0.1")
        (found,) = pool(1).run(operations, config)
        assert {"index_add", "addmm"} <= found  # of the embedding's gradient, and of products
        assert not found & (unsafe | {"nll_loss", "nll_loss_forward", "nll_loss2d_forward"})
