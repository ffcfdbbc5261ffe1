"""What each rank launched over each group, in order, and what their accounts say when nothing moves any more."""

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from zlib import crc32

import torch
import torch.distributed as dist

REMEMBERED = 64  # calls of a group that a rank can still name
SHOWN = 8  # lines of a report


class Watcher(Protocol):
    """Who reads the journals: the watchdog of run/watch.py."""

    def journal(self, axis: str, group: dist.ProcessGroup) -> "Journal": ...

    def share(self) -> float: ...

    def disagree(self) -> None: ...


class Journal:
    """A rank's collectives over one group. The digest is that of the same calls on every rank and in every process.

    Who waits for one wakes up after each `nap` to `look`, which raises if it waits in vain; given an error, it raises
    that or what is behind it.
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
        self.awaited = 0  # the number of the call that the rank does nothing but wait for; 0: none
        self.recent: deque[tuple[int, str, tuple[int, ...], torch.dtype | None]] = deque(maxlen=REMEMBERED)

    def note(self, kind: str, shape: tuple[int, ...] = (), dtype: torch.dtype | None = None) -> int:
        """The number of this call, counted from 1."""
        self.count += 1
        self.digest = hash((self.digest, crc32(kind.encode()), shape, dtype.itemsize if dtype else 0))
        self.recent.append((self.count, kind, shape, dtype))
        return self.count

    def wait(self, work: dist.Work, number: int) -> None:
        self.awaited = number
        while not work.is_completed():
            with suppress(RuntimeError):  # the nap is over, or the collective failed, which is raised below
                work.wait(self._nap)
            self._look(None)
        try:
            work.wait()
        except RuntimeError as error:
            self._look(error)
        self.awaited, self.landings = 0, self.landings + 1

    def blocking(self, kind: str, call: Callable[[], Any]) -> Any:
        """What a collective returns, which does when it is done."""
        self.awaited = self.note(kind)
        try:
            found = call()
        except RuntimeError as error:
            self._look(error)
            raise
        self.awaited, self.landings = 0, self.landings + 1
        return found

    def share(self) -> float:
        """Sums to nothing over the ranks of the group that have made the same calls. Whole and small, so the sum over
        all ranks is exact in fp64."""
        return (self.digest & 0xFFFFFF) * (len(self.ranks) - 1 if self.index == 0 else -1)

    def page(self) -> "Page":
        """As it stands; the rank may go on meanwhile."""
        calls = {number: name(kind, shape, dtype) for number, kind, shape, dtype in list(self.recent)}
        return Page(self.axis, self.ranks, max(calls, default=0), self.awaited, calls)


def name(kind: str, shape: Iterable[int], dtype: torch.dtype | None) -> str:
    return f"{kind} of {list(shape)} {str(dtype).removeprefix('torch.')}" if dtype else kind


@dataclass(frozen=True)
class Page:
    """A journal as it is sent."""

    axis: str
    ranks: tuple[int, ...]
    count: int
    awaited: int
    calls: dict[int, str]  # the last ones, by number


@dataclass(frozen=True)
class Account:
    """Where a rank stands."""

    step: int
    at: str  # the lines its threads are in, and what the backend has not finished
    pages: list[Page]

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Account":
        pages = [
            Page(p["axis"], tuple(p["ranks"]), p["count"], p["awaited"], {int(n): c for n, c in p["calls"].items()})
            for p in values["pages"]
        ]
        return cls(values["step"], values["at"], pages)


def explain(accounts: Mapping[int, Account], size: int, differ: bool = False) -> tuple[bool, str]:
    """Whether some called something else than the others, which they did for certain if they `differ`, and who did so
    or did not arrive, and where. Of `size` ranks some gave no account."""
    step = max((account.step for account in accounts.values()), default=0)
    lines = mismatches(accounts)
    if differ and not lines:
        lines = [f"collectives do not match, {REMEMBERED} calls or more ago on any axis"]
    return bool(lines), f"step {step}: " + "\n  ".join(shortened(lines or absences(accounts, size)))


def shortened(lines: list[str]) -> list[str]:
    more = len(lines) - SHOWN
    return lines if more <= 0 else [*lines[:SHOWN], f"and {more} more"]


def mismatches(accounts: Mapping[int, Account]) -> list[str]:
    """The first call of each group that its ranks do not agree on."""
    lines = []
    for (axis, _), pages in groups(accounts).items():
        for number in sorted({number for page in pages.values() for number in page.calls}):
            made = {rank: page.calls[number] for rank, page in pages.items() if number in page.calls}
            if len(set(made.values())) > 1:
                lines.append(f"axis {axis}, collective {number}: {said(made)}")
                break
    return ["collectives do not match", *lines] if lines else []


def groups(accounts: Mapping[int, Account]) -> dict[tuple[str, tuple[int, ...]], dict[int, Page]]:
    found: dict[tuple[str, tuple[int, ...]], dict[int, Page]] = {}
    for rank, account in sorted(accounts.items()):
        for page in account.pages:
            found.setdefault((page.axis, page.ranks), {})[rank] = page
    return found


def said(made: Mapping[int, str]) -> str:
    """The call of most ranks first."""
    by_call: dict[str, list[int]] = {}
    for rank, call in made.items():
        by_call.setdefault(call, []).append(rank)
    return "; ".join(
        f"{listed(by_call[call])} called {call}" for call in sorted(by_call, key=lambda c: -len(by_call[c]))
    )


def absences(accounts: Mapping[int, Account], size: int) -> list[str]:
    """Those who hold up the others, then who waits for them. A rank that waits itself holds up nobody."""
    silent = set(range(size)) - accounts.keys()
    counts = {(page.axis, page.ranks, rank): page.count for rank, each in accounts.items() for page in each.pages}

    def missing(page: Page) -> set[int]:
        return {rank for rank in page.ranks if counts.get((page.axis, page.ranks, rank), 0) < page.awaited}

    waiting = {rank: [page for page in each.pages if page.awaited] for rank, each in accounts.items()}
    absent = {rank for pages in waiting.values() for page in pages for rank in missing(page)}
    late = sorted(rank for rank in absent - silent if not waiting[rank])
    causes = silent | set(late)
    lines = [f"{listed(silent)} did not arrive and did not answer: stopped, dead or cut off"] if silent else []
    lines += [f"{listed([rank])} did not arrive: it is at {accounts[rank].at}" for rank in late]
    if not any(waiting.values()):  # on a GPU nobody waits in sight
        missed = behind(accounts)
        some = {rank for _, ranks in missed for rank in ranks} or accounts.keys()
        places = [f"{listed([rank])} is at {accounts[rank].at}" for rank in sorted(some)]
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
    """Who has launched less than others of a group, in words and by rank."""
    lines = []
    for (axis, _), pages in groups(accounts).items():
        most = max(page.count for page in pages.values())
        late = [rank for rank, page in pages.items() if page.count < most]
        if late:
            call = next(page.calls[most] for page in pages.values() if page.count == most)
            lines.append((f"axis {axis}, collective {most}: {listed(late)} did not arrive at {call}", late))
    return lines


def unfinished() -> list[str]:
    """What PyTorch's flight recorder, if it records, has seen launched and not completed: the first of each group."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    entries = json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", []) if dump else []
    first: dict[str, str] = {}
    for each in entries:
        if each["state"] != "completed":
            group = str(each["process_group"][-1])
            text = f"{each['profiling_name']} {each['collective_seq_id']} of {each['input_sizes']} over group {group}"
            first.setdefault(group, f"{text} is {each['state']}")
    return list(first.values())


def waits(rank: int, account: Account) -> list[str]:
    """What a rank waits for."""
    return [
        f"axis {page.axis}, collective {page.awaited}: rank {rank} waits for {listed(set(page.ranks) - {rank})} with "
        + page.calls.get(page.awaited, "it")
        for page in account.pages
        if page.awaited
    ]


def listed(ranks: Iterable[int]) -> str:
    ordered = sorted(ranks)
    return f"rank{'s' * (len(ordered) > 1)} {', '.join(map(str, ordered))}"
