"""`watch`: observe what Dask decides, for shadow mode. Nothing is decided here. See `seam` for the rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dask_gpurt.errors import InstallError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from distributed.scheduler import TaskState, WorkerState

    from dask_gpurt.placement.takeover.seam import Seam


def watch(seam: Seam, observe: Callable[[TaskState, Collection[WorkerState] | None, WorkerState | None], None]) -> None:
    """Call ``observe(ts, valid, ws)`` after each decision that Dask makes for a task.

    Parameters
    ----------
    seam
        Counts failures of `observe`, and restores the method.
    observe
        Gets the task, the workers it may run on (None: all), and the worker that Dask chose (None: none).

    Raises
    ------
    InstallError
        Another plugin has overridden the method.
    """
    name = "decide_worker_non_rootish"
    scheduler = seam.scheduler
    if name in scheduler.__dict__:
        raise InstallError(
            f"Scheduler.{name} is already overridden by {scheduler.__dict__[name]!r}. Remedy: remove the other plugin, "
            "or set gpurt.placement.enabled: false"
        )
    part = seam.part(name)
    stock = seam.stock(name)

    def decide_worker_non_rootish(ts: TaskState) -> WorkerState | None:
        ws = stock(ts)
        if part.retired is None:
            try:
                valid = None
                if ts.worker_restrictions or ts.host_restrictions or ts.resource_restrictions:
                    valid = scheduler.valid_workers(ts)
                    if not valid and valid is not None and ts.loose_restrictions:
                        valid = None
                observe(ts, valid, ws)
            except Exception:
                seam.failed(part.name)
        return ws

    seam.put(name, decide_worker_non_rootish)
