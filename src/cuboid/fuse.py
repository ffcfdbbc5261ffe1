"""Elementwise functions, run as they are written or each compiled into one kernel.

What is fused is a function of tensors that writes none but, as a whole, its first: collectives stay outside, and what a
compiler fails at runs as it is written.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from cuboid.device import is_gpu

#: Makes a function of tensors faster, or leaves it as it is.
Fuse = Callable[[Callable[..., Any]], Callable[..., Any]]


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile on first use with torch.compile. It takes seconds, and a C++ compiler on a CPU, Triton on a GPU."""
    fast = torch.compile(function, fullgraph=True)

    def call(*args: Any) -> Any:
        nonlocal fast
        if fast is not function:
            try:
                return fast(*args)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of a compiler, of many kinds; what is the function's own comes again
                warnings.warn(
                    f"torch.compile failed ({type(error).__name__}), so elementwise work runs unfused and slower; "
                    "install what it asks for, or set TORCH_COMPILE_DISABLE=1",
                    stacklevel=2,
                )
                fast = function
        return function(*args)

    return call


def fuse_on(device: torch.device) -> Fuse:
    """Compiles on a GPU, where a kernel per operation would add launches and memory traffic."""
    return compiled if is_gpu(device) else plain
