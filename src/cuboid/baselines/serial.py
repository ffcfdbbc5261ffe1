"""One device, in plain PyTorch: the reference for every other parallelism."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cuboid.comm.axis import Axis
from cuboid.comm.flight import Steps
from cuboid.layers.attend import Attend
from cuboid.layers.loss import Loss, OwnLoss
from cuboid.layers.product import Affine, check_way
from cuboid.mesh.cuboid import Cuboid
from cuboid.mesh.layout import Spec
from cuboid.mesh.mesh import Mesh
from cuboid.mesh.place import Index, Place
from cuboid.model.config import ModelConfig
from cuboid.model.cuboid import residual_dropout
from cuboid.model.parallel import Role
from cuboid.model.rotary import rotation
from cuboid.step.op import Ahead, Back, Layer, Local, recomputed, scaled, vjp
from cuboid.step.schedule import OFF, Schedule
from cuboid.step.weights import Gathered


class Serial:
    """One device: the same models and the same loss as `CuboidParallel`, unsharded.

    Args:
        config: The model.
        dtype: In which linears compute; None: that of the stored weights.
        device: The device.
    """

    schedule: Schedule = OFF
    retain_weights = False
    sums_over: Sequence[str] = ()

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

    def embed(self, tables: Sequence[nn.Parameter], rows: Sequence[int]) -> Layer:
        return Rows(tables)

    def norm(self, weight: nn.Parameter, bias: nn.Parameter | None) -> Layer:
        return norm(weight, bias, self.config.norm_eps)

    def into(self, linears: Sequence[Affine], heads: Sequence[int] = ()) -> Layer:
        check_way("into", *linears)
        biased = [linear.bias is not None for linear in linears]
        parameters = [linear.weight for linear in linears] + [each.bias for each in linears if each.bias is not None]
        return Local(partial(outputs, biased), *parameters, takes="residual", gives="heads" if heads else "inner")

    def attend(self, norms: Sequence[nn.Parameter] = (), causal: bool = True) -> Layer:
        c, alone = self.config, Axis("", 1, 0)
        return Attend(c.heads, c.kv_heads, c.head_dim, alone, alone, norms, c.norm_eps, causal)

    def out_of(self, linear: Affine, heads: bool = False) -> Layer:
        check_way("out_of", linear)
        return Local(F.linear, *linear.parameters, takes="attended" if heads else "inner", gives="residual")

    def dropout(self, name: str) -> Layer:
        return residual_dropout(self.config, name)

    def logits(self, weight: nn.Parameter, rows: int) -> Layer:
        return self.into([Affine(weight, None, (rows, self.config.hidden), "into")])

    def head_loss(self, weight: nn.Parameter, rows: int) -> Layer:
        return OnTheSpot(weight, cross_entropy)

    def own_loss(self, fn: Callable[[Tensor, Tensor], tuple[Tensor, Any]]) -> Layer:
        return OwnLoss(fn)


def norm(weight: nn.Parameter, bias: nn.Parameter | None, eps: float) -> Layer:
    """A norm of unsharded rows. RMSNorm is recomputed in backward, because PyTorch saves several tensors as large
    as X."""
    if bias is None:
        return recomputed(
            Local(lambda X, w: F.rms_norm(X, w.shape, w, eps), weight, takes="residual", gives="residual")
        )
    return Local(lambda X, w, b: F.layer_norm(X, w.shape, w, b, eps), weight, bias, takes="residual", gives="residual")


def outputs(biased: Sequence[bool], X: Tensor, *parameters: Tensor) -> Any:
    """X [s, b, k] times each weight, plus its bias. `parameters`: the weights, then the biases that exist."""
    weights, biases = parameters[: len(biased)], iter(parameters[len(biased) :])
    Ys = [F.linear(X, W, next(biases) if has else None) for W, has in zip(weights, biased, strict=True)]
    return tuple(Ys) if len(Ys) > 1 else Ys[0]


class Rows:
    """ids [s, b] -> [s, b, d]: rows of the token embedding plus, if learned, of the position embedding."""

    takes, gives = "ids", "residual"

    def __init__(self, tables: Sequence[nn.Parameter]) -> None:
        self.tables = tables

    def __call__(self, ids: Tensor, w: Gathered, at: Any) -> Steps:
        def rows(table: Tensor, *learned: Tensor) -> Tensor:
            X = F.embedding(ids, table)
            return X + learned[0][at.place.positions, None] if learned else X

        if not at.train:
            return rows(*(w[table] for table in self.tables)), None
        X, back = vjp(rows, *(w[table] for table in self.tables))

        def run(dX: Tensor, w: Gathered, before: Ahead) -> Steps:
            for table, gradient in zip(self.tables, back(dX), strict=True):
                w.add(table, gradient)
            return None
            yield

        return X, Back(run)
        yield


@dataclass(eq=False)
class OnTheSpot:
    """X [s, b, d] -> [sum of losses, how many count], of `losses(X, W, targets, loss)`. Differentiated in forward, so
    that the logits need not be saved; in fp32 or better, so that in fp16 no sum overflows."""

    weight: nn.Parameter
    losses: Callable[[Tensor, Tensor, Tensor, Loss], Tensor]
    takes: str = "residual"
    gives: str = "loss"
    early = True  # gradients are computed in forward

    def __call__(self, X: Tensor, w: Gathered, at: Any) -> Steps:
        loss, W = at.loss or Loss(), w[self.weight]
        W = W.to(torch.promote_types(W.dtype, torch.float32))
        count = (at.targets != loss.ignore_index).sum().to(W.dtype)
        if not at.train:
            return torch.stack((self.losses(X, W, at.targets, loss), count)), None
        total, back = vjp(lambda X, W: self.losses(X, W, at.targets, loss), X, W)
        dX, dW = back(torch.ones_like(total))
        w.add(self.weight, dW)

        def run(scale: Tensor, w: Gathered, before: Ahead) -> Steps:
            return scaled(dX, scale)
            yield

        return torch.stack((total, count)), Back(run)
        yield


def cross_entropy(X: Tensor, W: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """The sum of losses as a textbook has it, in the precision of W."""
    logits, targets = F.linear(X.to(W.dtype), W).flatten(0, 1), targets.flatten()
    options = {"ignore_index": loss.ignore_index, "label_smoothing": loss.label_smoothing}
    total = F.cross_entropy(logits, targets, reduction="sum", **options)  # type: ignore[arg-type]
    if loss.z_loss:
        total = total + loss.z_loss * (logits.logsumexp(-1).square() * (targets != loss.ignore_index)).sum()
    return total
