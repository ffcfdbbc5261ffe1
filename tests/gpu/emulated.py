"""CUDA devices that a CPU build of torch believes in. Import it before torch; $CUBOID_SHIM is shim.cpp, compiled.

What torch's CPU build lacks is put into `torch.cuda`, and attention takes the kernels that a GPU would choose. Tensors
on these devices are fake: they have shapes alone.
"""

import ctypes
import os
from collections import Counter
from types import SimpleNamespace
from typing import Any

shim = ctypes.CDLL(os.environ["CUBOID_SHIM"], ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
import torch.nn.attention.bias  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

DEVICES = 8
events: Counter[str] = Counter()  # made, recorded


class Event:
    """Of a stream that is never behind."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        events["made"] += 1

    def record(self, stream: Any = None) -> None:
        events["recorded"] += 1

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "Event") -> float:
        return 0.0


class Stream:
    """The one stream there is."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_stream(self, other: "Stream") -> None:
        pass

    def synchronize(self) -> None:
        pass


def same(*_: Any, **__: Any) -> None:
    pass


current = 0


def set_device(device: Any) -> None:
    global current
    current = torch.device("cuda", device).index if isinstance(device, int) else torch.device(device).index or 0
    shim.set_device(current)


vars(torch.cuda).update(
    Event=Event,
    Stream=Stream,
    is_available=lambda: True,
    is_initialized=lambda: True,
    device_count=lambda: DEVICES,
    set_device=set_device,
    current_device=lambda: current,
    current_stream=lambda device=None: Stream(),
    stream=lambda stream: stream,
    synchronize=same,
    empty_cache=same,
    manual_seed_all=same,
    get_rng_state=lambda device=None: torch.empty(0, dtype=torch.uint8),
    max_memory_allocated=lambda device=None: 1 << 30,
    memory_allocated=lambda device=None: 1 << 30,
    reset_peak_memory_stats=same,
    mem_get_info=lambda device=None: (79 << 30, 80 << 30),
    get_device_name=lambda device=None: "NVIDIA H100 80GB HBM3",
    get_device_properties=lambda device=None: SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", total_memory=80 << 30, multi_processor_count=132, major=9, minor=0
    ),
    _lazy_init=same,
)

host_attention, kernels = F.scaled_dot_product_attention, Counter[str]()


def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, is_causal: bool = False, **options: Any
) -> Tensor:
    """As torch chooses on a GPU: flash in low precision, memory-efficient in fp32, matmuls where neither can."""
    if q.device.type != "cuda":
        return host_attention(q, k, v, attn_mask, is_causal=is_causal, **options)
    lower = isinstance(attn_mask, torch.nn.attention.bias.CausalBias)
    low, unmasked = q.dtype in (torch.bfloat16, torch.float16), attn_mask is None or lower
    if low and unmasked:
        kernels["flash"] += 1
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal or lower, False)[0]
    if q.dtype == torch.float32 and unmasked and not lower and q.shape[1] == k.shape[1]:
        kernels["efficient"] += 1
        return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal)[0]
    kernels["matmuls"] += 1
    mask = q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2]) if lower else attn_mask
    return host_attention(q, k, v, mask, is_causal=is_causal, **options)


F.scaled_dot_product_attention = attention
