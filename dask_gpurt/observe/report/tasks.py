"""The tasks of a run: single ones, their sums by kind, and the workers that are slow for the same kind."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: siblings on other workers without which a duration says nothing about a worker
SIBLINGS = 3
#: durations below say nothing of a worker's speed, in seconds
MEASURABLE = 1e-3


#: the fields of a `Task`
Row = tuple[str, str, float, float, float]


class Task(NamedTuple):
    """One task that ended with a result. A row of `TaskHistory`; there are thousands."""

    address: str
    prefix: str
    #: Unix time
    start: float
    stop: float
    #: of the transfers that were made for it
    transfer_seconds: float

    @property
    def seconds(self) -> float:
        """For which it ran."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Kind:
    """The tasks of one prefix. Times in seconds."""

    prefix: str
    tasks: int
    seconds: float
    median: float
    longest: float
    #: of transfers that were made for them
    fetching: float


@dataclasses.dataclass(frozen=True)
class Slowness:
    """How much longer one worker takes for the same tasks than the others do."""

    address: str
    #: 2: twice as long
    factor: float
    #: that it was found from, and their seconds
    tasks: int
    seconds: float


def slowness(tasks: Iterable[Row]) -> list[Slowness]:
    """Slowest first; workers that had no tasks in common with others are left out.

    By the median of each prefix here against the median elsewhere: one large task among many small ones does not make
    a worker slow, a worker on which all of them are slow is.
    """
    by_prefix: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
    # By position: a property of thousands of tasks, asked for with each graph, shows on the scheduler.
    for address, prefix, start, stop, _ in tasks:
        if stop - start >= MEASURABLE:
            by_prefix[prefix].append((stop - start, address))
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for every in by_prefix.values():
        every.sort()
        places: defaultdict[str, list[int]] = defaultdict(list)
        for i, (_, address) in enumerate(every):
            places[address].append(i)
        for address, mine in places.items():
            n = len(every) - len(mine)
            if n < SIBLINGS or len(mine) < SIBLINGS:
                continue
            # The median of the others, without a list of them for each worker: its place moves up past each of ours.
            middle = n // 2
            for place in mine:
                if place > middle:
                    break
                middle += 1
            total = sum(every[place][0] for place in mine)
            s = sums[address]
            # Weighted by time: what takes long is what matters, and what is measured well.
            s[0] += total * math.log(every[mine[len(mine) // 2]][0] / every[middle][0])
            s[1] += total
            s[2] += len(mine)
    out = [Slowness(a, math.exp(s[0] / s[1]), int(s[2]), s[1]) for a, s in sums.items()]
    return sorted(out, key=lambda s: -s.factor)


def kinds(tasks: Iterable[Row]) -> list[Kind]:
    """Those that took most time first."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    fetching: defaultdict[str, float] = defaultdict(float)
    for _, prefix, start, stop, transfer_seconds in tasks:
        seconds[prefix].append(stop - start)
        fetching[prefix] += transfer_seconds
    out = [
        Kind(prefix, len(each), sum(each), _median(each), max(each), fetching[prefix])
        for prefix, each in seconds.items()
    ]
    return sorted(out, key=lambda kind: -kind.seconds)


@dataclasses.dataclass(frozen=True)
class Digest:
    """What single tasks say together."""

    #: those that took most time first
    kinds: tuple[Kind, ...]
    #: slowest first
    slow: tuple[Slowness, ...]

    @classmethod
    def of(cls, tasks: Iterable[Row]) -> Digest:
        """Look at all tasks, in O(n log n)."""
        every = list(tasks)
        return cls(tuple(kinds(every)), tuple(slowness(every)))


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
