"""The speeds of all workers together: whether any is slow, and whether a slow one is worth waiting for.

A root task that a slow worker pulls is often the last one of the graph: everybody waits for it. The fluid argument:
when the queue will be worked off by the other workers before this one could finish one more task, the task is better
left in the queue. Both sides are counted in units of one task, so the task's duration does not matter.

A slow worker is refused for at most `PATIENCE_SECONDS` in a row: should the others hang, work goes on.

Nothing walks over all workers per decision: the sum of speeds is taken anew at most every `STALE_SECONDS`, and only
when a slow worker asks.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from dask_gpurt.placement.tables.workers import WorkerInfo, Workers

#: a worker that takes so many times as long as usual is slow
SLOW = 1.5
STALE_SECONDS = 0.1
PATIENCE_SECONDS = 5.0
#: tasks that each of the others is taken to do before and after its share of the queue. True are about 1.5; but what
#: follows from a root of a slow worker is slow there too, or has to be moved. Simulated, half of 64 workers 4 times
#: slower: with 1.5 26.4 s and 3.3 GB moved, with 0.5 26.6 s and 1.7 GB, with 0.25 27.0 s, 0.5 GB and one chunk less in
#: memory, with 0 27.6 s and 0.1 GB
AT_HAND = 0.25


class ClusterSpeed:
    """Of the workers of one table."""

    def __init__(self, table: Workers, clock: Callable[[], float] = time.monotonic) -> None:
        self._table = table
        self._clock = clock
        #: root tasks that a slow worker was not given
        self.spared = 0
        #: a dict, for its order: the same events must give the same decisions in every process
        self._slow: dict[WorkerInfo, None] = {}
        self._refused: dict[WorkerInfo, float] = {}
        self._taken = -math.inf
        self._sum = 0.0
        #: slowness of the median worker
        self.usual = 1.0

    @property
    def uneven(self) -> bool:
        """Whether any worker is known to be slow."""
        return bool(self._slow)

    def is_slow(self, info: WorkerInfo) -> bool:
        return info in self._slow

    def learned(self, info: WorkerInfo) -> None:
        """The slowness of a worker may have changed."""
        if info.slowness > SLOW * self.usual:
            self._slow[info] = None
        else:
            self._slow.pop(info, None)

    def removed(self, info: WorkerInfo) -> None:
        self._slow.pop(info, None)
        self._refused.pop(info, None)

    @property
    def slow(self) -> list[WorkerInfo]:
        """The workers known to be slow."""
        return list(self._slow)

    @property
    def refusing(self) -> bool:
        """Whether a slow worker was refused a root task and has got none since."""
        return bool(self._refused)

    def refresh(self) -> None:
        """Take the sums anew. O(workers)."""
        workers = self._table.all.items
        self._taken = self._clock()
        self._sum = sum([w.ws.nthreads / w.slowness for w in workers])
        # As statistics.median, which takes several times as long; this is done a few times a second.
        ordered = sorted([w.slowness for w in workers])
        half = len(ordered) // 2
        if not ordered:
            self.usual = 1.0
        else:
            self.usual = ordered[half] if len(ordered) & 1 else 0.5 * (ordered[half - 1] + ordered[half])
        for info in list(self._slow):
            self.learned(info)

    def worth(self, info: WorkerInfo, queued: int) -> bool:
        """Whether a slow worker should start one of `queued` tasks rather than leave it to the others."""
        if info not in self._slow:
            return True
        if self._clock() - self._taken > STALE_SECONDS:
            self.refresh()
        ws = info.ws
        others = self._sum - ws.nthreads / info.slowness
        if others <= 0:
            return True
        waiting = max(0, len(ws.processing) + 1 - ws.nthreads)
        here = (1 + waiting / ws.nthreads) * info.slowness
        elsewhere = queued / others + AT_HAND * self.usual
        now = self._clock()
        if here <= elsewhere or now - self._refused.setdefault(info, now) > PATIENCE_SECONDS:
            self._refused.pop(info, None)
            return True
        self.spared += 1
        return False
