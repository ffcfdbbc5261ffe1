"""Ranks for the tests, forked once per count and used by every test that asks; and the command line.

Backward runs in those ranks alone, never in this process: what autograd leaves behind does not survive a fork.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stress
import torch
from hypothesis import settings
from texts import write_tokenizer
from tiny import Cuboid, Said

from cuboid.cli import main
from cuboid.run.launch import Pool, World

torch.set_num_threads(1)


def product_in_bf16_is_refused() -> bool:
    """Some virtual machines show AMX and do not have it: the process then ends at its first product in bf16."""
    child = os.fork()
    if child == 0:
        half = torch.ones(64, 64, dtype=torch.bfloat16)
        torch.mm(half, half)
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0


if product_in_bf16_is_refused():  # read at the first of oneDNN's products, here and in ranks
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

settings.register_profile("stable", derandomize=True, deadline=None)  # the same examples on any machine
settings.load_profile("stable")
stress.delay_ranks()


#: Pools that stay up. Ranks that only wait still cost a hundredth of a core each; new ones start in tenths of a second.
MOST_POOLS = 2


def tidily(world: World, fn: Callable[..., Any], *args: Any) -> Any:
    """A group keeps threads awake until it is collected: models and their meshes refer to each other."""
    try:
        return fn(world, *args)
    finally:
        gc.collect()


class ReusedPool(Pool):
    closed = False

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return super().run(tidily, fn, *args)

    def close(self, kill: bool = False) -> None:
        if not self.closed:
            super().close(kill)
        self.closed = True


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Pool]]:
    """pool(P): P ranks, reused unless a failure has ended them or other numbers of ranks were needed."""
    pools: dict[int, ReusedPool] = {}

    def of(ranks: int) -> Pool:
        found = pools.pop(ranks, None)
        if found is None or found.closed:
            found = ReusedPool(ranks)
        pools[ranks] = found  # the last used is last
        for idle in list(pools)[:-MOST_POOLS]:
            pools.pop(idle).close()
        return found

    gc.freeze()  # ranks need not scan objects that exist before the fork
    yield of
    for each in pools.values():
        each.close()


@pytest.fixture
def cuboid(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cuboid:
    """The command in this process, which spares the seconds that importing torch takes, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["cuboid", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return Said(int(ended.value.code or 0), out, err)

    return run


@pytest.fixture
def bpe(tmp_path: Path) -> Path:
    folder = tmp_path / "a tokenizer"
    folder.mkdir()
    return write_tokenizer(folder)
