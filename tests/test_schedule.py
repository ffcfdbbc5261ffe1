"""The schedule moves work in time and changes no value."""

import random
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from shutil import which
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from counts import count
from launches import launches
from sharded import EXACT, Case, compare
from silent import ends, silently
from torch import Tensor

from cuboid.comm.flight import Flight, Pause, Steps
from cuboid.layers import product
from cuboid.layers.product import Out, Side
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import shard_of
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import CuboidParallel, suitable_schedule
from cuboid.model.transformer import Transformer
from cuboid.plan.measure import Memory
from cuboid.run.launch import Pool, World
from cuboid.step.runner import At
from cuboid.step.schedule import MOST_AHEAD, OFF, PREFETCH, Clock, Schedule, Task, interleave, parse
from cuboid.step.weights import MOST_IN_FLIGHT

Pools = Callable[[int], Pool]
SUB_BATCHES, CHUNKS = Schedule(sub_batches=4), Schedule(chunks=2)
MODEL = ModelConfig("llama", layers=3, hidden=24, heads=12, kv_heads=12, vocab=37, context=12, dropout=0.1)


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(37, (8, 13), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def stepped(world: World, shape: Cuboid, schedule: Schedule, overlap: bool = True) -> tuple[list[Tensor], list[Any]]:
    """The gradients of a step, and its collectives in the order of their launch."""
    mesh = Mesh(shape, world.rank, overlap=overlap)
    model = Transformer(CuboidParallel(MODEL, mesh, schedule=schedule), seed=2)
    place = model.parallel.place(8, 12)
    mesh.ledger.spans = []
    model(*(place.take(whole, 0) for whole in batch()), place, dropout=3).backward()
    spans = mesh.ledger.spans
    mesh.close()
    return [shard_of(p.grad) for p in model.parameters() if p.grad is not None], spans


@pytest.mark.parametrize("shape", [Cuboid(2, 2, 2), pytest.param(Cuboid(2, 3, 2), marks=pytest.mark.slow)], ids=str)
def test_schedule_does_not_change_gradients(shape: Cuboid, pool: Pools) -> None:
    run = pool(shape.ranks).run
    plain = run(stepped, shape, OFF, False)
    for schedule in (OFF, PREFETCH):
        for rank, (gradients, _) in enumerate(run(stepped, shape, schedule)):
            assert all(map(torch.equal, gradients, plain[rank][0]))
    for schedule in (SUB_BATCHES, CHUNKS):
        for rank, (gradients, _) in enumerate(run(stepped, shape, schedule)):
            for a, b in zip(gradients, plain[rank][0], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def compare_compiled(world: World, case: Case) -> dict[str, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own imports warn
        return compare(world, case)


@pytest.mark.slow
@pytest.mark.skipif(which("c++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_schedule_compile_matches_one_device(family: Any, pool: Pools) -> None:
    config = ModelConfig(family, layers=1, hidden=24, heads=4, vocab=37, context=12)
    case = Case(config.replace(dropout=0.1), Cuboid(1, 1, 2), 2, 12, schedule=Schedule(compile=True), dropout=3)
    errors = pool(2).run(compare_compiled, case)[0]
    assert max(errors.values()) < EXACT, errors


def test_schedule_sets_collective_launch_order(pool: Pools) -> None:
    """On x alone the collectives are the weights'; on the other axes the activations'."""
    shape = Cuboid(2, 2, 1)
    spans = {s: pool(4).run(stepped, shape, s)[0][1] for s in (OFF, PREFETCH, SUB_BATCHES)}
    order = {
        s: [span.axis + ("" if span.kind == "all_gather" else "'") for span in found] for s, found in spans.items()
    }
    # embedding, its scatter, then a block's weights before its first X: with prefetch already with the embedding's, and
    # the next block's where they were
    assert order[OFF][:4] == ["x", "y'", "x", "y"]
    assert order[PREFETCH][:5] == ["x", "x", "y'", "x", "y"]
    # sub-batches: all have launched the embedding's scatter before the first gathers its X, and gather theirs before
    # the first multiplies; the last to leave the embedding has the next block's weights gathered
    assert order[SUB_BATCHES][:11] == ["x", "x", *["y'"] * 4, *["y"] * 3, "x", "y"]
    over_x = {s: sum(axis.startswith("x") for axis in found) for s, found in order.items()}
    assert over_x[PREFETCH] == over_x[SUB_BATCHES] == over_x[OFF] - 1  # the last block's stay
    # backward: the next block's weights are in flight before this one's matmuls are done
    last = len(order[PREFETCH]) - 1 - order[PREFETCH][::-1].index("x")
    assert order[PREFETCH][last:].count("y") > order[OFF][len(order[OFF]) - 1 - order[OFF][::-1].index("x") :].count(
        "y"
    )


def backward_of(world: World) -> list[str]:
    """What a step's backward regathers and when it computes the gradient of a weight, products numbered as forward
    comes to them."""
    numbers: dict[Side, int] = {}
    events: list[str] = []
    gather_any, weight_gradient = Side.gather, product.weight_gradient

    def gather(self: Side, X_s: Tensor, chunks: int) -> list[Flight]:
        if not isinstance(self, Out):
            events.append(f"X{numbers.setdefault(self, len(numbers))}")
        return gather_any(self, X_s, chunks)

    def gradient(*args: Any) -> None:
        events.append("dW")
        weight_gradient(*args)

    model = Transformer(CuboidParallel(MODEL.replace(layers=2, dropout=0.0), Mesh(Cuboid(), alone=True)))
    place = model.parallel.place(8, 12)
    with patch.object(Side, "gather", gather), patch.object(product, "weight_gradient", gradient):
        loss = model(*(place.take(whole, 0) for whole in batch()), place)
        events.clear()
        loss.backward()
    return events


def test_product_backward_gathers_next_input_early(pool: Pools) -> None:
    """The X of a product is regathered before the product after it computes its gradient."""
    (events,) = pool(1).run(backward_of)
    assert events == ["X7", *[each for i in reversed(range(7)) for each in (f"X{i}", "dW")], "dW"]


def gradients_by_move(world: World) -> list[tuple[str, int]]:
    """How many weights' gradients are made in each move of a step."""
    made: dict[str, int] = {}
    weight_gradient = product.weight_gradient

    def gradient(*args: Any) -> None:
        made[list(made)[-1]] += 1
        weight_gradient(*args)

    model = Transformer(CuboidParallel(MODEL.replace(layers=2, dropout=0.0), Mesh(Cuboid(), alone=True)))
    place = model.parallel.place(8, 12)
    tokens, targets = (place.take(whole, 0) for whole in batch())
    model.player.on_moves = lambda moves: made.update({"+".join(map(str, moves)): 0})
    with patch.object(product, "weight_gradient", gradient):
        model.play([(tokens, At(place, targets))] * 2, parse("F0 F1+B0 W0 B1 W1"))
    return list(made.items())


def test_product_makes_late_gradients_when_settled(pool: Pools) -> None:
    (made,) = pool(1).run(gradients_by_move)
    moves = dict(made)
    assert list(moves) == ["F0", "F1+B0", "W0", "B1", "W1"]
    assert moves == {"F0": 0, "F1+B0": 0, "W0": 8, "B1": 0, "W1": 8}


def test_interleave_launches_all_sub_batches_before_waiting() -> None:
    """As the embedding's do: all are launched before the first is awaited."""
    order: list[str] = []

    def sends(name: str) -> Steps:
        order.append(f"{name} launched")
        yield Pause(sent=1)
        order.append(f"{name} awaited")

    interleave([Task([sends(name) for name in "abc"], list)], Clock())
    assert order == [f"{name} {done}" for done in ("launched", "awaited") for name in "abc"]


def test_interleave_waits_for_messages_launched_before() -> None:
    """Whoever waits for a message that was launched before lets the others compute until it lands."""
    clock, order = Clock(), list[str]()
    message = clock.launch(3)

    def waits() -> Steps:
        yield Pause(message=message)
        order.append("waited")

    def works() -> Steps:
        for i in range(2):
            yield Pause(work=1)
            order.append(f"worked {i}")

    interleave([Task([waits(), works()], list)], clock)
    assert order == ["worked 0", "worked 1", "waited"]


def test_interleave_keeps_sub_batches_close() -> None:
    """One whose messages are short does not run ahead of one whose messages are long: each holds weights."""
    turns, leads = {"long": 0, "short": 0}, list[int]()

    def runs(name: str, sent: float) -> Steps:
        for _ in range(3 * MOST_AHEAD):
            yield Pause(sent=sent)
            turns[name] += 1
            leads.append(turns["short"] - turns["long"])

    interleave([Task([runs("long", 1000), runs("short", 0)], list)], Clock())
    assert MOST_AHEAD // 2 < max(leads) <= MOST_AHEAD


def test_clock_paces_a_link_by_the_forward() -> None:
    """A backward does twice its forward's work and sends as much, so that a byte takes three halves as long."""
    clock = Clock()
    clock.advance(clock.lands(clock.launch(10)))
    clock.compute(20)
    assert clock.lands(clock.launch(0)) == clock.now
    clock.forward = False
    first, second = clock.launch(4), clock.launch(2)
    assert clock.lands(first) == clock.now + 4 * 3
    assert clock.lands(second) == clock.now + 6 * 3  # behind the first
    clock.compute(15)
    assert clock.lands(first) == clock.now
    assert clock.lands(second) == clock.now + 3
    now = clock.now
    clock.advance(now - 1)  # work in a wait may take longer than the wait
    assert clock.now == now


def test_clock_runs_where_the_forward_sends_nothing() -> None:
    clock = Clock()
    clock.compute(20)
    clock.forward = False
    assert clock.lands(clock.launch(4)) == clock.now + 4


def launched_beside(world: World, beside: bool) -> list[tuple[str, str, str]]:
    """The moves that are under way at each launch of a step of two micro-batches, its axis and kind."""
    mesh = Mesh(Cuboid(2, 2, 1), world.rank)
    model = Transformer(CuboidParallel(MODEL.replace(layers=1), mesh, schedule=Schedule(beside=beside)), seed=2)
    place, now, found = model.parallel.place(8, 12), [""], list[tuple[str, str, str]]()
    tokens, targets = (place.take(whole, 0) for whole in batch())
    model.player.on_moves = lambda moves: now.append("+".join(map(str, moves)))
    launched = mesh.ledger.launched

    def launch(axis: str, kind: str, size: int) -> Any:
        found.append((now[-1], axis, kind))
        return launched(axis, kind, size)

    with patch.object(mesh.ledger, "launched", launch):
        model.play([(tokens, At(place, targets))] * 2)
    mesh.close()
    return found


def test_schedule_beside_interleaves_forward_with_backward(pool: Pools) -> None:
    """The same collectives as one after another; those of the second forward between those of the first backward."""
    turns, sides = (pool(4).run(launched_beside, beside)[0] for beside in (False, True))
    assert sorted(each[1:] for each in turns) == sorted(each[1:] for each in sides)
    assert list(dict.fromkeys(move for move, *_ in sides)) == ["F0", "F1+B0", "B1"]
    apart = [each[1:] for move in ("F1", "B0") for each in turns if each[0] == move]
    joint = [each[1:] for each in sides if each[0] == "F1+B0"]
    assert sorted(joint) == sorted(apart)
    assert joint != apart
    first = [each[1:] for each in turns if each[0] == "B0"]
    assert joint[: len(first)] != first  # nor one after the other the other way round


def launched_with_replicas(world: World) -> list[list[tuple[str, str]]]:
    """Axis and kind of all gradients' collectives, with every recomputation."""
    config = ModelConfig("llama", layers=3, hidden=8, heads=2, vocab=9, context=4)
    case = Case(config, Cuboid(2, 1, 1, replicas=2), batch=4, seq=4)
    every = [launches(replace(case, recompute=each), 0) for each in ("none", "selective", "full")]
    return [[(axis, kind) for axis, kind, _, _, shape in each if shape != (2,)] for each in every]  # not the losses


def test_schedule_sums_over_replicas_behind_the_last_use_of_each_stage() -> None:
    ((*found,),) = silently([0], 1, launched_with_replicas)
    for launched in found:
        last = len(launched) - 1 - launched[::-1].index(("x", "reduce_scatter"))
        early, late = (each.count(("replicas", "all_reduce")) for each in (launched[:last], launched[last:]))
        assert early + late == 6  # embedding, blocks, norm, head
        assert late <= 1 + MOST_IN_FLIGHT  # the embedding's, and of those whose sums over x are in flight


def test_schedule_without_overlap_waits_at_each_launch(pool: Pools) -> None:
    _, spans = pool(4).run(stepped, Cuboid(2, 2, 1), OFF, False)[0]
    for one, other in pairwise(spans):
        assert one.launched <= one.waited <= one.resumed <= other.launched


@pytest.mark.parametrize(
    ("batch", "seq", "shape", "suits"),
    [
        (8, 1024, (2, 2, 1), Schedule(sub_batches=2)),
        (4, 1024, (2, 2, 1), Schedule(sub_batches=2)),
        (2, 1024, (2, 2, 1), Schedule(chunks=2)),  # one sample a rank
        (1, 8192, (1, 1, 2), Schedule(chunks=4)),
        (4, 1024, (1, 1, 2), Schedule(sub_batches=4)),  # z cuts
        (4, 256, (1, 1, 2), Schedule(sub_batches=2)),  # too few tokens for four
        (2, 1024, (1, 1, 2), Schedule(sub_batches=2)),
        (8, 8, (2, 2, 1), PREFETCH),  # small
        (8, 1024, (4, 1, 1), PREFETCH),  # no activations move
    ],
)
def test_suitable_schedule_picks_sub_batches_by_size(
    batch: int, seq: int, shape: tuple[int, int, int], suits: Schedule
) -> None:
    model, cuboid = MODEL.replace(hidden=144), Cuboid(*shape)
    assert suitable_schedule(model, cuboid, batch, seq, 4) == suits
    assert suitable_schedule(model, replace(cuboid, pipe=8), batch, seq, 4) == suits  # every place has all tokens
    assert suitable_schedule(model, cuboid, batch, seq, 4, apart=False) == PREFETCH


# Memory


def peaks(world: World, config: ModelConfig) -> list[int]:
    """Without prefetching, with it, and with sub-batches."""
    found = []
    for schedule in (OFF, PREFETCH, SUB_BATCHES):
        parallel = CuboidParallel(config, Mesh(Cuboid(2, 2, 1), world.rank), schedule=schedule)
        model, place = Transformer(parallel, recompute="full"), parallel.place(8, 12)
        with Memory(model) as memory:
            model(*(place.take(whole, 0) for whole in batch()), place).backward()
        found.append(memory.peak)
    return found


def test_schedule_prefetch_memory_is_at_most_two_layers() -> None:
    wide = MODEL.replace(hidden=192, head_dim=16, ffn=768, dropout=0.0)
    layer = 4 * (wide.replace(layers=4).parameters - wide.replace(layers=3).parameters) // 2  # bytes, split by y alone
    for layers in (3, 6):
        for off, *on in silently(ends(4), 4, peaks, wide.replace(layers=layers)):
            assert max(on) - off <= 2 * layer


# No deadlock


def late(world: World, shape: Cuboid, steps: int) -> list[float]:
    """Steps of two tiny models in turn, whose ranks are late at random before a collective: two micro-batches beside
    each other in sub-batches, on one host; and linears in chunks, each rank a host. Both losses."""
    dice, names = random.Random(world.rank), ("all_gather_single", "all_to_all_single", "all_reduce")
    before = {name: getattr(dist, name) for name in names}

    def slow(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if dice.random() < 0.05:
                time.sleep(dice.random() * 2e-3)
            return before[name](*args, **options)

        return call

    meshes = [Mesh(shape, world.rank), Mesh(shape, world.rank, per_host=1)]
    config, schedules = MODEL.replace(layers=2), (Schedule(sub_batches=2, beside=True), Schedule(chunks=2))
    models = [
        Transformer(CuboidParallel(config, mesh, schedule=schedule), seed=2)
        for mesh, schedule in zip(meshes, schedules, strict=True)
    ]
    place = models[0].parallel.place(8, 12)
    tokens, targets = (place.take(whole, 0) for whole in batch())
    losses = [0.0, 0.0]
    for name in names:
        setattr(dist, name, slow(name))
    try:
        for step in range(steps):
            model = models[step % 2]
            model.zero_grad()
            batches = [(tokens, At(place, targets))] * 2
            losses[step % 2] = model.play(batches)[1].item()
    finally:
        for name in names:
            setattr(dist, name, before[name])
        for mesh in meshes:
            mesh.close()
    return losses


@pytest.mark.parametrize("shape", [Cuboid(2, 2, 2), pytest.param(Cuboid(2, 3, 2), marks=pytest.mark.slow)], ids=str)
def test_schedule_late_ranks_do_not_deadlock(shape: Cuboid, pool: Pools) -> None:
    first, *others = pool(shape.ranks).run(late, shape, count("steps with late ranks"))
    assert first[0] == pytest.approx(first[1])
    assert all(each == first for each in others)
