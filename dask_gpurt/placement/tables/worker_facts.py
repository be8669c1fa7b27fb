"""Read the parts of Dask's state that have no public attribute.

`takeover.seam` checks at installation that all of them exist.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from distributed.core import Status

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from distributed.scheduler import Scheduler, TaskState, WorkerState

#: bytes that the tasks assigned to a worker still have to fetch, each input once
pending_bytes: Callable[[WorkerState], int] = operator.attrgetter("_network_occ")


def connection(scheduler: Scheduler, address: str) -> socket.socket | None:
    """The socket of a worker's stream to the scheduler; None where there is none, or none of a known kind."""
    stream = getattr(getattr(scheduler.stream_comms.get(address), "comm", None), "stream", None)
    return getattr(stream, "socket", None)


#: whether a task is one that Dask may keep in its queue: a root-ish one is
is_queueable: Callable[[TaskState], bool] = operator.attrgetter("_queueable")


def is_running(ws: WorkerState) -> bool:
    """Whether a worker takes tasks: it is not paused, closing or gone."""
    return ws.status is Status.running
