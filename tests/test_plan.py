"""The planner: its schedule adds up to the formulas, its memory and dry runs to what really happens."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
import torch
from silent import silently

from cuboid.mesh.cuboid import AXES, Cuboid, factorisations
from cuboid.mesh.cuboid import orders as every_order
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import CuboidParallel, Policy
from cuboid.model.freeze import Trained
from cuboid.model.presets import PRESETS as MODELS
from cuboid.model.transformer import Transformer
from cuboid.plan import search, step
from cuboid.plan.cost.cuboid import step_cost
from cuboid.plan.dry import compare, dry_run
from cuboid.plan.explain import nothing_fits, why
from cuboid.plan.hardware import PRESETS, Link, every_kind
from cuboid.plan.layer import ITEMSIZE, Choice, Work
from cuboid.plan.measure import Memory
from cuboid.plan.search import at_rest, fits, orders, predict, rank, shapes
from cuboid.plan.shared import SharedTape
from cuboid.plan.sizes import Sizes, groups
from cuboid.plan.step import STEADY, prices_of, step_totals
from cuboid.plan.tape import Tape
from cuboid.plan.time import Group, Prices, collective_seconds
from cuboid.run.launch import World
from cuboid.step.schedule import Schedule
from cuboid.train.config import OptimizerSection
from cuboid.train.optimizer import adamw

SUB_BATCHES = Schedule(sub_batches=2)
GPT2 = ModelConfig("gpt2", layers=2, hidden=24, heads=24, vocab=37, context=16, ffn=40)
LLAMA = ModelConfig(
    "llama", layers=STEADY + 2, hidden=24, heads=24, kv_heads=4, vocab=41, context=16, ffn=36, head_dim=2
)
CPU, A100, H100 = (PRESETS[name] for name in ("cpu", "a100-hdr", "h100-ndr"))

#: Batch, precision and choice, in turn over the cuboids.
OPTIONS = [
    (12, "fp32", Choice("none", Policy(head_elements=64))),
    (2, "bf16", Choice("selective", Policy("retain"))),
    (4, "bf16", Choice("full", Policy("regather", "retain"))),
    (24, "fp32", Choice("full", Policy("retain", "retain", 64), SUB_BATCHES)),
    (48, "bf16", Choice("none", Policy(), SUB_BATCHES)),
]


@pytest.mark.parametrize(
    "config",
    [GPT2, LLAMA, LLAMA.replace(kv_heads=24, tied=True), LLAMA.replace(qk_norm=True), LLAMA.replace(qkv_bias=True)],
    ids=["gpt2", "few", "tied", "norms of heads", "biases of qkv"],
)
@pytest.mark.parametrize(
    "freeze", ["", r"embed|blocks\.0", "attention.[qo]|norm1|mlp.(gate|up.w)", "embed|blocks|^norm"]
)
def test_planner_step_totals_match_cost_formulas(config: ModelConfig, freeze: str) -> None:
    """Calls and bytes of every axis and collective, FLOPs, saved activations, parameters: to the last byte."""
    if Trained(config, freeze).nothing:
        pytest.skip("its tied head is frozen too")
    cuboids = [replace(k, replicas=data) for ranks in (1, 6, 12) for k in factorisations(ranks) for data in (1, 2)]
    for cuboid, (batch, precision, choice) in zip(cuboids, cycle(OPTIONS), strict=False):
        if config.heads % (cuboid.y * cuboid.z) or config.hidden % cuboid.z:
            continue
        sizes = Sizes(config, [cuboid], 8, batch, 13)
        if sizes.b[0] % choice.schedule.sub_batches:
            continue
        work = Work(config, batch, 13, precision, freeze=freeze)
        totals = step_totals(prices_of(A100, work, sizes), work, sizes, choice)
        at, itemsize = cuboid.coordinates(0), ITEMSIZE[precision]
        settings = choice.policy, choice.recompute, 4, itemsize, choice.schedule
        cost = step_cost(config, cuboid, at, batch, 13, *settings, freeze=freeze)
        counts = {
            key: [int(calls[0]), int(totals.sent[key][0])]
            for key, calls in totals.calls.items()
            if calls[0] and key[0] != "world"  # the norm's, which is the optimizer's
        }
        assert counts == dict(cost.traffic), cuboid
        assert (int(totals.flops[0]), int(totals.saved[0])) == (cost.flops, cost.saved), cuboid
        assert int(sizes.parameters[0]) * 4 == cost.parameters


def test_planner_ranking_matches_single_predictions() -> None:
    work = Work(LLAMA, 8, 16, "bf16")
    ranking = rank(A100, work, 16)
    assert len(ranking.plans) > 20
    for plan in ranking.plans[::5]:
        assert predict(A100, work, plan.cuboid, plan.choice).seconds == pytest.approx(plan.seconds, rel=1e-9)


def test_planner_extrapolates_deep_models_from_few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step extrapolated from a few layers takes as long as one simulated layer by layer."""
    work = Work(MODELS["llama-3-8b"].replace(layers=10), 64, 4096)
    cases = [
        (cuboid, choice)
        for cuboid in (Cuboid(64, 1, 1), Cuboid(8, 4, 2), Cuboid(2, 2, 1, 16))
        for choice in (Choice(), Choice("full", Policy("retain", "retain"), SUB_BATCHES))
    ]
    few = [predict(H100, work, *case).seconds for case in cases]
    monkeypatch.setattr("cuboid.plan.step.STEADY", 10)
    assert few == pytest.approx([predict(H100, work, *case).seconds for case in cases], rel=0.01)


