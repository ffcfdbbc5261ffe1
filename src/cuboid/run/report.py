"""Reports of failures under torchrun, where every rank learns of them and one reports."""

import os
import sys
import traceback

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from cuboid.run.errors import RankError, RunError


def report(error: Exception, rank: int) -> None:
    """Print, on one rank, what all know. A rank's own failure is recorded for torchrun's summary, which has all ranks'
    tracebacks; if torchrun will restart the ranks without a summary, it is printed too."""
    if isinstance(error, RankError | RunError):
        teller = error.teller if isinstance(error, RankError) else 0
        if teller in (None, rank):
            print(f"error: {error}", file=sys.stderr, flush=True)
        return
    get_error_handler().record_exception(error)
    count, most = (int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    if count < most or "TORCHELASTIC_ERROR_FILE" not in os.environ:
        print(traceback.format_exc(), file=sys.stderr, flush=True)
