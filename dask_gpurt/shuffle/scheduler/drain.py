"""Shuffles beside workers that do not run: who owns outputs when a run begins, and what a worker leaves behind.

`Drain.assigned` assigns the outputs of a new run. `Drain.heard` is called with the scheduler's events, and looks for
workers that begin no more tasks (`candidates.leaves`).

Theory of operation. Distributed has no plugin hook for the status of a worker, but logs each change as an event, which
plugins get. The event comes before the scheduler has forgotten the worker among those that run, and sometimes in the
middle of what it does with tasks; so what follows is done in a turn of the loop of its own:

1. every run of ours gives the outputs of that worker to others (`recovery.Amender.drain`);
2. a run of Dask's own kind with outputs there is restarted, as Dask does once the worker is gone;
3. tasks that the worker was given and has not begun are taken back by steal requests, which it answers truthfully. A
   worker that is drained and stays connected would keep them for ever, and a shuffle waits for all of its inputs.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from dask_gpurt.model.take_back import take_back
from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.scheduler.candidates import LEAVING, leaves, running
from dask_gpurt.shuffle.scheduler.restart import NOT_WANTED

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed.scheduler import Scheduler

    from dask_gpurt.shuffle.scheduler.recovery import Amender
    from dask_gpurt.shuffle.scheduler.runs import Runs

#: names of the statuses, as events have them
_NAMES = frozenset(status.name for status in LEAVING)


def worker_for(scheduler: Scheduler, runs: Runs, spec: Any, shift: int) -> dict[Any, str] | None:
    """Output -> owner of a new run of any kind, without workers that do not run, or left; None: as Dask has it.

    Parameters
    ----------
    shift
        By how many places the workers are rotated, so that many small shuffles do not begin with the same one.
    """
    barrier = runs.barrier_of(spec.id)
    allowed = list((barrier.worker_restrictions if barrier is not None else None) or scheduler.workers)
    workers = running(scheduler.workers, allowed)
    # Both sides of a join are made by one task: the second side follows the first, also to workers that do not run. Not
    # to one that has left, as it has when what it owned was not wanted: no flush would end. Should that be wanted now,
    # the first side is restarted.
    partner = runs.partner_owners(spec.id)
    there = {part: owner for part, owner in partner.items() if owner in scheduler.workers}
    if len(workers) == len(allowed) and len(there) == len(partner):
        return None
    workers = workers[shift % len(workers) :] + workers[: shift % len(workers)]
    return {part: there.get(part) or spec.pick_worker(part, workers) for part in spec.output_partitions}


class Drain:
    """Looks after the shuffles of one scheduler when a worker begins no more tasks."""

    def __init__(
        self,
        scheduler: Scheduler,
        plugin: seam.ShuffleSchedulerPlugin,
        runs: Runs,
        amender: Amender,
        failed: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._plugin = plugin
        self._runs = runs
        self._amender = amender
        self._failed = failed
        #: rotates the workers of new runs
        self._shift = itertools.count()

    def assigned(self, spec: Any) -> dict[Any, str] | None:
        """Output -> owner of a new run, see `worker_for`; None: as Dask has it. Never raises."""
        try:
            return worker_for(self._scheduler, self._runs, spec, next(self._shift))
        except Exception:
            self._failed()
            return None

    def heard(self, topic: str, event: Any) -> None:
        """An event was logged; `topic` is a worker's address if it is about one."""
        if not self._plugin.active_shuffles or not isinstance(event, dict):
            return
        if event.get("action") == "worker-status-change" and event.get("status") in _NAMES:
            self._scheduler.loop.add_callback(self._drained, topic)

    def _drained(self, address: str) -> None:
        """A worker begins no more tasks. Never raises."""
        ws = self._scheduler.workers.get(address)
        if ws is None or not leaves(ws):
            return
        try:
            for record in self._runs.all():
                self._amender.drain(record)
            for name, run in list(self._plugin.active_shuffles.items()):
                if self._runs.get(name) is None and address in run.run_spec.worker_for.values() and self._wanted(name):
                    self._runs.counters.restarted += 1
                    seam.restart_run(self._plugin, self._scheduler, run, f"worker {address} begins no more tasks")
            if self._plugin.active_shuffles:
                take_back(self._scheduler, ws)
        except Exception:
            self._failed()

    def _wanted(self, shuffle_id: Any) -> bool:
        """Whether outputs of a shuffle are still to be made."""
        barrier = self._runs.barrier_of(shuffle_id)
        return barrier is not None and any(ts.state not in NOT_WANTED for ts in barrier.dependents)
