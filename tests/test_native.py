"""The native layout is our serial model, step by step, and sends what its formula says."""

from collections.abc import Callable
from typing import NamedTuple

import namespaces
import pytest
import torch
import torch.distributed as dist
from sharded import relative
from torch import Tensor

from cuboid.baselines.serial import Serial
from cuboid.bench.count import wire_bytes
from cuboid.bench.native import Native
from cuboid.bench.native_model import fuse
from cuboid.comm.ledger import Ledger
from cuboid.mesh.layout import shard_of
from cuboid.model.config import ModelConfig
from cuboid.model.module import declared
from cuboid.model.transformer import Transformer
from cuboid.plan.cost.native import native_cost
from cuboid.plan.measure import count_flops
from cuboid.run.cluster import Cluster, sent
from cuboid.run.launch import Pool, World

LLAMA = ModelConfig("llama", layers=2, hidden=24, heads=16, kv_heads=8, vocab=37, context=16, ffn=40, head_dim=4)
GPT2 = ModelConfig("gpt2", layers=2, hidden=28, heads=8, vocab=37, context=22, ffn=48, head_dim=6)
EXACT = 1e-9  # relative, in fp64
BATCH, SEQ = 8, 16


class Case(NamedTuple):
    config: ModelConfig
    fsdp: int
    tp: int
    ideal: bool = False
    reshard: bool = True
    sp: bool = True
    ddp: bool = False


CASES = [
    Case(LLAMA, 8, 1, ideal=True),
    Case(LLAMA, 4, 2),
    Case(LLAMA, 2, 4, ideal=True),
    Case(LLAMA, 1, 8),
    Case(LLAMA.replace(tied=True), 2, 2, reshard=False),
    Case(GPT2, 8, 1),
    Case(GPT2, 4, 2, ideal=True, reshard=False),
    Case(GPT2, 2, 4),
    Case(GPT2, 1, 8, ideal=True),
    Case(GPT2.replace(tied=False, bias=False), 2, 2, ideal=True),
    Case(LLAMA, 2, 2, sp=False),
    Case(GPT2, 1, 4, sp=False),
    Case(LLAMA, 2, 2, ideal=True, sp=False),
    Case(GPT2.replace(tied=False), 2, 2, ideal=True, reshard=False, sp=False),
    Case(GPT2, 4, 1, ddp=True),
]


def name_of(case: Case) -> str:
    more = "-ideal" * case.ideal + "-no-sp" * (not case.sp) + "-ddp" * case.ddp
    return f"{case.config.family}-{case.fsdp}x{case.tp}{more}"


class Outcome(NamedTuple):
    """Of one rank and the second of two steps; only rank 0 looks for errors."""

    sent: dict[str, dict[str, tuple[int, int]]]
    predicted: dict[str, dict[str, tuple[int, int]]]
    parameters: tuple[int, int]  # bytes, and by formula
    flops: int
    errors: dict[str, float]
    serial_flops: int = 0


def batch_of(config: ModelConfig) -> Tensor:
    """Tokens and targets, every one of which counts."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, config.vocab, (2, BATCH, SEQ), generator=generator)


def noise(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """What to add to each: biases begin at zero and norms at one, where a misplaced slice does not show."""
    generator = torch.Generator().manual_seed(4)
    return {name: 0.2 * torch.randn(x.shape, generator=generator, dtype=x.dtype) for name, x in sorted(values.items())}


def compare(world: World, case: Case) -> Outcome:
    """Two steps with AdamW between them, on the ranks and on one device."""
    native = Native(case.config, world, case.fsdp, case.tp, 1, torch.float64, *case[3:])
    tokens, targets = batch_of(case.config)
    initial, ledger = native.values(), Ledger()
    added = fuse(case.config, noise(initial))
    with torch.no_grad():
        for name, parameter in native.model.named_parameters():
            shard_of(parameter).add_(native.specs[name].take(added[name], native.cuboid, native.coordinates))
    optimizer = torch.optim.AdamW(native.parameters(), lr=0.01, fused=True)
    first = native.loss(tokens, targets)
    first.backward()
    optimizer.step()
    optimizer.zero_grad()
    with count_flops() as flops, native.tally(ledger):
        second = native.loss(tokens, targets)
        second.backward()
    gradients = native.gradients()
    held = sum(shard_of(parameter).nbytes for parameter in native.parameters())
    native.close()
    cost = native_cost(case.config, case.fsdp, case.tp, BATCH, SEQ, world.rank, *case[3:], size=8)
    outcome = Outcome(ledger.counts(), cost.counts(), (held, cost.parameters), flops.get_total_flops(), {})
    if world.rank:
        return outcome
    return against_serial(outcome, [first.item(), second.item()], gradients, initial, case.config)


def against_serial(
    outcome: Outcome,
    losses: list[float],
    gradients: dict[str, Tensor],
    initial: dict[str, Tensor],
    config: ModelConfig,
) -> Outcome:
    parallel = Serial(config)
    model, place = Transformer(parallel, 1, torch.float64), parallel.place(BATCH, SEQ)
    parameters = {name: parameter for name, parameter, _ in declared(model)}
    assert initial.keys() == parameters.keys()
    assert all(torch.equal(initial[name], parameter) for name, parameter in parameters.items())
    with torch.no_grad():
        for name, by in noise(initial).items():
            parameters[name] += by
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens, targets = (place.take(whole, 0) for whole in batch_of(config))
    first = model(tokens, targets, place)
    first.backward()
    optimizer.step()
    optimizer.zero_grad()
    with count_flops() as flops:
        second = model(tokens, targets, place)
        second.backward()
    errors = {f"loss {i}": abs(losses[i] / wanted.item() - 1) for i, wanted in enumerate((first, second))}
    # some gradients are zero in exact arithmetic, such as that of a key's bias: what is left is rounding
    least = 1e-3 * model.gradient_norm().item()
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        errors[name] = relative(gradients[name], shard_of(parameter.grad), least)
    return outcome._replace(errors=errors, serial_flops=flops.get_total_flops())


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (case is not CASES[-1]), id=name_of(case)) for case in CASES],
)
def test_native_step_matches_serial_and_cost_formula(pool, case: Case) -> None:
    ranks: list[Outcome] = pool(case.fsdp * case.tp).run(compare, case)
    assert {name: error for name, error in ranks[0].errors.items() if not error <= EXACT} == {}
    assert sum(rank.flops for rank in ranks) == ranks[0].serial_flops
    for rank in ranks:
        assert rank.sent == rank.predicted
        assert rank.parameters[0] == rank.parameters[1]


WIDE = ModelConfig("llama", layers=2, hidden=256, heads=8, vocab=2048, context=128, ffn=512)


def on_the_wire(world: World, fsdp: int, tp: int, ideal: bool) -> tuple[int, int]:
    """Bytes of a step that this rank should send, and that all ranks have sent by the kernel's count."""
    native = Native(WIDE, world, fsdp, tp, ideal=ideal)
    batch = torch.zeros(8, 128, dtype=torch.int64)
    native.loss(batch, batch).backward()  # connections are made at their first use
    native.model.zero_grad()
    dist.barrier()
    before = sent("lo")
    dist.barrier()
    native.loss(batch, batch).backward()
    dist.barrier()
    after = sent("lo")
    dist.barrier()  # no rank continues before all have read
    native.close()
    counts = native_cost(WIDE, fsdp, tp, 8, 128, world.rank, ideal).counts()
    return sum(wire_bytes(counts).values()), after - before


