"""What a step launches, call by call, on pretended devices: whether a CUDA graph of one step would do the next.

A graph repeats the calls of its step with the numbers they had, on the memory they had. So two steps must make the same
calls, with the same numbers, and what they read but have not made themselves must lie where it lay.
"""

import messages  # noqa: I001  before torch

from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

import pretend


class Tape(TorchDispatchMode):
    """Of one step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.numbers: list[list[str]] = []  # of each call
        self.outside: list[list[int]] = []  # of each call, where that lies which the step reads and has not made
        self._made = set[int]()
        self._read: list[Tensor] = []  # kept, so that nothing else comes to lie there

    def __enter__(self) -> "Tape":
        messages.launched.append(self._message)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        messages.launched.remove(self._message)
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # a DTensor: it comes again with the tensor inside
        out = func(*args, **(kwargs or {}))
        given, found = (torch.utils._pytree.tree_leaves(each) for each in ((args, kwargs), out))
        if any(isinstance(x, FakeTensor) for x in found):
            return out  # DTensor asks for a shape
        if any(isinstance(x, Tensor) and x.is_cuda for x in (*given, *found)):
            if not pretend.plan_of(func).views:  # which launch nothing
                self._note(str(func), given)
            memory = {x.untyped_storage().data_ptr() for x in given if isinstance(x, Tensor)}
            self._made |= {x.untyped_storage().data_ptr() for x in found if isinstance(x, Tensor)} - memory
        return out

    def _message(self, message: messages.Message) -> None:
        self._note(message.kind, [*message.reads, *message.writes])

    def _note(self, name: str, given: list[Any]) -> None:
        on_device = [x for x in given if isinstance(x, Tensor) and x.is_cuda and x.numel()]
        read = [x for x in on_device if x.untyped_storage().data_ptr() not in self._made]
        self._read += read
        self.calls.append(f"{name} of {[list(x.shape) for x in on_device]}")
        self.numbers.append([number(x) for x in given if not (isinstance(x, Tensor) and x.is_cuda)])
        self.outside.append([x.data_ptr() for x in read])

    def differences(self, other: "Tape") -> list[str]:
        """What a graph of this step would do otherwise than the other step."""
        if self.calls != other.calls:
            calls = zip_longest(self.calls, other.calls)
            return [next(f"call {i}: {a}, then {b}" for i, (a, b) in enumerate(calls) if a != b)]
        numbers = zip(self.calls, self.numbers, other.numbers, strict=True)
        places = zip(self.calls, self.outside, other.outside, strict=True)
        said = [f"{call}: {a}, then {b}" for call, a, b in numbers if a != b]
        said += [f"{call}: reads what lies elsewhere" for call, a, b in places if a != b]
        return [*dict.fromkeys(said)]


def number(x: Any) -> str:
    """Of the host's: it would be a graph's for good."""
    return str(x.tolist()) if isinstance(x, Tensor) else str(x)