# Time


def tape_of(slowdown: float) -> Tape:
    """Two devices; a collective of n elements takes n seconds."""
    links = every_kind(Link(0.0, 0.0, 0.5))
    hw = replace(A100, inside=links, across=links, slowdown=slowdown, launch=0.0, one_wire=True)
    two = Group(np.array([2]), np.array([2]))
    return Tape(Prices(hw, "bf16", 1, {"x": two}))


@pytest.mark.parametrize(("slowdown", "took"), [(0.0, 10.0), (0.2, 10.8), (1.0, 14.0)])
def test_tape_charges_slowdown_for_overlapped_collective(slowdown: float, took: float) -> None:
    """4 seconds of a collective beside 10 of compute: hidden, partly paid for, or paid for in full."""
    tape = tape_of(slowdown)
    flight = tape.launch("x", "all_gather", np.array([4]))
    tape.compute("work", np.array([10.0]))
    tape.wait(flight)
    assert tape.now[0] == pytest.approx(took)
    assert tape.totals().exposed["x"][0] == 0


@pytest.mark.parametrize(
    ("wire", "work", "took", "waited"),
    [(0.0, 1.0, 5.0, 0.0), (0.5, 1.0, 4.0 / 0.5, 3.0), (0.5, 10.0, 14.0, 0.0)],
    ids=["no wire", "a slow wire", "a long computation"],
)
def test_shared_tape_hides_only_wire_time(wire: float, work: float, took: float, waited: float) -> None:
    """A collective of 4 seconds of the processor and 8 of the wire, or none of it."""
    links = every_kind(Link(0.0, 0.0, 1.0))
    hw = replace(CPU, inside=links, across=links, node=1, cores=1, wire=wire)
    two = Group(np.array([2]), np.array([1]))
    tape = SharedTape(Prices(hw, "fp32", 1, {"x": two}))
    flight = tape.launch("x", "all_gather", np.array([8]))
    tape.compute("work", np.array([work]))
    tape.wait(flight)
    assert tape.now[0] == pytest.approx(took)
    assert tape.totals().exposed["x"][0] == pytest.approx(waited)


def test_shared_tape_charges_each_axis_its_own_time() -> None:
    """Collectives of 4 seconds of the processor, over x and, for one of two candidates, over y."""
    links = every_kind(Link(0.0, 0.0, 1.0))
    hw = replace(CPU, inside=links, across=links, cores=1, slowdown=1.0)
    two, one = np.array([2, 2]), np.array([2, 1])
    tape = SharedTape(Prices(hw, "fp32", 1, {"x": Group(two, two), "y": Group(one, one)}))
    flights = [tape.launch(axis, "all_gather", np.array([8, 8])) for axis in ("x", "y")]
    tape.wait(flights[1])
    assert (tape.now.tolist(), tape.totals().exposed["y"].tolist()) == ([8, 0], [4, 0])
    tape.wait(flights[0])
    assert (tape.now.tolist(), tape.totals().exposed["x"].tolist()) == ([8, 4], [4, 4])


def test_tape_serialises_collectives_on_one_wire() -> None:
    tape = tape_of(0.0)
    flights = [tape.launch("x", "all_gather", np.array([4])) for _ in range(2)]
    tape.compute("work", np.array([1.0]))
    for flight in flights:
        tape.wait(flight)
    assert (tape.now[0], tape.totals().exposed["x"][0]) == (8.0, 7.0)


