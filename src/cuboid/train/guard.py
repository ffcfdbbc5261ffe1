"""The numerical guard: what happens to a step whose loss or gradient is not finite, or far above the last steps'.

It judges values that are the same on every rank, and its state is part of a checkpoint. So all ranks decide alike, and
a resumed run decides as an uninterrupted one.
"""

from collections import deque
from collections.abc import Mapping
from math import isfinite
from statistics import median
from typing import Any, Literal

from cuboid.train.config import GuardSection

REMEDY = "The last checkpoint is intact; resume from it with a lower optimizer.lr, or with another policy"


class Diverged(ValueError):
    """Training diverged, and the configuration says to stop."""


class Guard:
    def __init__(self, config: GuardSection) -> None:
        self.config = config
        self.losses: deque[float] = deque(maxlen=config.window)  # of the last steps taken
        self.norms: deque[float] = deque(maxlen=config.window)
        self.skips = self.in_a_row = 0
        self.spike = False  # whether the last step was one
        self.message = ""  # of the last step, to a person

    def admit(self, step: int, loss: float, norm: float, searching: bool = False) -> bool:
        """Whether to take the step. While fp16 is `searching` for its scale, a gradient may overflow."""
        kind, fault = self._fault(loss, norm)
        self.spike, self.message = kind == "spike", f"step {step}: {fault}" if fault else ""
        if kind == "nonfinite" and searching and isfinite(loss):
            self.skips, self.message = self.skips + 1, ""
            return False
        policy = {"": "take", "nonfinite": self.config.nonfinite, "spike": self.config.spike}[kind]
        if policy == "stop":
            raise Diverged(f'{self.message}; guard.{kind} = "stop" ends the run. {REMEDY}')
        if policy in ("take", "warn"):
            self.in_a_row = 0
            self.losses.append(loss)
            self.norms.append(norm)
            return True
        self.skips, self.in_a_row, self.message = self.skips + 1, self.in_a_row + 1, f"{self.message}; skipped"
        if self.in_a_row > self.config.max_skips:
            many = f"{self.in_a_row} in a row with guard.max_skips = {self.config.max_skips}"
            raise Diverged(f"{self.message}, {many}. {REMEDY}")
        return False

    def _fault(self, loss: float, norm: float) -> tuple[Literal["", "nonfinite", "spike"], str]:
        if not isfinite(loss):
            return "nonfinite", f"the loss is {loss}"
        if not isfinite(norm):
            return "nonfinite", "the gradient is not finite"
        c = self.config
        if len(self.losses) == c.window:
            for what, value, seen, factor in (
                ("loss", loss, self.losses, c.loss_factor),
                ("gradient's norm", norm, self.norms, c.norm_factor),
            ):
                usual = median(seen)
                if factor and value > factor * usual:
                    return "spike", f"the {what} is {value:.4g}; the median of the last {c.window} steps is {usual:.4g}"
        return "", ""

    def state(self) -> dict[str, Any]:
        return {
            "losses": list(self.losses),
            "norms": list(self.norms),
            "skips": self.skips,
            "in_a_row": self.in_a_row,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.losses.extend(state["losses"])
        self.norms.extend(state["norms"])
        self.skips, self.in_a_row = state["skips"], state["in_a_row"]
