"""64 ranks, each a process: the paper's cube and the cuboid that moves less than it; 2-D and 2.5-D as large."""

from collections.abc import Callable, Iterator

import pytest
from sharded import Case, compare, on_cuboid, on_squares, wrong

from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.mesh import Mesh
from cuboid.model.config import ModelConfig
from cuboid.model.parallel import Parallel
from cuboid.run.launch import Pool

LLAMA = ModelConfig("llama", layers=1, hidden=20, heads=16, kv_heads=8, head_dim=2, vocab=37, ffn=44)
SQUARE = ModelConfig("llama", layers=1, hidden=64, heads=8, vocab=61, ffn=64)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    with Pool(64) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "case"),
    [
        (on_cuboid, Case(LLAMA, Cuboid(4, 4, 4), batch=4, seq=10)),
        (on_cuboid, Case(LLAMA, Cuboid(8, 4, 2), batch=4, seq=10)),
        (on_squares, Case(SQUARE, Cuboid(1, 8, 8), batch=8, seq=6)),
        (on_squares, Case(SQUARE, Cuboid(4, 4, 4), batch=16, seq=6)),
    ],
    ids=["cube", "cuboid", "2-D", "2.5-D"],
)
def test_parallel_step_on_64_ranks_matches_one_device(
    parallel: Callable[[Case, Mesh], Parallel], case: Case, ranks: Pool
) -> None:
    assert not wrong(ranks.run(compare, case, parallel)[0])
