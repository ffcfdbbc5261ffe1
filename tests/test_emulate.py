"""Emulated devices: what an operation takes, what is still computed, and that layouts send what they would send."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Cuboid as Command
from tiny import on, sets, settings, write_text
from torch._subclasses.fake_tensor import FakeTensorMode

from cuboid.bench.emulation import Pair
from cuboid.bench.layouts import Layout, every
from cuboid.bench.plot import draw_pairs
from cuboid.bench.problem import Problem
from cuboid.bench.result import Spread
from cuboid.bench.turn import Times, count, turn
from cuboid.emulate.device import Device, Emulated
from cuboid.emulate.slow_motion import SlowMotion, parse, slowed
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import CuboidParallel
from cuboid.model.transformer import Transformer
from cuboid.plan.calibrate.operations import Timed, lines
from cuboid.plan.hardware import PRESETS, Operation
from cuboid.run.launch import Pool, World

Pools = Callable[[int], Pool]
SLOW = parse("fp32=1e9,bf16=4e9,stream=1e8,launch=1e-3")
MODEL = ModelConfig("gpt2", layers=1, hidden=32, heads=4, vocab=32, context=16, tied=False)
PROBLEM = Problem(MODEL, 8, 16)


def emulated(**changes: Any) -> Emulated:
    return Emulated(replace(SLOW.device, **changes))


# Time


@pytest.mark.parametrize(
    ("operate", "seconds"),
    [
        pytest.param(lambda a, b: a @ b, 2 * 200 * 300 * 400 / 1e9 + 1e-3, id="product"),
        pytest.param(lambda a, b: (a.bfloat16(), b.bfloat16()), 6 * 180_000 / 1e8 + 2e-3, id="narrowed"),
        pytest.param(lambda a, b: a + a, 3 * 4 * 60_000 / 1e8 + 1e-3, id="elementwise"),
        pytest.param(lambda a, b: a.add_(1), 4 * 60_000 / 1e8 + 1e-3, id="in place"),
        pytest.param(lambda a, b: torch.zeros(1000), 4 * 1000 / 1e8 + 1e-3, id="filled"),
        pytest.param(lambda a, b: (a.T, a[3:], a.view(-1), torch.empty_like(a)), 0.0, id="views"),
        pytest.param(lambda a, b: torch.arange(10**5) + 1, 0.0, id="integers"),
    ],
)
def test_emulated_device_is_busy_for_flops_and_bytes(operate: Callable[..., Any], seconds: float) -> None:
    a, b = torch.zeros(200, 300), torch.zeros(300, 400)
    with emulated() as device:
        operate(a, b)
    assert device.busy == pytest.approx(seconds)


def test_emulated_device_waits_for_its_host() -> None:
    """Launches that take longer than what is launched."""
    x = torch.zeros(10)
    with emulated(host=0.01) as device:
        device.reset()
        began = device.free
        for _ in range(5):
            x + x
        assert device.free - began == pytest.approx(5 * 0.01 + 1e-3 + 3 * 40 / 1e8)
        assert device.busy == pytest.approx(5 * (1e-3 + 3 * 40 / 1e8))


def test_emulated_device_synchronize_waits_until_done() -> None:
    with emulated() as device:
        torch.zeros(200, 300) @ torch.zeros(300, 400)
        device.synchronize()
        free, device.free = device.free, 0.0
        device.reset()
        assert device.free >= free  # the clock has come so far


def test_emulated_device_can_be_slow_and_uneven() -> None:
    x = torch.zeros(1000)

    def busy(**changes: Any) -> float:
        with emulated(**changes) as device:
            for _ in range(400):
                x + x
        return device.busy

    assert busy(slower=0.2) == pytest.approx(1.2 * busy())
    assert busy(jitter=0.1) == pytest.approx(busy(), rel=0.03)
    assert busy(jitter=0.1) != busy()


def test_emulated_device_prices_measured_operations_by_their_own_figures() -> None:
    figures = replace(SLOW.hardware, operations={"aten.gelu": Operation(0.5, 1e6), "aten.mul": Operation(0.25, 1e30)})
    x = torch.zeros(1000)
    for operate, seconds in (
        (lambda: torch.nn.functional.gelu(x), 0.5 + 8000 / 1e6),
        (lambda: x.mul_(2.0), 0.25),  # as the one that is not in place
        (lambda: x + x, 12000 / 1e8 + 1e-3),  # not measured
    ):
        with Emulated(Device(figures)) as device:
            operate()
        assert device.busy == pytest.approx(seconds)


def rehearsed(world: World) -> tuple[float, float]:
    """Only the first rank takes part in a collective; the others do not know of it."""
    with emulated() as device:
        if world.rank == 0:
            with device.rehearsal():
                whole = torch.empty(200)
                work = torch.distributed.all_gather_single(whole, whole[:100] + 1, async_op=True)
                assert work is not None
                work.wait()
                (whole @ whole).item()
        return device.busy, device.exposed


def test_emulated_device_rehearsal_sends_nothing_and_takes_no_time(pool: Pools) -> None:
    assert pool(2).run(rehearsed) == [(0.0, 0.0)] * 2


# Values and memory


def test_emulated_device_computes_integers_alone() -> None:
    with emulated():
        index = torch.arange(6).view(2, 3) * 2
        assert index.tolist() == [[0, 2, 4], [6, 8, 10]]
        made = torch.nn.functional.gelu(torch.zeros(5, 7, dtype=torch.bfloat16)[:, 1:])
        assert (made.shape, made.dtype) == ((5, 6), torch.bfloat16)
        assert made.sum().item() == 1.0  # a value without meaning


def test_emulated_device_runs_out_of_memory() -> None:
    small = replace(SLOW.hardware, memory=1000.0)
    with Emulated(Device(small)):
        kept = torch.zeros(200)
        for _ in range(5):
            torch.zeros(40)  # and gone again
        with pytest.raises(
            torch.OutOfMemoryError, match="has 1,000 bytes, of which 800 are taken; 400 more do not fit"
        ):
            torch.zeros(100)
    assert kept.shape == (200,)


def test_emulated_device_leaves_fake_tensors_alone() -> None:
    """DTensor finds shapes of unsharded tensors with them."""
    with Emulated(Device(replace(SLOW.hardware, memory=2000.0))) as device:
        with FakeTensorMode():
            fake = torch.empty_strided((1000, 1000), (1000, 1))
            fake.mul_(2.0)
            assert (fake @ fake).shape == fake.shape
        assert device.busy == 0
        assert torch.ones(10, 20).mul_(2.0).shape == (10, 20)
        assert device.busy > 0


def stepped(world: World) -> tuple[list[bool], list[float]]:
    """Whether gradients have their parameters' shapes, and how long three steps keep the device busy."""
    parallel = CuboidParallel(MODEL, Mesh(Cuboid(), alone=True))
    model, place = Transformer(parallel, None), parallel.place(8, 16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids, busy = torch.zeros(16, 8, dtype=torch.long), []
    with emulated() as device:
        for _ in range(3):
            device.reset()
            model(ids, ids, place).backward()
            same = [p.grad is not None and p.grad.shape == p.shape for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            busy.append(device.busy)
    return same, busy


def test_emulated_device_trains_a_model(pool: Pools) -> None:
    same, (first, second, third) = pool(1).run(stepped)[0]
    assert all(same)
    assert first > second  # which need not make the optimizer's state
    assert second == pytest.approx(third)


# Benchmarks


@pytest.mark.parametrize("way", ["1-D", "2-D", "cuboid", "native"])
def test_count_on_emulated_devices_matches_cost_formula(way: str, pool: Pools) -> None:
    chosen = next(c for c in every(PROBLEM, 4) if c.way == way and c.shape != Cuboid(4, 1, 1))
    for found in pool(4).run(count, chosen, PROBLEM, SLOW):
        assert found.traffic == found.predicted
        assert found.loss is None


@pytest.mark.parametrize("way", ["cuboid", "native"])
def test_turn_on_emulated_devices_times_work_that_is_not_done(way: Any, pool: Pools) -> None:
    slow = parse("fp32=1e8,stream=1e8,rank1=1.0")
    (one,), (other,) = pool(2).run(turn, Layout(way, Cuboid(2, 1, 1)), PROBLEM, 1, False, slow)
    assert other.busy == pytest.approx(2 * one.busy)  # the slower rank
    assert one.step >= one.exposed > 0  # it waits for the slower one
    for found in (one, other):
        assert found.step >= found.busy


# What is asked for


def test_slow_motion_keeps_ratios() -> None:
    one, slow = parse("v100-edr"), parse("v100-edr/2000")
    assert slow.factor == 2000
    for a, b in ((one.hardware, slow.hardware),):
        assert a.rate["fp32"] / b.rate["fp32"] == a.stream / b.stream == pytest.approx(2000)
        assert b.launch / a.launch == pytest.approx(2000)
        assert a.link("across", "all_gather").bandwidth / b.link("across", "all_gather").bandwidth == 2000
    assert (slow.links.inside, slow.links.between) == ("240.000mbit", "44.000mbit")
    assert "emulated devices v100-edr/2000" in str(slow)


def test_slow_motion_of_shrunken_model_keeps_ratio_of_bytes_to_flops() -> None:
    """Hidden size and tokens a twelfth: 144 times fewer bytes, 1,728 times fewer FLOPs, 20,000 / 144 times as long."""
    one, paper = parse("v100-edr"), parse("paper")
    assert paper == parse("v100-edr/20000,shrink=12")
    assert parse("paper/40000,jitter=0.1") == parse("v100-edr/40000,shrink=12,jitter=0.1")
    a, b = one.hardware, paper.hardware
    assert a.rate["fp32"] / b.rate["fp32"] / 12**3 == pytest.approx(paper.times)
    assert a.stream / b.stream / 12**2 == pytest.approx(paper.times)
    assert b.launch / a.launch == b.link("inside", "all_gather").hop / a.link("inside", "all_gather").hop
    assert b.launch / a.launch == pytest.approx(paper.times)
    assert "stands for hidden 3,072 and 12,288 tokens" in paper.meant(256, 1024)


def test_slow_motion_takes_figures_noise_and_links() -> None:
    text = (
        "fp32=2e9,stream=1e9,node=4,between=50mbit,inside=1gbit,jitter=0.1,rank3=0.2,host1=5mbit,group=2,uplink=9mbit"
    )
    found: SlowMotion = parse(text)
    assert (found.hardware.rate["fp32"], found.hardware.node) == (2e9, 4)
    assert found.hardware.link("across", "all_reduce").bandwidth == 50e6 / 8
    assert (found.of_rank(3).slower, found.of_rank(2).slower, found.device.jitter) == (0.2, 0.0, 0.1)
    links = found.links
    assert (links.of_host(1), links.of_host(0), links.group, links.uplink) == ("5mbit", "50mbit", 2, "9mbit")


def test_slow_motion_takes_a_calibration_file(tmp_path: Path) -> None:
    figures = replace(PRESETS["cpu"], name="mine", operations={"aten.gelu": Operation(1e-3, 1e9)})
    figures.save(tmp_path / "mine.json")
    found = parse(f"{tmp_path}/mine.json,between=50mbit")
    assert found.hardware.rate == figures.rate
    assert found.hardware.operations == figures.operations
    assert (found.factor, found.device.host, found.links.inside, found.links.between) == (1.0, 0.0, "", "50mbit")
    assert slowed(figures, 10.0).operations == {"aten.gelu": Operation(1e-2, 1e8)}


def test_calibrate_lines_tell_launch_from_stream() -> None:
    few, many = (Timed("aten.gelu", size, 1e-4 + size / 1e9) for size in (1 << 16, 1 << 22))
    small = [Timed("aten.div", 8, 3e-6), Timed("aten.div", 16, 5e-6), Timed("aten.div", 8, 4e-6)]
    found = lines([few, many, *small], 1e-5, 2e9)
    assert found["aten.gelu"].launch == pytest.approx(1.1e-4)
    assert found["aten.gelu"].stream == pytest.approx(1e9)
    assert found["aten.div"] == Operation(pytest.approx(1.4e-5), pytest.approx(2e9))


def test_bench_emulation_compares_medians() -> None:
    real = [Times(step, 0.0, 0.0, 0.0, 0, 0.0, 0.0) for step in (1.0, 9.0, 2.0)]
    emulated = [Times(step, 0.0, 0.0, 0.0, 0, 0.0, 0.0) for step in (2.3, 0.1, 2.2)]
    pair = Pair("2,1,1", "on", "10mbit", real, emulated)
    assert pair.apart == pytest.approx(0.1)
    assert pair.export()["apart"] == pair.apart


def test_bench_emulation_draws_steps_with_their_spread(tmp_path: Path) -> None:
    names, real = ["2,1,1\nschedule off", "1,2,1\nschedule on"], [Spread(2.0, 1.9, 2.1), Spread(1.0, 0.9, 1.5)]
    png, svg = draw_pairs(names, real, [Spread(2.1, 2.0, 2.2), Spread(0.95, 0.9, 1.0)], tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text()
    for word in ("schedule off", "1,2,1", "+5.0%", "-5.0%", "cores", "emulated", "median and quartiles"):
        assert f"<!-- {word}" in text or f" {word} " in text, word


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("v100", "neither a preset nor a figure, nor is it a file"),
        ("v100-edr/fast", "the factor is 'fast'; it must be a number of at least 1"),
        ("v100-edr/0.5", "the factor is '0.5'"),
        ("fp32=2e9", "does not say stream"),
        ("v100-edr/9,colour=3", "'colour=3', which is no figure of a device or link"),
        ("v100-edr/9,jitter=-1", "jitter is '-1'"),
        ("v100-edr/9,uplink=5mbit", "give group=N"),
        ("v100-edr/9,host2=fast", "rate='fast' is not a number"),
    ],
)
def test_slow_motion_rejects_what_it_cannot_be(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(text)


@pytest.mark.parametrize("named", ["rank8=0.5", "host2=5mbit"])
def test_slow_motion_rejects_ranks_and_hosts_that_are_not_there(named: str) -> None:
    slow = parse(f"v100-edr/9,{named}")
    slow.check(16)
    with pytest.raises(ValueError, match=f"--emulate has {named}, but there are"):
        slow.check(8)


# Training


def test_train_cli_emulate_times_steps_and_saves_nothing(cuboid: Command, tmp_path: Path) -> None:
    text = write_text(tmp_path)
    words = ["train", *sets(settings(text, *on("1,2,1"))), "--emulate", "fp32=1e9,stream=1e9"]
    said = cuboid(*words)
    assert said.code == 0, said.err
    assert "emulated devices: fp32 1 GFLOP/s" in said.out
    assert said.out.count("\nstep ") == 3
    assert "loss " not in said.out
    assert [path.name for path in tmp_path.iterdir()] == [text.name]
    rejected = cuboid(*words, "--trace", 1)
    assert rejected.code == 2
    assert "leave out --resume, --trace, torchrun" in rejected.err
