"""How a run uses its devices: memory by kind, FLOP/s per device, and the share of the peak that they are (MFU)."""

from dataclasses import dataclass, replace

import torch

from cuboid.device import name_of
from cuboid.mesh.layout import shard_of
from cuboid.model.transformer import Transformer
from cuboid.plan.hardware import peak_of
from cuboid.plan.layer import Work
from cuboid.plan.search import model_flops
from cuboid.train.config import TrainConfig
from cuboid.train.progress import StepReport


@dataclass(frozen=True)
class Use:
    """The use of one rank. FLOPs are the model's: nothing recomputed, causal scores counted in full."""

    weights: int  # bytes
    gradients: int
    optimizer: int
    flops: float  # of a step, per device
    peak: float  # FLOPs per second; 0 if not known

    @classmethod
    def of(cls, config: TrainConfig, model: Transformer, optimizer: torch.optim.Optimizer) -> "Use":
        d, mesh = config.data, model.parallel.mesh
        work = Work(
            model.config,
            d.batch // d.micro_batches,
            d.seq,
            config.precision.dtype,
            d.micro_batches,
            config.model.freeze,
        )
        trained = [p for p in model.parameters() if p.requires_grad]
        moments = [x for p in trained for x in optimizer.state[p].values()]
        peak = peak_of(name_of(mesh.device), config.precision.dtype)
        weights, gradients, state = (sum(map(_bytes, each)) for each in (model.parameters(), trained, moments))
        return cls(weights, gradients, state, model_flops(work) / mesh.cuboid.ranks, peak)

    def told(self, report: StepReport, seconds: float) -> StepReport:
        """The report of a step that took `seconds`, with FLOP/s and memory."""
        reached = self.flops / seconds
        return replace(
            report,
            weights_bytes=self.weights,
            gradients_bytes=self.gradients,
            optimizer_bytes=self.optimizer,
            flops_per_s=reached,
            mfu=reached / self.peak if self.peak else 0.0,
        )


def _bytes(x: torch.Tensor) -> int:
    shard = shard_of(x)
    return shard.numel() * shard.element_size()
