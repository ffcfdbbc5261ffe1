"""64 ranks, each a process: the paper's cube, and the cuboid that moves less than it."""

from sharded import Case, compare, wrong

from cuboid.config import ModelConfig
from cuboid.launch import Pool
from cuboid.mesh import Cuboid

LLAMA = ModelConfig("llama", layers=1, hidden=20, heads=16, kv_heads=8, head_dim=2, vocab=37, ffn=44)


def test_step_on_64_ranks_is_the_step_on_one_device() -> None:
    with Pool(64) as pool:
        for cuboid in (Cuboid(4, 4, 4), Cuboid(8, 4, 2)):
            assert not wrong(pool.run(compare, Case(LLAMA, cuboid, batch=4, seq=10))[0]), cuboid
