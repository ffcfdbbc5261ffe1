"""What is on its way while something else computes. Values do not depend on it; times do.

    prefetch   the next layer's weights are gathered while this one computes, in forward and in backward
    halves     two halves of a rank's batch go through each block in step: one computes while the other's collective
               is in flight; autograd plays the same interleaving backwards

What a product can hide by itself it always does: X's second gather under dX's product, dX's scatter under dW's, and
dW's scatter under everything that follows. On a `Mesh` made with `overlap=False` every collective is awaited where it
is launched, whatever the schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cuboid.comm import Steps


@dataclass(frozen=True)
class Schedule:
    prefetch: bool = True
    halves: bool = False


OFF, PREFETCH = Schedule(prefetch=False), Schedule()


def in_step(parts: Sequence[Steps]) -> list[Any]:
    """Play several steps in turn, each up to its next yield; what they return.

    >>> def counts(name):
    ...     for i in range(2):
    ...         print(name, i)
    ...         yield
    ...     return name
    >>> in_step([counts("a"), counts("b")])
    a 0
    b 0
    a 1
    b 1
    ['a', 'b']
    """
    results: list[Any] = [None] * len(parts)
    going = list(enumerate(parts))
    while going:
        still = []
        for i, steps in going:
            try:
                next(steps)
                still.append((i, steps))
            except StopIteration as end:
                results[i] = end.value
        going = still
    return results
