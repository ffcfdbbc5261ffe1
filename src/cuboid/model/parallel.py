"""What a way of spreading a Transformer over devices must supply. The model is written once, against this.

Tensors are sequence first, [s, b, d], and local to a rank. Methods that communicate are `Steps`: generators that yield
between launching a collective and needing it, and return their value.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from cuboid.comm.flight import Steps
from cuboid.layers.attention import Cache
from cuboid.layers.loss import Loss
from cuboid.layers.product import Linear
from cuboid.mesh.layout import Spec
from cuboid.mesh.mesh import Mesh
from cuboid.mesh.place import Place
from cuboid.model.config import ModelConfig
from cuboid.step.schedule import Schedule

#: What a parameter is to the model; a parallel decides from it how the parameter is cut.
Role = Literal["into.weight", "into.bias", "out_of.weight", "out_of.bias", "norm", "head_norm", "table"]


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
