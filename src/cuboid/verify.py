"""Runs a model on a cuboid and on one device, and compares values, bytes, FLOPs, memory and balance."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import nan
from typing import Any

import torch
from torch import Tensor

from cuboid.baselines.serial import Serial
from cuboid.comm.collectives import all_reduce, gather_pieces
from cuboid.device import is_gpu
from cuboid.layers.loss import Loss
from cuboid.layers.randomness import key_of, normal, normal_quantiles
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import shard_of
from cuboid.mesh.mesh import Mesh
from cuboid.mesh.place import Place
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import CuboidParallel, Policy
from cuboid.model.freeze import Trained
from cuboid.model.module import declared
from cuboid.model.nn import evaluating
from cuboid.model.parallel import Parallel
from cuboid.model.transformer import Recompute, Transformer
from cuboid.plan.cost import Cost
from cuboid.plan.cost.cuboid import cost_of_all
from cuboid.plan.measure import Memory, count_flops
from cuboid.run.launch import World
from cuboid.step.pipeline import Split, orders
from cuboid.step.runner import At
from cuboid.step.schedule import PREFETCH, Schedule

#: Dtype at rest, dtype of matmuls, and the largest difference of a tensor from the serial one, relative to its norm.
DTYPES: dict[str, tuple[torch.dtype, torch.dtype | None, float]] = {
    "fp64": (torch.float64, None, 1e-9),
    "fp32": (torch.float32, None, 1e-4),
    "bf16": (torch.float32, torch.bfloat16, 1e-1),
}
#: What is compared between ranks. At rest: parameters, gradients, AdamW's two moments, saved activations. The peak also
#: has transients: gathered operands, the head's chunk, messages in flight.
QUANTITIES = (
    "bytes of matrices",
    "bytes of norms, biases",
    "FLOPs",
    "saved activations",
    "all at rest",
    "peak of a step",
)


@dataclass(frozen=True)
class Case:
    config: ModelConfig
    cuboid: Cuboid
    batch: int
    seq: int
    dtype: str = "fp64"
    policy: Policy = Policy()
    loss: Loss = Loss()
    recompute: Recompute = "none"
    seed: int = 0
    schedule: Schedule = PREFETCH
    freeze: str = ""  # a pattern of the parameters that are not trained
    micro_batches: int = 1  # that the batch is split into

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.batch % self.micro_batches:
            raise ValueError(
                f"batch={self.batch} cannot be split into micro_batches={self.micro_batches}; use a multiple of it"
            )
        self.config.check(self.cuboid, self.micro_batch, self.seq)
        Split.of(self.config.layers, self.cuboid.pipe, self.schedule)
        orders(self.schedule, self.cuboid.pipe, self.micro_batches)
        if Trained(self.config, self.freeze).nothing:
            raise ValueError(f"freeze={self.freeze!r} leaves nothing to train; freeze less")

    @property
    def micro_batch(self) -> int:
        """Sequences of a micro-batch."""
        return self.batch // self.micro_batches

    def cost(self, rank: int) -> Cost:
        """Of all micro-batches; `saved` is of one."""
        storage, compute, _ = DTYPES[self.dtype]
        sizes = storage.itemsize, (compute or storage).itemsize
        at = self.cuboid.coordinates(rank)
        settings = self.policy, self.recompute, *sizes, self.schedule
        of = self.config, self.cuboid, at, self.micro_batch, self.seq, *settings
        return cost_of_all(self.micro_batches, *of, freeze=self.freeze)


@dataclass
class Balance:
    """One quantity over the ranks, against an even share of the serial one."""

    share: float
    mean: float
    largest: float
    predicted: bool | None  # every rank's equals the formula's; None: it has none


@dataclass
class Report:
    errors: dict[str, float] = field(default_factory=dict)
    tolerance: float = 0.0
    loss: float = 0.0
    gradient_norm: float = 0.0
    traffic: dict[str, dict[str, int]] = field(default_factory=dict)  # of rank 0, by axis and collective
    traffic_predicted: bool = True  # every rank's equals the formula's
    balance: dict[str, Balance] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)  # bytes alive on rank 0 at the peak, see `Memory`

    @property
    def ok(self) -> bool:
        exact = all(error <= self.tolerance for error in self.errors.values())
        return exact and self.traffic_predicted and all(b.predicted is not False for b in self.balance.values())

    def export(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


@dataclass
class Measured:
    """A step of one model on one rank."""

    model: Transformer
    place: Place
    logits: Tensor  # of the first micro-batch
    loss: Tensor
    flops: int
    saved: int | None  # by the forward of a micro-batch; on a pipe it is not measured
    memory: Memory
    traffic: Mapping[str, dict[str, tuple[int, int]]]
    norm: Tensor

    @property
    def quantities(self) -> list[float]:
        """In the order of `QUANTITIES`; NaN if not measured."""
        parameters = list(self.model.parameters())
        matrices, vectors = (sum(shard_of(p).nbytes for p in parameters if (p.dim() > 1) == m) for m in (True, False))
        trained = sum(shard_of(p).nbytes for p in parameters if p.requires_grad)
        saved = nan if self.saved is None else self.saved
        at_rest, peak = matrices + vectors + 3 * trained + saved, self.memory.peak + 2 * trained
        return [matrices, vectors, self.flops, saved, at_rest, peak]


def batch_of(case: Case) -> tuple[Tensor, Tensor]:
    """Tokens and targets [batch, seq], the same on every rank; the first target of each sample does not count."""
    generator = torch.Generator().manual_seed(case.seed)
    tokens = torch.randint(case.config.vocab, (case.batch, case.seq + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[:, 0] = case.loss.ignore_index
    return tokens[:, :-1], targets


@torch.no_grad()
def unsettle(model: Transformer, seed: int) -> None:
    """Move norms away from one and biases from zero, because a misplaced slice of equal values would not be noticed."""
    mesh, quantiles = model.parallel.mesh, normal_quantiles()
    for name, parameter, d in declared(model):
        if not d.std:
            ranges = d.spec.ranges(mesh.cuboid, mesh.coordinates)
            shard = shard_of(parameter)
            shard.add_(normal(key_of(seed, f"{name} moved"), d.spec.shape, ranges, 0.1, quantiles).to(shard))


def saved_bytes(memory: Memory, loss: Tensor, expected: int | None) -> int:
    """Bytes that forward saved. A backend's thread may hold a message longer than the rank waits for it, so if there is
    more than expected, it is read again a few times."""
    found = memory.saved(loss)
    for _ in range(200):
        if expected is None or found <= expected:
            break
        time.sleep(0.01)
        found = memory.saved(loss)
    return found


def measure(case: Case, parallel: Parallel, expected: int | None = None) -> Measured:
    storage, _, _ = DTYPES[case.dtype]
    model = Transformer(parallel, case.seed, storage, case.recompute)
    unsettle(model, case.seed)
    model.freeze(case.freeze)
    place = parallel.place(case.micro_batch, case.seq)
    device, batches = parallel.mesh.device, list[tuple[Tensor, At]]()
    of_each = zip(*(whole.to(device).chunk(case.micro_batches) for whole in batch_of(case)), strict=True)
    for i, (tokens, targets) in enumerate(of_each):
        at = At(place, place.take(targets, case.loss.ignore_index), case.loss, case.seed + i)
        batches.append((place.take(tokens, 0), at))
    (tokens, at), saved = batches[0], None
    with evaluating(model):
        logits = model.logits(tokens, place)
    if parallel.mesh.pipe.size == 1:
        with Memory(model) as memory:  # a separate step, because the FLOP counter keeps tensors alive
            loss = model(tokens, at.targets, place, case.loss, dropout=case.seed)
            saved = saved_bytes(memory, loss, expected)
            loss.backward()
        model.zero_grad()
    if parallel.mesh.pipe.size > 1 or len(batches) > 1:
        with Memory(model) as memory:
            model.play(batches)
        model.zero_grad()
    with count_flops() as flops:
        model.play(batches)
    model.zero_grad()
    parallel.mesh.ledger.reset()
    # under no mode, so that it is computed as in training: fused on a GPU
    loss = torch.stack(model.play(batches)).mean()
    traffic = parallel.mesh.ledger.counts()
    total, norm = flops.get_total_flops(), model.gradient_norm()
    return Measured(model, place, logits, loss.detach(), total, saved, memory, traffic, norm)


def verify(world: World, case: Case) -> Report | None:
    """Runs on every rank of the cuboid; rank 0 also runs on one device and returns the report."""
    mesh = Mesh(case.cuboid, world.rank, world.device, watch=world.watch)
    _, compute, tolerance = DTYPES[case.dtype]
    parallel = CuboidParallel(case.config, mesh, case.policy, compute, case.schedule)
    mine = measure(case, parallel, expected=None if is_gpu(world.device) else case.cost(world.rank).saved)
    whole = measure(case, Serial(case.config, compute, world.device)) if world.rank == 0 else None
    report = Report(tolerance=tolerance, peak=mine.memory.at_peak())
    compare(report, case, mesh, mine, whole)
    costs = [case.cost(rank) for rank in range(case.cuboid.ranks)]
    check_traffic(report, mesh, mine, costs[world.rank])
    check_balance(report, mesh, mine, whole, costs)
    mesh.close()
    return report if world.rank == 0 else None


def compare(report: Report, case: Case, mesh: Mesh, mine: Measured, whole: Measured | None) -> None:
    """Compares loss, logits, all gradients and their norm with the serial ones."""
    floor = 0.0
    if whole is not None:
        floor = 1e-3 * float(whole.norm)  # a gradient of zero, apart from rounding, is compared on the model's scale
        report.loss, report.gradient_norm = float(whole.loss), float(whole.norm)
        report.errors["loss"] = relative(mine.loss, whole.loss)
        report.errors["gradient norm"] = relative(mine.norm, whole.norm)
    logits = join_logits(case, mesh, mine)
    if whole is not None:
        report.errors["logits"] = relative(logits, whole.logits)
    gradients = torch.cat([shard_of(p.grad).reshape(-1) for p in mine.model.parameters() if p.grad is not None])
    pieces = gather_pieces(gradients, mesh.world)
    specs = mine.model.specs()
    if whole is None:
        return
    for name, spec in specs.items():
        reference = whole.model.get_parameter(name).grad
        if reference is None:  # frozen
            continue
        shapes = [spec.local_shape(case.cuboid, case.cuboid.coordinates(rank)) for rank in range(case.cuboid.ranks)]
        mine_of_each = [
            piece[: torch.Size(shape).numel()].view(shape) for piece, shape in zip(pieces, shapes, strict=True)
        ]
        pieces = [piece[torch.Size(shape).numel() :] for piece, shape in zip(pieces, shapes, strict=True)]
        try:
            report.errors[f"d {name}"] = relative(spec.join(mine_of_each, case.cuboid), reference, floor)
        except ValueError:  # copies of an element differ
            report.errors[f"d {name}"] = float("inf")


def relative(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    a, b = a.double().cpu(), b.double().cpu()
    return float((a - b).norm() / max(float(b.norm()), floor, 1e-300))


def join_logits(case: Case, mesh: Mesh, mine: Measured) -> Tensor:
    """The unsharded logits [s, b, v], without padding."""
    index = [gather_pieces(each, mesh.world) for each in mine.place.logits]
    pieces = gather_pieces(mine.logits, mesh.world)
    s, b, v = case.seq, case.micro_batch, case.config.vocab
    whole = mine.logits.new_full((s, b, v), torch.nan)
    for piece, rows, samples, classes in zip(pieces, *index, strict=True):
        inside = rows < s
        whole[rows[inside][:, None, None], samples[None, :, None], classes] = piece[inside]
    return whole


def check_traffic(report: Report, mesh: Mesh, mine: Measured, cost: Cost) -> None:
    predicted = cost.counts()
    wrong = torch.tensor(float(mine.traffic != predicted), device=mesh.device)
    report.traffic_predicted = float(all_reduce(wrong, mesh.world).wait()) == 0
    for axis in mine.traffic.keys() | predicted.keys():
        for kind in mine.traffic.get(axis, {}).keys() | predicted.get(axis, {}).keys():
            calls, sent = mine.traffic.get(axis, {}).get(kind, (0, 0))
            _, expected = predicted.get(axis, {}).get(kind, (0, 0))
            report.traffic[f"{axis} {kind}"] = {"calls": calls, "bytes": sent, "predicted": expected}


def check_balance(report: Report, mesh: Mesh, mine: Measured, whole: Measured | None, costs: list[Cost]) -> None:
    local = torch.tensor(mine.quantities, dtype=torch.float64, device=mesh.device)
    per_rank = torch.stack(gather_pieces(local, mesh.world)).cpu()
    if whole is None:
        return
    exact = 2 if is_gpu(mesh.device) else 4  # FLOPs and what is saved are by the formula of the CPU's attention kernel
    predicted = torch.tensor([[c.matrices, c.vectors, c.flops, c.saved] for c in costs], dtype=torch.float64)
    matrices, vectors, flops, saved, at_rest, peak = whole.quantities
    block, replicas = mesh.cuboid.block * mesh.cuboid.pipe, mesh.cuboid.replicas
    kept = at_rest - saved  # each replica has all of it, and its share of the rest
    shares = (
        matrices / block,
        vectors / block,
        flops / block / replicas,
        saved / block / replicas,
        (kept + (at_rest - kept) / replicas) / block,
        (kept + (peak - kept) / replicas) / block,
    )
    for i, (name, share) in enumerate(zip(QUANTITIES, shares, strict=True)):
        column = per_rank[:, i]
        if column.isnan().any():
            continue
        agrees = bool((column == predicted[:, i]).all()) if i < exact else None
        report.balance[name] = Balance(share, float(column.mean()), float(column.max()), agrees)
