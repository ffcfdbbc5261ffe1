"""Under torchrun every rank learns of a failure; one reports it."""

import os
import sys
import traceback

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from cuboid.run.errors import RankError, RunError


def report(error: Exception, rank: int) -> None:
    """What all ranks know is printed by one of them. A rank's own failure is left to torchrun's summary, which has the
    traceback of every rank that records one, unless torchrun will start the ranks again without a summary."""
    if isinstance(error, RankError | RunError):
        teller = error.teller if isinstance(error, RankError) else 0
        if teller in (None, rank):
            print(f"error: {error}", file=sys.stderr, flush=True)
        return
    get_error_handler().record_exception(error)
    count, most = (int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    if count < most or "TORCHELASTIC_ERROR_FILE" not in os.environ:
        print(traceback.format_exc(), file=sys.stderr, flush=True)
