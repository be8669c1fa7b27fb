"""`take_back`: have others run what a worker was given and has not begun."""

from __future__ import annotations

import heapq
from collections import Counter
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
    given: Counter[WorkerState] = Counter()
    others = scheduler.running - {ws}

    def load(w: WorkerState) -> float:
        return (len(w.processing) + given[w]) / w.nthreads

    # A look at all workers for each task would hold the scheduler for seconds: thousands of each are normal.
    heap = [(load(w), i, w) for i, w in enumerate(others)]
    heapq.heapify(heap)
    for ts in list(ws.processing) if isinstance(stealing, WorkStealing) else ():
        if ts.actor or ts in stealing.in_flight:
            continue
        able = scheduler.valid_workers(ts)
        if able is not None:
            able = able & others
            thief = min(able, key=load) if able else None
        else:
            thief = heap[0][2] if heap else None
        if thief is None:
            continue
        given[thief] += 1
        if able is None:
            heapq.heapreplace(heap, (load(thief), heap[0][1], thief))
        stealing.move_task_request(ts, ws, thief)
    return given.total()
