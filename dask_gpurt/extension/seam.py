"""What the extension itself uses of distributed beside its public API. The engines have seams of their own.

`refuse` keeps a server from starting. Dask logs what a preload raises and goes on without it, but it raises what a
plugin raises. So the error comes from a plugin. On a scheduler that is a public one. On a worker it is one that is
set up after it has registered, for which there is no call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed import Scheduler, SchedulerPlugin, Worker, WorkerPlugin
from distributed.worker_state_machine import GatherDepNetworkFailureEvent

from dask_gpurt.model.checks import require_call, require_names

if TYPE_CHECKING:
    from distributed.core import Server

#: set up by a worker when it has registered
_PENDING = "_pending_plugins"


def check_fetches(worker: Worker) -> None:
    """Look up what `extension.fetches` takes over.

    Raises
    ------
    SeamMismatch
        It is not there.
    """
    require_names(worker, "worker", ("state.has_what", "gather_dep"))
    require_call(worker.gather_dep, "Worker.gather_dep", "address", ["key"], 1, stimulus_id="s")
    failure = GatherDepNetworkFailureEvent
    require_call(failure, "GatherDepNetworkFailureEvent", worker="address", total_nbytes=1, stimulus_id="s")


def refuse(server: Server, error: Exception) -> None:
    """Keep a scheduler or worker that is being started from starting; other servers are left alone.

    Raises
    ------
    SystemExit
        A worker of this distributed has no such plugins. It must not run as if nothing had been asked.
    """
    if isinstance(server, Scheduler):
        server.add_plugin(_RefusedScheduler(error), name=_RefusedScheduler.name)
    elif isinstance(server, Worker):
        pending = getattr(server, _PENDING, None)
        if pending is None:
            raise SystemExit(str(error)) from error
        setattr(server, _PENDING, (*pending, _RefusedWorker(error)))


class _RefusedScheduler(SchedulerPlugin):
    """Ends the start of its scheduler."""

    name = "gpurt-refused"

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def start(self, scheduler: Scheduler) -> None:
        raise self.error


class _RefusedWorker(WorkerPlugin):
    """Ends the start of its worker."""

    name = "gpurt-refused"

    def __init__(self, error: Exception) -> None:
        self.error = error

    def setup(self, worker: Worker) -> None:
        raise self.error
