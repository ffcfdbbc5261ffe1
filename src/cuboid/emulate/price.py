"""The time of an operation on a device, from its FLOPs and bytes by the planner's formulas."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cuboid.plan.hardware import Hardware
from cuboid.plan.measure import moved
from cuboid.plan.time import product_seconds

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp32"}
aten = torch.ops.aten


def seconds(hw: Hardware, func: Any, args: Any, kwargs: Any, made: Any) -> float:
    """Seconds of an operation on these arguments with a result like `made`."""
    shapes = PRODUCTS.get(func.overloadpacket)
    if shapes is not None:
        times, m, n, k, dtype = shapes(*args)
        rows, columns, depth = (np.array([float(side)]) for side in (m, n, k))
        one = product_seconds(hw, PRECISIONS[dtype], rows, columns, depth, dtype.itemsize)
        return times * float(one[0])
    attention = ATTENTION.get(func.overloadpacket)
    if attention is not None:
        flops, backward, dtype = attention(*args, **kwargs)
        return float(flops / hw.rate[PRECISIONS[dtype]] / hw.attention[backward] + hw.launch)
    size, name = moved((args, kwargs, made)), str(func.overloadpacket)
    known = hw.operations.get(name) or hw.operations.get(name.removesuffix("_"))
    return size / known.stream + known.launch if known else size / hw.stream + hw.launch


def _mm(a: Tensor, b: Tensor, *_: Any) -> tuple[int, int, int, int, torch.dtype]:
    return 1, a.shape[0], b.shape[1], a.shape[1], a.dtype


def _bmm(a: Tensor, b: Tensor, *_: Any) -> tuple[int, int, int, int, torch.dtype]:
    return a.shape[0], a.shape[1], b.shape[2], a.shape[2], a.dtype


#: The number of matmuls, their sides m, n, k, and the precision.
PRODUCTS: dict[Any, Callable[..., tuple[int, int, int, int, torch.dtype]]] = {
    aten.mm: _mm,
    aten.bmm: _bmm,
    aten.addmm: lambda total, a, b, *_: _mm(a, b),
    aten.addmm_: lambda total, a, b, *_: _mm(a, b),
    aten.baddbmm: lambda total, a, b, *_: _bmm(a, b),
    aten.baddbmm_: lambda total, a, b, *_: _bmm(a, b),
}


def _attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, **_: Any
) -> tuple[float, bool, torch.dtype]:
    """FLOPs without masked scores, as kernels compute, whether it is backward, and the precision."""
    b, h, s, e = q.shape
    return 4.0 * b * h * s * k.shape[2] * e * (0.5 if causal else 1.0), False, q.dtype


def _attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dropout: float, causal: bool, **_: Any
) -> tuple[float, bool, torch.dtype]:
    flops, _backward, dtype = _attention(q, k, v, causal=causal)
    return 2.5 * flops, True, dtype


ATTENTION: dict[Any, Callable[..., tuple[float, bool, torch.dtype]]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
