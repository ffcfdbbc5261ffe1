"""A model that a user writes: float inputs, plain PyTorch, branches, a loss and first values of one's own. It is the
same on a cuboid as on one device, and mistakes are found when it is made."""

from collections.abc import Callable, Sequence

import pytest
import torch
from sharded import move_parameters, relative
from torch import Tensor
from torch.distributed.tensor import distribute_tensor

from cuboid import (
    MLP,
    At,
    Cuboid,
    CuboidParallel,
    LayerModule,
    Linear,
    Mesh,
    Model,
    ModelConfig,
    Norm,
    Parallel,
    Pool,
    Schedule,
    Serial,
    Stage,
    Table,
    World,
    chain,
    fork,
    local,
    recomputed,
    residual,
)
from cuboid.mesh.layout import shard_of
from cuboid.model.module import declared
from cuboid.model.nn import Attention
from cuboid.step.schedule import parse

CONFIG = ModelConfig("gpt2", hidden=8, heads=4, vocab=11, context=16, ffn=12)
BATCH, SEQ, EXACT = 8, 7, 1e-12


class Scale(LayerModule):
    """A number per feature, in plain PyTorch."""

    def __init__(self, parallel: Parallel) -> None:
        super().__init__(parallel)
        self.weight = self.declare("weight", "norm", parallel.config.hidden, mean=1.0)
        self.layer = local(lambda X, w: torch.tanh(X * w), self.weight)


class Mixer(LayerModule):
    """Attention and an MLP beside each other, one weighed against the other."""

    def __init__(self, parallel: Parallel) -> None:
        super().__init__(parallel)
        self.norm, self.scale = Norm(parallel, parallel.config.hidden, bias=True), Scale(parallel)
        self.attention, self.mlp = Attention(parallel, causal=False), MLP(parallel)
        both = chain(fork(self.attention, self.mlp, self.scale), local(lambda a, b, c: a * torch.sigmoid(b) + c))
        both.gives = "residual"
        self.layer = residual(self.norm, both)


def squares(X: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of squared errors, and how many count: padding is not a number."""
    counts = ~targets.isnan()
    return (X - targets.nan_to_num()).square().where(counts, 0).sum(), counts.sum()


class Regression(Model):
    """Features to features."""

    def __init__(self, parallel: Parallel, recompute: bool = False) -> None:
        super().__init__(parallel)
        self.first, self.second = Mixer(parallel), Mixer(parallel)
        self.recompute = recompute
        self.finish(seed=1, dtype=torch.float64)
        move_parameters(self, 2)

    def stages(self) -> Sequence[Stage]:
        first = recomputed(self.first) if self.recompute else self.first
        return [
            Stage("first", first, [self.first]),
            Stage("second", self.second),
            Stage("bend", local(torch.sin)),
            Stage("loss", self.parallel.own_loss(squares)),
        ]


def features(seed: int) -> Tensor:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, SEQ, CONFIG.hidden, generator=dice, dtype=torch.float64)


def batch_on(parallel: Parallel) -> tuple[Tensor, At]:
    place = parallel.place(BATCH, SEQ)
    return place.take_features(features(3)), At(place, place.take_features(features(4), fill=torch.nan))


def values(whole: Model, name: str) -> Tensor:
    """First values of one's own."""
    shape = whole.get_parameter(name).shape
    return 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)


def step(model: Model, order: str) -> tuple[float, Tensor | None]:
    """The loss, and dX where autograd gives it."""
    X, at = batch_on(model.parallel)
    if order:
        return model.play([(X, at)] * 2, parse(order))[0].item(), None
    X.requires_grad_()
    loss = model(X, at.targets, at.place)
    loss.backward()
    return loss.item(), X.grad


def errors(world: World, shape: Cuboid, schedule: Schedule, recompute: bool, order: str) -> dict[str, float]:
    mesh, whole = Mesh(shape, world.rank), Regression(Serial(CONFIG))
    model = Regression(CuboidParallel(CONFIG, mesh, schedule=schedule), recompute)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            mine = distribute_tensor(values(whole, name), tensor.device_mesh, tensor.placements)
            tensor.copy_(mine)
            whole.get_parameter(name).copy_(values(whole, name))
    (loss, dX), (wanted, dX_whole) = step(model, order), step(whole, "")
    found, norm = {"loss": abs(loss / wanted - 1)}, whole.gradient_norm().item()
    found["norm"] = abs(model.gradient_norm().item() / norm - 1)
    for name, parameter, d in declared(model):
        reference = whole.get_parameter(name).grad
        assert parameter.grad is not None, name
        assert reference is not None
        mine = d.spec.take(reference, shape, mesh.coordinates)
        found[name] = relative(shard_of(parameter.grad), mine, least=1e-3 * norm)
    if dX is not None and dX_whole is not None:
        place = model.parallel.place(BATCH, SEQ)
        found["dX"] = relative(dX, place.take_features(dX_whole.transpose(0, 1)), least=1e-9)
    return found


