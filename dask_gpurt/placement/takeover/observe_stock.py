"""Watching stock decide, for shadow mode. See `seam` for the rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import InstallError
from dask_gpurt.model.circuit_breaker import Part

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed.scheduler import TaskState, WorkerState

    from dask_gpurt.placement.takeover.seam import Seam


def watch(seam: Seam, observe: Callable[[Any, Any, Any], None]) -> None:
    """Only watch: stock decides, then ``observe(ts, valid, ws)`` is told its choice. Nothing else is taken over."""
    name = "decide_worker_non_rootish"
    scheduler = seam.scheduler
    if name in scheduler.__dict__:
        raise InstallError(f"Scheduler.{name} is already overridden by {scheduler.__dict__[name]!r}")
    part = seam.parts.setdefault(name, Part(name))
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
