"""`Parking`: tasks of outputs that are not complete wait, in state ``no-worker``.

They are restricted to a worker that does not exist, so Dask sends them nowhere. All on the scheduler's event loop.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING

from dask_gpurt.shuffle import seam

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

#: no worker has this address
NOWHERE = "gpurt://output-is-not-complete"


class Parking:
    """The parked tasks of one scheduler."""

    def __init__(self, scheduler: Scheduler, plugin: seam.ShuffleSchedulerPlugin) -> None:
        self._scheduler = scheduler
        self._plugin = plugin
        #: those that may run on any worker (``allow_other_workers``). While they are parked they may not: Dask would
        #: send them out, and they would come back, over and over
        self._loose: weakref.WeakSet[TaskState] = weakref.WeakSet()

    def park(self, ts: TaskState) -> None:
        """Have a task wait. When it is on a worker that will send it back, it waits from then on."""
        seam.restrict(self._plugin, ts, NOWHERE)
        self._scheduler.set_restrictions({ts.key: {NOWHERE}})
        if ts.loose_restrictions:
            ts.loose_restrictions = False
            self._loose.add(ts)

    def is_parked(self, ts: TaskState) -> bool:
        """Whether a task waits here."""
        return ts.worker_restrictions == {NOWHERE}

    def left(self, ts: TaskState) -> None:
        """A task that may have been parked has other restrictions now."""
        if ts in self._loose:
            self._loose.discard(ts)
            ts.loose_restrictions = True

    def wait_on(self) -> None:
        """They wait for us, not for a worker: ``no-workers-timeout`` must not end them."""
        if self._scheduler.no_workers_timeout is None:
            return
        unrunnable = self._scheduler.unrunnable
        for ts in [ts for ts in unrunnable if self.is_parked(ts)]:
            del unrunnable[ts]
            unrunnable[ts] = time.monotonic()  # at the end: distributed counts on their order
