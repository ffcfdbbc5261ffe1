"""The watchdog: if a rank stalls, dies or fails, all ranks end within a set time, with a message that says which and
where.

It costs a step only the journal entry of each collective. One thread checks whether the rank makes progress; another
polls the run's store for an alarm. After an alarm every rank puts its account into the store, and the rank that raised
the alarm explains from all accounts which ranks did not arrive. The main thread, which wakes up regularly while it
waits for a collective, raises that; if it hangs elsewhere, the process is ended.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from cuboid.comm.journal import Account, Journal, explain, listed, unfinished, waits
from cuboid.run.errors import RankError

EXIT_CODE = 70  # of a rank that hangs where no exception reaches it
MOMENT = 3.0  # seconds that a failed rank has for its own message before others report it
NAP = 0.02  # seconds between polls
OURS, TORCH = (os.path.dirname(file) + os.sep for file in (os.path.dirname(__file__), torch.__file__))
ALARM, ANSWERS, VERDICT, HEARD = "watch/alarm", "watch/answers", "watch/verdict", "watch/heard"


class Stalled(RankError):
    """Ranks did not arrive; the message names them and where they are."""


class Mismatched(RankError):
    """Ranks called different collectives; the message names ranks and calls."""


ERRORS = {"failed": RankError, "stalled": Stalled, "mismatched": Mismatched}


@dataclass(frozen=True)
class Alarm:
    rank: int
    why: str = ""  # the backend's error
    failure: str = ""  # the full message, if the rank itself failed
    differ: bool = False  # collectives are known not to match


class Watch:
    """A context manager, on every rank. A rank may not wait longer than `limit` seconds, nor in a step (`step` > 0) be
    busy for longer. `names`: what errors call the ranks; empty: by their numbers."""

    def __init__(self, rank: int, size: int, store: dist.Store, limit: float, names: Sequence[str] = ()) -> None:
        self.rank, self.size, self.limit, self.names = rank, size, limit, names
        self.interval = min(max(limit / 50, 0.05), 2.0)
        self.grace = min(max(limit / 8, 1.0), 10.0)  # for others to answer
        self.step = 0
        self._verdict: RankError | None = None
        self._journals: list[Journal] = []
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]  # calls of one client wait for each other
        self._alarm: Alarm | None = None
        self._wake, self._sent, self._judged, self._closed = (threading.Event() for _ in range(4))
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._keep_time, self._listen)]

    def journal(self, axis: str, group: dist.ProcessGroup) -> Journal:
        """A journal of one of this rank's groups, whose own timeout is set to later than the watchdog's."""
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2 * self.limit), group)
        ranks, nap = dist.get_process_group_ranks(group), timedelta(seconds=self.interval)
        self._journals.append(Journal(axis, ranks, self.rank, nap, self.look))
        return self._journals[-1]

    def share(self) -> float:
        """A number whose sum over all ranks is 0 if each group's ranks made the same calls."""
        return sum(journal.share() for journal in self._journals)

    def look(self, error: RuntimeError | None) -> None:
        """Called while waiting: raises what the watchdog has found. An `error` of the backend raises the alarm."""
        if error is not None:
            self.alarm(Alarm(self.rank, why=str(error)))
            _until(self._judged.is_set, 4 * self.grace + MOMENT)
        if self._verdict is not None:
            raise self._verdict from error
        if error is not None:
            raise error

    def disagree(self) -> None:
        """Called on all ranks when some collectives did not match."""
        self.alarm(Alarm(self.rank, differ=True))
        _until(self._judged.is_set, 4 * self.grace + MOMENT)
        raise self._verdict or Mismatched(f"step {self.step}: collectives do not match")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For as long as this rank waits for itself: it may be busy for any time, as outside a step."""
        step, self.step = self.step, 0
        try:
            yield
        finally:
            self.step = step

    def alarm(self, alarm: Alarm) -> None:
        self._alarm = self._alarm or alarm
        self._wake.set()

    def __enter__(self) -> "Watch":
        self._unhook = _before_abort(self._aborting)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and error is not self._verdict:
            at = f" at step {self.step}" if self.step else ""
            who = listed([self.rank], self.names)
            self.alarm(Alarm(self.rank, failure=f"{who} failed{at}: {type(error).__name__}: {error}"))
            _until(self._sent.is_set, self.grace)
        self._closed.set()
        self._wake.set()
        self._unhook()
        for thread in self._threads:
            thread.join(2 * self.interval)  # one that hangs in the store is left behind

    # the clock

    def _keep_time(self) -> None:
        seen, idle, tick = -1, 0.0, time.monotonic()
        while not self._closed.wait(self.interval):
            before, tick = tick, time.monotonic()
            passed = min(tick - before, 2 * self.interval)  # as in `_until`
            moved = self.step + sum(journal.count + journal.landings for journal in self._journals)
            busy = not self.step and not any(journal.awaited for journal in self._journals)
            idle = 0.0 if moved != seen or busy else idle + passed
            seen = moved
            if idle > 0.75 * self.limit:
                self.alarm(Alarm(self.rank))
            if self._alarm is not None:
                if not _until(self._sent.is_set, self.grace):
                    self._blame_keeper()
                self._end()
                return

    def _end(self) -> None:
        """End the process, unless the main thread raises the verdict in time."""
        if not _until(self._judged.is_set, 4 * self.grace + MOMENT):
            self._blame_keeper()
        if not _until(self._closed.is_set, self.grace + MOMENT):
            self._print()
            os._exit(EXIT_CODE)

    def _aborting(self, _: int) -> None:
        """Called in a thread of gloo that aborts because it received too much. Delays the abort until others know."""
        self.alarm(Alarm(self.rank))
        _until(self._judged.is_set, 4 * self.grace)
        _until(lambda: False, MOMENT)
        self._print()

    def _judge(self, kind: str, text: str, teller: int | None = None) -> None:
        if self._verdict is None:
            self._verdict = ERRORS[kind](text)
            self._verdict.teller = teller
        self._judged.set()

    def _print(self) -> None:
        if self._verdict is None or self._verdict.teller in (None, self.rank):
            print(f"error: {self._verdict}", file=sys.stderr, flush=True)

    def _blame_keeper(self) -> None:
        """The verdict if the store is lost, when only this rank's own account is known."""
        silent = f"{listed([0], self.names)}, which keeps the run's store, did not answer: stopped, dead or cut off"
        self._judge("stalled", "\n  ".join([f"step {self.step}: {silent}", *waits(self.rank, self._account())]))

    # the store, which only this thread uses, because a request may hang

    def _listen(self) -> None:
        try:
            while not self._closed.is_set():
                self._wake.wait(self.interval)
                if self._alarm is not None or self._store.check([ALARM]):
                    self._answer()
                    return
        except RuntimeError:  # the store is gone
            self._wake.wait()  # until a rank is missed
            self._blame_keeper()

    def _answer(self) -> None:
        store = self._store
        mine = json.dumps(asdict(self._alarm)) if self._alarm else ""
        first = Alarm(**json.loads(store.compare_set(ALARM, "", mine) if mine else store.get(ALARM)))
        self.alarm(first)
        self._sent.set()
        if first.failure:
            _until(lambda: first.rank == self.rank, MOMENT)
            self._judge("failed", first.failure, teller=0)
            return
        store.set(f"watch/{self.rank}", json.dumps(asdict(self._account())))
        store.add(ANSWERS, 1)
        if first.rank == self.rank:
            store.set(VERDICT, json.dumps(self._collect(first)))
        found = _until(lambda: store.check([VERDICT]), 2 * self.grace)
        silent = "stalled", f"step {self.step}: rank {first.rank} raised the alarm, but does not answer any more"
        kind, text = json.loads(store.get(VERDICT)) if found else silent
        store.add(HEARD, 1)
        if self.rank == 0:  # the store may end with this process
            _until(lambda: store.add(HEARD, 0) >= store.add(ANSWERS, 0), self.grace)
        self._judge(kind, text, first.rank if found else None)

    def _collect(self, alarm: Alarm) -> tuple[str, str]:
        """The verdict from all accounts."""
        store = self._store
        _until(lambda: store.add(ANSWERS, 0) == self.size, self.grace)
        ranks = [rank for rank in range(self.size) if store.check([f"watch/{rank}"])]
        accounts = {rank: Account.read(json.loads(store.get(f"watch/{rank}"))) for rank in ranks}
        mismatched, text = explain(accounts, self.size, alarm.differ, self.names)
        heard = f"\n  rank {self.rank} heard: {alarm.why}" if alarm.why else ""
        return "mismatched" if mismatched else "stalled", text + heard

    def _account(self) -> Account:
        at = [whereabouts({thread.ident for thread in self._threads}), *unfinished()]
        return Account(self.step, "; ".join(at), [journal.page() for journal in self._journals])


