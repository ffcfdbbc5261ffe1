"""What cannot work is rejected with a ValueError that says what arrived, what the rule is and what to do.

Ranks all refuse alike, and before any collective: none is left waiting for another.
"""

from collections.abc import Callable
from typing import Any

import pytest

from cuboid.layers.loss import Loss
from cuboid.mesh.cuboid import AXES, Cuboid
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig, RopeScaling
from cuboid.model.cuboid import CuboidParallel, Policy
from cuboid.run.launch import Pool, World

GPT2 = ModelConfig("gpt2", hidden=24, heads=12, vocab=37, context=16)


REFUSED: list[tuple[Callable[[], Any], list[str]]] = [
    (lambda: ModelConfig(vocab=0), ["vocab=0", "at least 1"]),
    (lambda: ModelConfig(layers=2.0), ["layers=2.0", "whole number"]),  # type: ignore[arg-type]
    (lambda: ModelConfig(layers=1 << 17), ["layers=131072", "at most 65536"]),
    (lambda: ModelConfig(hidden=1 << 40, heads=8), ["hidden=1099511627776", "at most 16777216"]),
    (lambda: ModelConfig(ffn=-1), ["ffn=-1", "at least 0"]),
    (lambda: ModelConfig("gpt3"), ["family='gpt3'", "gpt2, llama"]),
    (lambda: ModelConfig(hidden=100, heads=8), ["hidden=100", "heads=8", "96 or 104", "head_dim"]),
    (lambda: ModelConfig(heads=12, hidden=24, kv_heads=5), ["kv_heads=5", "heads=12", "[1, 2, 3, 4, 6, 12]"]),
    (lambda: ModelConfig("llama", heads=8, hidden=24), ["head_dim=3", "odd", "even head_dim"]),
    (lambda: ModelConfig(dropout=1.0), ["dropout=1.0", "below 1"]),
    (lambda: GPT2.check(Cuboid(1, 4, 2), 8, 8), ["heads=12", "y·z=8", "8 or 16", "[6, 4, 3]"]),
    (lambda: GPT2.replace(hidden=25, head_dim=2).check(Cuboid(1, 1, 2), 8, 8), ["hidden=25", "z=2", "24 or 26"]),
    (lambda: GPT2.check(Cuboid(1, 1, 1, replicas=3), 8, 8), ["batch=8", "replicas=3", "6 or 9"]),
    (lambda: GPT2.check(Cuboid(), 0, 8), ["batch=0", "at least 1"]),
    (lambda: ModelConfig(window=-1), ["window=-1", "at least 0"]),
    (
        lambda: ModelConfig("llama", hidden=24, heads=4, window=16).check(Cuboid(), 1, 17),
        ["seq=17", "window=16", "at most 16"],
    ),
    (lambda: RopeScaling(kind="yarn"), ["kind='yarn'", "llama3, linear"]),
    (lambda: GPT2.replace(qk_norm=True).check_plain("1-D parallel"), ["qk_norm=True", "1-D parallel", "cuboid"]),
    (lambda: GPT2.check(Cuboid(), 1, 17), ["seq=17", "context=16", "raise context or shorten seq"]),
    (
        lambda: ModelConfig("llama", hidden=24, heads=4, context=16).check(Cuboid(), 1, 17),
        ["seq=17", "context=16", "raise context or shorten seq"],
    ),
    (lambda: Cuboid(2, 0, 1), ["y=0", "at least 1"]),
    (lambda: Cuboid(2, 1, True), ["z=True", "whole number"]),
    (lambda: Cuboid(order=("x", "y", "z", "z")), ["'x,y,z,z'", "replicas, x, y, z", "once"]),
    (lambda: Policy(activations="keep"), ["activations='keep'", "regather, retain"]),  # type: ignore[arg-type]
    (lambda: Policy(weights=""), ["weights=''", "regather, retain"]),  # type: ignore[arg-type]
    (lambda: Loss(label_smoothing=1.0), ["label_smoothing=1.0", "at least 0 and below 1"]),
    (lambda: Loss(z_loss=-0.1), ["z_loss=-0.1", "not be negative"]),
    (lambda: Pool(0), ["ranks=0", "at least one"]),
]


