"""Journals of what each rank launched over each group, and their comparison when a run stalls."""

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from zlib import crc32

import torch
import torch.distributed as dist

REMEMBERED = 64  # last calls of a group that a journal keeps
SHOWN = 8  # most lines of a report


class Watcher(Protocol):
    """The reader of journals: the watchdog of run/watch.py."""

    def journal(self, axis: str, group: dist.ProcessGroup) -> "Journal": ...

    def share(self) -> float: ...

    def disagree(self) -> None: ...

    def paused(self) -> AbstractContextManager[None]: ...


class Journal:
    """A rank's collectives over one group. INVARIANT: the same calls give the same digest on every rank.

    A waiting rank calls `look` after each `nap`, which raises if the wait is in vain; given an error, it raises that or
    its cause.
    """

    def __init__(
        self,
        axis: str,
        ranks: Sequence[int],
        rank: int,
        nap: timedelta = timedelta(seconds=1),
        look: Callable[[RuntimeError | None], None] = lambda error: None,
    ) -> None:
        self.axis, self.ranks, self.index = axis, tuple(ranks), tuple(ranks).index(rank)
        self._nap, self._look = nap, look
        self.count = self.digest = self.landings = 0
        self.awaited = 0  # the number of the call for which the rank waits; 0: none
        self.recent: deque[tuple[int, str, tuple[int, ...], torch.dtype | None]] = deque(maxlen=REMEMBERED)

    def note(self, kind: str, shape: tuple[int, ...] = (), dtype: torch.dtype | None = None) -> int:
        """Enters a call; returns its number, from 1."""
        self.count += 1
        self.digest = hash((self.digest, crc32(kind.encode()), shape, dtype.itemsize if dtype else 0))
        self.recent.append((self.count, kind, shape, dtype))
        return self.count

    def wait(self, work: dist.Work, number: int) -> None:
        self.awaited = number
        while not work.is_completed():
            with suppress(RuntimeError):  # the nap is over, or the collective failed, which the wait below raises
                work.wait(self._nap)
            self._look(None)
        try:
            work.wait()
        except RuntimeError as error:
            self._look(error)
        self.awaited, self.landings = 0, self.landings + 1

    def blocking(self, kind: str, call: Callable[[], Any]) -> Any:
        """Calls a blocking collective and returns its result."""
        self.awaited = self.note(kind)
        try:
            found = call()
        except RuntimeError as error:
            self._look(error)
            raise
        self.awaited, self.landings = 0, self.landings + 1
        return found

    def share(self) -> float:
        """A number whose sum over the group is 0 if its ranks made the same calls. It is a small integer, so that the
        sum over all ranks is exact in fp64."""
        return (self.digest & 0xFFFFFF) * (len(self.ranks) - 1 if self.index == 0 else -1)

    def page(self) -> "Page":
        """A snapshot, while the rank may continue."""
        calls = {number: name(kind, shape, dtype) for number, kind, shape, dtype in list(self.recent)}
        return Page(self.axis, self.ranks, max(calls, default=0), self.awaited, calls)


def name(kind: str, shape: Iterable[int], dtype: torch.dtype | None) -> str:
    return f"{kind} of {list(shape)} {str(dtype).removeprefix('torch.')}" if dtype else kind


@dataclass(frozen=True)
class Page:
    """A journal's snapshot, as it is sent."""

    axis: str
    ranks: tuple[int, ...]
    count: int
    awaited: int
    calls: dict[int, str]  # the last ones, by number


@dataclass(frozen=True)
class Account:
    """The state of a rank."""

    step: int
    at: str  # the lines in which its threads are, and what the backend has not finished
    pages: list[Page]

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Account":
        pages = [
            Page(p["axis"], tuple(p["ranks"]), p["count"], p["awaited"], {int(n): c for n, c in p["calls"].items()})
            for p in values["pages"]
        ]
        return cls(values["step"], values["at"], pages)


def explain(
    accounts: Mapping[int, Account], size: int, differ: bool = False, names: Sequence[str] = ()
) -> tuple[bool, str]:
    """Returns whether ranks called different collectives, which is certain if they `differ`, and a report on who did so
    or did not arrive, and where. Some of the `size` ranks may have given no account. `names`: of those that did not
    arrive."""
    step = max((account.step for account in accounts.values()), default=0)
    lines = mismatches(accounts)
    if differ and not lines:
        lines = [f"collectives do not match, {REMEMBERED} calls or more ago on any axis"]
    return bool(lines), f"step {step}: " + "\n  ".join(shortened(lines or absences(accounts, size, names)))


def shortened(lines: list[str]) -> list[str]:
    more = len(lines) - SHOWN
    return lines if more <= 0 else [*lines[:SHOWN], f"and {more} more"]


