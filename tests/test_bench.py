"""The benchmark counts, times and compares what it says it does."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import namespaces
import pytest
from rich.console import Console
from typer.testing import CliRunner

from cuboid.bench.bare import Sent, bare, messages
from cuboid.bench.bound import product_words, regime, step_bytes
from cuboid.bench.cpu import Lean
from cuboid.bench.layouts import Layout, every, on_pipes, possible, scaling
from cuboid.bench.network import best, egress, feasible
from cuboid.bench.overlap import Found
from cuboid.bench.problem import Problem
from cuboid.bench.result import Spread
from cuboid.bench.run import _progress as progress_of
from cuboid.bench.turn import Times, count, turn
from cuboid.cli import app
from cuboid.mesh.cuboid import Cuboid
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import Policy
from cuboid.plan.check import check
from cuboid.plan.hardware import PRESETS
from cuboid.run.cluster import Cluster
from cuboid.run.launch import Pool

Pools = Callable[[int], Pool]
MODEL = ModelConfig("gpt2", layers=1, hidden=64, heads=8, vocab=64, context=64, tied=False)
PROBLEM = Problem(MODEL, 8, 64)
SIZES = ["--hidden", "32", "--heads", "8", "--vocab", "32", "--batch", "8", "--seq", "8", "--layers", "1"]
ENVELOPE = ("commit", "bench", "command", "began", "seconds", "settings", "machine")


# Formulas


def test_bound_covers_three_regimes() -> None:
    m, n, k = 4096, 512, 64
    for ranks, dims in ((8, 1), (64, 2), (1024, 3)):
        assert regime((n, k, m), ranks) == dims
    assert product_words((m, n, k), 8) == n * k * 7 / 8  # the smallest matrix alone moves
    assert product_words((n, n, n), 8) == pytest.approx(
        3 * (n // 2) ** 2 / 2
    )  # a cube gathers half of each of three blocks
    for edge in (m / n, m * n / k**2):  # the regimes meet
        assert product_words((m, n, k), int(edge)) == pytest.approx(product_words((m, n, k), int(edge) + 1), rel=0.2)


def bound_of_shared_gathers(problem: Problem, ranks: int) -> float:
    """As `step_bytes`, with q, k and v, for which a cuboid gathers X once, as one product."""
    c = problem.config
    shapes = [(c.hidden, c.q_dim + 2 * c.kv_dim), (c.hidden, c.ffn), (c.q_dim, c.hidden), (c.ffn, c.hidden)]
    shapes = shapes * c.layers + [(c.hidden, c.vocab)]
    return 3 * 4 * sum(product_words((problem.tokens, k, n), ranks) for k, n in shapes)


def test_bound_cuboid_traffic_is_over_two_thirds() -> None:
    """X, W and Y, or their gradients, take part in three products, for each of which the bound has them move. A cuboid
    moves each twice at least: dY is gathered once for two products, and so are X and W where they are kept."""
    least = {}
    for policy in (Policy(a, w) for a in ("regather", "retain") for w in ("regather", "retain")):  # type: ignore[arg-type]
        problem, found = Problem(MODEL.replace(layers=16), 8, 64, policy), []
        for ranks in (2, 4, 8, 16, 64):
            bound = bound_of_shared_gathers(problem, ranks)
            assert bound <= step_bytes(problem, ranks)
            for layout in (Layout("cuboid", shape, False) for shape in feasible(problem, ranks)):
                found.append(sum(layout.cost(problem, 0).bytes().values()) / bound)
        least[policy.activations, policy.weights] = min(found)
    assert min(least.values()) > 2 / 3
    assert least["retain", "retain"] < 0.7  # on 2,1,1 weights alone move, twice: nothing but the embedding is above
    assert least["retain", "retain"] < least["retain", "regather"] < least["regather", "regather"]


def test_spread_computes_median_and_quartiles() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.5, 2.5)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


def test_problem_grows_with_rank_count() -> None:
    grown = PROBLEM.grown(64, 8)
    assert (grown.config.hidden, grown.batch) == (128, 16)
    assert PROBLEM.grown(8, 8) == PROBLEM


def test_egress_matches_hand_computed_bytes() -> None:
    shape = Cuboid(2, 2, 1)  # hosts (0,1) and (2,3): y lies in a host, x across
    assert egress({("y", "all_gather"): [1, 100]}, shape, 2) == 0
    assert egress({("x", "all_gather"): [1, 100]}, shape, 2) == 200
    line = Cuboid(1, 4, 1)
    assert egress({("y", "all_reduce"): [1, 100]}, line, 2) == 100  # a ring leaves each host once
    assert egress({("y", "reduce_scatter"): [1, 90]}, line, 2) == 2 * 60  # direct: two of three are elsewhere
    assert egress({("y", "reduce_scatter"): [1, 90]}, line, 4) == 0


def test_best_cuboid_minimizes_egress_between_hosts() -> None:
    found = best(PROBLEM, 8, 4)
    assert found.ranks == 8
    assert egress(Layout("cuboid", found).cost(PROBLEM, 0).traffic, found, 4) == min(
        egress(Layout("cuboid", shape).cost(PROBLEM, 0).traffic, shape, 4)
        for layout in every(PROBLEM, 8)
        if layout.way == "cuboid"
        for shape in [layout.shape]
    )
    assert best(PROBLEM, 8, 4, flat=True).z == 1


def test_layout_lists_feasible_layouts_with_reasons_for_rest() -> None:
    names = {ranks: [c.way for c in scaling(PROBLEM, ranks, 4)] for ranks in (8, 16)}
    assert "2-D" in names[16]
    assert "cube" in names[8]
    assert "2-D" not in names[8]
    few = Problem(MODEL.replace(heads=2, kv_heads=2, head_dim=32), 8, 64)
    able, left_out = possible(every(few, 4), few)
    assert "1-D" not in [c.way for c in able]
    assert "heads=2" in left_out["1-D"]  # two cannot be split by four
    assert {c.name for c in able} | left_out.keys() == {c.name for c in every(few, 4)}


def test_layouts_of_pytorch_combine_every_variant() -> None:
    names = [layout.name for layout in every(PROBLEM, 4) if layout.native]
    assert sorted(names) == sorted(
        [f"native{sp}{ideal}{kept} 2×2" for sp in ("", "-SP") for ideal in ("", " ideal") for kept in ("", "+")]
        + [f"native{ideal}{kept} 4×1" for ideal in ("", " ideal") for kept in ("", "+")]
        + ["native 1×4", "native-SP 1×4", "native ideal 1×4", "DDP 4"]  # -SP has no reduce-scatter to make ideal
    )


# Ranks


SLOW = [pytest.param(way, marks=pytest.mark.slow) for way in ("1-D+SP", "native ideal")]


@pytest.mark.parametrize("way", ["1-D", "2.5-D", "cuboid", "native", *SLOW])
def test_count_matches_cost_formula_for_every_layout(way: str, pool: Pools) -> None:
    chosen = next(c for c in every(PROBLEM, 8) if c.way == way and c.shape != Cuboid(8, 1, 1))
    counts = pool(8).run(count, chosen, PROBLEM)
    assert all(each.traffic == each.predicted for each in counts)
    assert counts[0].traffic
    serial = pool(1).run(count, Layout("cuboid", Cuboid()), PROBLEM)[0]
    assert counts[0].loss == pytest.approx(serial.loss, rel=1e-5)
    assert serial.parameters / 8 <= counts[0].parameters < serial.parameters
    assert counts[0].parameters * 3 < counts[0].peak < serial.peak
    assert counts[0].flops == pytest.approx(serial.flops / 8, rel=0.01)


def test_count_of_ddp_has_the_buckets_of_later_steps(pool: Pools) -> None:
    """Its first step sums all gradients at once; those that are timed have buckets."""
    problem = replace(PROBLEM, config=MODEL.replace(hidden=256, ffn=1024, head_dim=32))
    counts = pool(2).run(count, Layout("DDP", Cuboid(2, 1, 1)), problem)
    assert all(each.traffic == each.predicted for each in counts)
    assert counts[0].traffic["fsdp"]["all_reduce"][0] == 3  # 1 MiB, the rest, and the loss


@pytest.mark.parametrize(("pipeline", "micro_batches"), [("1f1b", 4), ("interleaved", 2)])
def test_count_of_pipe_matches_cost_formula_on_every_rank(pipeline: str, micro_batches: int, pool: Pools) -> None:
    """And its losses are those of the whole batch, and one rank of each place has its memory measured."""
    problem = replace(PROBLEM, config=MODEL.replace(layers=4))
    found = {layout.name: layout for layout in on_pipes(problem, 4, 2, pipeline, micro_batches)}
    assert found.keys() == {"cuboid 1,1,2 pipe=2", "cuboid 1,2,1 pipe=2", "cuboid 2,1,1 pipe=2"}
    counts = pool(4).run(count, found["cuboid 1,2,1 pipe=2"], problem)
    assert all(each.traffic == each.predicted for each in counts)
    assert counts[0].traffic["pipe"]["send"][0] == micro_batches * (3 if pipeline == "interleaved" else 1)
    serial = pool(1).run(count, Layout("cuboid", Cuboid()), problem)[0]
    assert counts[0].loss == pytest.approx(serial.loss, rel=1e-5)
    assert [each.peak > 0 for each in counts] == [True, False, True, False]


def test_turn_times_every_step(pool: Pools) -> None:
    chosen = Layout("cuboid", Cuboid(2, 2, 1))
    times = pool(4).run(turn, chosen, PROBLEM, 2, True)
    assert [len(each) for each in times] == [2] * 4
    assert all(each.forward > 0 and each.backward > 0 and each.optimizer > 0 for each in times[0])
    assert all(0 < each.exposed <= each.step for each in times[0])
    assert times[0][0].crossed == 0  # no hosts


@namespaces.needed
def test_turn_bytes_between_hosts_match_egress() -> None:
    big = Problem(MODEL.replace(hidden=256, ffn=1024, head_dim=32), 8, 64)
    chosen = Layout("cuboid", Cuboid(2, 2, 2))
    with Cluster(2, "10gbit", 4) as cluster, Pool(8, cluster) as pool:
        times = pool.run(turn, chosen, big, 1, False)
    wanted = egress(chosen.cost(big, 0).traffic, chosen.shape, 4)
    assert max(each[0].crossed for each in times) == pytest.approx(wanted, rel=0.05)


# The command


def test_bench_cli_layouts_writes_results_and_plots(tmp_path: Path) -> None:
    out = tmp_path / "a folder"
    names = ("1-D", "2-D 2×2", "cuboid 1,2,2", "native 2×2", "cuboid 1,2,1 pipe=2")
    only = [word for name in names for word in ("--only", name)]
    words = ["bench", "layouts", "--ranks", "4", "--rounds", "2", "--steps", "1", "--out", str(out), *SIZES, *only]
    words += ["--layers", "2", "--pipe", "2", "--micro-batches", "2"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "On pipes: 1f1b, 2 micro-batches.\nBytes equal the formula's." in done.output
    found = json.loads((out / "layouts.json").read_text())
    rows = {row["layout"]: row for row in found["rows"]}
    assert rows.keys() == {*names, "1-D+SP"}
    assert all(row["bytes_equal_formula"] and len(row["samples"]) == 2 for row in rows.values())
    assert {name: row["micro_batches"] for name, row in rows.items() if row["micro_batches"] > 1} == {names[-1]: 2}
    losses = [row["loss"] for row in rows.values()]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)
    assert found.keys() == {*ENVELOPE, "rows"}
    assert found["machine"]["versions"]["torch"]
    assert found["seconds"] > 0
    assert {path.suffix for path in out.iterdir()} == {".json", ".png", ".svg"}
    (checked,) = check(out / "layouts.json", PRESETS["cpu"])
    assert [step.cuboid for step in checked.steps] == ["1,2,2", "1,2,1 pipe=2"]


def test_bench_cli_sweep_counts_once_and_logs_every_turn(tmp_path: Path) -> None:
    words = ["bench", "layouts", "--ranks", "2", "--rounds", "1", "--steps", "1", "--rate", ",", "--only", "cuboid 2"]
    done = CliRunner().invoke(app, [*words, *SIZES, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert re.findall(r"^\[(\d+)/(\d+)\]", done.output, re.M) == [("0", "3"), ("1", "3"), ("2", "3")]


@pytest.mark.parametrize("terminal", [True, False])
def test_bench_progress_reaches_total(terminal: bool) -> None:
    console = Console(file=StringIO(), force_terminal=terminal, width=80)
    with progress_of(2, console) as told:
        told("one")
        told("two")
    assert ("2/2" if terminal else "[1/2] two") in console.file.getvalue()  # type: ignore[attr-defined]


def test_bench_cli_cpu_writes_samples(tmp_path: Path) -> None:
    words = ["--ranks", "2", "--rounds", "1", "--hidden", "16", "--only", "cuboid 1,2", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["bench", "cpu", *words])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "cpu.json").read_text())
    assert found.keys() == {*ENVELOPE, "problem", "rows"}
    (row,) = found["rows"]
    assert row["name"] == "cuboid 1,2,1"
    assert {name: len(samples) for name, samples in row["samples"].items()} == {"step": 5, "serial": 5, "bare": 2}


def test_lean_computes_least_ratio_and_ns_per_byte() -> None:
    lean = Lean("cuboid", steps=[9.0, 6.0, 7.0], serial=[4.0, 5.0, 4.5], bare=[1.0, 0.5, 0.2], bytes=10**9)
    assert (lean.least, lean.ratio, lean.nanoseconds) == (5.0, 1.4, 0.5)


def test_overlap_found_derives_figures_from_samples() -> None:
    off = [Times(2.0, 3.0, 1.0, exposed, 100, 1.5, 0.0) for exposed in (3.0, 4.0, 5.0)]
    on = [Times(1.0, 2.0, 1.0, exposed, 100, 2.0, 0.0) for exposed in (0.5, 1.0, 1.5)]
    row = Found("2,1,1", 1.0, "8mbit", on, off, traced=2.0, tcps=[0.5], ranks=2, bytes=96).export()
    wanted = {"compute": 2.0, "communication": 4.0, "measured_ratio": 2.0, "exposed": 1.0, "cpu": 4.0, "gain": 1.5}
    wanted |= {"above_best": 1.0, "exposed_share": 0.25, "traced_share": 0.5, "bytes": 96}
    assert {name: row[name] for name in wanted} == wanted
    assert [step["exposed"] for step in row["samples"]["off"]] == [3.0, 4.0, 5.0]
    assert json.dumps(row)
    assert row["beside"] is None
    beside = Found("2,1,1", 1.0, "8mbit", on, off, 2.0, [0.5], 2, 96, besides=on)
    assert (beside.beside, beside.beside_cells()) == ((4.0, 0.25), ["4.00", "25%"])


def test_layout_beside_sends_bytes_of_all_micro_batches(pool: Pools) -> None:
    chosen, problem = Layout("cuboid", Cuboid(1, 2, 2), beside=True), replace(PROBLEM, micro_batches=2)
    sent = pool(4).run(messages, chosen, problem)[0]
    assert sum(each.bytes for each in sent if each.axis == "z") == 2 * chosen.cost(PROBLEM, 0).bytes()["z"]


def test_bare_collectives_send_bytes_of_step(pool: Pools) -> None:
    chosen = Layout("cuboid", Cuboid(2, 2, 2))
    sent = pool(8).run(messages, chosen, PROBLEM)
    assert len(pool(8).run(bare, chosen.shape, sent)[0]) == 2
    counts = chosen.cost(PROBLEM, 0).bytes()
    for axis in ("x", "y", "z"):
        assert sum(each.bytes for each in sent[0] if each.axis == axis) >= counts[axis]
    assert [Sent("x", kind, 96).given(4) for kind in ("all_gather", "reduce_scatter", "all_reduce")] == [
        8,
        32,
        16,
    ]


@pytest.mark.slow
def test_bench_cli_accuracy_matches_serial_losses(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "accuracy", "--steps", "2", "--only", "2-D", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "accuracy.json").read_text())
    assert found.keys() == {*ENVELOPE, "steps", "largest_relative_difference_to_one_device", "losses"}
    assert found["losses"].keys() == {"one device", "2-D, 2×2"}
    assert max(found["largest_relative_difference_to_one_device"].values()) < 1e-5
    assert (tmp_path / "accuracy.png").is_file()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["strong", "--ranks", "8,x"], "whole numbers"),
        (["strong", "--rate", "quick"], "25mbit"),
        (["layouts", "--only", "9-D"], "start of none"),
        (["layouts", "--ranks", "4", "--heads", "2", "--only", "1-D"], "--only '1-D': 1-D cannot run: heads=2"),
        (["layouts", "--activations", "keep"], "regather, retain"),
        (["strong", "--ranks", "7", "--heads", "64"], "do not fill hosts"),
        (["layouts", "--hosts", "2"], "--hosts: hosts are emulated only if links have a rate; add --rate"),
        (["strong", "--rate", "", "--hosts", "2"], "--hosts: hosts are emulated only if"),
        (["layouts", "--ranks-per-host", "2"], "--ranks-per-host: hosts are emulated only if"),
        (["strong", "--hosts", "2", "--ranks", "8"], "give one of them"),
        (["cpu", "--only", "cube"], "start of none of cuboid 1,1,8"),
        (["layouts", "--pipe", "4", "--layers", "3"], "3 blocks cannot be split into 4 stages"),
        (
            ["layouts", "--pipe", "3"],
            "8 ranks cannot be split into pipe=3 places; use a multiple of 3 ranks, or pipe of 2, 4, 8",
        ),
        (["layouts", "--pipe", "2", "--micro-batches", "3"], "into 3 micro-batches; use a divisor of it: 1, 2, 4"),
        (
            ["layouts", "--pipe", "2", "--pipeline", "interleaved", "--batch", "20", "--micro-batches", "5"],
            "use 4 or 6 micro-batches",
        ),
        (["layouts", "--pipe", "2", "--pipeline", "2f2b"], "--pipeline 2f2b is not one of gpipe, 1f1b"),
        (["layouts", "--micro-batches", "2"], "--micro-batches: there are no pipes without --pipe; add --pipe 2"),
        (["layouts", "--only", "cuboid 1,2,2 pipe=2"], "'cuboid 1,2,2 pipe=2': there are no pipes without --pipe"),
    ],
)
def test_bench_cli_rejects_bad_options_before_work(words: list[str], says: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", *words, "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, ValueError)
    assert says in str(done.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["strong"], "install iproute2 .*; or run on this machine's loopback with --rate ''"),
        (["layouts", "--rate", "8mbit"], "or run on this machine's loopback with --rate ''"),
        (["overlap"], "bench overlap cannot do without hosts, which need root and iproute2"),
    ],
)
def test_bench_cli_rejects_missing_hosts_before_work(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    done = CliRunner().invoke(app, ["bench", *words, "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, ValueError)
    assert re.search(says, str(done.exception))
    assert "--hosts" not in str(done.exception)
    assert done.output == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["overlap"], "bench overlap starts its own ranks; run it without torchrun"),
        (["cpu"], "bench cpu starts its own ranks"),
        (["accuracy"], "bench accuracy starts its own ranks"),
        (["layouts", "--rate", "8mbit"], "leave --rate out"),
    ],
)
def test_bench_cli_rejects_unsupported_runs_under_torchrun(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(ValueError, match=says):
        CliRunner().invoke(app, ["bench", *words], catch_exceptions=False)


@pytest.mark.parametrize("words", ["overlap --seq 8", "cpu --rate 8mbit", "cpu --ranks 4,8", "accuracy --rounds 2"])
def test_bench_cli_commands_take_their_own_options_only(words: str) -> None:
    assert CliRunner().invoke(app, ["bench", *words.split()]).exit_code == 2
