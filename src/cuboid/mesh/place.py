"""Which tokens of a batch a rank works on."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from cuboid.comm.axis import Axis


class Index(NamedTuple):
    """Global indices of a rank's [s, b, d]: positions, samples, features."""

    s: Tensor
    b: Tensor
    d: Tensor


@dataclass(frozen=True)
class Place:
    """The tokens of a batch that a rank works on: `positions` of each of `samples`. Made by `parallel.place`.

    Args:
        batch: The global number of samples; samples from it on are padding.
        seq: The global length of a sequence; positions from `start` + `seq` on are padding.
        start: The position of the first token.
        samples: This rank's samples, `[b]`.
        positions: This rank's positions, `[s]`.
        context: The axis over which the sequence is split; of size 1 if it is not.
        residual: Positions, samples and features of this rank's shard of the residual stream.
        logits: Positions, samples and classes of this rank's shard of the logits.
        turn: cos and sin of rotary positions.
    """

    batch: int
    seq: int
    start: int
    samples: Tensor
    positions: Tensor
    context: Axis
    residual: Index  # of the residual stream
    logits: Index
    turn: tuple[Tensor, Tensor] | None = None  # cos and sin of rotary positions
    _turns: dict[torch.dtype, tuple[Tensor, Tensor]] = field(default_factory=dict)  # the same in other precisions

    def rotation(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """cos and sin of rotary positions, for features of `dtype`: in fp32 or better."""
        if self.turn is not None and dtype not in self._turns:
            cos, sin = (each.to(torch.promote_types(dtype, torch.float32)) for each in self.turn)
            self._turns[dtype] = cos, sin
        return self._turns.get(dtype)

    def sub_batches(self, count: int) -> list["Place"]:
        """Splits this rank's samples into `count` equal sub-batches; into one if they cannot be split evenly."""
        if count == 1 or len(self.samples) % count:
            return [self]
        chunks = (each.chunk(count) for each in (self.samples, self.residual.b, self.logits.b))
        return [
            replace(self, samples=samples, residual=self.residual._replace(b=b), logits=self.logits._replace(b=rows))
            for samples, b, rows in zip(*chunks, strict=True)
        ]

    def check(self, inputs: Tensor, targets: Tensor | None, features: bool) -> None:
        """Raise ValueError unless `inputs` and `targets` have the shapes of this rank's features (`features`) or token
        ids."""
        ids, (s, b, d) = [len(self.positions), len(self.samples)], map(len, self.residual)
        wanted, take = ([s, b, d], "take_features") if features else (ids, "take")
        if list(inputs.shape) != wanted:
            raise ValueError(
                f"inputs have shape {list(inputs.shape)}, but this rank's slice, sequence first, is {wanted}; take it "
                f"with place.{take} from the unsharded batch, [{self.batch}, {self.seq}{', d' * features}]"
            )
        if targets is not None and list(targets.shape[:2]) not in (ids, [s, b]):
            raise ValueError(
                f"targets have shape {list(targets.shape)}, but inputs {wanted}, sequence first; take both from "
                "the unsharded batch with the same place"
            )

    def take_features(self, whole: Tensor, fill: float = 0.0) -> Tensor:
        """`whole` [batch, seq, d] -> this rank's shard of the residual stream, [s, b, d], padding filled with
        `fill`."""
        s, b, d = self.residual
        rows, columns = b.clamp(max=self.batch - 1), (s - self.start).clamp(max=self.seq - 1)
        inside = (s < self.start + self.seq)[:, None] & (b < self.batch)
        return torch.where(inside[..., None], whole[rows][:, columns][..., d].transpose(0, 1), fill)

    def take(self, whole: Tensor, fill: int) -> Tensor:
        """`whole` [batch, seq] -> this rank's [s, b], padding filled with `fill`."""
        columns, rows = self.positions - self.start, self.samples
        mine = whole[rows.clamp(max=self.batch - 1)][:, columns.clamp(max=self.seq - 1)]
        inside = (rows < self.batch)[:, None] & (columns < self.seq)
        return torch.where(inside, mine, fill).T.contiguous()
