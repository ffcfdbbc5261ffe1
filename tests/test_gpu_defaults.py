"""What is done otherwise on a GPU than on a CPU, by default: asked without one. Fusing: tests/gpu."""

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cuboid import device
from cuboid.bench.layouts import Layout
from cuboid.bench.problem import Problem
from cuboid.comm.ledger import Ledger
from cuboid.comm.transport.nccl import TIMED, Nccl
from cuboid.layers import product
from cuboid.mesh.cuboid import Cuboid
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import suitable_schedule

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def test_sub_batches_of_a_gpu_must_be_larger() -> None:
    """A part of the residual stream is 4 MB at least there, and a matmul of one of four parts has 2048 rows."""
    wide = ModelConfig("llama", layers=1, hidden=4096, heads=32, vocab=64, context=8192)

    def parts(gpu: bool, cuboid: Cuboid, batch: int, seq: int) -> int:
        return suitable_schedule(wide, cuboid, batch, seq, itemsize=2, gpu=gpu).sub_batches

    assert [parts(gpu, Cuboid(1, 4, 1), 4, 512) for gpu in (False, True)] == [2, 1]  # of 4 MB, the whole of it
    assert [parts(gpu, Cuboid(1, 4, 1), 4, 1024) for gpu in (False, True)] == [2, 2]
    assert [parts(gpu, Cuboid(1, 1, 4), 8, 512) for gpu in (False, True)] == [4, 2]  # of 512 rows
    assert [parts(gpu, Cuboid(1, 1, 4), 8, 1024) for gpu in (False, True)] == [4, 4]
    bench, problem = Layout("cuboid", Cuboid(1, 4, 1)), Problem(wide, 2, 512)  # in fp32
    assert [bench.schedule(replace(problem, gpu=gpu)).sub_batches for gpu in (False, True)] == [2, 1]


def test_nccl_goes_before_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that are split from the world's take over its options."""
    nccl = SimpleNamespace(Options=lambda **options: SimpleNamespace(**options, _timeout=timedelta(minutes=10)))
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", nccl, raising=False)
    limit = timedelta(seconds=100)  # the group's, or PyTorch warns
    assert vars(device.group_options(GPU, limit)) == {"is_high_priority_stream": True, "_timeout": limit}
    assert device.group_options(CPU, limit) is None


def test_one_of_seven_collectives_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()
    event: Any = lambda enable_timing: made.append(1) or SimpleNamespace(record=lambda: None)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    group: Any = SimpleNamespace(size=lambda: 4, rank=lambda: 0)
    nccl, ledger = Nccl(group, 1, 4, None, False), Ledger()

    def step(**kinds: int) -> list[int]:
        """A step's weights, which must be right on average: the calls of each kind."""
        ledger.reset()
        stamps = [nccl.stamp([], ledger.launched("x", kind, 8), False) for kind, n in kinds.items() for _ in range(n)]
        return [each.weight for each in stamps if each]

    assert step(all_gather=2 * TIMED) == 2 * [*[0] * (TIMED - 1), TIMED]
    assert len(made) == 2 * 3
    assert sum(sum(step(all_gather=10)) for _ in range(TIMED)) == 10 * TIMED
    rare = [step(all_reduce=2, all_gather=10)[:2] for _ in range(3)]
    assert rare == [[0, 0], [1, 1], [1, 1]]  # each of them, once it is known that a step has few
    assert step(all_reduce=TIMED)[:TIMED] == [*[1] * (TIMED - 1), 0]
    assert step(all_reduce=1) == [TIMED]  # the 14th of all
    traced = nccl.stamp([], ledger.launched("x", "all_gather", 8), listed=True)
    assert traced is not None
    assert traced.weight == 1


@pytest.mark.parametrize("add", [False, True])
def test_wide_sums_of_matmuls_are_one_kernel(add: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is dW of the head added up, chunk by chunk."""
    asked = list[Any]()

    def addmm(total: Tensor, A: Tensor, B: Tensor, out_dtype: torch.dtype, beta: float, out: Tensor) -> None:
        asked.append((out_dtype, out is total))
        out.copy_(beta * total + A.float() @ B.float())

    monkeypatch.setattr(product, "is_gpu", lambda _: True)
    monkeypatch.setattr(torch, "addmm", addmm)
    A, total = torch.full((2, 3), 0.5).bfloat16(), torch.ones(2, 2)
    product.mm(A, A.T, total, add)
    assert asked == [(torch.float32, True)]
    assert total.unique().tolist() == [1.75 if add else 0.75]
