"""Which of a model's parameters a step changes: not frozen ones, and not those of a copy."""

import re
from collections.abc import Callable, Sequence
from copy import deepcopy

import pytest
import torch
from sharded import Batches, against, plainly, relative
from steps import EXACT, GPT2, LLAMA, batches_on, loss_of, model_on, reference
from torch import Tensor

from cuboid.baselines.serial import Serial
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import shard_of
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import CuboidParallel
from cuboid.model.freeze import parameter_names
from cuboid.model.module import declared
from cuboid.model.transformer import Transformer
from cuboid.run.launch import Pool, World
from cuboid.step.op import chain
from cuboid.step.runner import Stage
from cuboid.step.schedule import PREFETCH, Schedule, parse

Pools = Callable[[int], Pool]

# Copies


def copied(world: World, shape: Cuboid) -> dict[str, bool]:
    mesh, wanted = Mesh(shape, world.rank), reference(GPT2)
    first = model_on(CuboidParallel(GPT2, mesh))
    plainly(first, batches_on(first.parallel))
    first.zero_grad()
    second, found = deepcopy(first), {}
    for name, trained, other in (("original", first, second), ("copy", second, first)):
        (batch,) = batches_on(trained.parallel, 1)
        mine, before = loss_of(trained, batch).item(), loss_of(other, batch).item()
        weights = [shard_of(parameter).clone() for parameter in other.parameters()]
        rule = torch.optim.SGD(trained.parameters(), lr=0.1)
        loss_of(trained, batch).backward()
        found[f"{name}: its own gradient"] = name == "copy" or against(trained, wanted) <= EXACT
        rule.step()
        found[f"{name}: learns"] = loss_of(trained, batch).item() < mine
        found[f"{name}: the other has no gradient"] = all(p.grad is None for p in other.parameters())
        found[f"{name}: the other's weights stay"] = all(map(torch.equal, weights, map(shard_of, other.parameters())))
        found[f"{name}: the other's loss stays"] = loss_of(other, batch).item() == before
        rule.zero_grad()
    equal = [
        relative(shard_of(a), shard_of(b)) <= EXACT
        for a, b in zip(first.parameters(), second.parameters(), strict=True)
    ]
    found["both took the same step"] = all(equal)
    mesh.close()
    return found


@pytest.mark.parametrize("shape", [Cuboid(), Cuboid(2, 2, 1), Cuboid(1, 2, 2)], ids=str)
def test_model_deepcopy_is_independent(shape: Cuboid, pool: Pools) -> None:
    for found in pool(shape.ranks).run(copied, shape):
        assert {name for name, is_so in found.items() if not is_so} == set()


# Frozen parameters

FROZEN: dict[str, tuple[ModelConfig, Callable[[str], bool]]] = {
    "queries and values": (GPT2, lambda name: ".q." in name or ".v." in name),
    "the weight of keys": (GPT2, lambda name: name.endswith(".k.weight")),
    "the bias of keys": (GPT2, lambda name: name.endswith(".k.bias")),
    "the gate": (LLAMA, lambda name: "gate" in name),
    "a block": (LLAMA, lambda name: name.startswith("blocks.0.")),
    "the last block": (GPT2, lambda name: name.startswith("blocks.1.")),
    "all blocks": (LLAMA, lambda name: name.startswith("blocks.")),
    "norms": (LLAMA, lambda name: "norm" in name),
    "the embedding": (LLAMA, lambda name: name.startswith("embed.")),
    "the head": (LLAMA, lambda name: name.startswith("head.")),
    "the tied embedding": (GPT2, lambda name: name.startswith("embed.")),
    "positions": (GPT2, lambda name: name.startswith("positions.")),
    "all but the first norm": (GPT2, lambda name: name != "blocks.0.norm1.weight"),
    "everything": (LLAMA, lambda name: True),
    "nothing any more": (GPT2, lambda name: False),
}


def played_late(model: Transformer, batches: Batches) -> list[Tensor]:
    return model.play(batches, parse("F0 F1+B0 W0 B1 W1"))


WHEN_FROZEN = (plainly, played_late)  # of which autograd rejects the first where nothing is to be trained


def errors_when_frozen(world: World, shape: Cuboid, schedule: Schedule) -> dict[str, float]:
    """By what is frozen, one after another in the same models."""
    mesh, found = Mesh(shape, world.rank), {}
    models = {c.family: model_on(CuboidParallel(c, mesh, schedule=schedule)) for c in (GPT2, LLAMA)}
    wanted = {c.family: reference(c) for c in (GPT2, LLAMA)}
    for what, (config, frozen) in FROZEN.items():
        model, whole = models[config.family], deepcopy_with_gradients(wanted[config.family])
        for name, parameter, _ in declared(model):
            parameter.requires_grad_(not frozen(name))
            if frozen(name):
                whole.get_parameter(name).grad = None
        for run in WHEN_FROZEN[what == "everything" :]:
            model.zero_grad()
            run(model, batches_on(model.parallel))
            found[what] = max(found.get(what, 0.0), against(model, whole))
    mesh.close()
    return found


