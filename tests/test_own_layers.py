"""Layers that a user writes of `local`, linears and losses: gradients of several micro-batches and of weights with
several uses, against one use at a time."""

from collections.abc import Callable, Sequence

import pytest
import torch
from sharded import against
from torch import Tensor

from cuboid import (
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
    Serial,
    Stage,
    World,
    chain,
    fork,
    local,
    residual,
)
from cuboid.mesh.layout import shard_of

CONFIG = ModelConfig("gpt2", hidden=8, heads=4, vocab=11, context=16, ffn=12)
SEQ, BATCH, EXACT = 4, 2, 1e-12
PARALLELS: dict[str, Callable[[], Parallel]] = {
    "Serial": lambda: Serial(CONFIG),
    "CuboidParallel": lambda: CuboidParallel(CONFIG, Mesh(Cuboid(), alone=True)),
}
on_both = pytest.mark.parametrize("parallel", PARALLELS)
Gradients = dict[str, Tensor]


class Words(Model):
    """An embedding, a layer, a head."""

    def __init__(self, parallel: Parallel, layer: Callable[[Parallel], LayerModule]) -> None:
        super().__init__(parallel)
        self.embed, self.mine = Embedding(parallel, CONFIG.vocab, CONFIG.hidden, 0.5), layer(parallel)
        self.finish(1, torch.float64)

    def stages(self) -> Sequence[Stage]:
        return [
            Stage("words", self.embed.lookup(), [self.embed], in_backward=False),
            Stage("mine", self.mine),
            Stage("head", self.embed.head_loss(), [self.embed], in_backward=False),
        ]


def batch(model: Model, seed: int = 0) -> tuple[Tensor, At]:
    ids = torch.randint(CONFIG.vocab, (2, SEQ, BATCH), generator=torch.Generator().manual_seed(seed))
    return ids[0], At(model.parallel.place(BATCH, SEQ), ids[1])


def backward(model: Model, seed: int = 0, scale: float = 1.0) -> None:
    X, at = batch(model, seed)
    (model(X, at.targets, at.place) * scale).backward()


def taken(model: Model) -> Gradients:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def gradients(model: Model, seed: int = 0) -> Gradients:
    backward(model, seed)
    return taken(model)


def close(found: Gradients, wanted: Gradients) -> bool:
    return found.keys() == wanted.keys() and all((found[n] - wanted[n]).norm() <= EXACT for n in wanted)


# Gradients that autograd hands out


class Shared(LayerModule):
    """Two parameters with one gradient, and one whose gradient is a number, expanded."""

    def __init__(self, parallel: Parallel) -> None:
        super().__init__(parallel)
        self.a, self.b = (self.declare(name, "norm", CONFIG.hidden, mean=1.0) for name in "ab")
        self.c = self.declare("c", "head_norm", 3, mean=1.0)
        self.layer = local(lambda X, a, b, c: X * (a + b) * c.sum(), self.a, self.b, self.c)


@on_both
def test_local_gradients_of_micro_batches_are_added_up(parallel: str) -> None:
    model = Words(PARALLELS[parallel](), Shared)
    one, other = gradients(model, 0), gradients(model, 1)
    wanted = {name: (one[name] + other[name]) / 2 for name in one}
    model.play([batch(model, 0), batch(model, 1)])
    assert close(taken(model), wanted)
    backward(model, 0, 0.5)
    backward(model, 1, 0.5)
    assert close(taken(model), wanted)


def aliased(world: World) -> bool:
    model = Words(CuboidParallel(CONFIG, Mesh(Cuboid(1, 1, 2), world.rank)), Shared)
    backward(model)
    a, b = (shard_of(p.grad).untyped_storage().data_ptr() for p in (model.mine.a, model.mine.b))
    return bool(a == b)