@pytest.mark.parametrize(("attempt", "words"), REFUSED, ids=[words[0] for _, words in REFUSED])
def test_config_rejects_bad_values(attempt: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as refusal:
        attempt()
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize("text", ["", "2", "2,2", "2,2,2,2", "2,2,a", "2,-1,2", "2.0,1,1", ",,"])
def test_cuboid_parse_rejects_malformed_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="write x,y,z such as 2,2,2") as refusal:
        Cuboid.parse(text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "given"),
    [("1,1,1 pipe=2", {"pipe": 4}), ("1,1,1 replicas=2", {"replicas": 1}), ("1,1,1 pipe=2 pipe=4", {})],
)
def test_cuboid_parse_rejects_a_size_given_twice(text: str, given: dict[str, int]) -> None:
    with pytest.raises(
        ValueError, match=r"(pipe|replicas)=\d, and (pipe|replicas)=\d is given too; leave one of them out"
    ):
        Cuboid.parse(text, **given)
    assert Cuboid.parse("1,1,1 pipe=2", pipe=2) == Cuboid.parse("1,1,1", pipe=2) == Cuboid(pipe=2)


def test_cuboid_parse_rejects_incomplete_axis_order() -> None:
    with pytest.raises(ValueError, match=f"must name each of {', '.join(AXES)} once"):
        Cuboid.parse("1,1,1", order="x,y")


def wrong_world(world: World, mesh: Mesh) -> None:
    Mesh(Cuboid(2, 3, 1), world.rank)


def wrong_heads(world: World, mesh: Mesh) -> None:
    CuboidParallel(GPT2.replace(heads=3, kv_heads=3), mesh)


def wrong_batch(world: World, mesh: Mesh) -> None:
    CuboidParallel(GPT2, mesh).place(batch=3, seq=4)


def wrong_seq(world: World, mesh: Mesh) -> None:
    CuboidParallel(GPT2, mesh).place(batch=2, seq=17)


def refusal_of(world: World, attempt: Callable[[World, Mesh], None]) -> tuple[str, dict[str, Any]]:
    mesh = Mesh(Cuboid(1, 2, 1, replicas=2), world.rank)
    try:
        attempt(world, mesh)
    except ValueError as error:
        return str(error), mesh.ledger.counts()
    finally:
        mesh.close()
    return "not refused", {}


@pytest.mark.parametrize(
    ("attempt", "text"),
    [
        (wrong_world, "cuboid 2,3,1 needs x·y·z·replicas·pipe = 6 ranks but 4 were started; start 6 ranks or"),
        (wrong_heads, "heads=3 cannot be split into y·z=2; use heads 2 or 4"),
        (wrong_batch, "batch=3 cannot be split over replicas=2; use batch 2 or 4"),
        (wrong_seq, "seq=17 is longer than context=16"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_cuboid_parallel_rejects_on_all_ranks_before_collectives(
    attempt: Callable[[World, Mesh], None], text: str, pool: Callable[[int], Pool]
) -> None:
    refusals = pool(4).run(refusal_of, attempt)
    assert len({message for message, _ in refusals}) == 1
    for message, traffic in refusals:
        assert message.startswith(text)
        assert traffic == {}


def test_pool_run_reraises_value_error_of_ranks(pool: Callable[[int], Pool]) -> None:
    with pytest.raises(ValueError, match="3 ranks but 2 were started"):
        pool(2).run(make_mesh, Cuboid(3, 1, 1))


def make_mesh(world: World, cuboid: Cuboid) -> None:
    Mesh(cuboid, world.rank)
