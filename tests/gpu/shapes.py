"""What steps launch on a GPU, as JSON for test_shapes.py: `shapes.py budgets` or `pipe`, `orders` and `ends` or `all`
and names, or `cases` or `broken` and names."""

import counting  # noqa: F401, I001  before torch

import json
import sys
from typing import Any

import torch
from torch import Tensor

from counting import count, per_layer
from cuboid.layers.attend import Attend
from cuboid.mesh.cuboid import Cuboid
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import Policy, suitable_schedule
from cuboid.step.schedule import Schedule

LLAMA_8B = ModelConfig("llama", layers=2, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, context=8192)
LLAMA = ModelConfig("llama", layers=2, hidden=64, heads=8, kv_heads=8, ffn=96, vocab=37, context=64)
GPT2 = ModelConfig("gpt2", layers=2, hidden=64, heads=8, vocab=37, context=64, dropout=0.1)
SUB_BATCHES = Schedule(sub_batches=2)

#: Model, cuboid, batch, sequence and options of a step: every axis, precision, recomputation and schedule.
CASES: dict[str, tuple[ModelConfig, Cuboid, int, int, dict[str, Any]]] = {
    "x": (LLAMA, Cuboid(8, 1, 1), 8, 32, {}),
    "x without prefetch": (LLAMA, Cuboid(4, 1, 1), 8, 32, {"schedule": Schedule(prefetch=False)}),
    "y": (GPT2, Cuboid(1, 4, 1), 8, 32, {"schedule": SUB_BATCHES}),
    "z in fp32": (LLAMA, Cuboid(1, 1, 4), 8, 32, {"precision": "fp32", "schedule": SUB_BATCHES}),
    "xyz in four": (LLAMA, Cuboid(2, 2, 2), 8, 32, {"schedule": Schedule(sub_batches=4)}),
    "xyz recomputed": (LLAMA, Cuboid(2, 2, 2), 8, 32, {"schedule": SUB_BATCHES, "recompute": "full"}),
    "xyz, attention recomputed": (LLAMA, Cuboid(2, 2, 2), 4, 32, {"recompute": "selective"}),
    "xyz in chunks and fp16": (GPT2, Cuboid(2, 2, 2), 2, 32, {"schedule": Schedule(chunks=2), "precision": "fp16"}),
    "x through the sequence": (LLAMA, Cuboid(4, 2, 1), 1, 32, {}),
    "few key heads, retained": (
        LLAMA.replace(kv_heads=2, qk_norm=True),
        Cuboid(1, 2, 4),
        2,
        32,
        {"policy": Policy("retain", "retain")},
    ),
    "replicas, beside": (
        GPT2,
        Cuboid(2, 1, 2, replicas=2),
        8,
        32,
        {"schedule": Schedule(beside=True), "micro_batches": 2},
    ),
}
#: Of several stages, so that no layer can be counted by itself.
PIPE = LLAMA.replace(layers=4, vocab=40, tied=True), Cuboid(1, 2, 1, pipe=2), 4, 32
INTERLEAVED = Schedule(sub_batches=2, pipeline="interleaved", stages=2)


def budget(cuboid: Cuboid) -> dict[str, Any]:
    schedule = suitable_schedule(LLAMA_8B, cuboid, 8, 8192, 2, gpu=True)
    layer, rest = per_layer(LLAMA_8B, cuboid, 8, 8192, schedule=schedule)
    return {"layer": layer.summary, "rest": rest.summary}


def case(name: str) -> dict[str, Any]:
    config, cuboid, batch, seq, options = CASES[name]
    layer, rest = per_layer(config, cuboid, batch, seq, **options)
    return {**layer.summary, "waits": sum((layer.waits + rest.waits).values())}


def order(name: str, ranks: str) -> list[Any]:
    """Of all ranks, or of those at the "ends", first and last of each axis."""
    config, cuboid, batch, seq, options = CASES[name]
    some = range(cuboid.ranks) if ranks == "all" else (0, cuboid.ranks - 1)
    return [count(config, cuboid, batch, seq, rank=rank, **options).launched for rank in some]


def pipe() -> dict[str, Any]:
    """The order of all ranks, and what the first one launches."""
    config, cuboid, batch, seq = PIPE
    options = {"schedule": INTERLEAVED, "micro_batches": 2}
    found = [count(config, cuboid, batch, seq, rank=rank, **options) for rank in range(cuboid.ranks)]  # type: ignore[arg-type]
    return {"launched": [each.launched for each in found], **found[0].summary}


def broken(planted: str) -> dict[str, Any]:
    """The first case with a fault in its attention."""
    attend = Attend._attend

    def faulty(*args: Any) -> Tensor:
        Y = attend(*args)
        if planted == "a host's tensor":
            return Y + torch.ones(Y.shape[-1])
        return Y * float(Y.sum()) if planted == "a value read back" else Y.clone()

    Attend._attend = faulty  # type: ignore[method-assign]
    try:
        return case("x")
    except RuntimeError as error:
        return {"error": str(error)}
    finally:
        Attend._attend = attend  # type: ignore[method-assign]


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "budgets":
        found: Any = {str(k): budget(k) for k in (Cuboid(8, 1, 1), Cuboid(2, 2, 2))}
    elif what == "cases":
        found = {name: case(name) for name in words}
    elif what == "orders":
        found = {name: order(name, words[0]) for name in words[1:]}
    elif what == "pipe":
        found = pipe()
    else:
        found = {planted: broken(planted) for planted in words}
    print(json.dumps(found))
