"""How many kernels torch.compile makes of each function that is fused on a GPU: counted as Inductor generates them for
the same graph on a CPU."""

import warnings
from collections.abc import Callable
from shutil import which
from typing import Any
from unittest import mock

import pytest
import torch
from fused import KERNELS
from torch import Tensor

from cuboid.comm.transport.nccl import add_up
from cuboid.layers.activation import swiglu
from cuboid.layers.attention import rotate
from cuboid.layers.loss import Loss
from cuboid.layers.norm import fused_gradient, merged_scaled, statistics, sums_alone
from cuboid.layers.randomness import dropout

S, B, D, V = 64, 2, 128, 512
ROWS = torch.arange(S), torch.arange(B), torch.arange(D)


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def fp32(*shape: int) -> Tensor:
    return torch.rand(*shape)


#: As they are called in a step of Llama's in bf16.
CALLS: dict[Callable[..., Any], tuple[Any, ...]] = {
    statistics: (bf16(S, B, D), False),
    merged_scaled: (fp32(1, 1, S, B), bf16(S, B, D), D, 1e-5, False, bf16(D)),
    sums_alone: (bf16(S, B, D), bf16(S, B, D), fp32(1, S, B), bf16(D), D, [True]),
    fused_gradient: (bf16(S, B, D), bf16(S, B, D), fp32(1, S, B), bf16(D), fp32(1, S, B, 1)),
    rotate: (bf16(S, B, 4, 32), fp32(S, 1, 1, 16), fp32(S, 1, 1, 16)),
    swiglu: (bf16(S, B, D), bf16(S, B, D)),
    dropout: (bf16(S, B, D), 0.1, torch.tensor(12345), ROWS),
    Loss().parts: (fp32(S, V), torch.arange(S), 0),
    Loss().merge: (fp32(2, 4, S), torch.arange(S), V),
    Loss().gradient: (fp32(S, V), torch.arange(S), 0, fp32(S), V, torch.bfloat16),
    add_up: (fp32(S * D), *(bf16(S * D) for _ in range(8))),
}


@pytest.mark.slow
@pytest.mark.skipif(which("c++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_fused_functions_become_at_most_as_many_kernels_as_counted() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own imports warn
        found = {function.__name__: generated(function, args) for function, args in CALLS.items()}
    counted = {name: KERNELS[name] + KERNELS.get(f"{name} backward", 0) for name in found}
    assert {name: n for name, n in found.items() if n > counted[name]} == {}
    assert {name.removesuffix(" backward") for name in KERNELS} == found.keys()


def generated(function: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Kernels of the forward and, if autograd differentiates it, of the backward, which may be made at once: the groups
    of operations that Inductor generates code for. How many loops each has on a CPU depends on the CPU."""
    from torch._inductor import config
    from torch._inductor.codegen.cpp import CppScheduling

    differentiated, found, plain = f"{function.__name__} backward" in KERNELS, [0], CppScheduling.codegen_node
    for x in args:
        if isinstance(x, Tensor) and x.dtype == torch.bfloat16:
            x.requires_grad_(differentiated)

    def counted(scheduling: Any, node: Any) -> Any:
        found[0] += 1
        return plain(scheduling, node)

    torch._dynamo.reset()
    with (
        mock.patch.object(CppScheduling, "codegen_node", counted),
        config.patch(force_disable_caches=True),
        torch.set_grad_enabled(differentiated),
    ):
        out = torch.compile(function, fullgraph=True, dynamic=False)(*args)
        if differentiated:
            out.sum().backward()
    assert found[0]
    return found[0]
