"""A shuffle that is computed, not stored: the place of index i depends only on the seed, the epoch and i.

A Feistel network permutes the numbers of b bits, 2^(b-1) < n <= 2^b. Each round adds (xor) a hash of one half of the
bits to the other half. The same addition undoes it, so it is a permutation for any hash. A number outside [0, n) goes
through the network again until it is inside ("cycle walking"): fewer than two passes on average.
"""

import torch
from torch import Tensor

from cuboid.layers.randomness import key_of, mix

_ROUNDS = 4


def shuffled(index: Tensor, n: int, seed: int) -> Tensor:
    """Returns the places in [0, n) of these indices of an endless stream. Each epoch, n indices, has every place
    once."""
    bits = (n - 1).bit_length()
    low = bits - bits // 2
    high_mask, low_mask = (1 << bits // 2) - 1, (1 << low) - 1
    epoch, place = index // n, index % n
    keys = [mix(epoch + key_of(seed, f"order.{r}")) for r in range(2 * _ROUNDS)]
    walking = torch.ones_like(place, dtype=torch.bool)
    while walking.any():
        high, rest = place >> low, place & low_mask
        for key_high, key_low in zip(keys[::2], keys[1::2], strict=True):
            high = high ^ (mix(rest + key_high) & high_mask)
            rest = rest ^ (mix(high + key_low) & low_mask)
        place = torch.where(walking, high << low | rest, place)
        walking = place >= n
    return place
