"""A step of any layout on the planner's clock: the collectives' formulas, and a rank's own code simulated on it."""

from dataclasses import replace

import numpy as np
import pytest

from cuboid.bench.layouts import Layout, Way, every, on_pipes, possible, scaling
from cuboid.bench.planned import planned_seconds, played_seconds
from cuboid.bench.problem import Problem
from cuboid.bench.result import Row
from cuboid.bench.turn import take_step
from cuboid.emulate.device import Device, Emulated
from cuboid.emulate.slow_motion import parse
from cuboid.mesh.cuboid import Cuboid
from cuboid.model.config import ModelConfig
from cuboid.plan.hardware import Hardware, Link, every_kind
from cuboid.plan.time import Group, rooted_seconds
from cuboid.run.launch import World
from cuboid.run.silent import silently

PAPER = parse("paper")
PROBLEM = Problem(ModelConfig("gpt2", layers=1, hidden=64, heads=64, vocab=128, context=16, tied=False), 16, 16)
LARGE = Problem(ModelConfig("gpt2", layers=1, hidden=256, heads=64, vocab=512, context=64, tied=False), 16, 64)


def machine(near: float, far: float) -> Hardware:
    """Hosts of four; links without latency, of `near` and `far` bytes per second."""
    hw = parse("fp32=1e12,stream=1e12,node=4").hardware
    return replace(hw, inside=every_kind(Link(0.0, 0.0, near)), across=every_kind(Link(0.0, 0.0, far)))


@pytest.mark.parametrize(
    ("kind", "ranks", "inside", "by_host", "held", "landed"),
    [
        # four ranks of one host: a tree of two rounds, of whose three sends each rank has 3/4
        pytest.param("broadcast", 4, 4, False, 3 / 4, 2, id="tree inside"),
        # eight hosts: three rounds, in each of which all four ranks of a host send over its link, ten times slower
        pytest.param("broadcast", 8, 1, False, 10 * 4 * 7 / 8, 10 * 4 * 3, id="tree between hosts"),
        pytest.param("broadcast", 8, 4, False, 3 / 8 + 10 * 4 / 2, 2 + 10 * 4, id="tree of two hosts"),
        # one block crosses, and its head hands it to the three others of its host
        pytest.param("broadcast", 8, 4, True, 3 / 4 + 10 / 2, 3 + 10, id="by hosts"),
        pytest.param("reduce", 8, 4, True, 3 / 4 + 10 / 2, 3 + 10, id="sum by hosts"),
        # a ring, then the parts to the root
        pytest.param("reduce", 4, 4, True, 3 / 4 + 3 / 16, 3 / 4 + 3 / 4, id="sum inside"),
        pytest.param("reduce", 2, 2, True, 1 / 2, 1, id="sum of two"),
        pytest.param("broadcast", 1, 1, True, 0, 0, id="alone"),
    ],
)
def test_rooted_seconds_tell_the_mean_of_links_from_the_roots_own(
    kind: str, ranks: int, inside: int, by_host: bool, held: float, landed: float
) -> None:
    group = Group(np.array([ranks]), np.array([inside]))
    found = rooted_seconds(machine(1e6, 1e5), kind, group, np.array([1_000_000]), by_host)
    assert [each[0] for each in found] == pytest.approx([held, landed])


@pytest.mark.parametrize("ranks", [8, 64])
def test_played_step_of_cuboid_is_what_cuboid_plan_says(ranks: int) -> None:
    """The same figures by two ways: the planner's own account of a step, and the model's code."""
    ours = [layout for layout in scaling(LARGE, ranks, 4) if layout.cuboidal]
    assert ours
    for layout in ours:
        played, planned = (f(PAPER.hardware, layout, LARGE) for f in (played_seconds, planned_seconds))
        assert played == pytest.approx(planned, rel=0.1), layout.name


def test_every_layout_on_emulated_devices_has_a_planned_step() -> None:
    deep = replace(PROBLEM, config=PROBLEM.config.replace(layers=2))
    pipes = on_pipes(deep, 4, 2, "1f1b", 4)
    layouts, _ = possible([*every(deep, 4, emulated=True), *scaling(deep, 64, 4), *pipes], deep)
    ways: dict[Way, float] = {}
    for layout in {each.way: each for each in layouts}.values():
        row = Row(layout, deep, layout.shape.ranks, "", 0.0, [], PAPER)
        assert row.planned is not None, layout.name
        ways[layout.way] = row.planned
    assert ways.keys() >= {
        "1-D",
        "1-D+SP",
        "2-D",
        "2-D ideal",
        "2.5-D",
        "FSDP×TP",
        "cube",
        "native",
        "native ideal",
        "pipe",
    }
    assert all(seconds > 0 for seconds in ways.values())


@pytest.mark.parametrize(("way", "shape"), [("1-D", Cuboid(1, 8, 1)), ("2-D", Cuboid(1, 4, 4))])
def test_played_step_lasts_longer_over_slower_links(way: Way, shape: Cuboid) -> None:
    """Compute takes next to no time here, so that all of a step is the links'."""
    one, other = (played_seconds(machine(2e4, bytes_), Layout(way, shape), PROBLEM) for bytes_ in (1e4, 2e4))
    assert one > 1.4 * other


def not_awaited(world: World, way: Way) -> tuple[int, int]:
    """How many collectives a step of PyTorch's own launches, and how many are never waited for."""
    runner = Layout(way, Cuboid(2, 4, 1)).runner(PROBLEM, world)
    with Emulated(Device(PAPER.hardware)) as device, device.rehearsal(), runner.counted():
        runner.ledger.spans = spans = []
        take_step(runner, PROBLEM, PROBLEM.seq)
    return len(spans), sum(not span.waited for span in spans)


@pytest.mark.parametrize("way", ["native", "native ideal"])
def test_tally_notes_where_torch_waits(way: Way) -> None:
    """Else a planned step would hide everything."""
    launched, left = silently(not_awaited, 0, 8, way)
    assert launched > 20
    assert left == 0
