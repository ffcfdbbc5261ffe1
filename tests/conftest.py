"""Ranks for the tests: forked once per count, used by every test that asks.

Backward runs in those ranks alone, never in this process: what autograd leaves behind does not survive a
fork.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings

from cuboid.launch import Pool

torch.set_num_threads(1)
settings.register_profile("stable", derandomize=True, deadline=None)  # the same examples on any machine
settings.load_profile("stable")


class ReusedPool(Pool):
    closed = False

    def close(self, kill: bool = False) -> None:
        super().close(kill)
        self.closed = True


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Pool]]:
    """pool(P): P ranks, the same ones for the whole session unless a failure has ended them."""
    pools: dict[int, ReusedPool] = {}

    def of(ranks: int) -> Pool:
        if ranks not in pools or pools[ranks].closed:
            pools[ranks] = ReusedPool(ranks)
        return pools[ranks]

    yield of
    for each in pools.values():
        if not each.closed:
            each.close()
