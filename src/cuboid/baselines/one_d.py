from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import round_up
from cuboid.model.config import ModelConfig

HEAD_ELEMENTS = 1 << 24


def check(config: ModelConfig, cuboid: Cuboid, batch: int, seq: int) -> None:
    """Raise if this model cannot run 1-D parallel with `batch` sequences of `seq` tokens."""
    if cuboid.x > 1 or cuboid.z > 1:
        raise ValueError(
            f"cuboid {cuboid} has x={cuboid.x} and z={cuboid.z}, but 1-D parallel cuts over y alone; "
            f"use x=1, z=1 and y={cuboid.block}"
        )
    config.check_plain("1-D parallel")
    config.check(cuboid, batch, seq)
    y, heads = cuboid.y, config.heads
    fits = {"kv_heads": [n for n in range(y, heads + 1, y) if heads % n == 0], "ffn": [round_up(config.ffn, y)]}
    for name, values in fits.items():
        n = getattr(config, name)
        if n % y:
            smaller = [p for p in range(y - 1, 0, -1) if n % p == 0 and heads % p == 0][:3]
            raise ValueError(
                f"{name}={n} cannot be cut into y={y}; use {name} {' or '.join(map(str, values))}, "
                f"or a cuboid with y one of {smaller}"
            )


class OneD:
    def __init__(self, *a, **k):
        raise NotImplementedError
