"""What a rank's step launches on a GPU, counted on fake CUDA tensors with NCCL's branches taken.

A function that torch.compile fuses is counted as the kernels of `KERNELS`, each call reading its arguments and writing
its results once. `test_fused_functions_become_at_most_as_many_kernels_as_counted` holds the table to what Inductor
generates for the same functions on a CPU. Messages that are launched together are one call.
"""

import emulated  # noqa: I001  before torch

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import cuboid.fuse
from cuboid.comm.transport import fake
from fused import KERNELS

#: Of aten: they move no byte.
FREE = {
    *("view", "_unsafe_view", "_reshape_alias", "view_as", "as_strided", "alias", "detach", "lift_fresh", "resize_"),
    *("split", "split_with_sizes", "chunk", "slice", "select", "unbind", "unfold", "expand", "squeeze", "unsqueeze"),
    *("transpose", "permute", "t", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"),
    *("is_same_size", "device", "promote_types"),
}
KINDS = ("flash_attention", "flash_attention_backward", "efficient_attention", "efficient_attention_backward")
MATMULS = ("mm", "addmm", "addmm_", "bmm", *(f"_scaled_dot_product_{kind}" for kind in KINDS))
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2")


class Count(TorchDispatchMode):
    """Kernels and the bytes each reads and writes, collectives, and where the host would wait, by name."""

    active: "Count | None" = None

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.bytes, self.calls, self.waits = (Counter[str]() for _ in range(4))
        self.paused = self.together = False

    def __enter__(self) -> "Count":
        Count.active = self
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        Count.active = None
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # a DTensor: it calls again with the tensor inside
        out = func(*args, **kwargs)
        name, space = func.__name__.partition(".")[0], func.namespace
        if space == "c10d":
            self.calls[name] += not self.together
        elif space == "aten" and name not in FREE and not self.paused:
            self.waits[name] += name in WAITS
            assert not rounds(name, args), f"{name} of {args[0].dtype} rounds a factor of {args[1].dtype}"
            self.see(name, moved((args, kwargs, out)), launches(name, args))
        return out

    def see(self, name: str, size: int, kernels: int = 1) -> None:
        self.kernels[name] += kernels
        self.bytes[name] += size

    @contextmanager
    def as_one(self, name: str, args: Any, found: list[Any], kernels: int) -> Iterator[None]:
        """What runs within it is one function of the compiler's."""
        self.paused, before = True, self.paused
        try:
            yield
        finally:
            self.paused = before
        if not before:
            self.see(name, moved((args, found)), kernels)


def rounds(name: str, args: Any) -> bool:
    """Whether a GPU casts a number on the device to a lower precision, that of the tensor it multiplies."""
    if name.rstrip("_") not in ("mul", "div") or not all(isinstance(x, Tensor) and x.is_cuda for x in args[:2]):
        return False
    tensor, number = args[:2]
    return tensor.dim() > 0 == number.dim() and tensor.dtype.itemsize < 4 < 2 * number.dtype.itemsize


def launches(name: str, args: Any) -> int:
    """How many kernels it is: a foreach is one only if the tensors that belong together lie alike in memory."""
    if not name.startswith("_foreach"):
        return 1
    lists = [each for each in args if isinstance(each, list | tuple) and each and isinstance(each[0], Tensor)]
    alike = all(x.stride() == tensors[0].stride() for tensors in zip(*lists, strict=True) for x in tensors)
    return 1 if alike else len(lists[0])


def moved(values: Any) -> int:
    return sum(x.numel() * x.element_size() for x in torch.utils._pytree.tree_leaves(values) if isinstance(x, Tensor))


class Fused(torch.autograd.Function):
    """A compiled function that autograd differentiates: its backward is a separate one, which recomputes its inputs."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        ctx.function, ctx.args = function, [x.detach() if isinstance(x, Tensor) else x for x in args]
        return once(function, args)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        name, found = f"{ctx.function.__name__} backward", list[Any]()
        assert Count.active is not None
        with Count.active.as_one(name, (gradients, ctx.args), found, KERNELS[name]), torch.enable_grad():
            args = [x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x for x in ctx.args]
            wanted = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
            out = ctx.function(*args)
            given = torch.autograd.grad(out, wanted, gradients if isinstance(out, tuple) else gradients[0])
            found += given
        each = iter(given)
        return None, *(next(each) if isinstance(x, Tensor) and x.requires_grad else None for x in args)


def once(function: Callable[..., Any], args: Any) -> Any:
    found = list[Any]()
    assert Count.active is not None
    with Count.active.as_one(function.__name__, args, found, KERNELS[function.__name__]):
        out = function(*args)
        found.append(out)
    return out


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of torch.compile."""

    def call(*args: Any) -> Any:
        if Count.active is None:
            return function(*args)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            return Fused.apply(function, *args)
        return once(function, args)

    return call


cuboid.fuse.compiled = counted
launch_all = fake._FakeNccl._launch_all


def launched_together(*args: Any) -> Any:
    if Count.active is None:
        return launch_all(*args)
    Count.active.calls["together"] += 1
    Count.active.together = True
    try:
        return launch_all(*args)
    finally:
        Count.active.together = False


fake._FakeNccl._launch_all = launched_together

from cuboid.comm.journal import Journal  # noqa: E402
from cuboid.comm.transport.fake import join_silent_world  # noqa: E402
from cuboid.mesh.cuboid import Cuboid  # noqa: E402
from cuboid.mesh.mesh import Mesh  # noqa: E402
from cuboid.model.config import ModelConfig  # noqa: E402
from cuboid.model.cuboid import COMPUTE, CuboidParallel, Policy  # noqa: E402
from cuboid.model.transformer import Transformer  # noqa: E402
from cuboid.run.launch import World  # noqa: E402
from cuboid.step.runner import At  # noqa: E402
from cuboid.step.schedule import PREFETCH, Schedule  # noqa: E402


@dataclass
class Counted:
    kernels: Counter[str]
    bytes: Counter[str]
    calls: Counter[str]
    waits: Counter[str]
    events: int
    launched: list[Any]  # axis, kind, shape, dtype and ranks of each collective

    def without(self, other: "Counted") -> "Counted":
        """What this did and the other did not."""
        mine, theirs = ((each.kernels, each.bytes, each.calls, each.waits) for each in (self, other))
        rest = [Counter({n: a[n] - b[n] for n in a | b}) for a, b in zip(mine, theirs, strict=True)]
        return Counted(*rest, self.events - other.events, [])

    @property
    def summary(self) -> dict[str, float]:
        """Matmuls and attention apart, GB are what kernels read and write."""
        small = [name for name in self.kernels if name not in MATMULS]
        return {
            "kernels": sum(self.kernels[name] for name in small),
            "GB": round(sum(self.bytes[name] for name in small) / 1e9, 2),
            "calls": sum(self.calls.values()),
            "events": self.events,
        }


class Recorder:
    """In the place of the watchdog: what is launched, over all groups, in one list."""

    def __init__(self, rank: int) -> None:
        self.rank, self.launched = rank, list[Any]()

    def journal(self, axis: str, group: Any) -> Journal:
        ranks, launched = dist.get_process_group_ranks(group), self.launched

        class Recording(Journal):
            def note(self, kind: str, shape: tuple[int, ...] = (), dtype: torch.dtype | None = None) -> int:
                launched.append((axis, kind, tuple(shape), str(dtype), ranks))
                return super().note(kind, shape, dtype)

        return Recording(axis, ranks, self.rank)

    def share(self) -> float:
        return 0.0

    def disagree(self) -> None:
        raise AssertionError("nobody reads these journals")


def step(
    world: World,
    config: ModelConfig,
    cuboid: Cuboid,
    batch: int,
    seq: int,
    precision: str = "bf16",
    schedule: Schedule = PREFETCH,
    recompute: Any = "none",
    policy: Policy = Policy(),
    micro_batches: int = 1,
) -> Counted:
    """A rank's forward and backward of several micro-batches."""
    recorder = Recorder(world.rank)
    mesh = Mesh(cuboid, world.rank, "cuda:0", watch=recorder)
    with FakeTensorMode():
        parallel = CuboidParallel(config, mesh, policy, COMPUTE[precision], schedule)
        model = Transformer(parallel, None, recompute=recompute)
        place = parallel.place(batch, seq)
        ids = torch.zeros(len(place.positions), len(place.samples), dtype=torch.long, device="cuda:0")
        at = At(place, ids, seed=1 if config.dropout else None)
        emulated.events.clear()
        recorder.launched.clear()
        with Count() as count:
            if micro_batches > 1 or cuboid.pipe > 1:
                model.play([(ids, at)] * micro_batches)
            else:
                model(ids, ids, place, dropout=at.seed).backward()
        assert all(p.grad is not None and p.grad.device.type == "cuda" for p in model.parameters())
    return Counted(count.kernels, count.bytes, count.calls, count.waits, emulated.events["recorded"], recorder.launched)


def count(config: ModelConfig, cuboid: Cuboid, *args: Any, rank: int = 0, **options: Any) -> Counted:
    """Of one rank, in this process: torch remembers the shapes that it has derived for another."""
    join_silent_world(rank, cuboid.ranks, "nccl")
    try:
        return step(World(rank, cuboid.ranks, torch.device("cpu"), cuboid.ranks), config, cuboid, *args, **options)
    finally:
        dist.destroy_process_group()


def per_layer(config: ModelConfig, *args: Any, **options: Any) -> tuple[Counted, Counted]:
    """A layer, and all that is not one."""
    one, two = (count(config.replace(layers=n), *args, **options) for n in (1, 2))
    layer = two.without(one)
    return layer, one.without(layer)
