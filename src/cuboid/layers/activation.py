"""The MLP's nonlinearities."""

import torch.nn.functional as F
from torch import Tensor


def swiglu(g: Tensor, u: Tensor) -> Tensor:
    return F.silu(g) * u


def gelu(x: Tensor) -> Tensor:
    """GPT-2's: the tanh form."""
    return F.gelu(x, approximate="tanh")
