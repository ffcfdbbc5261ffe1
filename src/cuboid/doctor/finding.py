"""What a check comes to: one line for a person, with what to do about it."""

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """Training works with a warning, if not as fast or as safely as it could; with an error it does not."""

    check: str
    status: Status
    said: str
    remedy: str = ""
    figures: dict[str, Any] = field(default_factory=dict)  # what was measured, for `--json`
