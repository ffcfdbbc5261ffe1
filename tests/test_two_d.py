"""2-D and 2.5-D parallel: the step on one device, and its cost by formula."""

import weakref
from collections.abc import Callable, Sequence
from itertools import cycle
from math import prod
from typing import Any, NamedTuple

import pytest
import torch
from sharded import Case, batch_of, compare, compare_own_loss, on_squares, relative, wrong
from silent import ends, silently
from torch import Tensor

from cuboid.baselines.serial import Serial
from cuboid.baselines.summa import sweep
from cuboid.baselines.two_d import TwoD
from cuboid.comm.axis import Axis
from cuboid.comm.collectives import broadcast, reduce
from cuboid.comm.flight import Flight, landed
from cuboid.comm.transport.gloo import Gloo
from cuboid.layers.loss import Loss
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import shard_of
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.generate import Sampling, generate
from cuboid.model.module import declared
from cuboid.model.transformer import Transformer
from cuboid.plan.cost.two_d import two_d_cost
from cuboid.plan.measure import Memory, count_flops
from cuboid.run.launch import Pool, World
from cuboid.step.op import chain
from cuboid.step.runner import Stage

Pools = Callable[[int], Pool]

GPT2 = ModelConfig("gpt2", layers=2, hidden=24, heads=12, vocab=37, context=15, ffn=36, dropout=0.2)
LLAMA = ModelConfig("llama", layers=2, hidden=24, heads=12, kv_heads=6, head_dim=4, vocab=41, ffn=48)
BATCH = 4, 6  # of logits that are differentiated
HARD = Loss(label_smoothing=0.1, z_loss=0.01)


EXACT = [
    Case(GPT2, Cuboid(), batch=3, seq=13, dropout=7),
    Case(GPT2, Cuboid(1, 2, 2), batch=4, seq=13, loss=HARD, dropout=7, recompute="selective"),
    Case(LLAMA, Cuboid(1, 2, 2), batch=6, seq=12),
    Case(LLAMA.replace(tied=True, bias=True, kv_heads=12), Cuboid(1, 2, 2), batch=2, seq=1, recompute="full"),
    Case(GPT2, Cuboid(2, 2, 2), batch=4, seq=13, loss=HARD, dropout=7, recompute="full"),
    Case(LLAMA, Cuboid(2, 2, 2, order=("z", "replicas", "y", "x")), batch=8, seq=7, loss=HARD, recompute="selective"),
    Case(LLAMA, Cuboid(1, 2, 2, replicas=2), batch=4, seq=12, loss=HARD),
    Case(GPT2, Cuboid(1, 2, 2, 2, ("y", "x", "replicas", "z")), batch=8, seq=5, dropout=7),
    Case(GPT2, Cuboid(1, 3, 3), batch=6, seq=13, loss=HARD, dropout=7),
    Case(LLAMA.replace(dropout=0.2), Cuboid(1, 3, 3), batch=3, seq=12, dropout=7, recompute="selective"),
    Case(GPT2.replace(tied=False, bias=False), Cuboid(3, 2, 2), batch=6, seq=13, recompute="full"),
    Case(LLAMA.replace(layers=1), Cuboid(3, 2, 2), batch=12, seq=7, loss=HARD),
    Case(GPT2.replace(layers=1), Cuboid(1, 4, 4), batch=8, seq=13, loss=HARD, dropout=7),
    Case(LLAMA.replace(layers=1, kv_heads=4, vocab=9), Cuboid(1, 4, 4), batch=4, seq=7),  # one rank has no class
]


def name_of(case: Case) -> str:
    return f"{case.cuboid}-{case.config.family}-b{case.batch}-s{case.seq}-{case.recompute}".replace(" × ", "-")


@pytest.mark.parametrize("case", EXACT, ids=name_of)
def test_two_d_step_matches_one_device(case: Case, pool: Pools) -> None:
    assert not wrong(pool(case.cuboid.ranks).run(compare, case, on_squares)[0])


# Cost


class Counts(NamedTuple):
    traffic: dict[str, Any]
    flops: int
    matrices: int
    vectors: int
    saved: int


def counted(world: World, case: Case, compute: torch.dtype | None) -> tuple[Counts, Counts]:
    """What a step does, and what the formulas say."""
    mesh = Mesh(case.cuboid, world.rank)
    parallel = TwoD(case.config, mesh, compute)
    model, place = Transformer(parallel, case.seed, recompute=case.recompute), parallel.place(case.batch, case.seq)
    tokens, targets = batch_of(case)
    mine = place.take(tokens, 0), place.take(targets, -100)
    with count_flops() as flops:
        with Memory(model) as memory:
            loss = model(*mine, place, case.loss, case.dropout)
            held = memory.saved(loss)
        loss.backward()
    mesh.close()
    sizes = [sum(shard_of(p).nbytes for p in model.parameters() if (p.dim() > 1) == matrix) for matrix in (True, False)]
    size = 4 if compute is None else compute.itemsize
    cost = two_d_cost(case.config, case.cuboid, mesh.coordinates, case.batch, case.seq, 4, size, case.recompute)
    found = Counts(mesh.ledger.counts(), flops.get_total_flops(), *sizes, held)
    return found, Counts(cost.counts(), cost.flops, cost.matrices, cost.vectors, cost.saved)


