"""AdamW on shards, the learning rate over the steps, and fp16's loss scale."""

from dataclasses import dataclass
from math import cos, isfinite, pi
from typing import Any

import torch
from torch import Tensor, nn

from cuboid.comm.collectives import all_reduce
from cuboid.device import upload
from cuboid.mesh.layout import shard_of, sharded_as
from cuboid.model.transformer import Transformer
from cuboid.train.checkpoint import MOMENTS
from cuboid.train.config import OptimizerSection, ScheduleSection
from cuboid.train.guard import Guard


class ShardedAdamW(torch.optim.AdamW):
    """AdamW that computes on the shards of DTensors: 7 µs per parameter on a CPU, 24 with DTensor's dispatch."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        is_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(shard_of, tensors)
        return is_complex


def adamw(model: nn.Module, config: OptimizerSection) -> torch.optim.AdamW:
    """Weight decay for matrices (embeddings too), none for norms and biases. Its state exists from the start, so that a
    checkpoint can be loaded into it; frozen parameters have none."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = ShardedAdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
    for p in parameters:
        moments = {name: sharded_as(p, torch.zeros_like(shard_of(p))) for name in MOMENTS}
        optimizer.state[p] = {"step": torch.zeros((), device=p.device), **moments}
    return optimizer


def learning_rate(step: int, schedule: ScheduleSection, highest: float) -> float:
    """Of step 0, 1, …: rises to `highest` in the last step of the warm-up, then falls until the last step."""
    if step < schedule.warmup:
        return highest * (step + 1) / schedule.warmup
    top = max(schedule.warmup - 1, 0)
    done = (step - top) / max(1, schedule.steps - 1 - top)
    fall = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + cos(pi * done)) / 2}[schedule.decay]
    return highest * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * fall)


@dataclass
class LossScale:
    """For fp16: halved when a gradient overflows, doubled after `interval` steps without overflow. Otherwise always
    1."""

    scale: float = 1.0
    interval: int = 0  # 0: fixed
    good: int = 0

    def update(self, overflowed: bool) -> None:
        if not self.interval:
            return
        if overflowed:
            self.scale, self.good = max(self.scale / 2, 1.0), 0
        elif self.good + 1 >= self.interval:
            self.scale, self.good = self.scale * 2, 0
        else:
            self.good += 1


@dataclass(frozen=True)
class Applied:
    loss: float
    norm: float
    skipped: bool
    stop: bool  # some rank was asked to stop


@torch.no_grad()
def apply(
    model: Transformer,
    optimizer: torch.optim.AdamW,
    scale: LossScale,
    guard: Guard,
    loss: Tensor,
    clip: float,
    lr: float,
    step: int,
    stop: bool = False,
) -> Applied:
    """Clip by the exact norm of the model's gradient and take the step, if the guard admits it.

    One small all-reduce carries the norm, the loss, whether to stop and whether all ranks launched the same
    collectives. INVARIANT: all ranks decide alike.
    """
    mesh, watch = model.parallel.mesh, model.parallel.mesh.watch
    local = torch.tensor([float(stop), watch.share() if watch else 0.0], dtype=torch.float64)
    told = upload(local, torch.empty_like(local, device=mesh.device))
    mine = torch.cat((torch.stack((model.gradient_square(), loss.double())), told))
    total, losses, stops, odd = all_reduce(mine, mesh.world).wait().tolist()  # the host waits, once a step
    if odd and watch is not None:
        watch.disagree()
    finite, value = isfinite(total), losses / mesh.world.size
    norm = total**0.5 / scale.scale if finite else float("nan")
    taken = guard.admit(step, value, norm, searching=scale.interval > 0 and scale.scale > 1)
    if taken:
        factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        gradients = [shard_of(p.grad) for p in model.parameters() if p.grad is not None]
        if gradients and factor / scale.scale != 1.0:  # none where all of a stage is frozen
            torch._foreach_mul_(gradients, factor / scale.scale)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad()
    scale.update(not finite)
    return Applied(value, norm, not taken, stops > 0)
