"""Bugs that others shipped, put in on purpose: the comparison of `sharded.py` must see every one of them.

Most of them do not show where only one axis is longer than one. That is why the suite runs on mixed cuboids, and why
the biases it runs with are not zero.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from sharded import Case, compare, wrong
from torch import Tensor

from cuboid.comm.flight import Steps, landed
from cuboid.layers import product
from cuboid.layers.product import Linear, Out
from cuboid.mesh.cuboid import Cuboid
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import SPECS, CuboidParallel
from cuboid.run.launch import Pool, RankError, World
from cuboid.step import weights
from cuboid.step.weights import Bucket, Weights

pytestmark = pytest.mark.slow

GPT2 = ModelConfig("gpt2", layers=1, hidden=24, heads=12, vocab=37, context=16, ffn=40)
LLAMA = ModelConfig("llama", layers=1, hidden=24, heads=12, kv_heads=2, vocab=37, ffn=40)


def interleaved() -> AbstractContextManager[Any]:
    """Weights cut by x, then y, but gathered as if by y, then x."""
    return patch.dict(SPECS, {"into.weight": ((("x", "y"), ("z",)), ())})


def table_interleaved() -> AbstractContextManager[Any]:
    """The same in the embedding."""
    return patch.dict(SPECS, {"table": ((("x", "y"), ("z",)), ())})


def norm_not_summed() -> AbstractContextManager[Any]:
    """Every y-rank keeps the norm's gradient of its own tokens."""
    return patch.dict(SPECS, {"norm": (SPECS["norm"][0], ())})


def head_norm_not_summed() -> AbstractContextManager[Any]:
    """Every z-rank keeps the gradient of its own heads."""
    return patch.dict(SPECS, {"head_norm": (SPECS["head_norm"][0], ("x", "y"))})


def replicas_not_summed() -> AbstractContextManager[Any]:
    """No sum over the axes a parameter is replicated over, `data` among them."""

    return patch.object(weights, "all_reduce", lambda x, axis: landed(x))


def axes_swapped() -> AbstractContextManager[Any]:
    """The way out of attention plays y for z."""

    def out_of(self: CuboidParallel, X: Tensor, W: Weights, linear: Linear, heads: int = 0) -> Steps:
        k, n = (self.mesh.z, self.mesh.y) if heads else (self.mesh.y, self.mesh.z)
        (Y,) = yield from self._product(X, W, [Out([linear])], k, n, blocks=n.size if heads else 1)
        return Y

    return patch.object(CuboidParallel, "out_of", out_of)


def heads_out_of_order() -> AbstractContextManager[Any]:
    """Blocks of heads gathered over z are taken for one another."""
    multiply = product.multiply
    return patch.object(product, "multiply", lambda X, W, Y: multiply(X.flip(0), W, Y))


@contextmanager
def keys_of_others() -> Iterator[None]:
    """Key heads picked for the queries of another z-rank."""
    few_heads = CuboidParallel._few_heads

    def wrong_heads(self: CuboidParallel, k: Tensor, v: Tensor) -> Steps:
        mine = self.mesh.z
        self.mesh.z = replace(mine, index=mine.size - 1 - mine.index)
        found = yield from few_heads(self, k, v)
        self.mesh.z = mine
        return found

    with patch.object(CuboidParallel, "_few_heads", wrong_heads):
        yield


def bias_of_others() -> AbstractContextManager[Any]:
    """Every z-rank adds the first block of the bias to its heads."""
    bias_of = product.bias_of

    def first(out: Out, call: product.Product, values: Any) -> Tensor | None:
        return bias_of(out, replace(call, k=replace(call.k, index=0)), values)

    return patch.object(product, "bias_of", first)


def second_use_lost() -> AbstractContextManager[Any]:
    """A weight used twice keeps one gradient of the two."""
    reduce = Bucket.reduce

    def once(self: Bucket, gradients: Sequence[Tensor | None]) -> None:
        if not self._reducing:
            reduce(self, gradients)

    return patch.object(Bucket, "reduce", once)


Mutant = Callable[[], AbstractContextManager[Any]]


def compare_mutant(world: World, mutant: Mutant, case: Case) -> dict[str, float]:
    with mutant():
        return compare(world, case)


def seen(mutant: Mutant, config: ModelConfig, cuboid: Cuboid, pool: Callable[[int], Pool]) -> bool:
    """Whether the comparison notices: by a difference, or because ranks cannot even agree."""
    try:
        errors = pool(cuboid.ranks).run(compare_mutant, mutant, Case(config, cuboid, batch=4, seq=12))[0]
    except (ValueError, RankError):
        return True
    return bool(wrong(errors, 1e-6))


def name_of(value: Any) -> str:
    return getattr(value, "__name__", None) or getattr(value, "family", None) or ",".join(map(str, value))


@pytest.mark.parametrize(
    ("mutant", "config", "grid"),
    [
        (interleaved, GPT2, (2, 2, 1)),
        (interleaved, LLAMA, (2, 2, 2)),
        (table_interleaved, GPT2, (2, 2, 1)),
        (norm_not_summed, GPT2, (2, 2, 1)),
        (norm_not_summed, LLAMA, (1, 2, 2)),
        (head_norm_not_summed, LLAMA.replace(qk_norm=True), (1, 2, 2)),
        (replicas_not_summed, LLAMA, (1, 2, 2)),
        (replicas_not_summed, GPT2, (2, 1, 1, 2)),
        (axes_swapped, GPT2, (1, 2, 2)),
        (axes_swapped, LLAMA, (2, 2, 2)),
        (heads_out_of_order, GPT2, (1, 2, 2)),
        (heads_out_of_order, LLAMA, (2, 1, 2)),
        (keys_of_others, LLAMA, (1, 1, 4)),
        (keys_of_others, LLAMA.replace(kv_heads=3), (1, 2, 2)),
        (bias_of_others, GPT2, (1, 2, 2)),
        (second_use_lost, GPT2, (2, 2, 1)),
        (second_use_lost, LLAMA.replace(tied=True), (1, 2, 2)),
    ],
    ids=name_of,
)
def test_sharded_compare_detects_injected_bug(
    mutant: Mutant, config: ModelConfig, grid: tuple[int, ...], pool: Callable[[int], Pool]
) -> None:
    assert seen(mutant, config, Cuboid(*grid), pool)


@pytest.mark.parametrize("grid", [(4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 1, 2), (1, 2, 2)], ids=name_of)
def test_sharded_compare_needs_x_and_y_split_to_see_interleaving(
    grid: tuple[int, ...], pool: Callable[[int], Pool]
) -> None:
    assert not seen(interleaved, GPT2, Cuboid(*grid), pool)


@pytest.mark.parametrize(
    ("mutant", "config", "grid"),
    [
        (norm_not_summed, GPT2, (2, 1, 2)),  # nothing is replicated but over y
        (replicas_not_summed, GPT2, (4, 1, 1)),
        (heads_out_of_order, GPT2, (2, 2, 1)),  # one block of heads
        (bias_of_others, GPT2, (2, 2, 1)),
        (second_use_lost, GPT2.replace(tied=False), (2, 2, 1)),
    ],
    ids=name_of,
)
def test_sharded_compare_passes_where_bug_has_no_effect(
    mutant: Mutant, config: ModelConfig, grid: tuple[int, ...], pool: Callable[[int], Pool]
) -> None:
    """The mutants break what they say they break, and nothing else."""
    assert not seen(mutant, config, Cuboid(*grid), pool)
