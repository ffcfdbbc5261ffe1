"""Elementwise functions, run as they are written or each compiled into one kernel.

What is fused is a function of tensors that writes none but, as a whole, its first: collectives stay outside, and what a
compiler fails at runs as it is written.
"""

import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from cuboid.device import is_gpu

#: Makes a function of tensors faster, or leaves it as it is.
Fuse = Callable[[Callable[..., Any]], Callable[..., Any]]

#: Of one function at most. Dtypes, numbers of dimensions, strides, and which arguments need gradients have one each;
#: sizes become variables when they change. PyTorch's own limit of 8 does not do for two models in a process.
GRAPHS = 64

SWITCH = "TORCH_COMPILE_DISABLE"  # PyTorch's own, which fails where a graph is demanded
NEEDS = "a GPU needs a C compiler and Python's headers (gcc, python3-dev), a CPU a C++ compiler (g++)"


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile on first use with torch.compile. It takes seconds, and a C++ compiler on a CPU, Triton on a GPU.

    A dispatch mode, such as one that counts memory or FLOPs, sees the operations as they are written: torch.compile
    works under none."""
    if os.environ.get(SWITCH) == "1":
        return function
    fast = torch.compile(function, fullgraph=True, recompile_limit=GRAPHS)  # type: ignore[call-overload]  # not in stubs

    def call(*args: Any) -> Any:
        nonlocal fast
        if fast is not function and _get_current_dispatch_mode() is None:
            try:
                return fast(*args)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of a compiler, of many kinds; what is the function's own comes again
                _warn(type(error).__name__)
                fast = function
        return function(*args)

    return call


@cache
def _warn(error: str) -> None:
    """Once for all functions of a process."""
    why, remedy = f"torch.compile failed ({error})", f"{NEEDS}; {SWITCH}=1 silences this"
    if error == "FailOnRecompileLimitHit":
        why = f"a function has been compiled {GRAPHS} times, for arguments of as many kinds"
        remedy = "use fewer models, dtypes and layouts in one process"
    warnings.warn(f"{why}, so elementwise work runs unfused and slower; {remedy}", stacklevel=3)


def fuse_on(device: torch.device) -> Fuse:
    """Compiles on a GPU, where a kernel per operation would add launches and memory traffic."""
    return compiled if is_gpu(device) else plain


def compile_fault(device: torch.device) -> str:
    """What torch.compile fails at on this device, "" if it works. Compiles a small function, without its caches."""
    if os.environ.get(SWITCH) == "1":
        return f"{SWITCH}=1 is set"
    from torch._inductor import config  # here: it takes seconds

    try:
        with config.patch(force_disable_caches=True):
            torch.compile(_probe, fullgraph=True)(torch.ones(64, device=device))
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {said[:200]}"
    return ""


def _probe(x: Tensor) -> Tensor:
    return x * x + 1
