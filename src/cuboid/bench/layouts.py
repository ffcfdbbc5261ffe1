"""The layouts that benchmarks compare: ways of spreading one model over the same ranks, ready to train."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import isqrt
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from cuboid.baselines.one_d import OneD
from cuboid.baselines.serial import Serial
from cuboid.baselines.two_d import TwoD
from cuboid.bench.native import Native
from cuboid.bench.network import best, feasible
from cuboid.bench.problem import Problem
from cuboid.comm.ledger import Ledger
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import shard_of
from cuboid.mesh.mesh import Mesh
from cuboid.model.cuboid import CuboidParallel, suitable_schedule
from cuboid.model.parallel import Parallel
from cuboid.model.transformer import Transformer
from cuboid.plan.cost import Cost
from cuboid.plan.cost.cuboid import cost_of_all
from cuboid.plan.cost.native import native_cost
from cuboid.plan.cost.one_d import one_d_cost
from cuboid.plan.cost.two_d import two_d_cost
from cuboid.plan.layer import Choice
from cuboid.run.launch import World
from cuboid.step.pipeline import Split, orders
from cuboid.step.runner import At
from cuboid.step.schedule import OFF, Schedule
from cuboid.train.optimizer import ShardedAdamW

#: "ideal": sends the least that the algorithm needs; gloo's own collectives send more.
Way = Literal[
    "serial",
    "1-D",
    "1-D+SP",
    "2-D",
    "2-D ideal",
    "2.5-D",
    "FSDP×TP",
    "cube",
    "cuboid",
    "pipe",
    "native",
    "native ideal",
    "DDP",
]


@dataclass(frozen=True)
class Layout:
    """`shape` is the block of ranks: y for 1-D; layers × rows × columns for 2-D, 2.5-D; x = FSDP, y = TP for native."""

    way: Way
    shape: Cuboid
    overlap: bool = True  # False: a cuboid without overlap
    sp: bool = True  # native: with sequence parallelism
    tuned: bool = False  # native: gathered weights stay from forward to backward, whatever the policy
    beside: bool = False  # a cuboid that runs each forward beside the previous micro-batch's backward
    choice: Choice | None = None  # a cuboid's, as planned; None: the problem's policy, and the schedule that suits
    micro_batches: int = 1  # that a cuboid's batch is split into
    pipeline: str = "1f1b"  # the schedule of a pipe, unless planned

    @property
    def native(self) -> bool:
        """Whether it is PyTorch's own."""
        return self.way.startswith("native") or self.way == "DDP"

    @property
    def cuboidal(self) -> bool:
        """Whether it is one of ours, which `cuboid plan` plans."""
        return self.way in ("cube", "cuboid", "pipe", "FSDP×TP")

    @property
    def by_host(self) -> bool:
        """Whether broadcasts and sums to one rank enter or leave each host once."""
        return self.way != "2-D"

    @property
    def name(self) -> str:
        k = self.shape
        if self.way in ("serial", "1-D", "1-D+SP"):
            return self.way
        if self.way in ("2-D", "2-D ideal"):
            return f"{self.way} {k.y}×{k.z}"
        if self.way == "2.5-D":
            return f"2.5-D {k.x}×{k.y}×{k.z}"
        if self.way == "DDP":
            return f"DDP {k.x}"
        if self.native:
            way = self.way if self.sp else self.way.replace("native", "native-SP")
            return f"{way}{'+' * self.tuned} {k.x}×{k.y}"
        if self.way == "FSDP×TP":
            return f"{self.way} {k.x}×{k.y}"
        long = [axis for axis in k.order if k.sizes[axis] > 1]
        order = "" if long == sorted(long) else " " + "".join(long)
        way = "cuboid" if self.way == "pipe" else self.way
        if self.choice is not None:
            many = f", {self.micro_batches} micro-batches" * (self.micro_batches > 1)
            return f"{way} {k}" + f", {self.choice.schedule.pipeline}" * (k.pipe > 1) + many
        return f"{way} {k}{order}" + ("" if self.overlap else ", no overlap")

    def cost(self, problem: Problem, rank: int) -> Cost:
        """The cost of one step on one rank, by formula."""
        p, k = problem, self.shape
        at = k.coordinates(rank)
        if self.native:
            return native_cost(p.config, k.x, k.y, p.batch, p.seq, rank, **self.native_options(p))
        if self.way in ("1-D", "1-D+SP"):
            return one_d_cost(p.config, k, at, p.batch, p.seq, self.way == "1-D+SP")
        if self.way in ("2-D", "2-D ideal", "2.5-D"):
            return two_d_cost(p.config, k, at, p.batch, p.seq)
        choice, count = self.chosen(p), self.count(p)
        sizes = p.config, k, at, p.batch // self.micro_batches, p.seq, choice.policy, choice.recompute
        return cost_of_all(count, *sizes, schedule=choice.schedule)

    def count(self, problem: Problem) -> int:
        """Micro-batches of a step."""
        return self.micro_batches * problem.micro_batches

    def chosen(self, problem: Problem) -> Choice:
        """A cuboid's choice: the planned one, or one that suits its sizes and the network."""
        if self.choice is not None:
            return self.choice
        if not self.cuboidal or not self.overlap:
            return Choice(policy=problem.policy, schedule=OFF)
        batch = problem.batch // self.micro_batches
        suits = suitable_schedule(problem.config, self.shape, batch, problem.seq, 4, problem.apart, problem.gpu)
        schedule = replace(suits, beside=self.beside)
        if self.shape.pipe > 1:
            schedule = replace(schedule, pipeline=self.pipeline, stages=stages_of(self.pipeline))
        return Choice(policy=problem.policy, schedule=schedule)

    def native_options(self, problem: Problem) -> dict[str, bool]:
        """Options of `Native` and of its cost."""
        reshard = problem.policy.weights == "regather" and not self.tuned
        return {"ideal": self.way == "native ideal", "reshard": reshard, "sp": self.sp, "ddp": self.way == "DDP"}

    def schedule(self, problem: Problem) -> Schedule:
        return self.chosen(problem).schedule

    def parallel(self, problem: Problem, mesh: Mesh) -> Parallel:
        if self.way == "serial":
            return Serial(problem.config)
        if self.way in ("1-D", "1-D+SP"):
            return OneD(problem.config, mesh, self.way == "1-D+SP")
        if self.way in ("2-D", "2-D ideal", "2.5-D"):
            return TwoD(problem.config, mesh)
        choice = self.chosen(problem)
        return CuboidParallel(problem.config, mesh, choice.policy, schedule=choice.schedule)

    def runner(self, problem: Problem, world: World) -> "LayoutRunner":
        return NativeRunner(self, problem, world) if self.native else ModelRunner(self, problem, world)


