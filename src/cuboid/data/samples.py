"""Samples of a sequence of tokens, and a rank's slice of each batch.

A sample is `seq` tokens and their targets, the tokens one position later. Samples lie end to end across the ends of
documents, as in GPT's training. Row r of batch t is number t · batch + r of one endless stream. So what a step sees
depends only on the seed and the step: not on the cuboid, its replicas, or where a run was resumed.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from cuboid.data.order import shuffled
from cuboid.data.tokens import Tokens
from cuboid.device import upload
from cuboid.mesh.place import Place

PADDED_TARGET = -100  # what `Loss` ignores
_NONE = -1


class Batch(NamedTuple):
    """[s, b] of int64, padding filled with token 0 and target -100."""

    tokens: Tensor
    targets: Tensor


class Samples:
    """The (len(tokens) - 1) // seq samples of `tokens`, as a stream.

    With a seed the stream is endless, and shuffled differently in each epoch. Without one, for validation, it has every
    sample once, in order, or `most` of them, spread evenly over the text; numbers from `len` on are padding.
    """

    def __init__(self, tokens: Tokens, seq: int, seed: int | None = None, most: int | None = None) -> None:
        if seq < 1:
            raise ValueError(f"seq={seq} must be at least 1")
        if len(tokens) <= seq:
            shorter = f" or seq of at most {len(tokens) - 1}" if len(tokens) > 1 else ""
            raise ValueError(
                f"the text has {len(tokens):,} tokens but a sample of seq={seq} needs {seq + 1:,}, "
                f"the last as a target; use more text{shorter}"
            )
        self.tokens, self.seq, self.seed = tokens, seq, seed
        self._all = (len(tokens) - 1) // seq
        self._count = self._all if most is None else min(most, self._all)

    def __len__(self) -> int:
        return self._count

    def windows(self, numbers: Tensor) -> Tensor:
        """The samples of the text at these numbers of the stream. Padding is negative in both."""
        if self.seed is None:
            return torch.where(numbers < self._count, numbers * self._all // self._count, _NONE)
        return torch.where(numbers < 0, numbers, shuffled(numbers.clamp(min=0), self._count, self.seed))

    def read(self, numbers: Tensor, positions: Tensor) -> Batch:
        """Reads `positions` [s] of samples `numbers` [b] of the stream -> [s, b], and nothing else.

        Negative numbers and positions from `seq` on are padding.
        """
        windows = self.windows(numbers)
        inside = (windows >= 0) & (positions < self.seq)[:, None]
        at = torch.where(inside, windows * self.seq + positions[:, None], 0)  # s b
        return Batch(
            torch.where(inside, self._ids(at), 0),
            torch.where(inside, self._ids(at + 1), PADDED_TARGET),
        )

    def _ids(self, at: Tensor) -> Tensor:
        return torch.from_numpy(self.tokens[at.numpy()].astype("int64"))


class Loader:
    """The batches of one rank, by step."""

    def __init__(self, samples: Samples, place: Place) -> None:
        if (place.start, place.seq) != (0, samples.seq):
            raise ValueError(
                f"the place has positions {place.start} to {place.start + place.seq} but samples have "
                f"0 to {samples.seq}; make both with the same seq"
            )
        self.samples, self._batch, self._device = samples, place.batch, place.positions.device
        # Once, not in each step, because the host waits for the device here.
        self._rows, self._positions = place.samples.cpu(), place.positions.cpu()
        self._ahead: dict[int, Batch] = {}
        self._fixed: list[Tensor] = []  # where batches are prefetched to

    def __call__(self, step: int) -> Batch:
        if step in self._ahead:
            return self._ahead.pop(step)
        both = self._read(step)
        return Batch(*upload(both, torch.empty_like(both, device=self._device)).unbind())

    def prefetch(self, steps: Iterable[int]) -> None:
        """Read these batches, and start copying them to the device, before they are asked for; drop any others. They
        come in the same tensors each time: nothing may still need a batch that was prefetched earlier."""
        self._ahead = {}
        for place, step in enumerate(steps):
            both = self._read(step)
            if place == len(self._fixed):
                self._fixed.append(torch.empty_like(both, device=self._device))
            self._ahead[step] = Batch(*upload(both, self._fixed[place]).unbind())

    def _read(self, step: int) -> Tensor:
        numbers = torch.where(self._rows < self._batch, step * self._batch + self._rows, _NONE)
        return torch.stack(self.samples.read(numbers, self._positions))
