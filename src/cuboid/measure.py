"""Count what a step does on this rank: FLOPs, and the bytes autograd keeps between forward and backward."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
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
