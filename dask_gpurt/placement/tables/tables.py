"""`Tables`: everything that placement knows of one cluster.

`bookkeeping` feeds the tables with events, and `decide` reads them. They act on nothing. Code that only needs facts
takes this object, not the engine.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dask_gpurt.model.link import LinkClass
from dask_gpurt.model.views import TaskView
from dask_gpurt.placement.tables.backlog import Backlog
from dask_gpurt.placement.tables.cluster_speed import ClusterSpeed
from dask_gpurt.placement.tables.devices import Devices
from dask_gpurt.placement.tables.disk_residency import DiskResidency
from dask_gpurt.placement.tables.durations import Durations
from dask_gpurt.placement.tables.overhead_budget import Budget
from dask_gpurt.placement.tables.slack import Slack
from dask_gpurt.placement.tables.workers import Workers
from dask_gpurt.topology.links import LinkMatrix
from dask_gpurt.topology.zones import Zones

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed.scheduler import Scheduler, TaskState

    from dask_gpurt.model.link import Link
    from dask_gpurt.placement.tables.backlog import Charge
    from dask_gpurt.placement.tables.durations import Prefix
    from dask_gpurt.placement.tables.workers import WorkerInfo

#: share of a worker's memory limit that task data may fill before more of it overflows: Dask's memory.target
HOST_SHARE = 0.6


class Tables:
    """Workers, assigned tasks, durations, links, zones, copies on disk, and the time that decisions may take."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic) -> None:
        self.scheduler = scheduler
        self.workers = Workers(HOST_SHARE)
        #: work assigned to each worker, in seconds and bytes
        self.backlog = Backlog()
        self.durations = Durations()
        self.links = LinkMatrix()
        self.zones = Zones()
        #: which copies are on disk, as the workers report it; the extension sets that of its scheduler
        self.residence = DiskResidency(clock)
        #: which workers can have no device
        self.devices = Devices()
        self.clock = clock
        self.speeds = ClusterSpeed(self.workers, clock)
        self.slack = Slack(scheduler, self.workers, self.durations)
        self.budget = Budget(clock=clock)

    def usual_link(self) -> Link:
        """The path between two workers: between nodes, where there are several."""
        return self.links.link(LinkClass.NETWORK if len(self.workers.nodes) > 1 else LinkClass.HOST)

    def charge(self, ts: TaskState, kind: Prefix, info: WorkerInfo, root: bool = False) -> Charge:
        """Add a task, of this kind in `durations`, to the work assigned to a worker; `root`: pulled from its block."""
        hint = self.guess_seconds(ts) if kind.seconds is None else 0.0
        return self.backlog.charge(ts.key, info, kind, hint, root)

    def guess_seconds(self, ts: TaskState) -> float:
        """Seconds that a task without measurements of its kind may take; Dask's own average goes first."""
        hint: float = ts.prefix.duration_average
        return hint if hint >= 0 else self.durations.guess(ts)

    def task_view(self, ts: TaskState) -> TaskView:
        """What is expected of a task: seconds, bytes of result, slack."""
        known = self.durations.known(ts)
        if known is None or known.seconds is None:
            return TaskView(self.guess_seconds(ts), 0.0, self.slack.seconds())
        return TaskView(known.seconds, known.output_bytes, self.slack.seconds())
