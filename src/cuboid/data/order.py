"""A shuffle that is computed, not stored: where index i goes depends on the seed, the epoch and i alone.

A Feistel network permutes the numbers of b bits, 2^(b-1) < n <= 2^b. Each of its rounds adds (xor) to one
half of the bits a hash of the other half, which the same addition undoes: so it is a permutation, whatever
the hash. A number that leaves [0, n) is sent through again until it is back ("cycle walking"): fewer than two
passes on average.
"""

import torch
from torch import Tensor

from cuboid.layers.randomness import key_of, mix

_ROUNDS = 4


def shuffled(index: Tensor, n: int, seed: int) -> Tensor:
    """The places in [0, n) of indices 0, 1, 2, … without end. An epoch, n of them, has every place once."""
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
