"""One device against plain PyTorch. Every other parallel is held against `Serial`, but that runs on the same runner as
they do: it is itself held against autograd on a model of `torch.nn`, and against finite differences."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from sharded import relative, wrong
from torch import Tensor

from cuboid.baselines.serial import Serial
from cuboid.bench.native_model import NativeTransformer
from cuboid.layers.loss import Loss
from cuboid.model.config import ModelConfig
from cuboid.model.module import declared
from cuboid.model.transformer import Recompute, Transformer
from cuboid.run.launch import Pool, World
from cuboid.step.runner import At
from cuboid.step.schedule import OFF, Schedule, parse

Pools = Callable[[int], Pool]
BATCH, SEQ = 4, 7

GPT2 = ModelConfig("gpt2", layers=2, hidden=24, heads=4, vocab=37, context=9, ffn=40)
LLAMA = ModelConfig("llama", layers=2, hidden=24, heads=6, kv_heads=2, vocab=37, ffn=40, head_dim=4)
SMOOTH = Loss(label_smoothing=0.1, z_loss=0.01)


class Case(NamedTuple):
    config: ModelConfig
    loss: Loss = Loss()
    recompute: Recompute = "none"
    schedule: Schedule = OFF


CASES = [
    Case(GPT2),
    Case(GPT2.replace(tied=False, bias=False), SMOOTH),
    Case(GPT2, SMOOTH, "selective", Schedule(sub_batches=2)),
    Case(LLAMA),
    Case(LLAMA.replace(tied=True, bias=True), SMOOTH),
    Case(LLAMA.replace(kv_heads=1), Loss(z_loss=0.01), "full", Schedule(sub_batches=4)),
    Case(LLAMA.replace(kv_heads=6), Loss(label_smoothing=0.2)),
]


def name_of(case: Case) -> str:
    c = case.config
    return f"{c.family}-{'tied' if c.tied else 'untied'}-kv{c.kv_heads}-{case.recompute}-{case.schedule.sub_batches}"


def serial_model(case: Case) -> Transformer:
    """Every parameter is moved: biases begin at zero, and keys and queries nearly do."""
    parallel = Serial(case.config)
    parallel.schedule = case.schedule
    model = Transformer(parallel, 1, torch.float64, case.recompute)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def batch_of(case: Case, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Tokens and targets [batch, seq], about a fifth of which are ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, case.config.vocab, (2, BATCH, SEQ), generator=generator)
    ignored = torch.rand(BATCH, SEQ, generator=generator) < 0.2
    return tokens, torch.where(ignored, case.loss.ignore_index, targets)


def gradients(parameters: dict[str, Any]) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in parameters.items() if parameter.grad is not None}


def compared(
    found: tuple[list[float], dict[str, Tensor]], wanted: tuple[list[float], dict[str, Tensor]]
) -> dict[str, float]:
    """Relative errors of losses and gradients."""
    assert found[1].keys() == wanted[1].keys()
    errors = {f"loss {i}": abs(a / b - 1) for i, (a, b) in enumerate(zip(found[0], wanted[0], strict=True))}
    # some gradients are zero in exact arithmetic, such as that of a key's bias: what is left is rounding
    least = 1e-3 * torch.cat([gradient.flatten() for gradient in wanted[1].values()]).norm().item()
    return errors | {name: relative(found[1][name], wanted[1][name], least) for name in wanted[1]}


# Plain PyTorch


def plain_loss(logits: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """(1 - e) cross entropy + e (its mean over classes) + z log(Z)², the mean over the targets that count."""
    counts = targets != loss.ignore_index
    logits, targets, e = logits[counts], targets[counts], loss.label_smoothing
    log_p, log_Z = logits.log_softmax(-1), logits.exp().sum(-1).log()
    rows = -(1 - e) * log_p[torch.arange(len(targets)), targets] - e * log_p.mean(-1) + loss.z_loss * log_Z**2
    return rows.mean()


def plain_step(model: Transformer, case: Case, seeds: list[int]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of micro-batches and gradients of their mean, by autograd, from the same parameters."""
    plain = NativeTransformer(case.config, fused=False).double()
    plain.load_state_dict({name: parameter.detach() for name, parameter, _ in declared(model)})
    batches = [batch_of(case, seed) for seed in seeds]
    losses = [plain_loss(plain(tokens), targets, case.loss) for tokens, targets in batches]
    torch.stack(losses).mean().backward()
    return [loss.item() for loss in losses], gradients(dict(plain.named_parameters()))


