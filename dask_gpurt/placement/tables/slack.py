"""`Slack`: for how many seconds the cluster has other work, so that one task may wait where its inputs are.

While every worker is busy, running a task here rather than there only changes which worker runs what else. Moving it to
a shorter queue gains nothing and costs the bytes moved. Time is lost only by a task that ends after all others. So the
seconds until then, with all remaining work spread evenly, are *slack*.

This holds only while there is work for every worker. With more than `IDLE_SHARE` of the workers idle there is no slack,
and the place where a task ends sooner is better again: a chain of tasks, the last joins of a tree.

Remaining work is counted by task group, from the counts that the scheduler keeps in any case. That is O(groups), at
most once in `EVERY` decisions, or as many as there are groups. A prefix without measurements counts as
`Durations.guess_seconds`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

    from dask_gpurt.placement.tables.durations import Durations
    from dask_gpurt.placement.tables.workers import Workers

#: share of the workers that may be idle while there is slack
IDLE_SHARE = 0.25
#: decisions between two looks, at least
EVERY = 16
#: of the remaining time; the rest is for work that cannot be spread evenly
USED = 0.8
_UNDONE = ("waiting", "queued", "no-worker", "processing")


class Slack:
    """The slack of one scheduler's cluster."""

    def __init__(self, scheduler: Scheduler, workers: Workers, durations: Durations) -> None:
        self._scheduler = scheduler
        self._workers = workers
        self._durations = durations
        self._countdown = 0
        self._remaining_seconds = 0.0

    def seconds(self) -> float:
        """Slack in seconds of a task that is decided now; 0: none."""
        workers = self._workers
        n = len(workers.all.items)
        idle = len(workers.idle.items)
        queued = bool(self._scheduler.queued)
        if not queued and idle > n * IDLE_SHARE:
            return 0.0
        self._countdown -= 1
        if self._countdown < 0:
            self._look(n)
        share = 1.0 if queued else 1.0 - idle / (n * IDLE_SHARE)
        return self._remaining_seconds * USED * share

    def _look(self, n: int) -> None:
        s = self._scheduler
        prefixes, kinds = self._durations.prefixes, self._durations.groups
        seconds = 0.0
        seen = False
        unseen = 0
        groups = s.task_groups
        for group in groups.values():
            states = group.states
            count = sum([states[state] for state in _UNDONE])
            if count:
                kind = kinds.get(group.name)
                if kind is None or kind.seconds is None:
                    kind = prefixes.get(group.prefix.name)
                each = None if kind is None else kind.settled()
                if each is not None:
                    seconds += count * each
                    seen = True
                else:
                    unseen += count
        if seen:
            # Not the mean of those that are seen: what is left may be a thousand short tasks, and then the long ones.
            seconds += unseen * self._durations.guess_seconds
        self._remaining_seconds = seconds / max(1, s.total_nthreads)
        self._countdown = max(EVERY, n // 8, len(groups) // 4)