@pytest.mark.parametrize(("case", "compute"), list(zip(EXACT, cycle([None, torch.bfloat16]))))
def test_two_d_step_counts_match_cost_formulas(case: Case, compute: torch.dtype | None) -> None:
    size = case.cuboid.ranks
    for found, predicted in silently(ends(size), size, counted, case, compute):
        assert found == predicted


def test_two_d_cost_layer_traffic_matches_optimus() -> None:
    """Optimus: over z X goes round twice and dX once, over y W twice and dW once, each as q blocks to q - 1 ranks."""
    q, tokens, config = 4, 2 * 12, LLAMA.replace(kv_heads=4)
    cuboid = Cuboid(1, q, q)
    one, two = (two_d_cost(config.replace(layers=n), cuboid, cuboid.coordinates(0), 2 * q, 12).counts() for n in (1, 2))
    d, into = config.hidden, (config.q_dim + 2 * config.kv_dim, 2 * config.ffn)
    products = [(d, into[0]), (config.q_dim, d), (d, into[1]), (config.ffn, d)]
    X, W = sum(tokens * k // q for k, _ in products), sum(n * k // q**2 for k, n in products)
    for axis, block in (("z", X), ("y", W)):
        for kind, times in (("broadcast", 2), ("reduce", 1)):
            assert two[axis][kind][1] - one[axis][kind][1] == times * block * (q - 1) * 4


class Watch:
    """Makes tensors and knows how many of them were alive at once."""

    def __init__(self) -> None:
        self.alive: list[weakref.ref[Tensor]] = []
        self.most = 0

    def make(self) -> Tensor:
        tensor = torch.empty(3)
        self.alive = [ref for ref in (*self.alive, weakref.ref(tensor)) if ref() is not None]
        self.most = max(self.most, len(self.alive))
        return tensor


def test_summa_sweep_keeps_at_most_three_turns_alive() -> None:
    blocks, sums = Watch(), Watch()

    def summed_elsewhere(i: int, block: Tensor) -> list[Flight]:
        partial = sums.make()
        return [Flight(lambda: partial[:0].clone())]

    assert len(sweep(6, lambda i: [landed(blocks.make())], summed_elsewhere)) == 6
    assert (blocks.most, sums.most) == (3, 3)


# The two collectives that are here alone


def rooted(world: World, size: int, per_host: int, mates: int) -> None:
    """Broadcasts from and reduces to every rank of a line, all under way at once, of values whose sum bf16 rounds."""
    mesh = Mesh(Cuboid(1, size, 2), world.rank, per_host=per_host)
    y, at = mesh.y, range(size)
    assert isinstance(y.transport, Gloo)
    assert y.transport.mates == mates

    def value(i: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.full((i + 1, 5), 256.0 if i == 0 else 1.0, dtype=dtype)  # the ranks' shapes differ

    visits = [broadcast(value(y.index), y, i, (i + 1, 5)) for i in at]
    sums = [
        reduce(value(y.index, dtype)[:1], y, i, torch.float32) for i in at for dtype in (torch.float64, torch.bfloat16)
    ]
    nothing = broadcast(value(0)[:0], y, 0, (0, 5)).wait(), reduce(value(0)[:0], y, 0).wait()
    assert [tuple(each.shape) for each in nothing] == [(0, 5), (0, 5)]
    for i, flight in enumerate(visits):
        assert torch.equal(flight.wait(), value(i))
    for i, flight in enumerate(sums):
        expected = torch.full((1, 5), 255.0 + size) if i // 2 == y.index else torch.empty(0)
        assert torch.equal(flight.wait(), expected)
    sent = [5 * (i + 1) * 8 * (size - 1) // size for i in at]
    wide = 5 * 8 * (size - 1) // size
    narrow = 5 * (2 if size == 2 else 4) * (size - 1) // size  # more than two ranks add in fp32 on the way
    counts = {"broadcast": (size, sum(sent)), "reduce": (2 * size, size * (wide + narrow))}
    assert mesh.ledger.counts() == {"y": counts}
    mesh.close()


@pytest.mark.parametrize(
    ("size", "per_host", "mates"),
    [(2, 4, 1), (3, 6, 1), (4, 8, 1), (4, 4, 2), (6, 4, 2), (6, 6, 3), (3, 4, 1), (4, 2, 1)],
)
def test_comm_broadcast_and_reduce_are_exact_and_counted(size: int, per_host: int, mates: int, pool: Pools) -> None:
    """On one host; on several that have as many ranks of a line each, by hosts; with more on one than on another."""
    pool(2 * size).run(rooted, size, per_host, mates)


def over_one(world: World) -> bool:
    x, axis = torch.ones(3), Axis("x", 1, 0)
    return broadcast(x, axis, 0, x.shape).wait() is x and reduce(x, axis, 0).wait() is x and not axis.ledger.entries


def test_comm_axis_of_one_launches_and_copies_nothing(pool: Pools) -> None:
    assert all(pool(2).run(over_one))


# Uses other than training in fp64


def rounding(world: World, case: Case) -> dict[str, float]:
    """How far gradients are from one device's when products are in bf16, relative to its full gradient."""
    mesh, (tokens, targets) = Mesh(case.cuboid, world.rank), batch_of(case)
    models = []
    for parallel in (TwoD(case.config, mesh, torch.bfloat16), Serial(case.config)):
        model, place = Transformer(parallel, case.seed), parallel.place(case.batch, case.seq)
        model(place.take(tokens, 0), place.take(targets, -100), place, case.loss).backward()
        models.append(model)
    mine, whole = models
    mesh.close()
    least = whole.gradient_norm().item()
    return {
        name: relative(
            shard_of(parameter.grad), d.spec.take(whole.get_parameter(name).grad, mesh.cuboid, mesh.coordinates), least
        )
        for name, parameter, d in declared(mine)
    }


@pytest.mark.parametrize("case", [EXACT[2], EXACT[8]], ids=name_of)
def test_two_d_bf16_matmul_stays_within_rounding(case: Case, pool: Pools) -> None:
    for errors in pool(case.cuboid.ranks).run(rounding, case):
        assert not wrong(errors, 0.03)
        assert wrong(errors, 1e-5)  # and bf16 they are


def large_rows(world: World, case: Case) -> tuple[float, float]:
    """The largest entry of the head's gradient before it is divided by the tokens that count, and the gradient's error
    with products in fp16. All rows are alike, so that they add up."""
    mesh, gradients = Mesh(case.cuboid, world.rank), []
    for parallel in (TwoD(case.config, mesh, torch.float16), Serial(case.config)):
        model, place = Transformer(parallel, case.seed), parallel.place(case.batch, case.seq)
        with torch.no_grad():
            model.norm.weight *= 50
            model.head.weight /= 10  # probabilities stay far from 0 and 1
        ids = place.take(torch.zeros(case.batch, case.seq, dtype=torch.int64), 0)
        model(ids, ids, place).backward()
        gradients.append(shard_of(model.head.weight.grad))
    mesh.close()
    mine, whole = gradients
    spec = TwoD(case.config, mesh).spec("table", tuple(whole.shape))
    largest = whole.abs().max().item() * case.batch * case.seq
    return largest, relative(mine, spec.take(whole, mesh.cuboid, mesh.coordinates), least=1e-3 * whole.norm().item())


def test_two_d_fp16_head_gradient_does_not_overflow(pool: Pools) -> None:
    config = LLAMA.replace(layers=1, kv_heads=12, vocab=8, context=512)
    for largest, error in pool(4).run(large_rows, Case(config, Cuboid(1, 2, 2), batch=4, seq=512)):
        assert largest > 2 * torch.finfo(torch.float16).max  # of each y-rank still more than fp16 has
        assert error < 0.01


class Weighted(Transformer):
    """Its loss is the mean over ranks of the sum of their logits, each times a number of its own."""

    def stages(self) -> Sequence[Stage]:
        *trunk, head = super().stages()
        loss = self.parallel.own_loss(self.weighted)
        loss.takes = ""
        return [*trunk, Stage("own loss", chain(self.classifier.logits(), loss), head.modules)]

    def weighted(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        place = self.parallel.place(*BATCH)
        (s, b, v), generator = place.logits, torch.Generator().manual_seed(1)
        numbers = torch.randn(place.seq, place.batch, self.config.vocab, generator=generator, dtype=torch.float64)
        return (logits * numbers[s[:, None, None], b[:, None], v]).sum(), 1.0


def differentiated(world: World, config: ModelConfig, cuboid: Cuboid) -> dict[str, float]:
    """The gradients of logits that are used for something else than the loss, against one device's."""
    mesh, grads = Mesh(cuboid, world.rank), []
    tokens = torch.arange(prod(BATCH)).view(BATCH) % config.vocab
    for parallel in (TwoD(config, mesh), Serial(config)):
        model, place = Weighted(parallel, dtype=torch.float64), parallel.place(*BATCH)
        mine = place.take(tokens, 0)
        (parallel.mesh.cuboid.ranks * model(mine, mine, place)).backward()
        grads.append({name: (d.spec, shard_of(parameter.grad)) for name, parameter, d in declared(model)})
    mesh.close()
    mine, whole = grads
    return {
        name: relative(grad, spec.take(whole[name][1], cuboid, mesh.coordinates), 1e-3)
        for name, (spec, grad) in mine.items()
    }


def test_two_d_own_loss_matches_one_device(pool: Pools) -> None:
    for errors in pool(8).run(compare_own_loss, Case(GPT2, Cuboid(2, 2, 2), 4, 13), on_squares):
        assert not wrong(errors)


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_two_d_logits_are_differentiable(config: ModelConfig, pool: Pools) -> None:
    for errors in pool(8).run(differentiated, config, Cuboid(2, 2, 2)):
        assert not wrong(errors)


def evaluated(world: World, case: Case) -> tuple[float, float, bool]:
    """The loss of a batch with gradients and without, and whether the latter sent no gradient."""
    mesh = Mesh(case.cuboid, world.rank)
    parallel = TwoD(case.config, mesh)
    model, place = Transformer(parallel), parallel.place(case.batch, case.seq)
    tokens, targets = batch_of(case)
    mine = place.take(tokens, 0), place.take(targets, -100)
    with_gradients = model(*mine, place, case.loss).item()
    mesh.ledger.reset()
    with torch.no_grad():
        without = model(*mine, place, case.loss).item()
    mesh.close()
    return with_gradients, without, "reduce" not in mesh.ledger.counts()["y"]


def test_two_d_evaluation_sends_no_gradients(pool: Pools) -> None:
    for with_gradients, without, silent in pool(4).run(evaluated, EXACT[2]):
        assert with_gradients == without
        assert silent


def tokens_of(world: World, config: ModelConfig, cuboid: Cuboid) -> tuple[list[int], list[int]]:
    mesh = Mesh(cuboid, world.rank)
    models = [Transformer(parallel, dtype=torch.float64) for parallel in (TwoD(config, mesh), Serial(config))]
    found, wanted = (list(generate(model.eval(), [3, 1, 4], 6, Sampling(0))) for model in models)
    mesh.close()
    return found, wanted


@pytest.mark.parametrize("config", [GPT2.replace(tied=False), LLAMA], ids=["gpt2", "llama"])
def test_two_d_generate_with_cache_matches_one_device(config: ModelConfig, pool: Pools) -> None:
    for found, wanted in pool(8).run(tokens_of, config.replace(init_std=0.3), Cuboid(2, 2, 2)):
        assert found == wanted
        assert len(set(wanted)) > 2  # not one token over and over


def refused(world: World, config: ModelConfig, cuboid: Cuboid, batch: int) -> tuple[str, dict[str, Any]]:
    mesh = Mesh(cuboid, world.rank)
    try:
        TwoD(config, mesh).place(batch, seq=4)
    except ValueError as error:
        return str(error), mesh.ledger.counts()
    finally:
        mesh.close()
    return "not refused", {}


SQUARE = Cuboid(1, 2, 2)


@pytest.mark.parametrize(
    ("config", "cuboid", "batch", "text"),
    [
        (
            GPT2,
            Cuboid(1, 4, 1),
            4,
            "cuboid 1,4,1 has y=4 and z=1, but 2-D parallel needs a square of ranks; use y = z",
        ),
        (GPT2, Cuboid(1, 1, 4), 4, "cuboid 1,1,4 has y=1 and z=4"),
        (GPT2.replace(hidden=33, heads=3, kv_heads=3), SQUARE, 2, "hidden=33 cannot be split into z=2; use hidden 34"),
        (
            GPT2.replace(heads=3, kv_heads=3),
            SQUARE,
            2,
            "heads=3 cannot be split into z=2; use heads 4, or y = z one of [1]",
        ),
        (LLAMA.replace(kv_heads=3), SQUARE, 2, "kv_heads=3 cannot be split into z=2; use kv_heads 4"),
        (GPT2.replace(ffn=35), SQUARE, 2, "ffn=35 cannot be split into z=2; use ffn 36"),
        (GPT2, SQUARE, 3, "batch=3 cannot be split into replicas·x·y=2; use batch 4"),
        (GPT2, Cuboid(2, 1, 1, replicas=2), 6, "batch=6 cannot be split into replicas·x·y=4; use batch 8"),
    ],
)
def test_two_d_rejects_unsupported_sizes(
    config: ModelConfig, cuboid: Cuboid, batch: int, text: str, pool: Pools
) -> None:
    for message, traffic in pool(4).run(refused, config, cuboid, batch):
        assert message.startswith(text)
        assert not traffic
    with pytest.raises(ValueError) as refusal:
        two_d_cost(config, cuboid, cuboid.coordinates(0), batch, 4)
    assert str(refusal.value).startswith(text)
