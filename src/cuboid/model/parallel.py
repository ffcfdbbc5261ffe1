"""What a way of spreading a Transformer over devices must supply. The model is written once, against this.

Tensors are sequence first, [s, b, d], and local to a rank. What communicates is a `Layer` (step/op.py). Layouts have
names, which layers take and give:

    ids         [s, b]             token ids of a rank's samples
    residual    [s, b, d]          the residual stream
    heads       (q, k, v)          what `into(…, heads)` gives and `attend` takes
    attended    [s, b, (h e)]      what `attend` gives and `out_of(…, heads=True)` takes
    inner       [s, b, f]          what `into` gives and `out_of` takes, the MLP's inner features
    loss        [2]                the sum of losses and how many count
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from cuboid.layers.product import Affine
from cuboid.mesh.layout import Spec
from cuboid.mesh.mesh import Mesh
from cuboid.mesh.place import Place
from cuboid.model.config import ModelConfig
from cuboid.step.op import Layer
from cuboid.step.schedule import Schedule

#: What a parameter is to the model; a parallel decides from it how the parameter is split.
Role = Literal["into.weight", "into.bias", "out_of.weight", "out_of.bias", "norm", "head_norm", "table"]


class Parallel(Protocol):
    """A way to spread a Transformer over devices: what `CuboidParallel` and `Serial` supply, and models are written
    against. Layouts (ids, residual, heads, attended, inner, loss) are those of the module's docstring."""

    config: ModelConfig
    mesh: Mesh
    dtype: torch.dtype | None  # that linears compute in; None: as the weights at rest
    schedule: Schedule
    retain_weights: bool  # unsharded, from forward to backward
    sums_over: Sequence[str]  # axes over which a rank's loss is a partial sum

    def spec(self, role: Role, shape: tuple[int, ...]) -> Spec:
        """How a parameter is split, what its replicas are, and over which axes its gradient is summed."""

    def place(self, batch: int, seq: int, start: int = 0, decode: bool = False) -> Place:
        """Which slice of a batch (ids and targets alike) this rank takes. A step of decoding pads the batch rather than
        split the sequence."""

    def embed(self, tables: Sequence[nn.Parameter], rows: Sequence[int]) -> Layer:
        """ids -> residual: rows of the token table and, if there is a second one, of the position table."""

    def norm(self, weight: nn.Parameter, bias: nn.Parameter | None) -> Layer:
        """residual -> residual: LayerNorm if there is a bias, RMSNorm if not."""

    def into(self, linears: Sequence[Affine], heads: Sequence[int] = ()) -> Layer:
        """residual -> inner, a tensor for each linear. With `heads`, each output's count of heads, residual -> heads:
        whole heads of whole sequences."""

    def attend(self, norms: Sequence[nn.Parameter] = (), causal: bool = True) -> Layer:
        """heads -> attended: of each token to those before it (with a cache, also to those seen in earlier steps) or to
        all; `norms` are the weights of RMSNorms of queries and keys."""

    def out_of(self, linear: Affine, heads: bool = False) -> Layer:
        """inner, or attended, -> residual."""

    def dropout(self, name: str) -> Layer:
        """residual -> residual, by global index; nothing where there is no seed."""

    def logits(self, weight: nn.Parameter, rows: int) -> Layer:
        """residual -> the products with a table's rows, split as `Place.logits` says."""

    def head_loss(self, weight: nn.Parameter, rows: int) -> Layer:
        """residual -> loss, of the targets of this rank's rows."""

    def own_loss(self, fn: Callable[[Tensor, Tensor], tuple[Tensor, Any]]) -> Layer:
        """residual -> loss: fn(X, targets) -> (sum of losses, how many count), of a rank's part of both."""