class LayoutRunner(Protocol):
    """One rank's model and optimizer."""

    optimizer: torch.optim.Optimizer
    ledger: Ledger

    @property
    def module(self) -> nn.Module: ...

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of the unsharded batch."""

    def clip(self) -> None:
        """Scale the gradients to a norm of at most 1."""

    def counted(self) -> AbstractContextManager[object]:
        """A context in which the ledger counts."""

    def close(self) -> None: ...


def adamw(module: nn.Module) -> torch.optim.AdamW:
    """The same for all layouts, PyTorch's own included: without DTensor's dispatch."""
    return ShardedAdamW(module.parameters(), lr=1e-3, weight_decay=0.1, fused=True)


class ModelRunner:
    """Runs our model under any parallelism."""

    def __init__(self, layout: Layout, problem: Problem, world: World) -> None:
        self.mesh = Mesh(
            layout.shape,
            world.rank,
            world.device,
            overlap=layout.overlap,
            per_host=world.local_size,
            by_host=layout.by_host,
            share_device=world.crowded,
        )
        self._parallel = layout.parallel(problem, self.mesh)
        self.module = Transformer(self._parallel, problem.seed, recompute=layout.chosen(problem).recompute)
        self.optimizer: torch.optim.Optimizer = adamw(self.module)
        self.ledger, self._layout, self._problem = self.mesh.ledger, layout, problem

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss. With several micro-batches it runs the backwards too; the returned loss then has none left."""
        of, split = self._layout, self._layout.micro_batches
        place = self._parallel.place(len(tokens) // split, tokens.shape[1])
        parts = zip(tokens.chunk(split), targets.chunk(split), strict=True)
        taken = [(place.take(ids, 0), place.take(wanted, -100)) for ids, wanted in parts]
        if of.count(self._problem) > 1 or of.shape.pipe > 1:
            batches = [(ids, At(place, wanted)) for ids, wanted in taken] * self._problem.micro_batches
            return torch.stack(self.module.play(batches)).mean().requires_grad_()
        loss: Tensor = self.module(*taken[0], place)
        return loss

    def clip(self) -> None:
        scale = (1 / self.module.gradient_norm()).clamp(max=1).float()
        torch._foreach_mul_([shard_of(p.grad) for p in self.module.parameters() if p.grad is not None], scale)

    def counted(self) -> AbstractContextManager[object]:
        return nullcontext()  # it always counts

    def close(self) -> None:
        self.mesh.close()


class NativeRunner:
    """Runs PyTorch's own model."""

    def __init__(self, layout: Layout, problem: Problem, world: World) -> None:
        k = layout.shape
        options = layout.native_options(problem)
        self._native = Native(problem.config, world, k.x, k.y, problem.seed, torch.float32, **options)
        self.module = self._native.model
        self.optimizer: torch.optim.Optimizer = adamw(self.module)
        self.ledger = Ledger()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self._native.loss(tokens, targets)

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)

    def counted(self) -> AbstractContextManager[object]:
        return self._native.tally(self.ledger)

    def close(self) -> None:
        self._native.close()


