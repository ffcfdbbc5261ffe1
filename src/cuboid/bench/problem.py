"""What every layout of a benchmark computes: one model, one batch."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import Policy


@dataclass(frozen=True)
class Problem:
    config: ModelConfig
    batch: int
    seq: int
    policy: Policy = Policy(activations="retain")
    seed: int = 0
    apart: bool = True  # see `World.apart`
    gpu: bool = False  # whether ranks compute on GPUs
    micro_batches: int = 1  # per step, each of the whole batch

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    def data(self, seq: int = 0) -> tuple[Tensor, Tensor]:
        """Tokens and targets [batch, seq], the same on every rank; every target counts."""
        generator = torch.Generator().manual_seed(self.seed)
        tokens = torch.randint(self.config.vocab, (self.batch, (seq or self.seq) + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def grown(self, ranks: int, base: int) -> "Problem":
        """The problem for `ranks` ranks with the same work per rank as this one for `base`: hidden and batch grow by
        the cube root, so that FLOPs grow with the ranks."""
        factor = (ranks / base) ** (1 / 3)
        heads = self.config.heads
        hidden = max(1, round(self.config.hidden * factor / heads)) * heads
        config = self.config.replace(hidden=hidden, head_dim=hidden // heads, ffn=4 * hidden)
        return replace(self, config=config, batch=round(self.batch * factor))

    def export(self) -> dict[str, Any]:
        return asdict(self)
