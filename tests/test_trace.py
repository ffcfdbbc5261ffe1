"""Traces tell what a rank did when; tracing changes nothing."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tiny import Cuboid, on, sets, settings, tiny, write_text

from cuboid.comm.ledger import Entry, Span
from cuboid.run.launch import Pool, World
from cuboid.train.loop import Trainer
from cuboid.train.trace import Phase, Trace, draw, draw_layer, events, save
from cuboid.train.tracing import Recorder, check_steps

Pools = Callable[[int], Pool]


def traced(world: World, text: Path, *changes: str) -> tuple[Trace, Trace, float]:
    """A step, the same with the schedule off, and the seconds waited by the ledger of the step."""
    trainer = Trainer(tiny(text, *on("2,2,1"), "model.layers=3", *changes), world)
    ledger = trainer.model.parallel.mesh.ledger
    trainer.step()
    trainer.recorder = recorder = Recorder(trainer.model)
    trainer.step()
    exposed, counts, found = ledger.exposed(), ledger.counts(), recorder.end()
    off = trainer.trace_unscheduled()
    assert trainer.recorder is trainer.model.player.on_moves is ledger.spans is None
    assert ledger.counts() == counts
    assert all(p.grad is None for p in trainer.model.parameters())
    trainer.model.parallel.mesh.close()
    return found, off, exposed


def test_trace_matches_ledger_and_exports(pool: Pools, tmp_path: Path) -> None:
    found = pool(4).run(traced, write_text(tmp_path), "overlap.sub_batches=2")
    for trace, off, exposed in found:
        assert [phase.name for phase in trace.phases] == ["forward", "backward", "optimizer"]
        assert trace.exposed() == pytest.approx(exposed, rel=0.05, abs=1e-3)
        assert {span.axis for span in trace.spans} == {"x", "y", "world"}
        assert [phase.name for phase in off.phases] == ["forward", "backward"]
    path = tmp_path / "trace.json"
    save([trace for trace, _, _ in found], path)
    shown = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in shown} == {0, 1, 2, 3}
    lanes = {event["args"]["name"] for event in shown if event["name"] == "thread_name"}
    assert {"compute", "x", "y", "z"} <= lanes
    draw({"on": found[0][0]}, "a step", tmp_path / "steps.png")
    draw_layer({"off": found[0][1], "on": found[0][0]}, "a layer", tmp_path / "layer.png")
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("steps.png", "layer.png"))


CHANGES = ["overlap.sub_batches=2", "memory.recompute=full", "data.micro_batches=2", "data.batch=1"]


@pytest.mark.parametrize("change", CHANGES)
def test_trace_layer_isolates_one_layer(change: str, pool: Pools, tmp_path: Path) -> None:
    for trace, off, _ in pool(4).run(traced, write_text(tmp_path), change):
        for whole in (trace, off):
            layer = whole.layer()
            outer = [phase for phase in whole.phases if phase.name != "optimizer"][-2:]
            assert [phase.name for phase in layer.phases] == ["forward", "backward"]
            for inside, outside in zip(layer.phases, outer, strict=True):
                assert outside.start < inside.start < inside.stop < outside.stop
            assert {span.axis for span in layer.spans} == {"x", "y"}
        for one, other in pairwise(off.spans):
            assert one.launched <= one.waited <= one.resumed <= other.launched
        for phase in off.layer().phases:  # its own weights come inside it, in forward and in backward
            assert any(
                (span.axis, span.kind) == ("x", "all_gather") and phase.start < span.launched < phase.stop
                for span in off.layer().spans
            )


def test_trace_waiting_is_not_computing() -> None:
    span = Span("y", "all_gather", 8, 1.0, Entry(), landed=4.0, waited=2.0, resumed=4.0)
    trace = Trace(0, [span], [Phase("forward", 0.0, 5.0)])
    assert trace.computing() == [(0.0, 2.0), (4.0, 5.0)]
    assert trace.exposed() == 2.0
    bars = [(e["name"], e["ts"], e["dur"]) for e in events([trace]) if e["ph"] == "X"]
    assert ("all_gather", 1e6, 3e6) in bars
    assert ("computing", 4e6, 1e6) in bars


def test_trace_layer_spans_first_to_last_sub_batch() -> None:
    spans = [
        Span(axis, "all_gather", 8, start, Entry(), stop, start, stop)
        for axis, start, stop in (("x", 0.1, 0.2), ("y", 2.5, 3.5), ("z", 6.0, 6.2), ("world", 9.5, 9.6))
    ]
    phases = [Phase("forward", 0.0, 5.0), Phase("backward", 5.0, 9.0), Phase("optimizer", 9.0, 10.0)]
    layer = Trace(0, spans, phases, [2.0, 1.0, 3.0, 4.0, 8.0, 5.5, 7.0]).layer()
    assert layer.phases == [Phase("forward", 1.0, 4.0), Phase("backward", 5.5, 8.0)]
    assert [span.axis for span in layer.spans] == ["y", "z"]
    assert layer.exposed() == pytest.approx(1.2)


# Runs


def left(run: Path) -> tuple[list[Any], dict[str, bytes]]:
    """The losses and the gradients' norms of each step, and the weights and moments at the end."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (last,) = (run / "checkpoints").iterdir()
    files = {path.name: path.read_bytes() for path in last.glob("*.safetensors")}
    assert files
    return [[row.get(name) for name in ("step", "loss", "grad_norm", "val_loss")] for row in rows], files


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(("overlap.sub_batches=2", "data.micro_batches=2", "model.layers=2"), id="sub-batches"),
        pytest.param(("data.batch=1", "precision.dtype=fp16"), id="context", marks=pytest.mark.slow),
    ],
)
def test_train_cli_tracing_does_not_change_results(changes: tuple[str, ...], cuboid: Cuboid, tmp_path: Path) -> None:
    text = write_text(tmp_path)
    for name, words in (("plain", []), ("traced", ["--trace", 2])):
        these = [*changes, "model.dropout=0.1", "schedule.steps=6", f"logging.folder={tmp_path / name}"]
        said = cuboid("train", *words, *sets(settings(text, *on("2,2,1"), *these)))
        assert said.code == 0, said.err
    assert left(tmp_path / "traced") == left(tmp_path / "plain")
    for what, file in (("trace", "trace.json"), ("timeline", "timeline.png")):
        assert f"\n  {what:<11}{tmp_path / 'traced' / file}\n" in said.out
        assert (tmp_path / "traced" / file).exists()
        assert not (tmp_path / "plain" / file).exists()
    shown = json.loads((tmp_path / "traced" / "trace.json").read_text())["traceEvents"]
    assert sum(event["name"] == "optimizer" and event["pid"] == 3 for event in shown) == 2


def test_check_steps_rejects_too_few_steps_for_trace() -> None:
    check_steps(2, 8, 12)
    check_steps(0, 12, 12)
    with pytest.raises(ValueError, match=r"--trace 3 of schedule.steps=12 with 8 done.* to at least 13"):
        check_steps(3, 8, 12)


def test_train_cli_rejects_trace_longer_than_run(cuboid: Cuboid, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["train", *sets(settings(write_text(tmp_path), *on("1,1,1"), "schedule.steps=4", f"logging.folder={run}"))]
    refused = cuboid(*words, "--trace", 50)
    assert refused.code == 2
    assert "--trace 50 of schedule.steps=4 with 0 done" in refused.err
    assert not run.exists()
    assert cuboid(*words).code == 0
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    refused = cuboid("train", "--resume", run, "--set", "schedule.steps=6", "--trace", 1)
    assert refused.code == 2
    assert "--trace 1 of schedule.steps=6 with 4 done: 2 are left" in refused.err
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    again = cuboid(*words, "--trace", 2)  # it goes on by itself, as it must be able to
    assert again.code == 0
    assert "no trace: 0 steps were run" in again.out