# Which layouts are compared


def scaling(problem: Problem, ranks: int, per_host: int) -> Iterator[Layout]:
    """The paper's layouts, if this number of ranks allows their shapes, and the best cuboid and FSDP × TP mesh by
    formula. 1-D+SP is left out: it sends as many bytes as 1-D, but its direct reduce-scatter crosses between hosts more
    often than 1-D's ring."""
    yield Layout("1-D", Cuboid(1, ranks, 1))
    for square in _squares(ranks):
        yield square
        if square.way == "2-D" and 1 < per_host < square.shape.z:  # rows of several hosts, each with several ranks
            yield Layout("2-D ideal", square.shape)
    yield Layout("FSDP×TP", best(problem, ranks, per_host, flat=True))
    edge, found = round(ranks ** (1 / 3)), best(problem, ranks, per_host)
    cube = Cuboid(edge, edge, edge)
    if cube.ranks == ranks:
        yield Layout("cube", cube)
    if found != cube:
        yield Layout("cuboid", found)


def _squares(ranks: int) -> Iterator[Layout]:
    """The 2-D and 2.5-D layouts of this number of ranks."""
    side = isqrt(ranks)
    if side * side == ranks:
        yield Layout("2-D", Cuboid(1, side, side))
    depth, side = _deepest(ranks)
    if depth > 1:
        yield Layout("2.5-D", Cuboid(depth, side, side))