def mismatches(accounts: Mapping[int, Account]) -> list[str]:
    """The first call of each group on which its ranks disagree."""
    lines = []
    for (axis, _), pages in groups(accounts).items():
        for number in sorted({number for page in pages.values() for number in page.calls}):
            made = {rank: page.calls[number] for rank, page in pages.items() if number in page.calls}
            if len(set(made.values())) > 1:
                lines.append(f"axis {axis}, collective {number}: {calls_of(made)}")
                break
    return ["collectives do not match", *lines] if lines else []


def groups(accounts: Mapping[int, Account]) -> dict[tuple[str, tuple[int, ...]], dict[int, Page]]:
    found: dict[tuple[str, tuple[int, ...]], dict[int, Page]] = {}
    for rank, account in sorted(accounts.items()):
        for page in account.pages:
            found.setdefault((page.axis, page.ranks), {})[rank] = page
    return found


def calls_of(made: Mapping[int, str]) -> str:
    """Which ranks called what; the call of most ranks first."""
    by_call: dict[str, list[int]] = {}
    for rank, call in made.items():
        by_call.setdefault(call, []).append(rank)
    return "; ".join(
        f"{listed(by_call[call])} called {call}" for call in sorted(by_call, key=lambda c: -len(by_call[c]))
    )


def absences(accounts: Mapping[int, Account], size: int, names: Sequence[str]) -> list[str]:
    """The ranks that hold up others, then those that wait for them. A waiting rank holds up nobody."""
    silent = set(range(size)) - accounts.keys()
    counts = {(page.axis, page.ranks, rank): page.count for rank, each in accounts.items() for page in each.pages}

    def missing(page: Page) -> set[int]:
        return {rank for rank in page.ranks if counts.get((page.axis, page.ranks, rank), 0) < page.awaited}

    waiting = {rank: [page for page in each.pages if page.awaited] for rank, each in accounts.items()}
    absent = {rank for pages in waiting.values() for page in pages for rank in missing(page)}
    late = sorted(rank for rank in absent - silent if not waiting[rank])
    causes = silent | set(late)
    lines = [f"{listed(silent, names)} did not arrive and did not answer: stopped, dead or cut off"] if silent else []
    lines += [f"{listed([rank], names)} did not arrive: it is at {accounts[rank].at}" for rank in late]
    if not any(waiting.values()):  # on GPUs, where waits cannot be seen
        missed = behind(accounts)
        some = {rank for _, ranks in missed for rank in ranks} or accounts.keys()
        places = [f"{listed([rank], names)} is at {accounts[rank].at}" for rank in sorted(some)]
        return [*lines, *(line for line, _ in missed), *(places if missed or not lines else [])]
    if not lines:
        lines = ["ranks wait for one another" if absent else "all ranks arrived, but not what they sent"]
    direct = [rank for rank, pages in waiting.items() if any(missing(page) & causes for page in pages)]
    direct = direct or [rank for rank, pages in waiting.items() if pages]
    for rank in sorted(direct):
        lines += waits(rank, accounts[rank])
    rest = sum(bool(pages) for pages in waiting.values()) - len(direct)
    return [*lines, f"{rest} more wait for these"] if rest else lines


def behind(accounts: Mapping[int, Account]) -> list[tuple[str, list[int]]]:
    """Ranks that launched fewer collectives than others of their group: a line for each group, and the ranks."""
    lines = []
    for (axis, _), pages in groups(accounts).items():
        most = max(page.count for page in pages.values())
        late = [rank for rank, page in pages.items() if page.count < most]
        if late:
            call = next(page.calls[most] for page in pages.values() if page.count == most)
            lines.append((f"axis {axis}, collective {most}: {listed(late)} did not arrive at {call}", late))
    return lines


def unfinished() -> list[str]:
    """The first launched, not completed collective of each group, by PyTorch's flight recorders if they are on: NCCL's,
    which builds for CUDA have, and that of the CPU's backends."""
    recorders = torch._C._distributed_c10d
    dumps = [getattr(recorders, f"_dump_{name}_trace_json", None) for name in ("nccl", "fr")]
    texts = [dump(includeCollectives=True, onlyActive=True) for dump in dumps if dump]
    first: dict[str, str] = {}
    for each in (entry for text in texts for entry in json.loads(text).get("entries", [])):
        if each["state"] != "completed":
            group = str(each["process_group"][-1])
            text = f"{each['profiling_name']} {each['collective_seq_id']} of {each['input_sizes']} over group {group}"
            first.setdefault(group, f"{text} is {each['state']}")
    return list(first.values())


def waits(rank: int, account: Account) -> list[str]:
    """Lines on what a rank waits for."""
    return [
        f"axis {page.axis}, collective {page.awaited}: rank {rank} waits for {listed(set(page.ranks) - {rank})} with "
        + page.calls.get(page.awaited, "it")
        for page in account.pages
        if page.awaited
    ]


def listed(ranks: Iterable[int], names: Sequence[str] = ()) -> str:
    """Ranks by their names; by their numbers if they have none."""
    ordered = sorted(ranks)
    if names:
        return ", ".join(names[rank] for rank in ordered)
    return f"rank{'s' * (len(ordered) > 1)} {', '.join(map(str, ordered))}"
