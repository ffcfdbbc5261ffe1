"""The one comparison of the suite: a model on a cuboid against the same model on one device, in fp64.

Loss, logits, every parameter's gradient, the gradient's norm and the initial parameters are compared. Biases
begin at zero and norms at one, where a misplaced slice does not show, so every parameter is moved before the
step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.baselines.serial import Serial
from cuboid.baselines.two_d import TwoD
from cuboid.layers.loss import Loss
from cuboid.layers.randomness import key_of
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import Spec, shard_of
from cuboid.mesh.mesh import Mesh
from cuboid.mesh.place import Index
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import CuboidParallel, Policy
from cuboid.model.module import declared
from cuboid.model.nn import Model, evaluating
from cuboid.model.parallel import Parallel
from cuboid.model.transformer import Recompute, Transformer
from cuboid.run.launch import World
from cuboid.step.op import chain
from cuboid.step.runner import At, Stage
from cuboid.step.schedule import PREFETCH, Schedule

EXACT = 1e-9  # relative, in fp64


@dataclass(frozen=True)
class Case:
    config: ModelConfig
    cuboid: Cuboid
    batch: int
    seq: int
    policy: Policy = field(default_factory=Policy)
    loss: Loss = field(default_factory=Loss)
    dropout: int | None = None  # the seed, if there is to be any
    recompute: Recompute = "none"
    seed: int = 1
    schedule: Schedule = PREFETCH
    micro_batches: int = 1  # of `batch` samples each
    order: str = ""  # of their forwards and backwards; empty: the schedule's
    freeze: str = ""


class Outcome(NamedTuple):
    """What a step gave, as one rank has it."""

    specs: dict[str, Spec]
    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]
    loss: float
    norm: float
    logits: Tensor
    index: Index


def on_cuboid(case: Case, mesh: Mesh) -> Parallel:
    return CuboidParallel(case.config, mesh, case.policy, schedule=case.schedule)


def on_squares(case: Case, mesh: Mesh) -> Parallel:
    """2-D and 2.5-D."""
    return TwoD(case.config, mesh)


def compare(world: World, case: Case, parallel: Callable[[Case, Mesh], Parallel] = on_cuboid) -> dict[str, float]:
    """The relative error of everything, on rank 0. Raises if initial parameters differ by a bit."""
    mesh = Mesh(case.cuboid, world.rank)
    mine = step(parallel(case, mesh), case, partial(played, order=case.order))
    mesh.close()
    ranks: list[Outcome] = [mine] * world.size  # on rank 0, every rank's
    dist.gather_object(mine, ranks if world.rank == 0 else None)
    if world.rank:
        return {}
    reference = step(Serial(case.config), replace(case, recompute="none"), plainly)
    errors = {
        "loss": abs(mine.loss / reference.loss - 1),
        "norm": abs(mine.norm / reference.norm - 1),
        "logits": relative(join_logits(ranks, case), reference.logits),
    }
    specs = {name: spec for rank in ranks for name, spec in rank.specs.items()}
    assert specs.keys() == reference.specs.keys()
    for name, spec in specs.items():
        if name not in reference.gradients:
            assert not any(name in rank.gradients for rank in ranks), f"{name} is frozen, and has a gradient"
            continue
        absent = torch.empty((0,) * len(spec.shape), dtype=torch.float64)  # where a rank's stages do not have it
        initial = spec.join([rank.initial.get(name, absent) for rank in ranks], case.cuboid)
        assert torch.equal(initial, reference.initial[name]), f"{name} begins with other values"
        gradient = spec.join([rank.gradients.get(name, absent) for rank in ranks], case.cuboid)
        # some gradients are zero in exact arithmetic, such as that of a key's bias: what is left is rounding
        errors[name] = relative(gradient, reference.gradients[name], least=1e-3 * reference.norm)
    return errors


class Squares(Transformer):
    """Its loss is the mean square of what its last norm gives."""

    def stages(self) -> Sequence[Stage]:
        *before, norm, _ = super().stages()
        loss = self.parallel.own_loss(lambda X, _: (X.square().sum(), X.numel()))
        return [*before, Stage(norm.name, chain(norm.layer, loss), [self.norm])]


def compare_own_loss(world: World, case: Case, parallel: Callable[[Case, Mesh], Parallel]) -> dict[str, float]:
    """This rank's relative errors of a loss of one's own and of its gradients. The head must be tied."""
    mesh, (tokens, targets), found = Mesh(case.cuboid, world.rank), batch_of(case), []
    for each in (parallel(case, mesh), Serial(case.config)):
        model, place = Squares(each, case.seed, torch.float64), each.place(case.batch, case.seq)
        move_parameters(model, case.seed)
        loss = model(place.take(tokens, 0), place.take(targets, -100), place)
        loss.backward()
        found.append((loss.item(), model))
    mesh.close()
    (mine, sharded), (wanted, whole) = found
    least = 1e-3 * whole.gradient_norm().item()
    errors = {"loss": abs(mine / wanted - 1)}
    for name, parameter, d in declared(sharded):
        gradient = d.spec.take(whole.get_parameter(name).grad, mesh.cuboid, mesh.coordinates)
        errors[name] = relative(shard_of(parameter.grad), gradient, least)
    return errors


Batches = Sequence[tuple[Tensor, At]]


def played(model: Model, batches: Batches, order: str = "") -> Tensor:
    """The mean loss, after its backward: as autograd has it or, of micro-batches, in an order or the schedule's."""
    if order or len(batches) > 1 or model.parallel.mesh.pipe.size > 1:
        return torch.stack(model.play(batches, order or None)).mean()
    return plainly(model, batches)