def test_collective_seconds_account_for_shared_node_links() -> None:
    """Eight devices a node. Sixteen in a ring leave a node once; pairs across nodes, eight at once, share its cards."""
    hw = replace(A100, inside=every_kind(Link(0, 0, 1e15)), across=every_kind(Link(0, 0, 8.0)))
    whole = np.array([16])
    ring, pairs = Group(np.array([16]), np.array([8])), Group(np.array([2]), np.array([1]))
    assert collective_seconds(hw, "all_gather", ring, whole, False)[0] == pytest.approx(15 / 8)
    assert collective_seconds(hw, "all_gather", pairs, whole, False)[0] == pytest.approx(8.0)
    assert collective_seconds(hw, "reduce_scatter", ring, whole, True)[0] == pytest.approx(8.0)  # direct: each sends


def test_planner_orders_are_one_per_node_placement() -> None:
    found = orders((1, 4, 4, 1), 4)
    assert {tuple(axis for axis in k.order if k.sizes[axis] > 1) for k in found} == {("x", "y"), ("y", "x")}
    assert len(orders((1, 4, 1, 1), 4)) == len(orders((2, 2, 2, 1), 8)) == 1  # all in one node


@pytest.mark.parametrize("node", [4, 6, 8, 12, 16, 24])
@pytest.mark.parametrize("shape", [(2, 4, 3, 1), (1, 2, 3, 4), (1, 6, 4, 1), (1, 8, 3, 2), (1, 12, 1, 4)])
def test_planner_groups_count_fewest_ranks_on_node(shape: tuple[int, int, int, int], node: int) -> None:
    data, x, y, z = shape
    for cuboid in every_order(Cuboid(x, y, z, data)):
        found = groups([cuboid], np.ones(1, dtype=np.int64), node)
        for axis in AXES:
            others = tuple(other for other in AXES if other != axis)
            members = cuboid.array((*others, axis)).reshape(-1, cuboid.sizes[axis])
            counts = [np.unique(ranks // node, return_counts=True)[1].min() for ranks in members]
            assert found[axis].inside[0] == min(counts), (str(cuboid), cuboid.order, axis)


def test_planner_groups_cross_unevenly_split_nodes() -> None:
    """Of 24 devices, 8 a node, {6, 7, 8} are on two nodes; of 6 devices all are on one."""
    for data, inside in ((8, 1), (2, 3)):
        found = groups([Cuboid(1, 3, 1, data)], np.ones(1, dtype=np.int64), 8)
        assert found["y"].inside[0] == inside


def test_planner_predicts_gain_from_overlap_and_sub_batches() -> None:
    work, cuboid = Work(MODELS["llama-3-8b"], 64, 4096), Cuboid(8, 4, 2)
    hidden = predict(H100, work, cuboid, Choice(schedule=SUB_BATCHES))
    assert hidden.seconds < predict(H100, work, cuboid, Choice()).seconds
    assert hidden.seconds < predict(H100, work, cuboid, Choice(schedule=SUB_BATCHES), overlap=False).seconds


# Memory and dry runs


def peaks(world: World, work: Work, choices: list[tuple[Cuboid, Choice]]) -> list[int]:
    """Of training steps of rank 0: the meter slows a rank down, so the others go without."""
    found = []
    for cuboid, choice in choices:
        parallel = CuboidParallel(work.config, Mesh(cuboid, world.rank), choice.policy, schedule=choice.schedule)
        model = Transformer(parallel, recompute=choice.recompute)
        place = parallel.place(work.batch, work.seq)
        ids = torch.zeros(len(place.positions), len(place.samples), dtype=torch.long)
        memory = Memory(model)
        with memory if world.rank == 0 else nullcontext():
            optimizer = adamw(model, OptimizerSection())
            model(ids, ids, place).backward()
            model.gradient_norm()
            optimizer.step()
        found.append(memory.peak)
    return found


SMALL = {
    "even": (ModelConfig("gpt2", 3, 128, 8, 1000, 64), 16),
    "deep": (ModelConfig("gpt2", 8, 64, 8, 300, 32), 16),
    "grouped": (ModelConfig("llama", 6, 128, 16, 500, 64, kv_heads=8), 16),
    "vocabulary": (ModelConfig("llama", 2, 64, 8, 8000, 64), 16),
    "wide": (ModelConfig("llama", 3, 256, 8, 256, 32), 8),
    "large": (ModelConfig("gpt2", 2, 1024, 8, 64, 16), 8),  # matrices that travel by themselves
    "few tokens": (ModelConfig("llama", 4, 128, 8, 32000, 32, tied=True), 8),
    "uneven": (ModelConfig("gpt2", 6, 96, 12, 12565, 32), 8),  # like gpt2-124m, with a vocabulary that x cannot split
}


CHOICES = [(Cuboid(2, 2, 2), Choice()), (Cuboid(4, 2, 1), Choice("full")), (Cuboid(8, 1, 1), Choice())]


@pytest.mark.parametrize("name", SMALL)
def test_planner_memory_matches_measured_peak(name: str) -> None:
    config, batch = SMALL[name]
    work = Work(config, batch, config.context, "fp32")
    (found,) = silently([0], 8, peaks, work, CHOICES)
    for (cuboid, choice), measured in zip(CHOICES, found, strict=True):
        planned = predict(CPU, work, cuboid, choice).peak
        print(f"{name}, {cuboid}: {measured:,} bytes measured, {planned / measured - 1:+.1%} planned")  # pytest -rP
        assert planned == pytest.approx(measured, rel=0.05), cuboid


def test_memory_of_sending_ranks_equals_silent_ones(pool) -> None:
    """The least of five steps: a thread of gloo's may hold what has arrived a little longer."""
    work, choices = Work(ModelConfig("gpt2", 2, 64, 8, 300, 16), 8, 16, "fp32"), CHOICES[:1]
    ((silent,),) = silently([0], 8, peaks, work, choices)
    assert min(pool(8).run(peaks, work, choices * 5)[0]) == pytest.approx(silent, rel=0.01)


@pytest.mark.parametrize(
    ("cuboid", "special"),
    [
        (Cuboid(8, 4, 2), {}),
        (Cuboid(8, 4, 2), {"qk_norm": True, "qkv_bias": True}),
        (Cuboid(8, 16, 4), {}),
        (Cuboid(64, 16, 4), {}),
    ],
    ids=str,
)
def test_dry_run_counts_match_plan(cuboid: Cuboid, special: dict[str, bool]) -> None:
    """64, 512 and 4,096 ranks."""
    config = ModelConfig("llama", layers=2, hidden=1024, heads=64, kv_heads=8, vocab=5000, context=512, **special)
    work, choice = (
        Work(config, 64, 256),
        Choice("selective", Policy("retain"), SUB_BATCHES if cuboid.x < 64 else Schedule()),
    )
    found = compare(dry_run(work, cuboid, choice, backend="nccl"), predict(H100, work, cuboid, choice), work)
    assert [each.what for each in found if not each.ok] == []
    assert {"x all_gather, bytes", "FLOPs", "bytes saved for backward"} <= {each.what for each in found}


def test_dry_run_peak_memory_matches_plan() -> None:
    """Few tokens: the embedding and its gradient are most of it."""
    work, cuboid = Work(MODELS["gpt2-124m"].replace(layers=2), 8, 128, "fp32"), Cuboid(2, 2, 2)
    counted = dry_run(work, cuboid, Choice(), backend="nccl")
    assert predict(H100, work, cuboid, Choice()).peak == pytest.approx(counted.peak, rel=0.02)


# Search


@pytest.mark.parametrize(("devices", "batch"), [(4096, 2048), (65536, 16384)])
def test_planner_ranks_plans_for_many_devices(devices: int, batch: int) -> None:
    ranking = rank(H100, Work(MODELS["llama-3-70b"], batch, 4096), devices)
    assert ranking.plans
    assert all(plan.cuboid.ranks == devices for plan in ranking.plans)


def test_planner_ranks_every_shape_by_time() -> None:
    work = Work(LLAMA, 8, 16, "bf16")
    ranking = rank(A100, work, 12)
    found = {(p.cuboid.replicas, p.cuboid.x, p.cuboid.y, p.cuboid.z) for p in ranking.plans}
    assert found == set(shapes(LLAMA, 12, 8))
    assert (1, 12, 1, 1) in found
    assert [p.seconds for p in ranking.plans] == sorted(p.seconds for p in ranking.plans)
    first = ranking.plans[0]
    assert all(first.seconds <= plan.seconds for plan in ranking.corners.values() if plan)
    assert str(first.cuboid) in why(ranking)
    assert sum(first.compute.values()) + sum(first.exposed.values()) == pytest.approx(first.seconds)


def test_planner_micro_batches_trade_time_for_memory() -> None:
    config, cuboid = MODELS["gpt3-1.3b"], Cuboid(2, 2, 2)
    whole, parts = Work(config, 32, 2048), Work(config, 8, 2048, micro_batches=4)
    a, b = (predict(A100, work, cuboid, Choice()) for work in (whole, parts))
    assert b.peak < a.peak
    assert a.seconds < b.seconds < 2 * a.seconds
    for plan, work in ((a, whole), (b, parts)):
        sizes = cuboid, cuboid.coordinates(0), work.batch, work.seq, Policy(), "none", 4, 2, Choice().schedule
        costs = [step_cost(config, *sizes, last=i == 0) for i in range(work.micro_batches)]
        for axis in "xyz":
            sent = [each for cost in costs for each in cost.counts()[axis].values()]
            assert (plan.calls[axis], plan.sent[axis]) == tuple(map(sum, zip(*sent, strict=True)))
        assert plan.calls["world"] == 1  # the norm's


def test_planner_advises_what_fits_if_nothing_does() -> None:
    long = Work(MODELS["gpt3-6.7b"], 64, 2048)
    said = nothing_fits(rank(A100, long, 8))
    assert "--micro-batches" in said
    count = int(said.split("--micro-batches ")[1].split()[0])
    assert rank(A100, replace(long, batch=64 // count, micro_batches=count), 8).plans
    narrow, work = Cuboid(1, 8, 1), Work(MODELS["llama-3-8b"], 512, 4096)
    said = nothing_fits(rank(A100, work, 8, narrow), narrow)
    count = int(said.split("--micro-batches ")[1].split()[0])  # of that very cuboid
    assert rank(A100, replace(work, batch=512 // count, micro_batches=count), 8, narrow).plans
    assert not rank(A100, replace(work, batch=2 * 512 // count, micro_batches=count // 2), 8, narrow).plans


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("name", ["gpt2-124m", "llama-3.2-1b"])
def test_planner_fits_tells_by_memory_alone_whether_there_is_a_plan(name: str, layers: int, micro_batches: int) -> None:
    work = Work(MODELS[name].replace(layers=layers), 8, 256, micro_batches=micro_batches)
    least = rank(replace(A100, memory=1.0), work, 4).too_large[0].peak
    assert at_rest(work) <= 4 * least
    assert fits(replace(A100, memory=float(least)), work, 4)
    assert not fits(replace(A100, memory=float(least - 1)), work, 4)


def test_planner_advice_simulates_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where parameters, gradients and optimizer states alone do not fit, nothing is priced; elsewhere lean choices."""
    ranking = rank(H100, Work(MODELS["llama-3-70b"], 64, 4096), 8)
    priced: list[int] = []

    class Counted(search.Predictions):
        def __init__(self, prices: Prices, work: Work, sizes: Sizes, choice: Choice) -> None:
            priced.append(sizes.cuboids[0].ranks)
            super().__init__(prices, work, sizes, choice)

    monkeypatch.setattr(search, "Predictions", Counted)
    said = nothing_fits(ranking)
    assert said.startswith("nothing fits on 8 devices: the smallest, ")
    assert said.endswith("; more micro-batches would not help; 32 devices would")
    assert "optimizer states alone take" in said
    assert set(priced) == {16, 32}
    assert len(priced) <= 4


@pytest.mark.parametrize("cuboid", [Cuboid(2, 2, 1, replicas=2), Cuboid(4, 2, 1)], ids=str)
@pytest.mark.parametrize("batch", [16, 64])
def test_planner_layers_that_are_not_played_take_as_long_as_played(
    cuboid: Cuboid, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where gradients pile up on a slow link, behind all that is computed."""
    config = ModelConfig("gpt2", layers=16, hidden=256, heads=16, vocab=512, context=64, tied=False)
    hw = replace(H100, node=2, group=2, uplink=1e8, rate={"fp32": 1e12}, peak={"fp32": 1e12})
    work, choice = Work(config, batch, 64, "fp32"), Choice(policy=Policy("retain", "retain"))
    plan = predict(hw, work, cuboid, choice)
    monkeypatch.setattr(step, "STEADY", config.layers)
    played = predict(hw, work, cuboid, choice)
    assert plan.seconds == pytest.approx(played.seconds, rel=1e-6)
    assert plan.seconds == pytest.approx(sum(plan.compute.values()) + sum(plan.exposed.values()), rel=1e-6)
