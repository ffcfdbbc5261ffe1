"""Breakages of the core, put in on purpose: its tests must notice every one of them.

Most do not show where only one axis is longer than one. That is why the suite runs on mixed cuboids, and why the biases
it runs with are not zero. Which are noticed is remembered in pytest's cache as long as nothing changes, so a run that
was broken off goes on where it was.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import test_blocks
import test_cost
import test_frozen
import test_op
import test_own_model
import test_pipeline
import test_precision
import test_property
import test_reference
import test_schedule
import test_step
from mutants import MUTANTS, Mutant, edited
from ranks import ReusedPool
from sharded import Case, compare, wrong

from cuboid.mesh.cuboid import Cuboid
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import SPECS, Policy
from cuboid.run.launch import Pool, World
from cuboid.step.schedule import OFF, PREFETCH, Schedule

pytestmark = pytest.mark.slow

Pools = Callable[[int], Pool]
Check = Callable[[Pools], None]
GPT2 = ModelConfig("gpt2", layers=2, hidden=24, heads=12, vocab=37, context=16, ffn=41, dropout=0.1)
LLAMA = ModelConfig("llama", layers=2, hidden=24, heads=12, kv_heads=2, vocab=37, ffn=40, qk_norm=True)
TIMEOUT = 20.0  # seconds: ranks that wait for each other in vain

VALUES = [
    Case(GPT2, Cuboid(2, 2, 1), 4, 12, schedule=Schedule(sub_batches=2)),
    Case(LLAMA, Cuboid(1, 2, 2), 4, 12, schedule=Schedule(sub_batches=2, beside=True), micro_batches=2),
    Case(GPT2, Cuboid(1, 2, 2), 2, 12, dropout=3, recompute="full", schedule=Schedule(chunks=2)),
    Case(LLAMA.replace(kv_heads=12), Cuboid(2, 1, 2), 1, 16, Policy("retain", "retain", 40), schedule=OFF),
    Case(LLAMA, Cuboid(1, 2, 1, replicas=2), 4, 7, recompute="selective", micro_batches=2),
    Case(LLAMA.replace(kv_heads=12), Cuboid(1, 2, 3), 1, 12, schedule=Schedule(chunks=4)),
    Case(LLAMA.replace(vocab=38), Cuboid(3, 1, 1), 3, 12, schedule=PREFETCH),
]


def same_values(case: Case, pools: Pools) -> None:
    assert not wrong(pools(case.cuboid.ranks).run(compare, case)[0], 1e-6)


def alone(test: Callable[[], None], pools: Pools) -> None:
    test()


COSTS = [case for case in test_cost.CASES if case.cuboid in (Cuboid(2, 2, 1), Cuboid(1, 2, 2))]

#: The core's tests, those that notice most first.
CHECKS: dict[str, Check] = {
    **{f"values of {case.config.family} on {case.cuboid}": partial(same_values, case) for case in VALUES},
    "combinators": test_op.test_combinators_match_plain_autograd,
    "one device": partial(test_reference.test_serial_step_matches_plain_autograd, test_reference.CASES[0]),
    "lasting weights": partial(alone, test_op.test_gathered_lasting_weight_does_not_hold_what_was_gathered_with_it),
    "in flight": partial(alone, test_op.test_sums_keep_few_gradients_in_flight),
    "launch order": test_schedule.test_schedule_sets_collective_launch_order,
    "beside": test_schedule.test_schedule_beside_interleaves_forward_with_backward,
    "X gathered early": test_schedule.test_product_backward_gathers_next_input_early,
    "dW when asked for": test_schedule.test_product_makes_late_gradients_when_settled,
    "interleave": partial(alone, test_schedule.test_interleave_launches_all_sub_batches_before_waiting),
    "reach": partial(alone, test_schedule.test_interleave_keeps_sub_batches_close),
    "launches of all ranks": partial(
        alone, test_property.test_cuboid_parallel_launches_alike_where_ranks_pick_unequal_key_heads
    ),
    "launches of ranks without words": partial(
        alone, test_property.test_cuboid_parallel_launches_alike_where_ranks_own_no_words
    ),
    "clock": partial(alone, test_schedule.test_clock_paces_a_link_by_the_forward),
    "messages waited for": partial(alone, test_schedule.test_interleave_waits_for_messages_launched_before),
    "memory": partial(alone, test_schedule.test_schedule_prefetch_memory_is_at_most_two_layers),
    "second backward": test_step.test_model_second_backward_says_why_not,
    "hooks": test_step.test_model_gradient_hooks_are_called_once_per_step,
    "optimizer": partial(test_step.test_model_parameters_train_as_serial_with_torch_optimizer, Cuboid(2, 2, 1)),
    "copies": partial(test_frozen.test_model_deepcopy_is_independent, Cuboid(2, 2, 1)),
    "frozen": partial(
        test_frozen.test_model_frozen_parameters_get_no_gradient_and_change_no_other, Cuboid(2, 2, 1), PREFETCH
    ),
    **{
        f"orders on {shape}": partial(test_step.test_model_play_gives_same_gradients_in_any_order, shape, setting)
        for shape, setting in zip(test_step.MIXED, test_step.SETTINGS, strict=True)
    },
    "a pipeline": partial(test_pipeline.test_pipeline_step_matches_one_device, test_pipeline.FEW[0]),
    "a pipeline of sub-batches": partial(test_pipeline.test_pipeline_step_matches_one_device, test_pipeline.FEW[3]),
    "own model": lambda pools: test_own_model.test_own_model_matches_serial(
        Cuboid(1, 2, 2), Schedule(sub_batches=2), True, ""
    ),
    "encoder": partial(test_blocks.test_encoder_loss_and_gradients_match_serial, Cuboid(1, 2, 1, replicas=2), 2, 7),
    **{
        f"sums of bf16 {add.__name__}": partial(test_precision.test_gathered_adds_up_bf16_gradients_of_many, add)
        for add in (test_precision.of_sub_batches, test_precision.of_chunks)
    },
    "sums over ranks of bf16": test_precision.test_reduce_scatter_of_bf16_sums_in_fp32,
    "fp16": partial(
        test_precision.test_head_gradient_of_fp16_is_finite_and_close_for_frequent_word, Cuboid(1, 2, 1), True
    ),
    **{
        f"counts of {test_cost.id_of(case)}": partial(
            alone, partial(test_cost.test_step_cost_matches_every_measured_count, case)
        )
        for case in COSTS
    },
}


@contextmanager
def fresh_pools() -> Iterator[Pools]:
    """Of ranks forked now, with what is broken."""
    pools: dict[int, ReusedPool] = {}

    def of(ranks: int) -> Pool:
        if ranks not in pools or pools[ranks].closed:
            pools[ranks] = ReusedPool(ranks, timeout=TIMEOUT)
        return pools[ranks]

    try:
        yield of
    finally:
        for pool in pools.values():
            pool.close(kill=True)


def noticed_by(broken: AbstractContextManager[Any]) -> str:
    """The first check that fails; "" where none does."""
    with broken, fresh_pools() as pools:
        for name, check in CHECKS.items():
            try:
                check(pools)
            except Exception as error:  # any exception is noticed
                return f"{name}: {type(error).__name__}"
    return ""


@cache
def state_of_sources() -> str:
    root, found = Path(__file__).parents[1], blake2b(digest_size=8)
    for path in sorted([*root.glob("src/**/*.py"), *root.glob("tests/*.py")]):
        found.update(path.read_bytes())
    return found.hexdigest()


def remembered(config: pytest.Config, what: str, find: Callable[[], str]) -> str:
    """What was found, or will be, unless the sources change."""
    key = "cuboid/mutants/" + re.sub(r"\W+", "_", what)
    assert config.cache is not None
    state, found = config.cache.get(key, ("", ""))
    if state != state_of_sources():
        found = find()
        config.cache.set(key, (state_of_sources(), found))
    return found


def test_core_checks_pass_where_nothing_is_broken() -> None:
    assert noticed_by(nullcontext()) == ""


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.what for mutant in MUTANTS])
def test_core_checks_notice_injected_bug(mutant: Mutant, pytestconfig: pytest.Config) -> None:
    assert remembered(pytestconfig, mutant.what, lambda: noticed_by(edited(mutant)))


# How parameters lie

SPEC_MUTANTS: dict[str, tuple[str, Any]] = {
    "weights split by x, then y, but gathered as if by y, then x": ("into.weight", ((("x", "y"), ("z",)), ())),
    "the same in the embedding": ("table", ((("x", "y"), ("z",)), ())),
    "every y-rank keeps the norm's gradient of its own tokens": ("norm", ((("z", "x"),), ())),
    "every z-rank keeps the gradient of its own heads": ("head_norm", (((),), ("x", "y"))),
}


def misplaced(what: str) -> AbstractContextManager[Any]:
    role, spec = SPEC_MUTANTS[what]
    return patch.dict(SPECS, {role: spec})


@pytest.mark.parametrize("what", SPEC_MUTANTS)
def test_core_checks_notice_misplaced_parameters(what: str, pytestconfig: pytest.Config) -> None:
    assert remembered(pytestconfig, what, lambda: noticed_by(misplaced(what)))


def compare_misplaced(world: World, what: str, case: Case) -> dict[str, float]:
    with misplaced(what):
        return compare(world, case)


INTERLEAVED, _, NORM_NOT_SUMMED, _ = SPEC_MUTANTS


@pytest.mark.parametrize(
    ("what", "grid"),
    [
        *((INTERLEAVED, grid) for grid in ((4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 1, 2), (1, 2, 2))),
        (NORM_NOT_SUMMED, (2, 1, 2)),  # nothing is replicated but over y
    ],
)
def test_sharded_compare_passes_where_bug_has_no_effect(what: str, grid: tuple[int, ...], pool: Pools) -> None:
    """The mutants break what they say they break, and nothing else."""
    case = Case(GPT2, Cuboid(*grid), 4, 12)
    assert not wrong(pool(case.cuboid.ranks).run(compare_misplaced, what, case)[0], 1e-6)
