"""What ends a run."""


class RunError(RuntimeError):
    """What ended a run is no fault of the program, a full disk say; the message says all, and no traceback is shown."""


class RankError(RuntimeError):
    """A rank failed: this one, or another that this one needs."""

    teller: int | None = None  # the rank that reports what all ranks know; None: whoever knows
