"""`take_back`: have others run what a worker was given and has not begun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed.stealing import WorkStealing

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, WorkerState


def take_back(scheduler: Scheduler, ws: WorkerState) -> int:
    """Have other workers run what a worker was given and has not begun; how many tasks it is asked for.

    By steal requests: the worker says of each task whether it has begun. Those under way are not asked for again.
    Without Dask's work stealing nothing is done.
    """
    stealing = scheduler.extensions.get("stealing")
    load: dict[WorkerState, int] = {}
    for ts in list(ws.processing) if isinstance(stealing, WorkStealing) else ():
        valid = scheduler.valid_workers(ts)
        others = scheduler.running if valid is None else valid & scheduler.running
        if ts.actor or ts in stealing.in_flight or not others - {ws}:
            continue
        thief = min(others - {ws}, key=lambda w: (len(w.processing) + load.get(w, 0)) / w.nthreads)
        load[thief] = load.get(thief, 0) + 1
        stealing.move_task_request(ts, ws, thief)
    return sum(load.values())
