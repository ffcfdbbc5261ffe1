"""The result of a check: one line, with what to do about it."""

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """The result of a check. A warning: training works, but not as fast or safe as possible. An error: it does not."""

    check: str
    status: Status
    said: str
    remedy: str = ""
    figures: dict[str, Any] = field(default_factory=dict)  # what was measured, for `--json`
