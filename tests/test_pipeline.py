"""A pipeline of cuboids: its orders as data, and its step against one device."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launches import differences
from sharded import Case, compare, wrong
from silent import silently
from torch.distributed.pipelining import schedules as theirs

from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import shard_of
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import CuboidParallel
from cuboid.model.transformer import Transformer
from cuboid.plan.cost.cuboid import step_cost
from cuboid.plan.measure import count_flops
from cuboid.run.launch import Pool, World
from cuboid.step.pipeline import Split, bubble, orders, simulate
from cuboid.step.runner import At
from cuboid.step.schedule import PIPELINES, Move, Schedule

Pools = Callable[[int], Pool]
GPT2 = ModelConfig("gpt2", layers=4, hidden=24, heads=4, vocab=37, context=12, ffn=20)
LLAMA = ModelConfig("llama", layers=5, hidden=24, heads=12, kv_heads=4, vocab=37, context=12, ffn=20, qk_norm=True)


def scheduled(name: str, stages: int = 1, **more: Any) -> Schedule:
    return Schedule(pipeline=name, stages=max(stages, 2) if name == "interleaved" else stages, **more)


# Orders


def possible() -> list[tuple[Schedule, int, int]]:
    """Schedules, places and micro-batches."""
    found = []
    for name in PIPELINES:
        for stages in {"1f1b": (1,), "interleaved": (2, 3)}.get(name, (1, 2)):
            for pipe in range(2, 6):
                counts = [m for m in range(1, 14) if stages == 1 or m % max(1, m // pipe) == 0]
                found += [(scheduled(name, stages), pipe, m) for m in counts]
    return found


def seconds(schedule: Schedule) -> Callable[[Move], float]:
    """Of a stage: 3 forward, 5 backward, 2 of them for weight gradients."""
    apart = schedule.pipeline == "zero-bubble"
    return lambda move: {"F": 3, "B": 3 if apart else 5, "W": 2}[move.kind]


def test_pipeline_orders_have_every_move_once_and_never_wait_for_one_another() -> None:
    for schedule, pipe, m in possible():
        found = orders(schedule, pipe, m)
        moves = [move for order in found for each in order for move in each]
        kinds = "FBW" if schedule.pipeline == "zero-bubble" else "FB"
        stages = range(pipe * schedule.stages)
        assert sorted(moves) == sorted(Move(kind, i, stage) for kind in kinds for i in range(m) for stage in stages)
        assert all(move.stage % pipe == place for place, order in enumerate(found) for each in order for move in each)
        slots = simulate(found, seconds(schedule))  # raises if places wait for one another
        for order in found:
            for kind, i, stage in (move for each in order for move in each):
                if kind != "F":  # of each stage: forward, then backward, then weight gradients
                    assert slots[Move({"B": "F", "W": "B"}[kind], i, stage)][1] <= slots[Move(kind, i, stage)][0]


def test_pipeline_bubble_is_its_formula() -> None:
    """With as many micro-batches as places or more, in whole rounds."""
    for schedule, pipe, m in possible():
        if m % pipe == 0 and m >= 2 * pipe:
            idle = (pipe - 1) * (3 + 5 - 2 * 2 * (schedule.pipeline == "zero-bubble"))
            work = schedule.stages * m * (3 + 5)
            share = bubble(orders(schedule, pipe, m), seconds(schedule))
            assert share == pytest.approx(idle / (idle + work)), (schedule, pipe, m)


def test_pipeline_1f1b_keeps_as_many_micro_batches_alive_as_places_follow() -> None:
    for place, order in enumerate(orders(Schedule(), 4, 12)):
        alive, most = 0, 0
        for (move,) in order:
            alive += 1 if move.kind == "F" else -1
            most = max(most, alive)
        assert most == 4 - place


#: Tables of torch.distributed.pipelining. It has none of forward beside backward in this form.
TABLES = {
    "gpipe": theirs.ScheduleGPipe,
    "1f1b": theirs.Schedule1F1B,
    "interleaved": theirs.ScheduleInterleaved1F1B,
    "zero-bubble": theirs.ScheduleInterleavedZeroBubble,
}


def their_order(schedule: type[Any], pipe: int, stages: int, m: int, place: int) -> list[Move]:
    """As torch has it; what it calls I, a backward without weight gradients, is our B there."""
    shape = {"pp_group_size": pipe, "n_local_stages": stages, "_num_stages": pipe, "_n_microbatches": m}
    like = SimpleNamespace(**shape, microbatches_per_round=m // max(1, m // pipe))
    if issubclass(schedule, theirs.PipelineScheduleSingle):
        table = schedule._get_pipeline_order(like)[place]
    else:
        table = schedule._calculate_single_rank_operations(like, place)
    moves = [each for each in table if each is not None and each.computation_type.value in "FBIW"]
    kinds = [each.computation_type.value.replace("I", "B") for each in moves]
    found = [Move(kind, each.microbatch_index, each.stage_index) for kind, each in zip(kinds, moves, strict=True)]
    if (
        schedule is theirs.Schedule1F1B and place == pipe - 1
    ):  # whose forwards its table numbers from 1, but runs from 0
        found = [move._replace(batch=move.batch - (move.kind == "F")) for move in found]
    return found


@pytest.mark.parametrize("name", TABLES)
def test_pipeline_orders_are_those_of_torch(name: str) -> None:
    """It has gpipe and 1f1b for one stage per rank, and 1f1b for as many micro-batches as places or more."""
    compared = 0
    for schedule, pipe, m in possible():
        single = name in ("gpipe", "1f1b")
        if schedule.pipeline == name and not (single and schedule.stages > 1) and not (name == "1f1b" and m < pipe):
            for place, order in enumerate(orders(schedule, pipe, m)):
                assert [move for (move,) in order] == their_order(TABLES[name], pipe, schedule.stages, m, place)
                compared += 1
    assert compared > 100


def test_simulate_rejects_places_that_wait_for_one_another() -> None:
    first, last = orders(Schedule(), 2, 2)
    with pytest.raises(ValueError, match="wait for one another: B0, F0"):
        simulate([[first[2], *first[:2], *first[3:]], last], seconds(Schedule()))


def test_split_deals_blocks_evenly_or_as_given() -> None:
    assert Split.of(7, 3, Schedule()).blocks == (3, 2, 2)
    given = Split.of(5, 2, scheduled("interleaved", split=(2, 1, 1, 1)))
    assert [list(given.stages(place)) for place in range(2)] == [[0, 2], [1, 3]]
    assert [list(given.layers(stage)) for stage in range(4)] == [[0, 1], [2], [3], [4]]


REFUSED: list[tuple[Callable[[], Any], Sequence[str]]] = [
    (lambda: GPT2.check(Cuboid(pipe=5), 1, 1), ["layers=4", "pipe=5", "pipe at most 4"]),
    (lambda: Split.of(5, 2, scheduled("interleaved", 3)), ["5 blocks", "6 stages", "pipe=2 with 2 each"]),
    (lambda: Split.of(4, 4, scheduled("interleaved")), ["4 blocks", "8 stages", "pipe=2 with 2 each"]),
    (lambda: Split.of(3, 2, scheduled("interleaved")), ["pipe=2 with 1 each, in another schedule"]),
    (lambda: Split.of(4, 2, Schedule(split=(3, 2))), ["split=[3, 2]", "2 stages", "4 in all", "[2, 2]"]),
    (lambda: Split.of(4, 2, Schedule(split=(4, 0))), ["split=[4, 0]", "a block or more"]),
    (lambda: Split.of(4, 1, Schedule(split=(4,))), ["a pipe of one"]),
    (lambda: orders(scheduled("interleaved"), 4, 9), ["9 micro-batches", "pipe=4", "8 or 10"]),
    (lambda: Schedule(pipeline="2f2b"), ["'2f2b'", "gpipe, 1f1b"]),
    (lambda: Schedule(pipeline="1f1b", stages=2), ["1f1b has one, interleaved two or more"]),
    (lambda: Cuboid(pipe=0), ["pipe=0"]),
]


@pytest.mark.parametrize(("attempt", "words"), REFUSED)
def test_pipeline_rejects_bad_input_with_what_would_fit(attempt: Callable[[], Any], words: Sequence[str]) -> None:
    with pytest.raises(ValueError) as refused:
        attempt()
    assert all(word in str(refused.value) for word in words), str(refused.value)


# Launches


@pytest.mark.parametrize("name", PIPELINES)
def test_pipeline_ranks_of_a_stage_launch_alike_and_messages_match(name: str) -> None:
    case = case_of(GPT2.replace(layers=6), Cuboid(1, 2, 1, pipe=2), scheduled(name, sub_batches=2), 4)
    more = case_of(LLAMA.replace(layers=7), Cuboid(2, 1, 1, pipe=3), scheduled(name), 3)
    assert silently([0], 1, differences, [case, more]) == [[]]


# Against one device


def case_of(config: ModelConfig, cuboid: Cuboid, schedule: Schedule, m: int = 4, **more: Any) -> Case:
    return Case(config, cuboid, batch=4 * cuboid.replicas, seq=6, schedule=schedule, micro_batches=m, **more)


FEW = [
    case_of(GPT2, Cuboid(2, 1, 1, pipe=2), scheduled("1f1b")),
    case_of(GPT2.replace(dropout=0.2, tied=False), Cuboid(1, 2, 1, 2, pipe=2), scheduled("zero-bubble"), dropout=3),
    case_of(
        LLAMA.replace(tied=True, layers=7),
        Cuboid(1, 1, 2, pipe=3),
        scheduled("interleaved", split=(2, 1, 1, 1, 1, 1)),
        3,
    ),
    case_of(LLAMA, Cuboid(1, 2, 1, pipe=3), scheduled("beside", sub_batches=2, split=(3, 1, 1)), recompute="full"),
    case_of(GPT2, Cuboid(1, 1, 2, pipe=4), scheduled("gpipe"), 2),
    case_of(GPT2, Cuboid(2, 1, 1, pipe=2, order=("x", "pipe", "replicas", "y", "z")), scheduled("zero-bubble", 2)),
]


#: Backward ends in the first, in the last, in the second, with the head frozen in the first, and in the last stage.
FROZEN = [
    case_of(
        GPT2.replace(layers=8), Cuboid(1, 2, 1, pipe=2), scheduled("interleaved"), freeze=r"embed|posi|blocks\.[01]"
    ),
    case_of(GPT2.replace(tied=False), Cuboid(1, 1, 2, pipe=2), scheduled("zero-bubble"), freeze="blocks|embed|posi"),
    case_of(
        LLAMA.replace(tied=True), Cuboid(1, 2, 1, pipe=3), scheduled("beside", sub_batches=2), freeze=r"embed|blocks\.0"
    ),
    case_of(LLAMA, Cuboid(2, 1, 1, pipe=2), scheduled("1f1b"), recompute="full", freeze=r"head|^norm|blocks\.4"),
    case_of(LLAMA, Cuboid(1, 1, 2, pipe=3), scheduled("zero-bubble"), 3, freeze=r"embed|blocks\.[0123]|attention"),
]
FEW += FROZEN


@pytest.mark.parametrize("case", FEW, ids=lambda case: f"{case.cuboid} {case.schedule.pipeline}")
def test_pipeline_step_matches_one_device(case: Case, pool: Pools) -> None:
    assert not wrong(pool(case.cuboid.ranks).run(compare, case)[0])


#: Pipes of 2, 3 and 4 of cuboids on which every pair of axes is split, and each with uneven shards; of at most 16
#: ranks, with two replicas where that allows them.
MANY = [
    *(Cuboid(*shape, pipe=2) for shape in ((1, 2, 2, 2), (2, 2, 1, 2), (2, 1, 2, 2), (1, 3, 2))),
    *(Cuboid(*shape, pipe=3) for shape in ((1, 2, 2), (2, 2, 1), (2, 1, 2), (1, 2, 1, 2), (1, 3, 1))),
    *(Cuboid(*shape, pipe=4) for shape in ((1, 2, 2), (2, 2, 1), (2, 1, 2), (1, 1, 2, 2), (1, 3, 1))),
]


def many() -> list[Case]:
    """Every schedule meets both families with each recomputation, tied and not. Splits and dropout have counters
    of their own, so that every pipe meets each with each."""
    found = []
    for n, cuboid in enumerate(MANY):
        for i, name in enumerate(PIPELINES):
            k, stages = i + n, cuboid.pipe * (2 if name == "interleaved" else 1)
            dropout = (n // 4 + i) % 2
            config = (GPT2, LLAMA)[k // 6 % 2].replace(layers=9, tied=k % 2 == 0, heads=12, dropout=0.2 * dropout)
            split = (9 - (stages - 1), *(1,) * (stages - 1)) if n // 2 % 2 else ()
            schedule, recompute = scheduled(name, sub_batches=1 + (n // 3 + i) % 2, split=split), k // 2 % 3
            more = {"recompute": ("none", "selective", "full")[recompute], "dropout": 3 if dropout else None}
            found.append(case_of(config, cuboid, schedule, **more))
    return found


def test_many_schedules_meet_every_recomputation_tied_and_not() -> None:
    for name in PIPELINES:
        cases = [case for case in many() if case.schedule.pipeline == name]
        assert len({(case.config.family, case.config.tied, case.recompute) for case in cases}) == 12
        assert {case.cuboid.pipe for case in cases if case.cuboid.replicas > 1} == {2, 3, 4}
        assert name in {case.schedule.pipeline for case in FEW}


@pytest.mark.parametrize("pipe", [2, 3, 4])
def test_many_pipes_meet_tied_split_recomputation_and_dropout_with_each_other(pipe: int) -> None:
    cases = [case for case in many() if case.cuboid.pipe == pipe]
    assert len({(case.config.tied, bool(case.schedule.split), case.recompute) for case in cases}) == 12
    assert len({(case.config.tied, bool(case.schedule.split), case.dropout) for case in cases}) == 8
    for tied in (True, False):
        assert 0.4 <= sum(case.config.tied is tied for case in cases) / len(cases) <= 0.6


@pytest.mark.slow
@pytest.mark.parametrize("case", many(), ids=lambda case: f"{case.cuboid} {case.schedule.pipeline}")
def test_pipeline_every_schedule_matches_one_device(case: Case, pool: Pools) -> None:
    assert not wrong(pool(case.cuboid.ranks).run(compare, case)[0])


def split_as(world: World, splits: Sequence[tuple[int, ...]]) -> str:
    """What a rank says of a model whose ranks have these splits."""
    mesh = Mesh(Cuboid(1, 2, 1, pipe=2), world.rank)
    try:
        Transformer(CuboidParallel(GPT2, mesh, schedule=Schedule(split=splits[world.rank])))
    except ValueError as error:
        return str(error)
    finally:
        mesh.close()
    return ""


def test_model_rejects_ranks_that_split_blocks_in_different_ways(pool: Pools) -> None:
    assert set(pool(4).run(split_as, [(3, 1)] * 4)) == {""}
    (said,) = set(pool(4).run(split_as, [(3, 1), (3, 1), (2, 2), (3, 1)]))
    assert said.startswith(
        "rank 2 has stages of [2, 2] blocks, rank 0 of [3, 1]; give all ranks the same overlap.split"
    )


# Traffic


def traffic(world: World, case: Case, m: int) -> tuple[list[Any], list[Any]]:
    """Calls and bytes by axis and kind, FLOPs and bytes of parameters of a step, and what the formulas say."""
    mesh = Mesh(case.cuboid, world.rank)
    parallel = CuboidParallel(case.config, mesh, case.policy, schedule=case.schedule)
    model, place = Transformer(parallel, recompute=case.recompute), parallel.place(case.batch, case.seq)
    model.freeze(case.freeze)
    ids = torch.zeros(len(place.positions), len(place.samples), dtype=torch.long)
    with count_flops() as flops:
        model.play([(ids, At(place, ids, case.loss, case.dropout))] * m)
    options = case.policy, case.recompute, 4, 4, case.schedule
    sizes = case.config, case.cuboid, mesh.coordinates, case.batch, case.seq
    costs = [step_cost(*sizes, *options, last=i == m - 1, micro_batches=m, freeze=case.freeze) for i in range(m)]
    total: dict[tuple[str, str], list[int]] = {}
    for cost in costs:
        for key, entry in cost.traffic.items():
            total[key] = [a + b for a, b in zip(total.get(key, [0, 0]), entry, strict=True)]
    found = {key: [entry.calls, entry.bytes] for key, entry in mesh.ledger.entries.items()}
    held = sum(shard_of(p).nbytes for p in model.parameters())
    return [found, flops.get_total_flops(), held], [total, sum(c.flops for c in costs), costs[0].parameters]


@pytest.mark.parametrize("case", FEW, ids=lambda case: f"{case.cuboid} {case.schedule.pipeline}")
def test_pipeline_bytes_calls_and_flops_are_the_formulas(case: Case) -> None:
    for found, predicted in silently(
        list(range(case.cuboid.ranks)), case.cuboid.ranks, traffic, case, case.micro_batches
    ):
        assert found == predicted
