"""What torch.compile makes of each function that is fused on a GPU, on a CPU: how many kernels Inductor generates for
the same graph, and which values they compute."""

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
from cuboid.step.op import scaled

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
    scaled: (bf16(S, B, D), torch.tensor(1 / 3, dtype=torch.float64)),
    add_up: (fp32(S * D), *(bf16(S * D) for _ in range(8))),
}


COMPILES = pytest.mark.skipif(which("c++") is None, reason="torch.compile needs a C++ compiler on a CPU")
#: Of a result, relative to its norm. Between operations a fused function does not round to bf16.
TOLERANCE = {torch.bfloat16: 2**-8, torch.float32: 1e-6}


def differentiated(function: Callable[..., Any]) -> bool:
    return f"{function.__name__} backward" in KERNELS


@pytest.mark.slow
@COMPILES
@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_fused_function_computes_what_is_written(function: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own imports warn
        found = results(function, torch.compile(function, fullgraph=True, dynamic=False))
    written = results(function, function)
    assert len(found) == len(written) > 0
    for one, other in zip(found, written, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        off = (one.double() - other.double()).norm() / other.double().norm()
        assert off <= TOLERANCE.get(one.dtype, 0)


def results(function: Callable[..., Any], run: Callable[..., Any]) -> list[Tensor]:
    """Of the call, and its gradients if autograd differentiates it; what it has written, if it returns nothing."""
    args = [x.clone() if isinstance(x, Tensor) else x for x in CALLS[function]]
    wanted = [x.requires_grad_() for x in args if isinstance(x, Tensor) and x.dtype == torch.bfloat16]
    with torch.set_grad_enabled(differentiated(function)):
        out = run(*args)
    if out is None:
        return [args[0]]
    outs = list(out) if isinstance(out, tuple) else [out]
    if differentiated(function):
        generator = torch.Generator().manual_seed(0)
        (out,) = outs
        outs += torch.autograd.grad(out, wanted, torch.randn(out.shape, generator=generator).to(out.dtype))
    return outs


@pytest.mark.slow
@COMPILES
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

    found, plain = [0], CppScheduling.codegen_node
    for x in args:
        if isinstance(x, Tensor) and x.dtype == torch.bfloat16:
            x.requires_grad_(differentiated(function))

    def counted(scheduling: Any, node: Any) -> Any:
        found[0] += 1
        return plain(scheduling, node)

    torch._dynamo.reset()
    with (
        mock.patch.object(CppScheduling, "codegen_node", counted),
        config.patch(force_disable_caches=True),
        torch.set_grad_enabled(differentiated(function)),
    ):
        out = torch.compile(function, fullgraph=True, dynamic=False)(*args)
        if differentiated(function):
            out.sum().backward()
    assert found[0]
    return found[0]
