"""The interface of a parallelism: what it must supply for a Transformer. The model is written once, against this.

Tensors are sequence first, [s, b, d], and local to a rank. All that communicates is a `Layer` (step/op.py). Layers take
and give named layouts:

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

#: What a parameter is in the model; a parallelism decides by it how the parameter is sharded.
Role = Literal["into.weight", "into.bias", "out_of.weight", "out_of.bias", "norm", "head_norm", "table"]


class Parallel(Protocol):
    """How a Transformer is spread over devices; models are written against it. `CuboidParallel` and `Serial` implement
    it. The module's docstring explains the layouts: ids, residual, heads, attended, inner, loss."""

    config: ModelConfig
    mesh: Mesh
    dtype: torch.dtype | None  # that linears compute in; None: as the weights at rest
    schedule: Schedule
    retain_weights: bool  # unsharded, from forward to backward
    sums_over: Sequence[str]  # axes over which a rank's loss is a partial sum

    def spec(self, role: Role, shape: tuple[int, ...]) -> Spec:
        """How a parameter of global `shape` is sharded and replicated, by its `role` in the model, and over which axes
        its gradient is summed."""

    def place(self, batch: int, seq: int, start: int = 0, decode: bool = False) -> Place:
        """This rank's slice of a batch, of ids and targets alike: `batch` sequences of `seq` tokens, from position
        `start` on. A step of decoding (`decode`) pads the batch instead of splitting the sequence. Raises ValueError if
        the ranks cannot split such a batch, or the model has no such positions."""

    def embed(self, tables: Sequence[nn.Parameter], rows: Sequence[int]) -> Layer:
        """ids -> residual: rows of the token embedding, the first of `tables`, plus, if there is a second one, of the
        position embedding. `rows` are their global numbers of rows."""

    def norm(self, weight: nn.Parameter, bias: nn.Parameter | None) -> Layer:
        """residual -> residual: LayerNorm with `weight` and `bias`, RMSNorm where `bias` is None."""

    def into(self, linears: Sequence[Affine], heads: Sequence[int] = ()) -> Layer:
        """residual -> inner, a tensor for each of `linears`. With `heads`, the number of heads of each output,
        residual -> heads: full heads of full sequences. Raises ValueError if a linear was made "out_of"."""

    def attend(self, norms: Sequence[nn.Parameter] = (), causal: bool = True) -> Layer:
        """heads -> attended: each token attends to those before it (with a cache, also to those of earlier steps) or,
        unless `causal`, to all. `norms` are the weights of QK-norm."""

    def out_of(self, linear: Affine, heads: bool = False) -> Layer:
        """inner or, with `heads`, attended -> residual, by `linear`. Raises ValueError if it was made "into"."""

    def dropout(self, name: str) -> Layer:
        """residual -> residual: dropout by global index; the identity without a seed. `name` tells its random numbers
        from those of other layers."""

    def logits(self, weight: nn.Parameter, rows: int) -> Layer:
        """residual -> logits, the matmul with an embedding's `weight`, of `rows` rows, sharded as `Place.logits`
        says."""

    def head_loss(self, weight: nn.Parameter, rows: int) -> Layer:
        """residual -> loss of this rank's targets, with logits of `weight` and `rows` as in `logits`."""

    def own_loss(self, fn: Callable[[Tensor, Tensor], tuple[Tensor, Any]]) -> Layer:
        """residual -> loss: `fn`(X, targets) -> (sum of losses, how many count), of a rank's shards of both."""