def test_local_gradients_have_memory_of_their_own(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(aliased) == [False, False]


# Weights with several uses in a stage


class Twice(LayerModule):
    """Two branches that use the same linears, in groups or each by itself."""

    def __init__(self, parallel: Parallel, grouped: bool, order: int) -> None:
        super().__init__(parallel)
        d = CONFIG.hidden
        self.a, self.b, self.c = (Linear(parallel, "into", d, d, True, 0.3) for _ in range(3))
        self.d = Linear(parallel, "out_of", d, d, False, 0.3)

        def branch(fn: Callable[..., Tensor], *linears: Linear) -> list:  # type: ignore[type-arg]
            each = [each.affine for each in linears]
            into = parallel.into(each) if grouped else fork(*(parallel.into([one]) for one in each))
            return [into, local(fn), parallel.out_of(self.d.affine)]

        branches = branch(lambda a, b, c: a + 2 * b + 3 * c, self.a, self.b, self.c), branch(torch.sub, self.a, self.c)
        self.layer = chain(*(residual(*each) for each in branches[::order]))


@on_both
@pytest.mark.parametrize("order", [1, -1])
def test_weights_in_several_groups_get_the_gradients_of_all(order: int, parallel: str) -> None:
    alone, grouped = (Words(PARALLELS[parallel](), lambda p, g=g: Twice(p, g, order)) for g in (False, True))  # type: ignore[misc]
    assert close(gradients(grouped), gradients(alone))


class Both(Model):
    """A table whose rows are looked up and multiplied in one stage."""

    def __init__(self, parallel: Parallel) -> None:
        super().__init__(parallel)
        self.embed = Embedding(parallel, CONFIG.vocab, CONFIG.hidden, 0.5)
        self.finish(1, torch.float64)

    def stages(self) -> Sequence[Stage]:
        bent = local(torch.sin, gives="residual"), self.parallel.own_loss(lambda X, _: (X.sum(), X.numel()))
        return [Stage("all", chain(self.embed.lookup(), self.embed.logits(), *bent), [self.embed])]


def table_error(world: World) -> float:
    found, wanted = Both(CuboidParallel(CONFIG, Mesh(Cuboid(1, 2, 1), world.rank))), Both(Serial(CONFIG))
    ids = torch.arange(SEQ * BATCH).view(BATCH, SEQ) % CONFIG.vocab
    for model in (found, wanted):
        place = model.parallel.place(BATCH, SEQ)
        model(place.take(ids, 0), place.take(ids, 0), place).backward()
    return against(found, wanted)


def test_table_of_lookup_and_logits_gets_both_gradients(pool: Callable[[int], Pool]) -> None:
    assert max(pool(2).run(table_error)) <= EXACT


# Layers without parameters, and without a gradient


class Masked(LayerModule):
    """Without parameters. A mask and indices go from one local layer to the next."""

    def __init__(self, parallel: Parallel, split: bool = True) -> None:
        super().__init__(parallel)
        chosen = local(lambda X: (X > 0, torch.full((SEQ, BATCH, 1), 3), X)), local(self._taken)
        self.layer = chain(*chosen) if split else local(lambda X: self._taken(X > 0, torch.full((SEQ, BATCH, 1), 3), X))

    @staticmethod
    def _taken(mask: Tensor, i: Tensor, X: Tensor) -> Tensor:
        return X * mask + X.gather(-1, i)


@on_both
def test_local_gives_masks_and_indices_in_a_stage_without_parameters(parallel: str) -> None:
    split, joint = (Words(PARALLELS[parallel](), lambda p, s=s: Masked(p, s)) for s in (True, False))  # type: ignore[misc]
    assert close(gradients(split), gradients(joint))


# Losses


class Weighed(Model):
    """Squares of weight 0.001 each."""

    def __init__(self, parallel: Parallel) -> None:
        super().__init__(parallel)
        self.norm = Norm(parallel, CONFIG.hidden, True)
        self.finish(1, torch.float64)

    def stages(self) -> Sequence[Stage]:
        def loss(X: Tensor, targets: Tensor) -> tuple[Tensor, float]:
            return 0.001 * (X - targets).square().sum(), 0.001 * X.numel()

        return [Stage("norm", self.norm), Stage("loss", self.parallel.own_loss(loss))]


@on_both
def test_own_loss_is_the_mean_also_where_its_count_is_below_one(parallel: str) -> None:
    model = Weighed(PARALLELS[parallel]())
    X = torch.randn(SEQ, BATCH, CONFIG.hidden, dtype=torch.float64)
    loss = model(X, torch.zeros_like(X), model.parallel.place(BATCH, SEQ))
    assert 0.001 * X.numel() < 1
    assert (loss - torch.nn.functional.layer_norm(X, X.shape[-1:]).square().mean()).abs() <= EXACT
