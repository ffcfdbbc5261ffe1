"""Cross entropy of a sharded vocabulary, against PyTorch's own of the unsharded one."""

from collections.abc import Callable
from itertools import accumulate, pairwise, product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cuboid.layers.loss import Loss
from cuboid.run.launch import Pool, World

ROWS, VOCAB = 9, 13
#: Sizes of the vocabulary's shards; with a small vocabulary, the last ranks hold none of it.
PARTS = [(13,), (7, 6), (5, 5, 3), (5, 5, 3, 0), (12, 1, 0, 0)]
LOSSES = [Loss(ignore, smoothing, z) for ignore, smoothing, z in product((-100, 4), (0.0, 0.3), (0.0, 0.05))]


def textbook(logits: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """The sum over the rows that count."""
    cross = F.cross_entropy(
        logits, targets, ignore_index=loss.ignore_index, label_smoothing=loss.label_smoothing, reduction="sum"
    )
    counts = targets != loss.ignore_index
    return cross + loss.z_loss * (logits.logsumexp(-1).square() * counts).sum()


def in_parts(logits: Tensor, targets: Tensor, loss: Loss, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the losses, the rows that count and d logits, from parts of these sizes."""
    starts = [0, *accumulate(sizes)]
    parts = [logits[:, a:b].clone() for a, b in pairwise(starts)]
    merged = torch.stack([loss.parts(part, targets, start) for part, start in zip(parts, starts, strict=False)])
    total, count, lse = loss.merge(merged, targets, VOCAB)
    placed = zip(parts, starts, strict=False)
    gradients = [loss.gradient(part, targets, start, lse, VOCAB, part.dtype) for part, start in placed]
    return total, count, torch.cat(gradients, -1)


def errors(world: World, loss: Loss, sizes: tuple[int, ...], scale: float) -> tuple[float, float, int]:
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    targets[[1, 5]] = loss.ignore_index
    total, count, gradient = in_parts(logits, targets, loss, sizes)
    wanted = textbook(logits.requires_grad_(), targets, loss)
    wanted.backward()
    assert logits.grad is not None
    ignored = int((targets == loss.ignore_index).sum())
    return abs(total / wanted - 1).item(), (gradient - logits.grad).abs().max().item(), int(count) + ignored


@pytest.mark.parametrize("scale", [1.0, 300.0], ids=["small", "large"])
@pytest.mark.parametrize("sizes", PARTS, ids=str)
def test_loss_on_vocab_shards_matches_torch_cross_entropy(
    sizes: tuple[int, ...], scale: float, pool: Callable[[int], Pool]
) -> None:
    for loss in LOSSES:
        value, gradient, rows = pool(1).run(errors, loss, sizes, scale)[0]
        assert value < 1e-12, loss
        assert gradient < 1e-12 * scale, loss
        assert rows == ROWS


def test_loss_is_zero_if_all_targets_are_ignored() -> None:
    logits, targets = torch.randn(2, VOCAB, dtype=torch.float64), torch.full((2,), -100)
    total, count, gradient = in_parts(logits, targets, Loss(label_smoothing=0.1, z_loss=0.1), (7, 6))
    assert total == count == 0
    assert not gradient.any()
