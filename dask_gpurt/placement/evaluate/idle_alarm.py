"""`IdleAlarm`: notice threads that stay idle while root tasks are queued for other workers. Pure; needs no repetition.

`tick` feeds it, and `stage` says what follows. *Stock* means Dask's own choice.

Stock never leaves a thread idle while a root is queued. Placement does, for a moment, where the owner of a root will be
free at once (`root_dispatch`). When that lasts, the reasoning was wrong, whatever the cause. The harm is idle threads,
so idle threads are what is measured.

It is a cumulative sum. Each tick adds the share of threads that are idle while roots are queued, less `ALLOWED`, times
the seconds since the last tick; the sum never falls below 0. The alarm trips at `SHARE` times the patience. The
patience is `TASKS` times the mean duration of this graph's tasks, within `LEAST_SECONDS` and `MOST_SECONDS`. So half of
the threads idle trips it after two thirds of the patience, a third of them after somewhat more than the patience; a
tenth never does.

Each trip goes one stage further, until the graphs under way are done:

1. queued roots are not held for their owners, who still take their own first;
2. roots are left to stock altogether.
"""

from __future__ import annotations

#: share of idle threads that is usual
ALLOWED = 0.1
#: idle share times patience at which it trips
SHARE = 0.25
#: durations of a task that make the patience, and its bounds in seconds
TASKS = 3.0
LEAST_SECONDS = 0.5
MOST_SECONDS = 5.0
#: a tick counts as so long at most: a blocked event loop must not trip it
LONGEST_TICK_SECONDS = 0.5


class IdleAlarm:
    """The alarm of one scheduler."""

    __slots__ = ("_at", "_level", "stage", "trips")

    def __init__(self) -> None:
        #: 0: roots are held; 1: not held; 2: stock's
        self.stage = 0
        #: trips since the start
        self.trips = 0
        self._level = 0.0
        self._at: float | None = None

    def tick(self, now: float, idle_share: float, task_seconds: float | None) -> bool:
        """Add the share of idle threads. Return whether the alarm trips now.

        Parameters
        ----------
        now
            Seconds, monotonic.
        idle_share
            Of all threads, those idle while roots are queued; 0 when none is queued.
        task_seconds
            Mean duration of the tasks so far; None: none is done.
        """
        before, self._at = self._at, now
        if before is None or self.stage >= 2:
            return False
        seconds = min(max(0.0, now - before), LONGEST_TICK_SECONDS)
        self._level = max(0.0, self._level + (idle_share - ALLOWED) * seconds)
        patience = LEAST_SECONDS * TASKS if task_seconds is None else TASKS * task_seconds
        if self._level <= SHARE * min(max(patience, LEAST_SECONDS), MOST_SECONDS):
            return False
        self._level = 0.0
        self.stage += 1
        self.trips += 1
        return True

    def reset(self) -> None:
        """Return to stage 0, because the roots are done: those to come are held again."""
        self.stage = 0
        self._level = 0.0
        self._at = None