def plainly(model: Model, batches: Batches) -> Tensor:
    """The same with nothing but `loss.backward()`, one micro-batch after another."""
    total = torch.zeros((), dtype=torch.float64)
    for tokens, at in batches:
        loss = model(tokens, at.targets, at.place, at.loss, at.seed) / len(batches)
        loss.backward()
        total += loss.detach()
    return total


@torch.no_grad()
def move_parameters(model: Model, seed: int) -> None:
    """Away from zero and one, the same on every cuboid."""
    mesh = model.parallel.mesh
    for name, parameter, d in declared(model):
        generator = torch.Generator().manual_seed(key_of(seed, name))
        noise = 0.2 * torch.randn(d.spec.shape, generator=generator, dtype=torch.float64)
        shard_of(parameter).add_(d.spec.take(noise, mesh.cuboid, mesh.coordinates))


def step(parallel: Parallel, case: Case, run: Callable[[Model, Batches], Tensor] = played) -> Outcome:
    """One forward and backward of the case's model and batch."""
    loss = case.loss
    model = Transformer(parallel, case.seed, torch.float64, case.recompute)
    model.freeze(case.freeze)
    parameters = {name: parameter for name, parameter, _ in declared(model)}
    specs = {name: declaration.spec for name, _, declaration in declared(model)}
    initial = {name: shard_of(parameter).clone() for name, parameter in parameters.items()}
    move_parameters(model, case.seed)
    place = parallel.place(case.batch, case.seq)
    batches = []
    for tokens, targets in zip(*(whole.chunk(case.micro_batches) for whole in batch_of(case)), strict=True):
        at = At(place, place.take(targets, loss.ignore_index), loss, case.dropout)
        batches.append((place.take(tokens, 0), at))
    value = run(model, batches)
    gradients = {name: shard_of(p.grad) for name, p in parameters.items() if p.grad is not None}
    norm = model.gradient_norm().item()
    with evaluating(model):
        logits = model.logits(batches[0][0], place)
    return Outcome(specs, initial, gradients, value.item(), norm, logits, place.logits)


def batch_of(case: Case) -> tuple[Tensor, Tensor]:
    """Tokens and targets of all micro-batches. A quarter of these is ignored, and all of the first sample if there are
    others, so that the ranks of x count unequal numbers of tokens."""
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.micro_batches * case.batch, case.seq)
    tokens, targets = (torch.randint(0, case.config.vocab, shape, generator=generator) for _ in range(2))
    ignored = torch.rand(shape, generator=generator) < 0.25
    if shape[0] > 1:
        ignored[0] = True
    ignored[-1, 0] = False
    return tokens, torch.where(ignored, case.loss.ignore_index, targets)


def join_logits(ranks: Sequence[Outcome], case: Case) -> Tensor:
    """The unsharded logits, [s, b, v]; positions from `seq` on are padding."""
    whole = torch.full((case.seq, case.batch, case.config.vocab), torch.nan, dtype=torch.float64)
    for rank in ranks:
        s, b, v = rank.index
        inside = s < case.seq
        whole[s[inside, None, None], b[:, None], v] = rank.logits[inside]
    return whole


def relative(found: Tensor, wanted: Tensor, least: float = 0.0) -> float:
    return ((found - wanted).norm() / max(wanted.norm().item(), least)).item()


def against(model: Model, reference: Model) -> float:
    """The largest relative error of this rank's shards of the gradients against those of one device."""
    mesh, norm, errors = model.parallel.mesh, reference.gradient_norm().item(), [0.0]
    for name, parameter, d in declared(model):
        wanted, found = reference.get_parameter(name).grad, parameter.grad
        assert (wanted is None) == (found is None), f"{name} has a gradient on one of the two alone"
        if wanted is not None and found is not None:
            mine = d.spec.take(wanted, mesh.cuboid, mesh.coordinates)
            errors.append(relative(shard_of(found), mine, least=1e-3 * norm))
    return torch.tensor(errors, dtype=torch.float64).max().item()  # what is not a number is the largest


def wrong(errors: dict[str, float], tolerance: float = EXACT) -> dict[str, float]:
    """The errors above the tolerance, those that are not a number included."""
    return {name: error for name, error in errors.items() if not error <= tolerance}
