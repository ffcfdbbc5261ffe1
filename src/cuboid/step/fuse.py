"""Elementwise work as it is written, or each function of it compiled into one kernel.

What is fused is a pure function of tensors: collectives stay outside.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

#: Makes a function of tensors faster, or leaves it as it is.
Fuse = Callable[[Callable[..., Any]], Callable[..., Any]]


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """By torch.compile, when it is first called; takes seconds then, and a C++ compiler on a CPU."""
    return torch.compile(function, fullgraph=True)
