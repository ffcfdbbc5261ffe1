from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import round_up
from cuboid.model.config import ModelConfig

HEAD_ELEMENTS = 1 << 24


def check(config: ModelConfig, cuboid: Cuboid, batch: int, seq: int) -> None:
    """Raise if this model cannot run 2-D parallel with `batch` sequences of `seq` tokens."""
    q = cuboid.y
    if cuboid.z != q:
        raise ValueError(
            f"cuboid {cuboid} has y={q} and z={cuboid.z}, but 2-D parallel needs a square of ranks; "
            f"use y = z, and x for layers of such squares"
        )
    for name in ("hidden", "heads", "kv_heads", "ffn"):
        n = getattr(config, name)
        if n % q:
            smaller = [p for p in range(q - 1, 0, -1) if n % p == 0][:3]
            raise ValueError(
                f"{name}={n} cannot be cut into z={q}; use {name} {round_up(n, q)}, or y = z one of {smaller}"
            )
    config.check_plain("2-D parallel")
    config.check(Cuboid(), batch, seq)
    parts = cuboid.data * cuboid.x * q
    if batch % parts:
        raise ValueError(f"batch={batch} cannot be cut into data·x·y={parts}; use batch {round_up(batch, parts)}")


class TwoD:
    def __init__(self, *a, **k):
        raise NotImplementedError