# The step


def one_batch(world: World, case: Case) -> dict[str, float]:
    model, (tokens, targets) = serial_model(case), batch_of(case)
    place = model.parallel.place(BATCH, SEQ)
    loss = model(place.take(tokens, 0), place.take(targets, -100), place, case.loss)
    loss.backward()
    found = [loss.item()], gradients({name: parameter for name, parameter, _ in declared(model)})
    return compared(found, plain_step(model, case, [3]))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_serial_step_matches_plain_autograd(case: Case, pool: Pools) -> None:
    errors = pool(1).run(one_batch, case)[0]
    assert {"loss 0", "embed.weight", "blocks.1.mlp.down.weight", "norm.weight"} <= errors.keys()
    assert not wrong(errors)


def three_batches(world: World, case: Case, order: str) -> dict[str, float]:
    model, seeds = serial_model(case), [3, 4, 5]
    place = model.parallel.place(BATCH, SEQ)
    batches = []
    for seed in seeds:
        tokens, targets = batch_of(case, seed)
        batches.append((place.take(tokens, 0), At(place, place.take(targets, -100), case.loss)))
    losses = model.play(batches, parse(order))
    found = [loss.item() for loss in losses], gradients({name: parameter for name, parameter, _ in declared(model)})
    return compared(found, plain_step(model, case, seeds))


@pytest.mark.parametrize("order", ["F0 B0 F1 B1 F2 B2", "F0 F1+B0 F2+B1 B2", "F0 F1 F2 B2 W2 B0 B1 W0 W1"])
@pytest.mark.parametrize("case", [CASES[2], CASES[4]], ids=name_of)
def test_serial_micro_batches_match_plain_autograd(case: Case, order: str, pool: Pools) -> None:
    assert not wrong(pool(1).run(three_batches, case, order)[0])


# Options that the plain model lacks


def slopes(world: World, config: ModelConfig) -> dict[str, float]:
    """The error of each gradient along a random direction, against central differences of the loss."""
    case = Case(config, SMOOTH)
    model, (tokens, targets) = serial_model(case), batch_of(case)
    place, generator = model.parallel.place(BATCH, SEQ), torch.Generator().manual_seed(6)
    mine = place.take(tokens, 0), place.take(targets, -100)
    model(*mine, place, case.loss).backward()
    errors, step = {}, 1e-5
    for name, parameter, _ in declared(model):
        assert parameter.grad is not None
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        values = []
        with torch.no_grad():
            for move in (step, -2 * step, step):
                parameter += move * direction
                values.append(model(*mine, place, case.loss).item())
        slope = (values[0] - values[1]) / (2 * step)
        errors[name] = abs(slope - (parameter.grad * direction).sum().item()) / max(abs(slope), 1e-2)
    return errors


@pytest.mark.parametrize(
    "config",
    [
        LLAMA.replace(layers=1, qk_norm=True),
        LLAMA.replace(layers=1, qkv_bias=True),
        GPT2.replace(layers=1, qk_norm=True, tied=False),
    ],
    ids=["qk_norm", "qkv_bias", "gpt2-qk_norm"],
)
def test_serial_gradients_match_finite_differences(config: ModelConfig, pool: Pools) -> None:
    errors = pool(1).run(slopes, config)[0]
    wanted = "blocks.0.attention.norm_k.weight" if config.qk_norm else "blocks.0.attention.q.bias"
    assert wanted in errors
    assert not wrong(errors, 1e-6)
