"""`ClusterSpeed`: which workers are slow, and whether a slow one should start another root task.

`uneven` says whether any worker is slow, `is_slow` asks for one worker, and `worth` decides for a root task.

A root task on a slow worker is often the last one of the graph, and all others wait for it. `worth` therefore asks:
will the other workers empty the queue before this worker could finish one more task? Then the task is better left in
the queue. Both sides are counted in units of one task, so the task's duration does not matter.

A slow worker is refused for at most `PATIENCE_SECONDS` in a row. Should the others hang, work goes on.

No decision walks over all workers. The sum of speeds is taken anew at most every `STALE_SECONDS`, and only when a slow
worker asks.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from dask_gpurt.placement.tables.worker_facts import is_running

if TYPE_CHECKING:
    from collections.abc import Callable

    from dask_gpurt.placement.tables.workers import WorkerInfo, Workers

#: a worker is slow when it takes so many times as long as the median worker
SLOW = 1.5
STALE_SECONDS = 0.1
PATIENCE_SECONDS = 5.0
#: tasks that each of the others is taken to do before and after its share of the queue. True are about 1.5; but what
#: follows from a root of a slow worker is slow there too, or has to be moved. Simulated, half of 64 workers 4 times
#: slower: with 1.5 26.4 s and 3.3 GB moved, with 0.5 26.6 s and 1.7 GB, with 0.25 27.0 s, 0.5 GB and one chunk less in
#: memory, with 0 27.6 s and 0.1 GB
AT_HAND = 0.25


class ClusterSpeed:
    """The speeds of all workers of one `Workers` table."""

    def __init__(self, table: Workers, clock: Callable[[], float] = time.monotonic) -> None:
        self._table = table
        self._clock = clock
        #: whether any worker is known to be slow; read for every task, hence no property
        self.uneven = False
        #: a dict, for its order: the same events must give the same decisions in every process
        self._slow: dict[WorkerInfo, None] = {}
        self._refused: dict[WorkerInfo, float] = {}
        self._taken = -math.inf
        self._sum = 0.0
        #: slowness of the median worker
        self.usual = 1.0

    def is_slow(self, info: WorkerInfo) -> bool:
        """Whether this worker is known to be slow. O(1)."""
        return info in self._slow

    def learned(self, info: WorkerInfo) -> None:
        """Classify a worker whose slowness may have changed as slow or not."""
        if info.slowness > SLOW * self.usual:
            self._slow[info] = None
        else:
            self._slow.pop(info, None)
        self.uneven = bool(self._slow)

    def removed(self, info: WorkerInfo) -> None:
        """Forget a worker that has left."""
        self._slow.pop(info, None)
        self.uneven = bool(self._slow)
        self._refused.pop(info, None)

    @property
    def slow(self) -> list[WorkerInfo]:
        """The workers known to be slow."""
        return list(self._slow)

    @property
    def refusing(self) -> bool:
        """Whether a slow worker was refused a root task and has got none since."""
        return bool(self._refused)

    def nothing_queued(self) -> None:
        """Forget who was refused: what was left is done. For the next graph the patience begins anew."""
        self._refused.clear()

    def refresh(self) -> None:
        """Take the sum of speeds and the median slowness anew. O(workers)."""
        workers = self._table.all.items
        self._taken = self._clock()
        # Those that are paused or leave take none of the queue, and may do so for hours.
        self._sum = sum([w.ws.nthreads / w.slowness for w in workers if is_running(w.ws)])
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
        if here <= elsewhere:
            self._refused.pop(info, None)
            return True
        # It may be asked twice before it gets one: its patience is not over before `given`.
        return now - self._refused.setdefault(info, now) > PATIENCE_SECONDS

    def given(self, info: WorkerInfo) -> None:
        """Note that a worker gets a root task: if it was refused some, its patience begins anew."""
        self._refused.pop(info, None)
