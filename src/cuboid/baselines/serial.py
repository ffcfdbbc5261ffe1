"""One device, in plain PyTorch: the reference every other parallel is held against."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cuboid.comm.axis import Axis
from cuboid.comm.flight import Steps
from cuboid.layers.attention import attend, attend_both_ways, attend_cached, rotate
from cuboid.layers.loss import Loss
from cuboid.layers.norm import RMSNorm
from cuboid.layers.product import Linear
from cuboid.layers.randomness import dropout
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import Spec
from cuboid.mesh.mesh import Mesh
from cuboid.mesh.place import Index, Place
from cuboid.model.config import ModelConfig
from cuboid.model.parallel import CAUSAL, Attend, Role
from cuboid.model.rotary import rotation
from cuboid.step.schedule import OFF, Schedule
from cuboid.step.weights import Trail


class _Plain:
    """Weights that are where they are needed."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype

    def __getitem__(self, parameter: nn.Parameter) -> Tensor:
        return parameter.to(self.dtype or parameter.dtype)

    def along(self, trail: Trail) -> "_Plain":
        return self


class Serial:
    schedule: Schedule = OFF

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.config, self.dtype = config, dtype
        self.mesh = Mesh(Cuboid(), device=device, alone=True)

    def spec(self, role: Role, shape: tuple[int, ...]) -> Spec:
        return Spec(shape, ((),) * len(shape))

    def place(self, batch: int, seq: int, start: int = 0, decode: bool = False) -> Place:
        self.config.check(Cuboid(), batch, start + seq)
        device = self.mesh.device
        s = torch.arange(start, start + seq, device=device)
        b, d, v = (torch.arange(n, device=device) for n in (batch, self.config.hidden, self.config.vocab))
        turn = rotation(self.config, s) if self.config.rotary else None
        return Place(batch, seq, start, b, s, Axis("x", 1, 0), Index(s, b, d), Index(s, b, v), turn)

    def bucket(self, parameters: Sequence[tuple[nn.Parameter, Spec]], before: _Plain | None = None) -> _Plain:
        return _Plain(self.dtype)

    def open(self, buckets: Sequence[_Plain], last: bool) -> Sequence[None]:
        return [None] * len(buckets)

    def prefetch(self, bucket: _Plain) -> None:
        pass

    def keep(self, bucket: _Plain) -> None:
        pass

    def gather(self, bucket: _Plain, opened: None) -> _Plain:
        return bucket

    def release(self, bucket: _Plain) -> None:
        pass

    def embed(self, ids: Tensor, tables: Sequence[tuple[_Plain, nn.Parameter]], place: Place) -> Steps:
        (W, table), *learned = tables
        X = F.embedding(ids, W[table])
        for W, positions in learned:
            X = X + W[positions][place.positions, None]
        return X
        yield

    def norm(self, X: Tensor, W: _Plain, weight: nn.Parameter, bias: nn.Parameter | None) -> Steps:
        if bias is None:
            return RMSNorm.apply(X, W[weight], self.config.norm_eps)
        return F.layer_norm(X, weight.shape, W[weight], W[bias], self.config.norm_eps)
        yield

    def into(self, X: Tensor, W: _Plain, linears: Sequence[Linear], heads: Sequence[int] = ()) -> Steps:
        Ys = [F.linear(X, W[linear.weight], None if linear.bias is None else W[linear.bias]) for linear in linears]
        return [Y.unflatten(-1, (h, -1)) for Y, h in zip(Ys, heads, strict=True)] if heads else Ys
        yield

    def attend(self, q: Tensor, k: Tensor, v: Tensor, place: Place, how: Attend = CAUSAL) -> Steps:
        if how.norms is not None:
            q, k = (RMSNorm.apply(x, w, self.config.norm_eps) for x, w in zip((q, k), how.norms, strict=True))
        return attend_whole(q, k, v, place, how)
        yield

    def out_of(self, X: Tensor, W: _Plain, linear: Linear, heads: int = 0) -> Steps:
        return F.linear(X, W[linear.weight], None if linear.bias is None else W[linear.bias])
        yield

    def dropout(self, X: Tensor, key: int, place: Place) -> Tensor:
        return dropout(X, self.config.dropout, key, place.residual)

    def logits(self, X: Tensor, W: _Plain, weight: nn.Parameter) -> Steps:
        return F.linear(X, W[weight])
        yield

    def to_head(self, X: Tensor) -> Tensor:
        return X

    def head_loss(self, parts: Sequence[Tensor], W: _Plain, weight: nn.Parameter, targets: Tensor, loss: Loss) -> Steps:
        (X,) = parts
        return _HeadLoss.apply(X, W[weight], targets, loss)
        yield


def attend_whole(q: Tensor, k: Tensor, v: Tensor, place: Place, how: Attend) -> Tensor:
    """Attention where a rank has the whole sequence of its heads."""
    if place.turn is not None:
        q, k = rotate(q, place.turn), rotate(k, place.turn)
    if how.cache is not None:
        return attend_cached(q, k, v, how.cache, place.seq)
    return attend(q, k, v) if how.causal else attend_both_ways(q, k, v, place.seq)


def cross_entropy(X: Tensor, W: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """The loss as a textbook has it."""
    logits = F.linear(X, W).flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    count = (targets != loss.ignore_index).sum().clamp(min=1)
    total = F.cross_entropy(
        logits,
        targets.flatten(),
        ignore_index=loss.ignore_index,
        label_smoothing=loss.label_smoothing,
        reduction="sum",
    )
    if loss.z_loss:
        lse = logits.logsumexp(-1)
        total = total + loss.z_loss * (lse.square() * (targets.flatten() != loss.ignore_index)).sum()
    return total / count


class _HeadLoss(torch.autograd.Function):
    """Differentiated on the spot, so that the logits need not be saved."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, W: Tensor, targets: Tensor, loss: Loss) -> Tensor:
        with torch.enable_grad():
            X, W = X.detach().requires_grad_(), W.detach().requires_grad_()
            value = cross_entropy(X, W, targets, loss)
            ctx.save_for_backward(*torch.autograd.grad(value, (X, W)))
        return value.detach()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dX, dW = ctx.saved_tensors
        return dX * dloss, dW * dloss, None, None
