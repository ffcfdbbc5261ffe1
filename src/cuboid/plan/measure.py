"""Measures a step on this rank: FLOPs, peak memory, and bytes saved between forward and backward."""

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from cuboid.mesh.layout import shard_of


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in it. (torch's own tree functions take ten times as long.)"""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))


def moved(values: Any) -> int:
    """Bytes that an operation reads and writes, given its arguments and its result."""
    return sum(x.numel() * x.element_size() for x in tensors(values))


@dataclass
class _Alive:
    size: int
    kind: str
    floating: bool


class Memory(TorchDispatchMode):
    """Peak bytes of this rank's tensors: a module's parameters and all that is allocated inside this context.

    What was alive at the peak is listed by kind: parameters, gradients, saved activations, and the rest by the module
    of this package that allocated it ("autograd" if PyTorch's own backward did).
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module, self._now, self.peak = module, 0, 0
        self._alive: dict[int, tuple[_Alive, weakref.ref[torch.UntypedStorage]]] = {}
        self._at_peak: list[_Alive] = []
        for parameter in module.parameters():
            self._see(shard_of(parameter), "parameters")

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                self._call(parameter.grad, "gradients")

    def at_peak(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for each in self._at_peak:
            total[each.kind] += each.size
        return dict(total)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # a wrapper such as DTensor, which calls again with the tensors inside
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            maker = _maker()
            if type(each) in (Tensor, nn.Parameter, FakeTensor) and maker:  # wrappers hold no memory of their own
                self._see(each, maker)
        return out

    def saved(self, loss: Tensor) -> int:
        """Bytes that forward saved for backward: what it allocated that is still alive, without integers, kept weights
        and the loss. From now on they count as saved activations."""
        passed = loss.grad_fn.passed  # type: ignore[union-attr]
        kept = [weight for weights in passed.kept.values() for weight in weights.values()]
        others = {_identity(x) for x in (loss, *kept)}
        found = [a for i, (a, _) in list(self._alive.items()) if a.floating and i not in others]
        mine = [alive for alive in found if alive.kind not in ("parameters", "mesh.place")]  # which has angles
        for alive in mine:
            alive.kind = "saved activations"
        return sum(alive.size for alive in mine)

    def _call(self, tensor: Tensor, kind: str) -> None:
        """Count a tensor as `kind` from now on, unless it is a parameter."""
        found = self._alive.get(_identity(shard_of(tensor)))
        if found is not None and found[0].kind != "parameters":
            found[0].kind = kind

    def _see(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        identity, alive = storage._cdata, _Alive(storage.nbytes(), kind, tensor.is_floating_point())
        if not alive.size or identity in self._alive:
            return

        def gone(_: object) -> None:
            self._now -= alive.size
            del self._alive[identity]

        self._alive[identity] = alive, weakref.ref(storage, gone)
        self._now += alive.size
        if self._now > self.peak:
            now = list(self._alive.values())  # a backend's thread may free one meanwhile
            self.peak, self._at_peak = self._now, [each for each, _ in now]


def _identity(x: Tensor) -> int:
    """An id of a tensor's memory; a fake tensor has one too."""
    return x.untyped_storage()._cdata


def _maker() -> str:
    """The module of this package that called the running operation; "" while DTensor propagates shapes, on tensors
    without values."""
    frame = sys._getframe(2)
    while frame is not None:
        package, _, module = frame.f_globals.get("__name__", "").partition(".")
        if module == "distributed.tensor._sharding_prop":
            return ""
        if package == "cuboid":
            return "autograd" if frame.f_code.co_name == "measure" else module
        frame = frame.f_back  # type: ignore[assignment]
    return "autograd"


def count_flops() -> FlopCounterMode:
    """A counter that also knows the CPU's attention kernel and matmuls in place or with wider outputs. Causal attention
    counts in full, as usual."""
    aten = torch.ops.aten

    def product(_: torch.Size, a: torch.Size, b: torch.Size, *__: object, **___: object) -> int:
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
            aten.addmm: product,
            aten._scaled_dot_product_flash_attention_for_cpu: attention,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
        },
    )
