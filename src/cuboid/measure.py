"""Count what a step does on this rank: FLOPs, and the bytes autograd keeps between forward and backward."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


class Saved:
    """What autograd saved and still holds, each storage counted once. Parameters and token ids are no activations."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self._saved: list[weakref.ref[Tensor]] = []

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in self._parameters:
            self._saved.append(weakref.ref(x))
        return x

    @property
    def bytes(self) -> int:
        held = (x.untyped_storage() for ref in self._saved if (x := ref()) is not None)
        return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


class Memory(TorchDispatchMode):
    """The bytes of this rank's tensors, now and at most, from those given at the start on."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in tensors:
            self._see(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor):
                self._see(each)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if not size or address in self._alive:
            return

        def gone(_: object) -> None:
            self.now -= size
            del self._alive[address]

        self._alive[address] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


@contextmanager
def saved_for_backward(module: nn.Module) -> Iterator[Saved]:
    """Use it around forward, and read it before backward lets go of anything."""
    saved = Saved(module)
    with torch.autograd.graph.saved_tensors_hooks(saved, lambda x: x):
        yield saved


def count_flops() -> FlopCounterMode:
    """A counter that knows the CPU's attention kernel and in-place products too. Causal attention counts
    in full, as is the custom."""
    aten = torch.ops.aten

    def product(_: torch.Size, a: torch.Size, b: torch.Size, **__: object) -> int:
        return 2 * a[0] * a[1] * b[1]

    def attention(q: torch.Size, k: torch.Size, v: torch.Size, *_: object, **__: object) -> int:
        return sdpa_flop_count(q, k, v)

    def attention_backward(
        dy: torch.Size, q: torch.Size, k: torch.Size, v: torch.Size, *_: object, **__: object
    ) -> int:
        return sdpa_backward_flop_count(dy, q, k, v)

    return FlopCounterMode(
        display=False,
        custom_mapping={
            aten.addmm_: product,
            aten._scaled_dot_product_flash_attention_for_cpu: attention,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
        },
    )
