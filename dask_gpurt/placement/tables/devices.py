"""`Devices`: which workers can have no GPU, and keeps tasks that read device values off them.

A cuDF frame that is fetched by a worker without a GPU cannot be rebuilt there: the fetch fails, and the task with it.
Dask does not know: its stealing, and the probes of `candidates`, take any worker. In a cluster of both kinds this
table leaves out of a choice those workers whose heartbeats say that they can have no device. Where all are of one kind
it does nothing, and costs a look at a flag.

What lies on a device is known by the type of the value, as Dask reports it. Values of torch and Numba are of one type
wherever they lie, and a container hides what is in it: those are left to Dask.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distributed.scheduler import TaskState, WorkerState

    from dask_gpurt.placement.tables.workers import WorkerInfo

#: libraries whose objects lie on a device, wherever they are
LIBRARIES = frozenset({"cudf", "cuml", "cugraph", "cupy", "cupyx", "pylibcudf", "rmm"})
#: inputs looked at
MAX_INPUTS = 16
#: figure in a worker's heartbeat: whether its process can have a device
FIGURE = "device_possible"


class Devices:
    """The workers of one scheduler, as far as their heartbeats have said."""

    def __init__(self) -> None:
        #: address -> its process can have a device
        self._possible: dict[str, bool] = {}
        #: workers that can have none
        self.without = 0
        #: candidates and thieves left out
        self.left_out = 0

    @property
    def mixed(self) -> bool:
        """There are workers of both kinds."""
        return 0 < self.without < len(self._possible)

    def look(self, ws: WorkerState) -> None:
        """Take in what a worker's heartbeat says, once."""
        if ws.address not in self._possible and (said := ws.metrics.get("gpurt", {}).get(FIGURE)) is not None:
            self._possible[ws.address] = bool(said)
            self.without += not said

    def removed(self, address: str) -> None:
        """Forget a worker that has left."""
        if self._possible.pop(address, None) is False:
            self.without -= 1

    def able(self, ts: TaskState, workers: list[WorkerInfo]) -> list[WorkerInfo]:
        """Those that can run a task; all of them where none can, which is for Dask to report."""
        if not self.mixed or not reads_device_values(ts):
            return workers
        able = [w for w in workers if self._possible.get(w.address, True)]
        self.left_out += len(workers) - len(able)
        return able or workers

    def statistics(self) -> dict[str, int]:
        """Return counts as plain JSON."""
        return {"without": self.without, "left_out": self.left_out}


def reads_device_values(ts: TaskState) -> bool:
    """Whether an input lies on a device, by its type."""
    return _any(d.type for d in islice(ts.dependencies, MAX_INPUTS))


def _any(names: Iterable[str | None]) -> bool:
    return any(name and name.partition(".")[0] in LIBRARIES for name in names)