def _deepest(ranks: int) -> tuple[int, int]:
    """(layers, side) with layers × side² = ranks and the most layers ≤ side; (1, 1) if there is none."""
    found = [(ranks // q**2, q) for q in range(2, ranks) if ranks % q**2 == 0 and ranks // q**2 <= q]
    return max(found, default=(1, 1))


def every(problem: Problem, ranks: int, emulated: bool = False) -> Iterator[Layout]:
    """All layouts and cuboids of this number of ranks. On emulated devices DDP is left out: it launches collectives
    from C++, where they are not seen."""
    yield Layout("1-D", Cuboid(1, ranks, 1))
    yield Layout("1-D+SP", Cuboid(1, ranks, 1))
    yield from _squares(ranks)
    for shape in feasible(problem, ranks):
        yield Layout("cuboid", shape)
    for tp in (p for p in range(1, ranks + 1) if ranks % p == 0 and problem.batch % (ranks // p) == 0):
        yield from _natives(Cuboid(ranks // tp, tp, 1), not emulated)


def _natives(shape: Cuboid, ddp: bool) -> Iterator[Layout]:
    """PyTorch's own on one mesh, in all variants that may be fastest: with sequence parallelism and without ("-SP"),
    weights regathered in backward or kept ("+"), gloo's reduce-scatters or the least traffic ("ideal"), and DDP.
    Without sequence parallelism only FSDP has reduce-scatters, so that "ideal" changes nothing where x = 1."""
    for sp in (True, False)[: 1 + (shape.y > 1)]:
        for tuned in (False, True)[: 1 + (shape.x > 1)]:
            yield Layout("native", shape, sp=sp, tuned=tuned)
            if sp or shape.x > 1:
                yield Layout("native ideal", shape, sp=sp, tuned=tuned)
    if ddp and shape.y == 1 < shape.x:
        yield Layout("DDP", shape)


def stages_of(pipeline: str) -> int:
    """Stages of a rank."""
    return 2 if pipeline == "interleaved" else 1


def on_pipes(problem: Problem, ranks: int, pipe: int, pipeline: str, micro_batches: int) -> Iterator[Layout]:
    """All cuboids of this number of ranks on a pipe of so many places, where the batch is split into micro-batches.
    Raises ValueError if there is no such pipe, whatever the cuboid."""
    if ranks % pipe:
        divisors = [str(n) for n in range(2, ranks + 1) if ranks % n == 0]
        other = f", or pipe of {', '.join(divisors)}" if divisors else ""
        raise ValueError(
            f"{ranks} ranks cannot be split into pipe={pipe} places; use a multiple of {pipe} ranks{other}"
        )
    if problem.batch % micro_batches:
        choices = ", ".join(str(n) for n in range(1, problem.batch + 1) if problem.batch % n == 0)
        raise ValueError(
            f"batch={problem.batch} cannot be split into {micro_batches} micro-batches; use a divisor of it: {choices}"
        )
    schedule = Schedule(pipeline=pipeline, stages=stages_of(pipeline))
    Split.of(problem.config.layers, pipe, schedule)
    orders(schedule, pipe, micro_batches)
    for shape in feasible(replace(problem, batch=problem.batch // micro_batches), ranks // pipe):
        yield Layout("pipe", replace(shape, pipe=pipe), pipeline=pipeline, micro_batches=micro_batches)


def possible(layouts: Iterable[Layout], problem: Problem) -> tuple[list[Layout], dict[str, str]]:
    """Returns the layouts that can run this problem, and by name why others cannot: a layout may need more heads or a
    larger batch."""
    found, left_out = [], {}
    for layout in layouts:
        try:
            layout.cost(problem, 0)
        except ValueError as error:
            left_out[layout.name] = str(error)
        else:
            found.append(layout)
    return found, left_out


def begin_with(only: Sequence[str], names: Sequence[str], left_out: Mapping[str, str] | None = None) -> list[str]:
    """The names that start with one of `only`. Raises ValueError if no name starts with one of them."""
    for each in only:
        if not any(name.startswith(each) for name in names):
            for name, why in (left_out or {}).items():
                if name.startswith(each):
                    raise ValueError(f"--only {each!r}: {name} cannot run: {why}")
            raise ValueError(f"--only {each!r} matches the start of none of {', '.join(names)}")
    return [name for name in names if name.startswith(tuple(only))]
