"""A training step on every cuboid of 1, 2, 4, 6, 8 and 12 ranks is the step on one device, to rounding.

There are too many options to try all together on every cuboid. Each cuboid gets one choice of all options,
and on the cuboids with several axes longer than one every pair of values occurs.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from sharded import Case, compare, wrong

from cuboid.layers.loss import Loss
from cuboid.mesh.cuboid import AXES, Cuboid, factorisations
from cuboid.model.config import ModelConfig, RopeScaling
from cuboid.model.cuboid import Policy
from cuboid.run.launch import Pool
from cuboid.step.schedule import OFF, PREFETCH, Schedule

OPTIONS: dict[str, tuple[Any, ...]] = {
    "family": ("gpt2", "llama", "llama3"),
    "tied": (True, False),
    "bias": (True, False, "qkv"),
    "qk_norm": (False, True),
    "dropout": (0.0, 0.2),
    "kv_heads": ("all", "few", "one", "odd"),
    "head_dim": ("hidden/heads", "other"),
    "vocab": (60, 37, 5),  # divides evenly, does not, leaves some ranks without a class
    "ffn": (96, 41),
    "layers": (1, 2),
    "batch": ("2x", "x/2", "one", "three"),
    "seq": (12, 7),
    "activations": ("regather", "retain"),
    "weights": ("regather", "retain"),
    "head": ("whole", "chunks"),
    "recompute": ("none", "selective", "full"),
    "schedule": (OFF, PREFETCH, Schedule(sub_batches=2), Schedule(chunks=2), Schedule(False, sub_batches=2, chunks=3)),
    "smoothing": (0.0, 0.1),
    "z_loss": (0.0, 0.01),
    "ignore": (-100, 2),  # outside the vocabulary, and within
    "order": (AXES, ("z", "replicas", "y", "x"), ("x", "z", "replicas", "y")),
}
Choice = dict[str, Any]

GRIDS = [grid for ranks in (1, 2, 4, 6, 8, 12) for grid in factorisations(ranks)]
GRIDS += [
    Cuboid(x, y, z, data)
    for x, y, z, data in (
        (1, 1, 1, 2),
        (2, 1, 1, 2),
        (1, 2, 1, 2),
        (1, 1, 2, 2),
        (1, 2, 1, 3),
        (2, 2, 1, 2),
        (1, 2, 2, 2),
        (2, 1, 2, 2),
        (3, 1, 2, 2),
        (1, 2, 3, 2),
    )
]


def mixed(grid: Cuboid) -> bool:
    return sum(size > 1 for size in grid.sizes.values()) > 1


def pairs(choice: Choice) -> set[tuple]:
    return set(combinations(choice.items(), 2))


def choices(grids: list[Cuboid]) -> Iterator[Choice]:
    """A choice of all options for each grid: of random ones, that with most pairs no mixed grid has yet."""
    dice, seen = random.Random(0), set[tuple]()
    for grid in grids:
        tries = [{name: dice.choice(values) for name, values in OPTIONS.items()} for _ in range(200)]
        best = max(tries, key=lambda choice: len(pairs(choice) - seen))
        if mixed(grid):
            seen |= pairs(best)
        yield best


def kv_heads(kind: str, heads: int, grid: Cuboid) -> int:
    """All heads; a few, which y can split but y·z cannot; one; or a number that y cannot split."""
    divisors = [n for n in range(2, heads) if heads % n == 0]
    fits = {
        "all": [heads],
        "few": [n for n in divisors if n % grid.y == 0 and n % (grid.y * grid.z)] or [grid.y],
        "one": [1],
        "odd": [n for n in divisors if n % grid.y] or [1],
    }
    return fits[kind][0]


def case_of(grid: Cuboid, choice: Choice, seed: int) -> Case:
    c = choice
    heads = 24 if 12 % (grid.y * grid.z) else 12
    batch = {"2x": 2 * grid.x, "x/2": max(1, grid.x // 2), "one": 1, "three": 3}[c["batch"]]
    config = ModelConfig(
        family="gpt2" if c["family"] == "gpt2" else "llama",
        layers=c["layers"],
        hidden=2 * heads,
        heads=heads,
        kv_heads=kv_heads(c["kv_heads"], heads, grid),
        head_dim=0 if c["head_dim"] == "hidden/heads" else 6,
        vocab=c["vocab"],
        context=15,
        ffn=c["ffn"],
        tied=c["tied"],
        bias=c["bias"] is True,
        qkv_bias=bool(c["bias"]),
        qk_norm=c["qk_norm"],
        dropout=c["dropout"],
        rope_scaling=RopeScaling(original_context=8) if c["family"] == "llama3" else None,
    )
    return Case(
        config,
        Cuboid(grid.x, grid.y, grid.z, grid.replicas, c["order"]),
        batch=batch * grid.replicas,
        seq=c["seq"],
        policy=Policy(c["activations"], c["weights"], 40 if c["head"] == "chunks" else 1 << 24),
        loss=Loss(c["ignore"], c["smoothing"], c["z_loss"]),
        dropout=7 if c["dropout"] else None,
        recompute=c["recompute"],
        seed=seed,
        schedule=c["schedule"],
    )


CHOICES = list(choices(GRIDS))
CASES = [case_of(grid, choice, seed) for seed, (grid, choice) in enumerate(zip(GRIDS, CHOICES, strict=True))]
# where x is longer than the batch it cuts the sequence too
CASES += [
    replace(case_of(Cuboid(x, y, z), CHOICES[batch], seed=batch), batch=batch)
    for batch, x, y, z in ((1, 2, 2, 1), (2, 4, 1, 2), (3, 2, 1, 2), (1, 4, 2, 1), (1, 2, 2, 2))
]


def slow(case: Case) -> bool:
    """One axis alone hides most mistakes, and of twelve ranks those with three axes find what those with two do."""
    long = sum(size > 1 for size in case.cuboid.sizes.values())
    return case.cuboid.ranks > 2 and long < (2 if case.cuboid.ranks < 12 else 3)


def name_of(case: Case) -> str:
    c = case.config
    return f"{case.cuboid}-{c.family}-kv{c.kv_heads}-b{case.batch}-s{case.seq}".replace(" × ", "-")


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name_of(case), marks=[pytest.mark.slow] * slow(case)) for case in CASES]
)
def test_cuboid_parallel_step_matches_serial(case: Case, pool: Callable[[int], Pool]) -> None:
    errors = pool(case.cuboid.ranks).run(compare, case)[0]
    assert not wrong(errors), case


def test_cases_cover_every_option_pair_on_mixed_cuboids() -> None:
    seen = set[tuple]()
    for grid, choice in zip(GRIDS, CHOICES, strict=True):
        if mixed(grid):
            seen |= pairs(choice)
    wanted = {((a, one), (b, other)) for a, b in combinations(OPTIONS, 2) for one in OPTIONS[a] for other in OPTIONS[b]}
    assert seen == wanted


@pytest.mark.parametrize(
    "happens",
    [
        pytest.param(lambda c, g: c.kv_heads % g.y and c.kv_heads > 1, id="kv_heads that y cannot split"),
        pytest.param(lambda c, g: c.kv_heads % g.y == 0 != c.kv_heads % (g.y * g.z), id="kv_heads that z cannot"),
        pytest.param(lambda c, g: c.vocab < g.x * g.y, id="ranks without a class"),
        pytest.param(lambda c, g: c.ffn % g.y and g.z > 1, id="an inner size that y cannot split"),
    ],
)
def test_cases_cover_sizes_that_do_not_divide(happens: Callable[[ModelConfig, Cuboid], bool]) -> None:
    assert any(happens(case.config, case.cuboid) for case in CASES)
