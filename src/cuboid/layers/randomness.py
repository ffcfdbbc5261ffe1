"""Random numbers by global index: the value at an index depends on the seed, the tensor's name and the index alone.

So the same seed is the same model, and the same dropout, on every cuboid. Only integer arithmetic and table look-ups
are used, because a transcendental function may round differently at the edge of a slice.
"""

import hashlib

import torch
from torch import Tensor

_GOLDEN, _MIX1, _MIX2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # splitmix64, as signed
_TABLE_BITS = 16
_CHUNK = 1 << 16  # values at a time: small enough for the cache, and a build needs little more than its shards


def key_of(seed: int, name: str) -> int:
    """A 63-bit key for one tensor."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Keys(dict[str, Tensor]):
    """By name the key of a seed, on the device. Tensors stay the same when another seed is written into them, so that
    what reads them can be repeated as it is."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        self._seed, self._device = seed, device

    def __missing__(self, name: str) -> Tensor:
        self[name] = torch.full((), key_of(self._seed, name), device=self._device)
        return self[name]

    def write(self, seed: int) -> None:
        self._seed = seed
        for name, key in self.items():
            key.fill_(key_of(seed, name))


def _shift(h: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (h >> bits) & ((1 << (64 - bits)) - 1)


def mix(h: Tensor) -> Tensor:
    """splitmix64's finaliser: every bit of the result depends on every bit of h."""
    h = (h ^ _shift(h, 30)) * _MIX1
    h = (h ^ _shift(h, 27)) * _MIX2
    return h ^ _shift(h, 31)


def normal_quantiles() -> Tensor:
    """The standard normal at the middles of 2^16 equally likely intervals, scaled to a variance of exactly one.

    No module keeps it: a tensor kept from a real run could not be used in a dry one.
    """
    n = 1 << _TABLE_BITS
    p = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    z = torch.special.ndtri(p)
    return z / z.square().mean().sqrt()


def normal(
    key: int, shape: tuple[int, ...], ranges: tuple[tuple[int, int], ...], std: float, quantiles: Tensor | None = None
) -> Tensor:
    """The slice `ranges` of a normal tensor of the global `shape`, in fp64 on the CPU, without making the rest.

    `quantiles`: those of `normal_quantiles`, which take longer than a small tensor's values."""
    (top, bottom), *rest = ranges
    columns = torch.zeros(1, dtype=torch.int64)
    for n, (start, stop) in zip(shape[1:], rest, strict=True):
        columns = (columns[:, None] * n + torch.arange(start, stop)).reshape(-1)
    width = torch.Size(shape[1:]).numel()
    slice_shape = tuple(stop - start for start, stop in ranges)
    out = torch.empty(bottom - top, columns.numel(), dtype=torch.float64)
    step = max(1, _CHUNK // max(1, columns.numel()))
    table = (normal_quantiles() if quantiles is None else quantiles) * std
    for row in range(top, bottom, step):
        rows = torch.arange(row, min(row + step, bottom))
        index = rows[:, None] * width + columns
        out[row - top : row - top + rows.numel()] = table[_shift(mix(index * _GOLDEN + key), 64 - _TABLE_BITS)]
    return out.view(slice_shape)


def dropout(x: Tensor, p: float, key: int | Tensor, index: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Drop elements of x [s, b, d] by their global indices (positions, samples, features). No mask is kept."""
    if p == 0:
        return x
    s, b, d = index
    row = mix((s[:, None] << 32 | b[None, :]) * _GOLDEN + key)
    h = mix(row[..., None] + d * _GOLDEN)
    return x * ((_shift(h, 40) >= round(p * (1 << 24))).to(x.dtype) / (1 - p))
