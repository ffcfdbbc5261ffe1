"""A model that a user writes: float inputs, plain PyTorch, branches, a loss and first values of one's own. It is the
same on a cuboid as on one device, and mistakes are found when it is made."""

from collections.abc import Callable, Sequence

import pytest
import torch
from sharded import move_parameters, relative
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from cuboid import (
    MLP,
    At,
    Cuboid,
    CuboidParallel,
    Embedding,
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
    World,
    chain,
    fork,
    local,
    recomputed,
    residual,
)
from cuboid.baselines.one_d import OneD
from cuboid.baselines.two_d import TwoD
from cuboid.mesh.layout import shard_of
from cuboid.model.module import declared
from cuboid.model.nn import Attention
from cuboid.step.op import Layer

CONFIG = ModelConfig("gpt2", hidden=8, heads=4, vocab=11, context=16, ffn=12)
BATCH, SEQ, EXACT = 8, 7, 1e-12
ALONE = Mesh(Cuboid(), alone=True)


class Scale(LayerModule):
    """A number per feature, in plain PyTorch."""

    def __init__(self, parallel: Parallel) -> None:
        super().__init__(parallel)
        self.weight = self.declare("weight", "norm", parallel.config.hidden, mean=1.0)
        self.layer = local(lambda X, w: torch.tanh(X * w), self.weight)


class GatedMLP(LayerModule):
    """Two linears side by side in a fork, joined."""

    def __init__(self, parallel: Parallel) -> None:
        super().__init__(parallel)
        d, f = parallel.config.hidden, parallel.config.ffn
        self.gate, self.up = (Linear(parallel, "into", f, d, True, 0.1) for _ in range(2))
        self.down = Linear(parallel, "out_of", d, f, True, 0.1)
        branches = fork(parallel.into([self.gate.affine]), parallel.into([self.up.affine]))
        self.layer = chain(branches, local(lambda g, u: torch.sigmoid(g) * u), parallel.out_of(self.down.affine))


class Mixer(LayerModule):
    """Attention and an MLP beside each other, one weighed against the other."""

    def __init__(self, parallel: Parallel) -> None:
        super().__init__(parallel)
        self.norm, self.scale = Norm(parallel, parallel.config.hidden, bias=True), Scale(parallel)
        self.attention, self.mlp = Attention(parallel, causal=False), GatedMLP(parallel)
        both = chain(fork(self.attention, self.mlp, self.scale), local(lambda a, b, c: a * torch.sigmoid(b) + c))
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
        return model.play([(X, at)] * 2, order)[0].item(), None
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
        self.embed, self.norm, self.mlp = (
            Embedding(parallel, c.vocab, c.hidden, 0.1),
            Norm(parallel, c.hidden, True),
            None,
        )
        self.mlp = MLP(parallel)
        self._stages = stages
        self.finish()

    def stages(self) -> Sequence[Stage]:
        return self._stages(self)


def embed(model: Broken) -> Stage:
    return Stage("words", model.embed.lookup(), [model.embed], in_backward=False)


def mix(*layers: Layer | Callable[..., object]) -> Stage:
    return Stage("mix", chain(*layers))  # type: ignore[arg-type]


def with_plain_linear(model: Broken) -> Sequence[Stage]:
    model.plain = nn.Linear(3, 2)
    return [embed(model), head(model)]


def with_a_list(model: Broken) -> Sequence[Stage]:
    model.several = [MLP(model.parallel)]
    return [embed(model), Stage("mix", model.several[0]), head(model)]


def into(model: Broken, linear: Linear) -> Layer:
    return model.parallel.into([linear.affine])


