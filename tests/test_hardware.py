"""Where a plan's figures come from: presets, hardware files, models of others, published and measured times."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest

from cuboid.model.config import ModelConfig
from cuboid.plan import hardware
from cuboid.plan.check import check
from cuboid.plan.hardware import PRESETS
from cuboid.plan.layer import Work
from cuboid.plan.published import published
from cuboid.plan.search import rank
from cuboid.plan.source import model

CPU = PRESETS["cpu"]
GPT2 = ModelConfig("gpt2", layers=2, hidden=24, heads=24, vocab=37, context=16, ffn=40)


def test_published_misses_only_documented_figures() -> None:
    """All within what is allowed but those of one order of ranks, which docs/planner.md names."""
    lines = {line.what: line for line in published()}
    assert len(lines) == 10
    assert {what for what, line in lines.items() if not line.ok} == {
        f"3-D against {other}, x within nodes" for other in ("1-D", "2-D")
    }
    one_d, two_d = (lines[f"3-D against {other}, z within nodes"].predicted for other in ("1-D", "2-D"))
    assert one_d > two_d > 1


def test_hardware_presets_cite_source_of_every_figure() -> None:
    assert {"v100-edr", "a100-hdr", "h100-ndr", "cpu"} == set(PRESETS)
    figures = {each.name for each in fields(hardware.Hardware)} - {"name", "source"}
    for preset in PRESETS.values():
        told = {name for names in preset.source for name in names.split(", ")}
        assert told == ({"all"} if preset is CPU else figures), preset.name


def links(**changes: float) -> dict[str, dict[str, float]]:
    return dict.fromkeys(hardware.KINDS, {"base": 1e-3, "hop": 1e-3, "bandwidth": 1e9} | changes)


def test_hardware_unmeasured_links_rejected_only_where_needed() -> None:
    work, devices = Work(GPT2, 16, 16, "fp32"), CPU.node
    near, alone = replace(CPU, across={}), replace(CPU, node=1, inside={}, across={})
    assert rank(near, work, devices).plans[0].seconds == rank(CPU, work, devices).plans[0].seconds
    assert rank(alone, work, 1).plans
    for hw, count, level in (
        (near, 2 * devices, "across"),
        (alone, 2, "across"),
        (replace(CPU, inside={}), 2, "inside"),
    ):
        with pytest.raises(ValueError, match=f"{count} devices needs links {level} nodes .* none measured; run cuboid"):
            rank(hw, work, count)


def test_hardware_load_round_trips_and_rejects_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    CPU.save(path)
    assert hardware.load(str(path)) == CPU
    good = CPU.export()
    for bad, says in (
        ([], "the file is .*; it must be a table"),
        ({"name": "x", "node": 8}, "does not say memory, peak, rate"),
        (good | {"colour": "red"}, "has colour, which no hardware has"),
        (good | {"stream": "fast"}, "stream is 'fast'; it must be a number from 1e-06 to 1e.30"),
        (good | {"rate": {"fp32": 0}}, "rate.fp32 is 0; it must be a number from 1e-06"),
        (good | {"rate": {}}, "rates of none .* at least one rate"),
        (good | {"peak": {}}, "peaks of none; it must have .* a peak for each"),
        (good | {"peak": dict.fromkeys(CPU.peak, 0)}, "peak.fp32 is 0"),
        (good | {"stream": math.nan}, "stream is nan"),
        (good | {"memory": math.inf}, "memory is inf"),
        (good | {"memory": True}, "memory is True"),
        (good | {"memory": 10**400}, "memory is 1000"),
        (good | {"tile": ["a", "b"]}, r"tile\[0\] is 'a'; it must be a whole number from 1"),
        (good | {"tile": [0, 0]}, r"tile\[0\] is 0"),
        (good | {"tile": [128]}, r"tile is \[128\]; it must be a list of 2"),
        (good | {"attention": [0.5]}, r"attention is \[0.5\]; it must be a list of 2"),
        (good | {"direct": "no"}, "direct is 'no'; it must be true or false"),
        (good | {"direct": 0}, "direct is 0; it must be true or false"),
        (good | {"launch": -1}, "launch is -1; it must be a number from 0"),
        (good | {"depth": -1e9}, "depth is -1000000000.0; it must be a number from 0"),
        (good | {"units": -1}, "units is -1"),
        (good | {"node": 1.5}, "node is 1.5; it must be a whole number from 1"),
        (good | {"cores": 0.5}, "cores is 0.5; it must be a whole number from 0"),
        (good | {"wire": 1e-9}, "wire is 1e-09; it must be 0 or a number from 1e-06"),
        (good | {"slowdown": 1.1}, "slowdown is 1.1; it must be a number from 0 to 1"),
        (good | {"name": 3}, "name is 3; it must be a text"),
        (good | {"source": {"all": 3}}, "source.all is 3; it must be a text"),
        (good | {"inside": links(base=-1)}, "inside.all_gather.base is -1"),
        (good | {"inside": links(hop=-1)}, "inside.all_gather.hop is -1"),
        (good | {"across": links(bandwidth=math.inf)}, "across.all_gather.bandwidth is inf"),
        (good | {"inside": {"all_gather": {"base": 1}}}, "inside.all_gather does not say hop, bandwidth"),
        (
            good | {"across": {"all_gather": links()["all_gather"]}},
            "across of all_gather; it must be of all_gather, reduce",
        ),
    ):
        path.write_text(json.dumps(bad))
        with pytest.raises(ValueError, match=says):
            hardware.load(str(path))
    path.write_text("{")
    with pytest.raises(ValueError, match="not a hardware file"):
        hardware.load(str(path))
    with pytest.raises(ValueError, match="did you mean a100-hdr"):
        hardware.load("a100-hdm")


def test_source_model_reads_and_checks_hugging_face_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
    path.write_text(json.dumps({"model_type": "mistral", "vocab_size": 99, "intermediate_size": 200, **sizes}))
    found = model(str(tmp_path))
    assert (found.family, found.layers, found.hidden, found.kv_heads, found.ffn) == ("llama", 3, 96, 2, 200)
    path.write_text('{"model_type": "mamba"}')
    with pytest.raises(ValueError, match="mamba"):
        model(str(path))
    for change, says in (
        ({"model_type": ["llama"]}, r"model_type=\['llama'\]"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no'; it must be true or false"),
        ({"tie_word_embeddings": 0}, "tie_word_embeddings=0"),
        ({"hidden_size": "96"}, "hidden='96' must be a whole number"),
        ({"vocab_size": 99.0}, "vocab=99.0 must be a whole number"),
    ):
        path.write_text(json.dumps({"model_type": "mistral", "vocab_size": 99, **sizes, **change}))
        with pytest.raises(ValueError, match=says):
            model(str(path))


def test_plan_check_predicts_measured_layouts() -> None:
    """Six real results, predicted by their machine's figures as well as docs/planner.md says."""
    folder = Path(__file__).parent.parent / "benchmarks" / "planner"
    hw = hardware.load(str(folder / "machine.json"))
    checks = [found for name in ("hidden-512", "hidden-768") for found in check(folder / name / "layouts.json", hw)]
    assert len(checks) == 6  # two models, three networks
    for found in checks:
        assert found.ok, (found.path, found.rate, found.mean_error, found.regret)
        assert len(found.steps) == 10
        assert found.reference == "2,2,2"
        assert found.error(next(step for step in found.steps if step.cuboid == "2,2,2")) == 0
        assert found.regret >= 0
        assert found.choice in found.steps