@pytest.mark.slow
@namespaces.needed
def test_native_cost_matches_kernel_byte_counters() -> None:
    with Cluster(1, per_host=4) as host, Pool(4, host) as pool:
        for fsdp, tp in ((4, 1), (2, 2), (1, 4)):
            shipped, ideal = (pool.run(on_the_wire, fsdp, tp, ideal) for ideal in (False, True))
            for ranks in (shipped, ideal):
                assert ranks[0][1] == pytest.approx(sum(wire for wire, _ in ranks), rel=0.05)
            assert shipped[0][1] > 1.2 * ideal[0][1]


def again_and_again(world: World) -> list[float]:
    """The loss of one model after another, each ended before the next, as shipped and ideal in turn."""
    losses, (tokens, targets) = [], batch_of(GPT2)
    for ideal in (False, True, False, True):
        native = Native(GPT2, world, 2, 2, ideal=ideal)
        ledger = Ledger()
        with native.tally(ledger):
            loss = native.loss(tokens, targets)
            loss.backward()
        assert ("all_to_all" in ledger.counts()["tp"]) == ideal
        assert ("reduce_scatter" in ledger.counts()["tp"]) != ideal
        losses.append(loss.item())
        native.close()
    return losses


@pytest.mark.slow
def test_native_successive_models_do_not_interfere(pool) -> None:
    """DTensor remembers meshes and placements that it takes for equal."""
    losses = pool(4).run(again_and_again)[0]
    assert losses == pytest.approx(losses[:1] * 4, rel=1e-5)


def built(world: World, config: ModelConfig, fsdp: int, tp: int) -> None:
    Native(config, world, fsdp, tp)


def stepped(world: World, batch: int, seq: int) -> None:
    native = Native(GPT2, world, 2, 1, ideal=True)
    tokens = torch.zeros(batch, seq, dtype=torch.int64)
    for _ in range(2):
        native.loss(tokens, tokens).backward()


def mismatched(world: World) -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    Native(GPT2, world, 2, 1).loss(tokens, tokens[:, :4])


@pytest.mark.parametrize(
    ("work", "args", "message"),
    [
        (built, (GPT2, 2, 2), "fsdp=2 × tp=2 needs 4 ranks but 2 were started; choose sizes whose product is 2"),
        (built, (GPT2.replace(heads=7, kv_heads=7), 1, 2), r"heads=7 cannot be split into tp=2; .* tp one of \[1\]"),
        (built, (LLAMA.replace(kv_heads=1), 1, 2), "kv_heads=1 cannot be split into tp=2"),
        (built, (GPT2.replace(ffn=31), 1, 2), "ffn=31 cannot be split into tp=2"),
        (built, (GPT2.replace(vocab=1), 1, 2), "vocab=1 leaves the last of tp=2 ranks no row; use vocab 2"),
        (stepped, (3, 8), "batch=3 cannot be split into fsdp=2; use batch 2 or 4"),
        (stepped, (2, 23), "seq=23 is longer than context=22"),
        (stepped, (2, 8), "cannot add to gradients; clear them"),
        (mismatched, (), r"targets \(2, 4\) must be shaped as tokens, \(2, 8\)"),
    ],
)
def test_native_rejects_bad_input_with_advice(
    pool, work: Callable[..., None], args: tuple[object, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pool(2).run(work, *args)


def test_native_cost_rejects_what_native_rejects() -> None:
    with pytest.raises(ValueError, match="seq=9 cannot be split into tp=2; use seq 8 or 10"):
        native_cost(GPT2, 1, 2, 8, 9)
    with pytest.raises(ValueError, match="heads=8 cannot be split into tp=3"):
        native_cost(GPT2, 1, 3, 8, 9)
