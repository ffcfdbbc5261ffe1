"""Errors that end a run."""


class RunError(RuntimeError):
    """A run ended for a reason outside the program, such as a full disk. Shown without a traceback."""


class RankError(RuntimeError):
    """This rank failed, or another that it needs."""

    teller: int | None = None  # the rank that reports what all ranks know; None: whoever knows