@pytest.mark.parametrize(
    ("shape", "schedule", "recompute", "order"),
    [
        (Cuboid(2, 2, 1), Schedule(), False, ""),
        (Cuboid(1, 2, 2), Schedule(sub_batches=2), True, ""),
        (Cuboid(2, 1, 2), Schedule(prefetch=False, sub_batches=4, chunks=2), False, "F0 F1+B0 W0 B1 W1"),
        (Cuboid(1, 1, 2, replicas=2), Schedule(chunks=2), True, "F0 F1 B1 B0"),
    ],
    ids=lambda value: str(value) if isinstance(value, Cuboid) else "",
)
def test_own_model_matches_serial(shape: Cuboid, schedule: Schedule, recompute: bool, order: str) -> None:
    with Pool(shape.ranks) as pool:  # new ranks: DTensor remembers meshes, closed ones too
        for found in pool.run(errors, shape, schedule, recompute, order):
            assert {name: error for name, error in found.items() if not error <= EXACT} == {}


# Mistakes

Layers = Callable[["Broken"], Sequence[Stage]]


class Broken(Model):
    """Modules to make mistakes with."""

    def __init__(self, parallel: Parallel, stages: Layers) -> None:
        super().__init__(parallel)
        c = parallel.config
        self.embed, self.norm, self.mlp = Table(parallel, c.vocab, c.hidden, 0.1), Norm(parallel, c.hidden, True), None
        self.mlp = MLP(parallel)
        self._stages = stages
        self.finish()

    def stages(self) -> Sequence[Stage]:
        return self._stages(self)


def embed(model: Broken) -> Stage:
    return Stage("words", model.embed.lookup(), [model.embed], in_backward=False)


def head(model: Broken) -> Stage:
    return Stage("head", model.embed.head_loss(), [model.embed], in_backward=False)


MISTAKES: dict[str, tuple[Layers, Sequence[str]]] = {
    "a module in no stage": (
        lambda m: [embed(m), Stage("mix", m.mlp), head(m)],
        ["norm.weight, norm.bias: in no stage"],
    ),
    "modules in no stage": (
        lambda m: [embed(m), head(m)],
        ["norm.weight, norm.bias, mlp.up.weight and 3 more: in no stage"],
    ),
    "a stage that does not fit the one before": (
        lambda m: [Stage("mix", m.mlp), embed(m), head(m)],
        ["words takes the layout 'ids', but mix before it gives 'residual'"],
    ),
    "a layer that does not fit the one before": (
        lambda m: [embed(m), Stage("mix", chain(m.norm, m.parallel.attend())), head(m)],
        ["Attend takes the layout 'heads', but Norm before it gives 'residual'"],
    ),
    "a residual branch that changes the layout": (
        lambda m: [embed(m), Stage("mix", residual(m.norm, m.parallel.into([m.mlp.up.affine])), [m.mlp]), head(m)],
        ["a residual branch takes the layout 'residual' and gives 'inner'"],
    ),
    "no loss": (
        lambda m: [embed(m), Stage("mix", chain(m.norm, m.mlp), [m.norm, m.mlp])],
        ["the last stage, mix, gives no loss"],
    ),
    "no stages": (lambda m: [], ["lists no stages"]),
    "a module of a module": (
        lambda m: [
            embed(m),
            Stage("mix", chain(m.norm, m.mlp), [m.norm, m.mlp]),
            Stage("again", chain(m.parallel.into([m.mlp.up.affine]), m.parallel.out_of(m.mlp.down.affine)), [m.mlp.up]),
            head(m),
        ],
        ["mlp.up.weight", "stages mix and again"],
    ),
}


@pytest.mark.parametrize("parallel", ["Serial", "CuboidParallel"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_model_finds_mistake_at_construction(mistake: str, parallel: str) -> None:
    stages, says = MISTAKES[mistake]
    on = Serial(CONFIG) if parallel == "Serial" else CuboidParallel(CONFIG, Mesh(Cuboid(), alone=True))
    with pytest.raises(ValueError) as error:
        Broken(on, stages)
    for words in says:
        assert words in str(error.value)


def test_stage_whose_weights_are_not_named_says_so() -> None:
    model = Broken(
        Serial(CONFIG),
        lambda m: [embed(m), Stage("mix", chain(m.norm, m.mlp), [m.norm]), Stage("more", m.mlp), head(m)],
    )
    place, ids = model.parallel.place(2, 4), torch.zeros(4, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="a parameter of 96 elements that belongs to no module of its stage"):
        model(ids, ids, place)


def test_linear_rejects_unknown_way() -> None:
    with pytest.raises(ValueError, match="say into"):
        Linear(Serial(CONFIG), "onto", 4, 8, False, 0.1)
