"""What a way of spreading a Transformer over devices must supply. The model is written once, against this.

Tensors are sequence first, [s, b, d], and local to a rank. Methods that communicate are `Steps`: generators that yield
between launching a collective and needing it, and return their value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from cuboid.attention import Cache
from cuboid.config import ModelConfig
from cuboid.flight import Steps
from cuboid.layout import Spec
from cuboid.loss import Loss
from cuboid.mesh import Axis, Mesh
from cuboid.product import Linear
from cuboid.schedule import Schedule

#: What a parameter is to the model; a parallel decides from it how the parameter is cut.
Role = Literal["into.weight", "into.bias", "out_of.weight", "out_of.bias", "norm", "head_norm", "table"]


class Index(NamedTuple):
    """Where a rank's [s, b, d] lies in the whole: positions, samples, features."""

    s: Tensor
    b: Tensor
    d: Tensor


@dataclass(frozen=True)
class Place:
    """The tokens of a batch that a rank works on: `positions` of each of `samples`.

    `batch` and `seq` are the global sizes, `start` is the position of the first token. Positions from start + seq on
    and samples from `batch` on are padding. `context` is the axis over which the sequence itself is cut, of size 1
    where it is not.
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

    def parts(self, count: int) -> list["Place"]:
        """This rank's samples in so many equal parts, or in one where they cannot be cut so."""
        if count == 1 or len(self.samples) % count:
            return [self]
        chunks = (each.chunk(count) for each in (self.samples, self.residual.b, self.logits.b))
        return [
            replace(self, samples=samples, residual=self.residual._replace(b=b), logits=self.logits._replace(b=rows))
            for samples, b, rows in zip(*chunks, strict=True)
        ]

    def take(self, whole: Tensor, fill: int) -> Tensor:
        """[batch, seq] of all ranks -> this rank's [s, b], padding filled with `fill`."""
        columns, rows = self.positions - self.start, self.samples
        part = whole[rows.clamp(max=self.batch - 1)][:, columns.clamp(max=self.seq - 1)]
        inside = (rows < self.batch)[:, None] & (columns < self.seq)
        return torch.where(inside, part, fill).T.contiguous()


class Attend(NamedTuple):
    """How tokens attend: to those before them (with a cache, also to those seen in earlier steps) or to all; with the
    weights of the RMSNorms of queries and keys, if there are any."""

    causal: bool = True
    cache: Cache | None = None
    norms: tuple[Tensor, Tensor] | None = None


CAUSAL = Attend()


class Weights(Protocol):
    """The weights of one layer, ready for use."""

    def __getitem__(self, parameter: nn.Parameter) -> Tensor: ...


class Parallel(Protocol):
    config: ModelConfig
    mesh: Mesh
    dtype: torch.dtype | None  # of products; None: as the weights at rest
    schedule: Schedule

    def spec(self, role: Role, shape: tuple[int, ...]) -> Spec:
        """How a parameter is cut, what its replicas are, and over which axes its gradient is summed."""

    def place(self, batch: int, seq: int, start: int = 0, decode: bool = False) -> Place:
        """Which slice of a batch (ids and targets alike) this rank takes. A step of decoding pads the batch rather than
        cut the sequence."""

    def bucket(self, parameters: Sequence[tuple[nn.Parameter, Spec]], before: Any = None) -> Any:
        """Weights that travel together. Those of the bucket `before` are needed next in backward."""

    def open(self, buckets: Sequence[Any], last: bool) -> Sequence[Any]:
        """Begin a micro-batch, the step's last or not: a handle for each bucket."""

    def prefetch(self, bucket: Any) -> None:
        """Have the weights of a bucket on their way: `gather` will ask for them soon."""

    def keep(self, bucket: Any) -> None:
        """Have the weights of a bucket stay for backward, which will ask for them soon."""

    def gather(self, bucket: Any, opened: Any) -> Any:
        """The `Weights` of a bucket, until it is released."""

    def release(self, bucket: Any) -> None: ...

    def embed(self, ids: Tensor, tables: Sequence[tuple[Any, nn.Parameter]], place: Place) -> Steps:
        """Rows of the token table (and of the position table, if there is one) -> the residual stream."""

    def norm(self, X: Tensor, W: Any, weight: nn.Parameter, bias: nn.Parameter | None) -> Steps:
        """LayerNorm if there is a bias, RMSNorm if not."""

    def into(self, X: Tensor, W: Any, linears: Sequence[Linear], heads: Sequence[int] = ()) -> Steps:
        """Products that leave the residual stream, of one X. With `heads`, each output's count of heads, whole heads
        of whole sequences come out, ready for `attend`."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, place: Place, how: Attend = CAUSAL) -> Steps:
        """Attention of the outputs of `into(..., heads=…)`."""

    def out_of(self, X: Tensor, W: Any, linear: Linear, heads: int = 0) -> Steps:
        """The product that returns to the residual stream, from what `into` or `attend` gave."""

    def dropout(self, X: Tensor, key: int, place: Place) -> Tensor:
        """Of the residual stream, by global index."""

    def logits(self, X: Tensor, W: Any, weight: nn.Parameter) -> Steps:
        """X times a table's rows, cut as `Place.logits` says."""

    def to_head(self, X: Tensor) -> Any:
        """A part of the residual stream after the last norm, on its way to `head_loss`."""

    def head_loss(self, parts: Sequence[Any], W: Any, weight: nn.Parameter, targets: Tensor, loss: Loss) -> Steps:
        """The mean loss over all ranks' tokens, the same on every rank, of what `to_head` gave for each part of the
        batch."""
