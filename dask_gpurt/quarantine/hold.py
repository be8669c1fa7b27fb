"""`Holds`: workers that are there, answer, and get no more work.

Theory of operation. In the scheduler's books the worker is ``closing_gracefully``, and it is not told. So it gets no
task, no stolen one, no scattered value and no replica; shuffles give its outputs to others; what it runs ends, and what
it holds can be fetched. A change of status that it tells is kept back and remembered, since its memory monitor says
``running`` after each pause; one with which it leaves goes on.

Its data leaves as that of a worker that is retired: distributed's `RetireWorker` copies what is only there, and drops
what others have too. That policy ends when there is nothing left to copy, or nobody to copy it to, and tasks that still
run add results; so it is added again until the worker holds nothing of its own (`Holds.look`). Tasks that it has not
begun are asked back, which it answers truthfully.

A task that no other worker may run (``workers=``, resources, all others have left) must not wait for ever: its
worker is let go, and said so. Where others may run it and none of them runs, they may be paused for good, as by results
that a client keeps. One worker that would run is then let go, at the second look: most pauses are short.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING

from distributed.active_memory_manager import ActiveMemoryManagerExtension, RetireWorker
from distributed.core import Status

from dask_gpurt.model.checks import require_call, require_names
from dask_gpurt.model.take_back import take_back
from dask_gpurt.model.wrapped import StatusChanges

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Scheduler
    from distributed.scheduler import TaskState, WorkerState

logger = logging.getLogger("distributed.scheduler.gpurt")

#: of the scheduler, used here
_NAMES = (
    *("handle_worker_status_change", "queued", "unrunnable", "valid_workers", "running", "extensions"),
    "stream_comms",
)
#: what a worker says while it works; kept back
_WORKING = ("running", "paused")
#: between two rounds of the copies, where the cluster's own memory manager is off
_INTERVAL_SECONDS = 2.0


@dataclasses.dataclass
class Held:
    """One worker that gets no work."""

    worker: str
    #: by the clock of `time.time`
    since: float
    #: what it was, or has said since
    reported: str
    #: copies what is only there; None: it has ended
    policy: RetireWorker | None = None


class Holds:
    """The held workers of one scheduler.

    `failed` is called, with its exception being handled, when what a worker has could not be made to leave it.
    """

    def __init__(self, scheduler: Scheduler, failed: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._failed = failed
        self.held: dict[str, Held] = {}
        #: tasks that were asked back
        self.taken_back = 0
        #: what tasks waited for at the last look while no worker ran that may do it
        self._waited: set[tuple[object, ...]] = set()
        self._statuses: StatusChanges | None = None
        self._manager: ActiveMemoryManagerExtension | None = None

    def check(self) -> None:
        """Look whether workers can be held here.

        Raises
        ------
        SeamMismatch
            This distributed is not one we know.
        """
        handler = self._scheduler.stream_handlers.get("worker-status-change")
        require_call(handler, "the scheduler's worker-status-change", status="running", worker="w", stimulus_id="s")
        require_names(self._scheduler, "Scheduler", _NAMES)

    def stop(self) -> None:
        """Let all go, and leave the scheduler as it was."""
        for worker in list(self.held):
            self.release(worker)

    # ------------------------------------------------------------------ in and out

    def hold(self, worker: str) -> bool:
        """Give a worker no more work; False when it is not there, or does not work anyway."""
        ws = self._scheduler.workers.get(worker)
        if ws is None or worker in self.held or ws.status.name not in _WORKING:
            return False
        if self._statuses is None:
            self._statuses = StatusChanges(self._scheduler.stream_handlers, self._keeps)
            self._statuses.install()
        self.held[worker] = Held(worker, time.time(), ws.status.name)
        self._scheduler.handle_worker_status_change(Status.closing_gracefully, ws, _stimulus("hold"))
        self._drain(ws)
        return True

    def release(self, worker: str) -> bool:
        """Let a worker work again; False when it was not held."""
        held = self.held.pop(worker, None)
        if held is None:
            return False
        manager = self._memory_manager()
        if held.policy is not None and manager is not None and held.policy in manager.policies:
            manager.policies.remove(held.policy)
        ws = self._scheduler.workers.get(worker)
        if ws is not None and ws.status is Status.closing_gracefully:
            # Not one that is being retired meanwhile, which only its own message tells.
            if held.reported in _WORKING:
                self._scheduler.handle_worker_status_change(held.reported, ws, _stimulus("release"))
            elif self._retirement_failed(worker):
                # distributed then gives a worker back its status: here that of a held one, in which it runs nothing.
                message = {"op": "worker-status-change", "status": "running", "stimulus_id": _stimulus("release")}
                self._scheduler.stream_comms[worker].send(message)
        self._rest()
        return True

    def _retirement_failed(self, worker: str) -> bool:
        """Whether a worker that has said it is retired is not any more; where that cannot be known, it still is."""
        own = self._scheduler.extensions.get("amm")
        return (
            isinstance(own, ActiveMemoryManagerExtension)
            and own.running
            and not any(isinstance(p, RetireWorker) and p.address == worker for p in own.policies)
        )

    def forget(self, worker: str) -> None:
        """It has left."""
        self.held.pop(worker, None)
        self._rest()

    def _keeps(self, status: str, worker: str, stimulus_id: str) -> bool:
        held = self.held.get(worker)
        if held is None:
            return False
        held.reported = status
        return status in _WORKING

    # ------------------------------------------------------------------ while it lasts

    def look(self) -> list[str]:
        """Go on with what is to leave held workers; returns those that a task waits for and that are to be let go."""
        for worker in self.held:
            ws = self._scheduler.workers.get(worker)
            if ws is not None:
                self._drain(ws)
        return self._wanted()

    def unique(self, worker: str) -> int:
        """Values that only this worker holds, besides actors."""
        ws = self._scheduler.workers.get(worker)
        return 0 if ws is None else sum(len(ts.who_has or ()) == 1 and not ts.actor for ts in ws.has_what)

    def _drain(self, ws: WorkerState) -> None:
        # A round of the memory manager runs policies of the user too. One that raises must not undo half of a hold.
        try:
            self._take_away(ws)
        except Exception:
            self._failed()

    def _take_away(self, ws: WorkerState) -> None:
        held = self.held[ws.address]
        self.taken_back += take_back(self._scheduler, ws)
        if ws.actors:
            return  # they stay, and distributed moves nothing from beside them
        manager = self._memory_manager()
        if manager is None:
            manager = self._manager = ActiveMemoryManagerExtension(
                self._scheduler, policies=set(), register=False, start=True, interval=_INTERVAL_SECONDS
            )
        if held.policy is not None and held.policy not in manager.policies:
            held.policy = None
        if held.policy is None and self.unique(ws.address):
            held.policy = RetireWorker(ws.address)
            manager.add_policy(held.policy)
            manager.run_once()

    def _memory_manager(self) -> ActiveMemoryManagerExtension | None:
        """The cluster's own where it runs, else ours; as `Scheduler.retire_workers` has it."""
        if self._manager is not None:
            return self._manager
        own = self._scheduler.extensions.get("amm")
        return own if isinstance(own, ActiveMemoryManagerExtension) and own.running else None

    def _rest(self) -> None:
        """Leave nothing in the scheduler while no worker is held."""
        if self.held:
            return
        if self._statuses is not None:
            self._statuses.uninstall()
            self._statuses = None
        if self._manager is not None:
            self._manager.stop()
            self._manager = None

    def _wanted(self) -> list[str]:
        workers = self._scheduler.workers
        held = {ws for worker in self.held if (ws := workers.get(worker)) is not None}
        wanted: set[str] = set()
        waited, self._waited = self._waited, set()
        # Thousands of tasks may wait, and few for different workers: one look at all workers for each question.
        asked: set[tuple[object, ...]] = set()
        queued = self._scheduler.queued
        # What Dask queues may run anywhere: one stands for all.
        for ts in [*self._scheduler.unrunnable, *([queued.peek()] if queued else [])] if held else ():
            question = (
                ts.loose_restrictions,
                frozenset(ts.worker_restrictions or ()),
                frozenset(ts.host_restrictions or ()),
                frozenset((ts.resource_restrictions or {}).items()),
            )
            if question in asked:
                continue
            asked.add(question)
            able = {ws for ws in workers.values() if self._may_run(ts, ws)}
            if not able & held:
                continue
            if not able - held:
                wanted |= {ws.address for ws in able}
            elif able.isdisjoint(self._scheduler.running):
                self._waited.add(question)
                # One that is paused itself would run nothing either.
                would = [one.worker for one in self.held.values() if one.reported == "running"]
                would = [worker for worker in would if workers.get(worker) in able]
                if question in waited and wanted.isdisjoint(would):
                    wanted.update(would[:1])
        return sorted(wanted)

    def _may_run(self, ts: TaskState, ws: WorkerState) -> bool:
        """Whether the user allows a worker for a task, were it running."""
        if ts.loose_restrictions:
            return True
        if ts.worker_restrictions or ts.host_restrictions:
            hosts = {self._scheduler.coerce_hostname(host) for host in ts.host_restrictions or ()}
            if ws.address not in (ts.worker_restrictions or ()) and ws.host not in hosts:
                return False
        needs = ts.resource_restrictions or {}
        return all(ws.resources.get(name, 0) >= amount for name, amount in needs.items())


def _stimulus(what: str) -> str:
    return f"gpurt-quarantine-{what}-{time.time()}"
