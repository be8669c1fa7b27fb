"""`Lateness`: how long threads idle until a root comes, though roots are queued, and how much to send ahead for it.

`ran` takes in the times of each task that has run. `seconds_ahead` is for how long a thread is given short roots ahead.

Theory of operation. A thread that has a task in hand starts it at once. Without one it waits for a message to the
scheduler and one back, through two busy event loops: 2 ms on an idle cluster, 10 ms where workers and scheduler share
cores. Nobody needs to know how long. The tasks' own times tell what it costs: from the end of the task that freed a
thread to the start of the root that took it, by the worker's clock alone. It counts if roots were queued at that end;
else there was nothing to send.

While threads idle for more than `LATE` of the time of roots, twice as much is sent ahead, up to `MOST_SECONDS`; while
hardly at all, half as much. Rejected: always as much. Simulated with 16 workers and fast messages, 40 ms made 21 of 220
graphs slower, one of uneven tasks 3.4 times, and nothing faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from dask_gpurt.placement.tables.workers import WorkerInfo

#: roots that a thread gets ahead take so long, at least and at most
LEAST_SECONDS, MOST_SECONDS = 0.01, 0.04
#: shares of the time of roots that threads idle before them: above the first more is sent ahead, below the second less
LATE, IN_TIME = 0.1, 0.02
#: roots between two changes, and over how many the averages go
EVERY = 8


class Lateness:
    """Of the roots of one scheduler."""

    def __init__(self) -> None:
        self.seconds_ahead = LEAST_SECONDS
        #: worker -> when its threads became free while roots were queued, by its clock
        self.freed: dict[WorkerInfo, list[float]] = {}
        self._idle = self._busy = 0.0
        self._roots = 0

    def ran(self, info: WorkerInfo, startstops: Collection[Mapping[str, Any]], *, root: bool, queued: bool) -> None:
        """Take in a task that a worker has run; `root`: it was a queued root, `queued`: roots are queued now."""
        times = next((s for s in startstops if s["action"] == "compute"), None)
        if times is None:
            return
        start, stop = times["start"], times["stop"]
        ends = self.freed.get(info)
        if ends:
            before = max((end for end in ends if end <= start), default=None)
            if before is not None:
                ends.remove(before)
                if root:
                    self._learn(start - before, stop - start)
        if not queued:
            self.freed.pop(info, None)
            return
        if ends is None:
            ends = self.freed[info] = []
        ends.append(stop)
        if len(ends) > info.ws.nthreads:
            ends.remove(min(ends))

    def lost(self, info: WorkerInfo) -> None:
        """Forget when a worker's threads became free: it has left, or ran a task whose times are not known."""
        self.freed.pop(info, None)

    def _learn(self, idle: float, busy: float) -> None:
        # A thread that is free for longer was not waiting for a message.
        idle = min(idle, MOST_SECONDS)
        self._idle += (idle - self._idle) / EVERY
        self._busy += (busy - self._busy) / EVERY
        self._roots += 1
        if self._roots < EVERY:
            return
        if self._idle > LATE * self._busy:
            self._roots, self.seconds_ahead = 0, min(MOST_SECONDS, 2 * self.seconds_ahead)
        elif self._idle < IN_TIME * self._busy:
            self._roots, self.seconds_ahead = 0, max(LEAST_SECONDS, self.seconds_ahead / 2)
