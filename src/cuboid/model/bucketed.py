"""What parallels have in common whose weights live in the buckets of weights.py."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cuboid.layers.randomness import dropout
from cuboid.mesh.layout import Spec
from cuboid.mesh.mesh import Mesh
from cuboid.mesh.place import Place
from cuboid.model.config import ModelConfig
from cuboid.step.schedule import OFF, Schedule
from cuboid.step.weights import Bucket, Weights, gather, open_buckets


class Bucketed:
    """Weights where they are needed, unless x cuts them: then a bucket moves nothing but its gradients' sums."""

    config: ModelConfig
    mesh: Mesh
    dtype: torch.dtype | None
    schedule: Schedule = OFF

    def bucket(self, parameters: Sequence[tuple[nn.Parameter, Spec]], before: Bucket | None = None) -> Bucket:
        return Bucket(parameters, self.mesh, self.dtype)

    def open(self, buckets: Sequence[Bucket], last: bool) -> Sequence[Tensor]:
        return open_buckets(buckets, self.mesh, last)

    def prefetch(self, bucket: Bucket) -> None:
        bucket.launch("forward")

    def keep(self, bucket: Bucket) -> None:
        bucket.launch("backward")

    def gather(self, bucket: Bucket, opened: Tensor) -> Weights:
        return gather(bucket, opened)

    def release(self, bucket: Bucket) -> None:
        bucket.release("forward")

    def dropout(self, X: Tensor, key: int, place: Place) -> Tensor:
        return dropout(X, self.config.dropout, key, place.residual)

    def to_head(self, X: Tensor) -> Any:
        return X
