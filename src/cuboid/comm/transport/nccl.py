"""NCCL. Its own collectives are the best there are, but it adds bf16 to bf16."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cuboid.comm.transport.base import Result, Transport, Works


class Nccl(Transport):
    def reduce_scatter(self, xs: Sequence[Tensor], dtype: torch.dtype) -> tuple[Works, Result]:
        """NCCL's own in fp32 or better; for low precision an all-to-all and a local sum."""
        like, lengths = xs[0], [x.numel() // self.size for x in xs]
        if torch.promote_types(like.dtype, torch.float32) != like.dtype:
            return super().reduce_scatter(xs, dtype)
        mine = like.new_empty(sum(lengths))
        works = [
            self.wire.reduce_scatter_single(place, x.view(-1), group=self.group, async_op=True)
            for x, place in zip(xs, mine.split(lengths), strict=True)
        ]
        return works, lambda: mine.to(dtype)
