"""What observation uses of distributed and Bokeh beside their public API. No other file of it does.

Each part looks up its names before it changes anything: `check_scheduler` for the stall ledger, `check_worker` for the
slots, `check_tasks` for traces. A name that is missing switches that part off, with the reason in `dask_gpurt.status`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed.metrics import time
from distributed.scheduler import TaskState

from dask_gpurt.model.checks import require_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from bokeh.document import Document
    from bokeh.server.tornado import BokehTornado
    from distributed import Scheduler, Worker

_SCHEDULER = ("workers", "tasks", "queued", "unrunnable", "handlers", "coerce_address")
_WORKER = (
    *("execute", "handle_stimulus", "executors", "digests_total", "transfer_incoming_log", "_last_tick"),
    *("state.nthreads", "state.executing", "state.waiting", "state.constrained", "state.running"),
)
#: msgpack packs no larger number
MAX_SIZE = 2**63 - 1
_BOKEH = ("_applications", "app_paths", "prefix", "add_handlers")


def check_scheduler(scheduler: Scheduler) -> None:
    """Look up what the stall ledger reads.

    Raises
    ------
    SeamMismatch
        It is not there.
    """
    require_names(scheduler, "scheduler", _SCHEDULER)


def check_worker(worker: Worker) -> None:
    """Look up what the slots of a worker are measured by.

    Raises
    ------
    SeamMismatch
        It is not there.
    """
    require_names(worker, "worker", _WORKER)


def standing_seconds(worker: Worker) -> float:
    """Seconds since the worker's event loop noted, as it does 50 times a second, that it runs. On that loop."""
    return float(time() - worker._last_tick)


def check_tasks() -> None:
    """Look up what a trace has of tasks.

    Raises
    ------
    SeamMismatch
        It is not there.
    """
    require_names(TaskState, "TaskState", ("_queueable",))


def is_queueable(ts: TaskState) -> bool:
    """Whether a task may wait on the scheduler for a free thread; not that of a shuffle or an actor."""
    return bool(ts._queueable)


def size(nbytes: Any) -> int | None:
    """A size in bytes that Dask has from a user's ``sizeof``, which may return any type: numpy's, or a float."""
    try:
        return min(int(nbytes), MAX_SIZE)
    except (TypeError, ValueError, OverflowError):  # None, nan, infinite
        return None


def add_application(bokeh: BokehTornado, address: str, document: Callable[[Document], None]) -> None:
    """Add an application to a running Bokeh server, as its `__init__` does for each of its own; it has no call for it.

    Parameters
    ----------
    bokeh
        The `BokehTornado`.
    address
        The page, such as ``/gpurt``.
    document
        Fills a new document.

    Raises
    ------
    SeamMismatch
        This Bokeh has other names. Nothing was changed.
    """
    from bokeh.application import Application
    from bokeh.application.handlers.function import FunctionHandler
    from bokeh.server.contexts import ApplicationContext
    from bokeh.server.urls import per_app_patterns
    from tornado.ioloop import IOLoop

    require_names(bokeh, "BokehTornado", _BOKEH)
    context = ApplicationContext(Application(FunctionHandler(document)), url=address, io_loop=IOLoop.current())
    prefix = bokeh.prefix.rstrip("/")
    patterns = [
        (prefix + address + path, handler, {"application_context": context, "bokeh_websocket_path": address + "/ws"})
        for path, handler in per_app_patterns
    ]
    bokeh.add_handlers(r".*", patterns)
    bokeh._applications[address] = context
    context.run_load_hook()
