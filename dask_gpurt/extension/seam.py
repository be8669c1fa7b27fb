"""What the extension itself uses of distributed beside its public API. The engines have seams of their own.

`refuse` keeps a server from starting. Dask logs what a preload raises and goes on without it, but not what a call after
the preloads raises: on a scheduler the ``start`` of a plugin, on a worker ``start_services``.

Dask closes a server whose start fails, and raises "Scheduler failed to start." The reason is the cause of that error,
and a nanny's worker loses it on the way to its nanny. So the last thing in that close is our error, which then is what
Dask raises: "Cluster failed to start: dask-gpurt: ...". This replaces two methods of that one server, once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed import Scheduler, SchedulerPlugin, Worker
from distributed.core import Status
from distributed.protocol.serialize import serialize
from distributed.worker_state_machine import GatherDepNetworkFailureEvent

from dask_gpurt.model.checks import require_call, require_names

if TYPE_CHECKING:
    from distributed.core import Server

#: a worker calls it right after its preloads
_AFTER_PRELOADS = "start_services"
#: why a server did not start
_ERROR = "_Server__startup_exc"


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


def check_checksums(worker: Worker) -> None:
    """Look up what checksums of fetches rely on.

    Raises
    ------
    SeamMismatch
        It is not there.
    """
    require_names(worker, "worker", ("handlers", "rpc.connect", "rpc.deserializers"))
    require_call(worker.rpc.connect, "ConnectionPool.connect", "address")
    answer = worker.handlers.get("get_data")
    require_call(answer, "the get_data handler", None, keys=(), who="", serializers=None)
    require_call(serialize, "serialize", 1, ("dask",), context=None, iterate_collection=False)


def refuse(server: Server, error: Exception) -> None:
    """Keep a scheduler or worker that is being started from starting; other servers are left alone.

    Raises
    ------
    SystemExit
        A worker of this distributed starts without that call. It must not run as if nothing had been asked.
    """
    if isinstance(server, Scheduler):
        server.add_plugin(_Refused(error), name=_Refused.name)
    elif isinstance(server, Worker):
        if _AFTER_PRELOADS not in Worker.start_unsafe.__code__.co_names:
            raise SystemExit(str(error)) from error

        def start_services(*args: Any, **kwargs: Any) -> None:
            raise error

        setattr(server, _AFTER_PRELOADS, start_services)
    else:
        return
    stock = server.close

    async def close(*args: Any, **kwargs: Any) -> None:
        del server.close
        await stock(*args, **kwargs)
        if hasattr(server, _ERROR):  # as Dask does, so that awaiting the server again raises again
            setattr(server, _ERROR, error)
            server.status = Status.failed
        raise error

    server.close = close


class _Refused(SchedulerPlugin):
    """Ends the start of its scheduler."""

    name = "gpurt-refused"

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def start(self, scheduler: Scheduler) -> None:
        raise self.error