def out_of(model: Broken, linear: Linear) -> Layer:
    return model.parallel.out_of(linear.affine)


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
    "a linear out of taken into": (
        lambda m: [embed(m), mix(into(m, m.mlp.down)), head(m)],
        ["parallel.into got a Linear of weight [8, 12] that was made as 'out_of'", "use parallel.out_of"],
    ),
    "a linear into taken out of": (
        lambda m: [embed(m), mix(into(m, m.mlp.up), out_of(m, m.mlp.up)), head(m)],
        ["parallel.out_of got a Linear of weight [12, 8] that was made as 'into'", "use parallel.into"],
    ),
    "a fork that changes the layout in a residual branch": (
        lambda m: [
            embed(m),
            Stage("mix", residual(m.norm, fork(into(m, m.mlp.up), into(m, m.mlp.up)), local(torch.mul)), [m.mlp]),
            head(m),
        ],
        ["a residual branch takes the layout 'residual' and gives 'inner'"],
    ),
    "branches of a fork that take different layouts": (
        lambda m: [embed(m), mix(fork(m.norm, out_of(m, m.mlp.down)), local(torch.add)), head(m)],
        ["the branches of a fork take the layouts 'residual' and 'inner'"],
    ),
    "branches of a fork that give different layouts": (
        lambda m: [embed(m), mix(fork(m.norm, into(m, m.mlp.up)), local(lambda a, b: a), m.norm), head(m)],
        ["but Local before it gives 'residual and inner'", "local(fn, gives='residual')"],
    ),
    "a recomputed head": (
        lambda m: [embed(m), Stage("head", recomputed(m.norm, m.embed.head_loss()), [m.norm, m.embed])],
        ["recomputed(…) got a head, which computes its gradients in forward", "leave it out of recomputed"],
    ),
    "dropout of inner features": (
        lambda m: [embed(m), mix(into(m, m.mlp.up), m.parallel.dropout("it"), out_of(m, m.mlp.down)), head(m)],
        ["takes the layout 'residual', but "],
    ),
    "a stage that does not name its module": (
        lambda m: [embed(m), Stage("mix", chain(m.norm, m.mlp), [m.norm]), Stage("more", m.mlp), head(m)],
        ["stage mix uses mlp.up.weight, mlp.up.bias, mlp.down.weight and 1 more", "Stage('mix', layer, [module, …])"],
    ),
    "a stage that names no module": (
        lambda m: [embed(m), mix(m.norm, m.mlp), head(m)],
        ["stage mix uses norm.weight, norm.bias, mlp.up.weight and 3 more"],
    ),
    "a plain module": (
        with_plain_linear,
        ["plain.weight, plain.bias: not declared", "make them by `declare`"],
    ),
    "modules in a list": (with_a_list, ["stage mix names a MLP that is no attribute of the model"]),
    "a plain module as a layer": (
        lambda m: [embed(m), mix(m.norm, nn.Linear(2, 2)), head(m)],
        ["Linear is no layer; use local(fn, *parameters)"],
    ),
    "a plain module in local": (
        lambda m: [embed(m), mix(m.norm, local(nn.Linear(2, 2))), head(m)],
        ["local(…) got a Linear, whose parameters"],
    ),
    "a function as a layer": (lambda m: [embed(m), mix(torch.sin), head(m)], ["sin is no layer"]),
    "a function as a branch": (lambda m: [embed(m), mix(fork(torch.sin)), head(m)], ["sin is no layer"]),
}


PARALLELS: dict[str, Callable[[], Parallel]] = {
    "Serial": lambda: Serial(CONFIG),
    "CuboidParallel": lambda: CuboidParallel(CONFIG, ALONE),
    "OneD": lambda: OneD(CONFIG, ALONE),
    "TwoD": lambda: TwoD(CONFIG, ALONE),
}


@pytest.mark.parametrize("parallel", PARALLELS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_model_finds_mistake_at_construction(mistake: str, parallel: str) -> None:
    stages, says = MISTAKES[mistake]
    with pytest.raises(ValueError) as error:
        Broken(PARALLELS[parallel](), stages)
    for words in says:
        assert words in str(error.value)


def loss_of(model: Model) -> Tensor:
    ids = torch.zeros(4, 2, dtype=torch.long)
    loss: Tensor = model(ids, ids, model.parallel.place(2, 4))
    return loss


def test_backward_without_weights_says_so() -> None:
    model = Broken(
        CuboidParallel(CONFIG, ALONE),
        lambda m: [embed(m), Stage("mix", chain(m.norm, m.mlp), [m.norm, m.mlp], in_backward=False), head(m)],
    )
    with pytest.raises(ValueError, match=r"its weight \[8, 12\] in backward, but its stage says in_backward=False"):
        loss_of(model).backward()


def test_unfinished_model_says_so() -> None:
    class Unfinished(Broken):
        def finish(self, *_: object, **__: object) -> None:
            pass

    with pytest.raises(ValueError, match=r"Unfinished is not finished; end its __init__ with self\.finish\(seed\)"):
        loss_of(Unfinished(Serial(CONFIG), lambda m: []))


def test_linear_rejects_unknown_way() -> None:
    with pytest.raises(ValueError, match="use into"):
        Linear(Serial(CONFIG), "onto", 4, 8, False, 0.1)
