"""`home`: the worker of a root that is done there before other workers could have its input.

Dask takes for a root each task of a large group that reads few results: the chunks of a file, but also 512 slices of
four large frames. Its queue gives a slice of two milliseconds to any worker with a free slot, and half a gigabyte is
sent for it, to all workers at once over the link of one. So a root is not queued, and runs where all that it reads is,
while this holds:

1. That worker is done with what it has in hand, and with all that waits for the largest input, in a quarter (`SHARE`)
   of the time in which the workers that would take part had it all. A quarter, as both are estimates. It is known how
   long each task in hand takes, and none has run for longer than one transfer: the root could wait behind it for ever.
2. The results that the worker is about to make take no more memory than the copy of the input would elsewhere, or than
   roots sent ahead may.

A map over one model takes longer than that. It is queued, as in stock.

Measured in the simulator: a task shuffle, a groupby and a join on 64 workers took 37 to 40 s without this rule, and
14 s with it (stock 40 s; with ``worker-saturation: inf`` 15 s).

Rejected: a root at a time, as long as it is done before the input could be elsewhere. On four workers a map over one
model took 1.5 times as long, as all of it went to the worker that had the model while three copies were on their way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dask_gpurt.placement.decide.root_times import AHEAD_SHARE, ROUND_TRIP_SECONDS
from dask_gpurt.placement.tables import worker_facts

if TYPE_CHECKING:
    from distributed.scheduler import TaskState, WorkerState

    from dask_gpurt.placement.tables.tables import Tables

SHARE = 0.25
#: an input with more copies is near to many workers, and a root with more inputs is not looked at
MOST_HOLDERS, MOST_INPUTS = 8, 8
#: in bytes; less is on its way for no longer than messages are, over any link
LEAST_BYTES = 1 << 20
#: tasks of a worker, at most; with more it gets no roots beyond its slots
LOOKED = 256


def home(ts: TaskState, tables: Tables) -> WorkerState | None:
    """The worker to run a ready TaskState on at once, should Dask take it for a root; None: queue it."""
    inputs = ts.dependencies
    if not inputs or len(inputs) > MOST_INPUTS:
        return None
    # Most tasks end here.
    largest, nbytes = None, LEAST_BYTES
    for d in inputs:
        if d.nbytes > nbytes:
            largest, nbytes = d, d.nbytes
    if largest is None:
        return None
    holders, waiting = largest.who_has, len(largest.waiters or ())
    if not holders or len(holders) > MOST_HOLDERS:
        return None
    scheduler = tables.scheduler
    others = min(waiting, len(scheduler.running) - len(holders))
    if others <= 0 or not scheduler.is_rootish(ts):
        return None
    kind = tables.durations.known(ts)
    if kind is None or kind.seconds is None:
        return None
    sent = tables.usual_link().seconds(nbytes, 1)
    if sent < ROUND_TRIP_SECONDS:
        return None
    soonest, best = SHARE * others * sent, None
    for ws in holders:
        info = tables.workers.by_address.get(ws.address)
        if info is None or info.ws is not ws or not worker_facts.is_running(ws):
            continue
        # Of brief tasks only some are charged, see `durations`.
        made = info.reserved_bytes + (1 + max(0, len(ws.processing) - info.tasks)) * kind.output_bytes
        if made > max(float(nbytes), AHEAD_SHARE * info.mark_bytes) or any(ws not in (d.who_has or ()) for d in inputs):
            continue
        each = info.slowness / ws.nthreads
        done = each * kind.seconds * waiting / len(holders)
        if done >= soonest or (in_hand := _seconds_in_hand(ws, tables, sent)) is None:
            continue
        done += each * in_hand
        if done < soonest:
            soonest, best = done, ws
    return best


def _seconds_in_hand(ws: WorkerState, tables: Tables, most: float) -> float | None:
    """What a worker's tasks take; None: not known, or one runs for longer than `most`. Roots would wait behind it."""
    if len(ws.processing) > LOOKED or any(s > most and ts in ws.processing for ts, s in ws.executing.items()):
        return None
    seconds_of, total = tables.durations.seconds_of, 0.0
    for ts in ws.processing:
        if ts not in ws.long_running:
            seconds = seconds_of(ts)
            if seconds is None:
                return None
            total += seconds
    return total
