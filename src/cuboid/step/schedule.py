"""What is on its way while something else computes, and how that is computed. Times depend on it, values do not.

    prefetch   the next layer's weights are gathered while this one computes, in forward and in backward; the last
               layer's stay from one to the other
    parts      a rank's batch goes through the blocks in so many parts, in step: one computes while the others'
               collectives are in flight; autograd plays the same interleaving backwards
    chunks     a product takes its tokens so many at a time: one chunk is multiplied while the next is gathered and the
               one before scattered. For a batch that has no parts
    compile    elementwise work is fused by torch.compile: values then differ in rounding

What a product can hide by itself it always does: X's second gather under dX's product, dX's scatter under dW's, and
dW's scatter under everything that follows. On a `Mesh` made with `overlap=False` every collective is awaited where it
is launched, whatever the schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cuboid.comm.flight import Steps
from cuboid.step.fuse import Fuse, compiled, plain


@dataclass(frozen=True)
class Schedule:
    prefetch: bool = True
    parts: int = 1
    chunks: int = 1
    compile: bool = False

    @property
    def fuse(self) -> Fuse:
        return compiled if self.compile else plain

    def __post_init__(self) -> None:
        for name in ("parts", "chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"a schedule of {name}={getattr(self, name)} is none; use 1 or more")


OFF, PREFETCH = Schedule(prefetch=False), Schedule()

#: How many pauses a part may be ahead of another: less than a block has, so that two blocks' weights are enough.
MOST_AHEAD = 8


@dataclass
class _Part:
    steps: Steps
    ready: float = 0.0  # when what it waits for is thought to have landed
    work: float = 0.0  # that it does next
    done: int = 0


def in_step(parts: Sequence[Steps]) -> list[Any]:
    """Play several steps from pause to pause, one computing while the others' collectives are in flight; what they
    return.

    Whose turn it is follows from a clock that counts FLOPs, on which a link takes as long over all that is sent as the
    work takes. Of the parts whose collective has landed by then, one that will only launch its next goes
    before one that computes, and the one ahead before the others; so they spread out, and links and cores are both
    kept busy. Sizes are the same on all ranks, hence the order is, whatever the time.

    >>> from cuboid.comm.flight import Pause
    >>> def counts(name):
    ...     for i in range(2):
    ...         print(name, i)
    ...         yield Pause(sent=1, work=1)
    ...     return name
    >>> in_step([counts("a"), counts("b")])
    a 0
    b 0
    a 1
    b 1
    ['a', 'b']
    """
    results: list[Any] = [None] * len(parts)
    going = {i: _Part(steps) for i, steps in enumerate(parts)}
    clock = link = work = sent = 0.0
    while going:
        last = min(part.done for part in going.values())
        free = [i for i, part in going.items() if part.done < last + MOST_AHEAD]
        i = min(free, key=lambda i: (max(clock, going[i].ready), going[i].work > 0, -going[i].done, i))
        part = going[i]
        clock = max(clock, part.ready) + part.work
        try:
            pause = next(part.steps)
        except StopIteration as end:
            results[i] = end.value
            del going[i]
            continue
        work, sent = work + pause.work, sent + pause.sent
        part.ready, part.work, part.done = clock, pause.work, part.done + 1
        if pause.sent:
            part.ready = link = max(link, clock) + pause.sent * (work or sent) / sent
    return results
