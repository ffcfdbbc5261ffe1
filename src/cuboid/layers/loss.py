"""Cross entropy of sharded rows of logits, with ignored targets, label smoothing and z-loss.

l are the V logits of a row, t is the target, e the smoothing, ζ the weight of the z-loss:

    loss = (1−e) (lse − l_t) + e (lse − mean(l)) + ζ lse²
    dl   = softmax(l) (1 + 2 ζ lse) − (1−e) [t] − e/V

A shard of the row gives (max, Σ exp(l − max), l_t or 0, Σ l); `merge` combines the shards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cuboid.comm.axis import Axis
from cuboid.comm.collectives import all_reduce
from cuboid.comm.flight import Steps
from cuboid.step.op import Ahead, Back, vjp


@dataclass(frozen=True)
class Loss:
    """Options of the cross entropy.

    Args:
        ignore_index: Targets of this value do not count.
        label_smoothing: The share of the target that is spread over the vocabulary.
        z_loss: The weight of the squared log-partition function, which keeps logits small.

    Raises:
        ValueError: If `label_smoothing` is not in [0, 1) or `z_loss` is negative.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing={self.label_smoothing} must be at least 0 and below 1")
        if self.z_loss < 0:
            raise ValueError(f"z_loss={self.z_loss} must not be negative")

    def parts(self, logits: Tensor, targets: Tensor, start: int) -> Tensor:
        """logits [r, v] of classes `start` to `start` + v, targets [r] -> [4, r], what `merge` needs of them."""
        rows, classes = logits.shape
        if classes == 0:  # with a small vocabulary, the last ranks hold none of it
            zero = logits.new_zeros(rows)
            return torch.stack((zero - torch.inf, zero, zero, zero))
        top = logits.amax(-1)
        exps = (logits - top[:, None]).exp_().sum(-1)
        local = targets - start
        has = (local >= 0) & (local < classes)
        at_target = logits.gather(-1, local.clamp(0, classes - 1)[:, None])[:, 0] * has
        return torch.stack((top, exps, at_target, logits.sum(-1)))

    def merge(self, parts: Tensor, targets: Tensor, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
        """parts [p, 4, r] -> (sum of losses, number of rows that count, lse [r])."""
        tops, exps, at_target, total = parts.unbind(1)
        top = tops.amax(0)
        lse = top + (exps * (tops - top).exp()).sum(0).log()
        e = self.label_smoothing
        loss = lse - (1 - e) * at_target.sum(0) - e / vocab * total.sum(0) + self.z_loss * lse.square()
        counts = targets != self.ignore_index
        return torch.where(counts, loss, 0).sum(), counts.sum(), lse

    def gradient(
        self, logits: Tensor, targets: Tensor, start: int, lse: Tensor, vocab: int, dtype: torch.dtype
    ) -> Tensor:
        """d(sum of losses)/d logits [r, v], in `dtype`. Overwrites the logits."""
        classes = logits.shape[1]
        d = logits.sub_(lse[:, None]).exp_()
        if self.z_loss:
            d *= (1 + 2 * self.z_loss * lse)[:, None]
        if self.label_smoothing:
            d -= self.label_smoothing / vocab
        local = targets - start
        has = (local >= 0) & (local < classes)
        if classes:
            hit = has.to(d.dtype) * (self.label_smoothing - 1)
            d.scatter_add_(1, local.clamp(0, classes - 1)[:, None], hit[:, None])
        return d.mul_((targets != self.ignore_index)[:, None]).to(dtype)


@dataclass(eq=False)
class OwnLoss:
    """X [s, b, d] -> [sum of losses, number that count], by a user's fn(X, targets) -> (sum, count) on a rank's shard.
    This layer sums over `axes`; the runner sums over the others."""

    fn: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | float]]
    axes: Sequence[Axis] = ()

    takes, gives = "residual", "loss"

    def __call__(self, X: Tensor, w: Any, at: Any) -> Steps:
        counted, wide = list[Tensor](), torch.promote_types(X.dtype, torch.float32)

        def total(X: Tensor) -> Tensor:
            losses, count = self.fn(X, at.targets)
            counted.append(torch.as_tensor(count, dtype=wide, device=X.device))
            return losses.to(wide)

        losses, back = vjp(total, X) if at.train else (total(X), None)
        sums = torch.stack((losses, counted[0]))
        for axis in self.axes:
            sums = all_reduce(sums, axis).wait()

        def run(scale: Tensor, w: Any, before: Ahead) -> Steps:
            assert back is not None
            return back(scale.to(wide))[0]
            yield

        return sums, Back(run) if at.train else None
        yield
