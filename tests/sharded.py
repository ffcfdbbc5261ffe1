"""The one comparison of the suite: a model on a cuboid against the same model on one device, in fp64.

Loss, logits, every parameter's gradient, the gradient's norm and the initial parameters are compared. Biases
begin at zero and norms at one, where a misplaced slice does not show, so every parameter is moved before the
step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cuboid.baselines.serial import Serial
from cuboid.baselines.two_d import TwoD
from cuboid.layers.loss import Loss
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import Spec
from cuboid.mesh.mesh import Mesh
from cuboid.mesh.place import Index
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import CuboidParallel, Policy
from cuboid.model.nn import declared
from cuboid.model.parallel import Parallel
from cuboid.model.transformer import Recompute, Transformer
from cuboid.run.launch import World
from cuboid.step.op import chain
from cuboid.step.runner import Stage
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
    mine = step(parallel(case, mesh), case)
    mesh.close()
    ranks: list[Outcome] = [mine] * world.size  # on rank 0, every rank's
    dist.gather_object(mine, ranks if world.rank == 0 else None)
    if world.rank:
        return {}
    reference = step(Serial(case.config), case)
    errors = {
        "loss": abs(mine.loss / reference.loss - 1),
        "norm": abs(mine.norm / reference.norm - 1),
        "logits": relative(join_logits(ranks, case), reference.logits),
    }
    for name, spec in mine.specs.items():
        initial = spec.join([rank.initial[name] for rank in ranks], case.cuboid)
        assert torch.equal(initial, reference.initial[name]), f"{name} begins with other values"
        gradient = spec.join([rank.gradients[name] for rank in ranks], case.cuboid)
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
        with torch.no_grad():
            for _, parameter, declaration in declared(model):
                spec = declaration.spec
                by = torch.linspace(-0.3, 0.7, prod(spec.shape), dtype=torch.float64).sin().view(spec.shape)
                parameter += spec.take(by, each.mesh.cuboid, each.mesh.coordinates)
        loss = model(place.take(tokens, 0), place.take(targets, -100), place)
        loss.backward()
        found.append((loss.item(), model))
    mesh.close()
    (mine, sharded), (wanted, whole) = found
    least = 1e-3 * whole.gradient_norm().item()
    errors = {"loss": abs(mine / wanted - 1)}
    for name, parameter, d in declared(sharded):
        gradient = d.spec.take(whole.get_parameter(name).grad, mesh.cuboid, mesh.coordinates)
        errors[name] = relative(parameter.grad, gradient, least)
    return errors


def step(parallel: Parallel, case: Case) -> Outcome:
    """One forward and backward of the case's model and batch."""
    mesh, loss = parallel.mesh, case.loss
    model = Transformer(parallel, case.seed, torch.float64, case.recompute)
    parameters = {name: parameter for name, parameter, _ in declared(model)}
    specs = {name: declaration.spec for name, _, declaration in declared(model)}
    initial = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    generator = torch.Generator().manual_seed(case.seed)
    with torch.no_grad():
        for name, parameter in parameters.items():
            noise = 0.2 * torch.randn(specs[name].shape, generator=generator, dtype=torch.float64)
            parameter += specs[name].take(noise, mesh.cuboid, mesh.coordinates)
    tokens, targets = batch_of(case)
    place = parallel.place(case.batch, case.seq)
    mine = place.take(tokens, 0)
    value = model(mine, place.take(targets, loss.ignore_index), place, loss, case.dropout)
    value.backward()
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    norm = model.gradient_norm().item()
    with torch.no_grad():
        logits = model.logits(mine, place)
    return Outcome(specs, initial, gradients, value.item(), norm, logits, place.logits)


def batch_of(case: Case) -> tuple[Tensor, Tensor]:
    """Tokens and targets. A quarter of these is ignored, and all of the first sample if there are others, so
    that the ranks of x count unequal numbers of tokens."""
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.batch, case.seq)
    tokens, targets = (torch.randint(0, case.config.vocab, shape, generator=generator) for _ in range(2))
    ignored = torch.rand(shape, generator=generator) < 0.25
    if case.batch > 1:
        ignored[0] = True
    ignored[-1, 0] = False
    return tokens, torch.where(ignored, case.loss.ignore_index, targets)


def join_logits(ranks: Sequence[Outcome], case: Case) -> Tensor:
    """The whole logits, [s, b, v]; positions from `seq` on are padding."""
    whole = torch.full((case.seq, case.batch, case.config.vocab), torch.nan, dtype=torch.float64)
    for rank in ranks:
        s, b, v = rank.index
        inside = s < case.seq
        whole[s[inside, None, None], b[:, None], v] = rank.logits[inside]
    return whole


def relative(found: Tensor, wanted: Tensor, least: float = 0.0) -> float:
    return ((found - wanted).norm() / max(wanted.norm().item(), least)).item()


def wrong(errors: dict[str, float], tolerance: float = EXACT) -> dict[str, float]:
    """The errors above the tolerance, those that are not a number included."""
    return {name: error for name, error in errors.items() if not error <= tolerance}