def deepcopy_with_gradients(model: Transformer) -> Transformer:
    copy = deepcopy(model)
    for mine, theirs in zip(copy.parameters(), model.parameters(), strict=True):
        mine.grad = None if theirs.grad is None else theirs.grad.clone()
    return copy


@pytest.mark.parametrize(
    ("shape", "schedule"),
    [
        (Cuboid(2, 2, 1), PREFETCH),
        (Cuboid(1, 2, 2), Schedule(sub_batches=2)),
        pytest.param(Cuboid(1, 1, 2, replicas=2), PREFETCH, marks=pytest.mark.slow),
        pytest.param(Cuboid(2, 1, 2), Schedule(chunks=2), marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value) if isinstance(value, Cuboid) else "",
)
def test_model_frozen_parameters_get_no_gradient_and_change_no_other(
    shape: Cuboid, schedule: Schedule, pool: Pools
) -> None:
    for errors in pool(shape.ranks).run(errors_when_frozen, shape, schedule):
        assert {what: error for what, error in errors.items() if not error <= EXACT} == {}


def test_parameter_names_are_the_models() -> None:
    for config in (GPT2, LLAMA, GPT2.replace(tied=False, bias=False), LLAMA.replace(qkv_bias=True, tied=True)):
        assert parameter_names(config) == [name for name, _, _ in declared(Transformer(Serial(config)))]


def test_freeze_takes_patterns_and_modules_alike() -> None:
    by_name, by_module = (Transformer(Serial(GPT2)) for _ in range(2))
    by_name.freeze(r"embed|blocks\.0")
    by_module.embed.requires_grad_(False)
    by_module.blocks[0].requires_grad_(False)  # type: ignore[attr-defined]
    trained = [[name for name, p in model.named_parameters() if p.requires_grad] for model in (by_name, by_module)]
    assert trained[0] == trained[1]
    assert trained[0][:2] == ["positions.weight", "blocks.1.norm1.weight"]
    by_name.freeze("")
    assert sum(p.requires_grad for p in by_name.parameters()) == len(trained[0])


class FrozenFirst(Transformer):
    def finish(self, seed: int | None = 0, dtype: torch.dtype = torch.float32, wraps: bool = False) -> None:
        self.freeze("embed")
        super().finish(seed, dtype, wraps)


def test_freeze_before_the_model_is_finished_lasts() -> None:
    model = FrozenFirst(Serial(GPT2))
    assert not model.embed.weight.requires_grad
    assert model.norm.weight.requires_grad


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("embedd", "'embedd' is in no parameter's name; did you mean embed"),
        ("embed|block.0.atention", "'block.0.atention' is in no parameter's name; did you mean blocks.0.attention"),
        ("embed|", "'' is in no parameter's name"),
        ("blocks.(", "is not a regular expression"),
    ],
)
def test_freeze_rejects_what_matches_nothing(pattern: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Transformer(Serial(GPT2)).freeze(pattern)


# Nothing is done for them


class OneEnd(Transformer):
    """The last norm and the head are one stage: the norm needs the head's dX though nothing below is trained."""

    def stages(self) -> Sequence[Stage]:
        *below, norm, head = super().stages()
        return [*below, Stage("end", chain(norm.layer, head.layer), [self.norm, self.classifier])]


def errors_of_one_end(world: World, shape: Cuboid) -> float:
    mesh, config = Mesh(shape, world.rank), LLAMA
    models = [OneEnd(parallel, 1, torch.float64) for parallel in (CuboidParallel(config, mesh), Serial(config))]
    for model in models:
        model.freeze("embed|blocks")
        plainly(model, batches_on(model.parallel, 1))
    mesh.close()
    assert models[1].norm.weight.grad is not None
    return against(*models)


def test_frozen_blocks_leave_a_stage_of_norm_and_head_its_gradients(pool: Pools) -> None:
    assert max(pool(4).run(errors_of_one_end, Cuboid(2, 1, 2))) <= EXACT


def steps_below(world: World) -> list[int]:
    """Stages whose backward ran, with the head, the last block or the first trained alone."""
    found = []
    for frozen in ("embed|positions|blocks|^norm", r"embed|positions|blocks\.0", "embed|positions", "mlp"):
        model = model_on(CuboidParallel(GPT2.replace(tied=False), mesh := Mesh(Cuboid(2), world.rank)))
        model.freeze(frozen)
        seen = list[int]()
        losses = [loss_of(model, batch) for batch in batches_on(model.parallel)]
        model.player.runners[0].on_stage = seen.append
        sum(losses).backward()  # type: ignore[union-attr]
        mesh.close()
        found.append(min(seen))
    return found


def test_backward_ends_with_lowest_trained_stage(pool: Pools) -> None:
    for found in pool(2).run(steps_below):
        assert found == [4, 2, 1, 0]