@contextmanager
def watched(rank: int, size: int, limit: float, names: Sequence[str] = ()) -> Iterator[Watch | None]:
    """Watches the ranks of the default process group; yields None for a single rank or without a limit."""
    if size == 1 or not limit:
        yield None
        return
    with Watch(rank, size, dist.distributed_c10d._get_default_store(), limit, names) as watch:
        yield watch


def whereabouts(silent: Collection[int | None]) -> str:
    """The lines in which this process's threads are: the main one and others that run code of this package, such as
    autograd's on a GPU. PyTorch's own frames and `silent` threads are left out."""
    names, main = {thread.ident: thread.name for thread in threading.enumerate()}, threading.main_thread().ident
    found = {}
    for thread, innermost in sys._current_frames().items():
        frames = list[FrameType]()
        frame: FrameType | None = innermost
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        inside = OURS if thread != main else ""
        mine = [f for f in frames if f.f_code.co_filename.startswith(inside) and not _is_torch(f)]
        if mine and thread not in silent:
            found[thread] = f"{os.path.basename(mine[0].f_code.co_filename)}:{mine[0].f_lineno}"
    at = found.pop(main or 0, "no place known")
    others = [f"{names.get(thread, 'a thread of autograd')} at {each}" for thread, each in found.items()]
    return "; ".join([at, *others])


def _is_torch(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(TORCH)


def _until(done: Callable[[], bool], seconds: float) -> bool:
    """Whether `done` within `seconds`. Time without a processor counts little: other ranks were held up too."""
    left, tick = seconds, time.monotonic()
    while not done():
        if left <= 0:
            return False
        time.sleep(NAP)
        before, tick = tick, time.monotonic()
        left -= min(tick - before, 2 * NAP)
    return True


def _before_abort(call: Callable[[int], None]) -> Callable[[], None]:
    """Have `call` called, in any thread that aborts, before the process ends. The returned function undoes it."""
    libc, handler = ctypes.CDLL(None), ctypes.CFUNCTYPE(None, ctypes.c_int)(call)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    before = libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))

    def undo(_keep: object = handler) -> None:
        libc.signal(signal.SIGABRT, before)

    return undo
