"""`StallLedger`: on the scheduler, the cause of every idle second of every slot.

Theory of operation. A worker knows why a slot that has a task is idle (`slots`). Of the rest, ``unassigned``, it knows
only how long; why nothing was assigned is known here. Between two events the scheduler's state is constant, so at any
time there is one cause for a slot that has nothing (`StallLedger._cause`). Per worker the integral of

    slots without an assigned task  x  cause

is kept exactly. It is made of a global vector of seconds per cause, and of what that vector was at the last change of
the worker's number of assigned tasks. An event of one task touches one worker, in about three microseconds. With a
heartbeat the worker's unassigned seconds are settled against these integrals (`worker_account`), so that its causes sum
to slots x wall time.

A skewed task is looked for at heartbeats only: it needs a walk over what runs, and nothing but time makes a task long.
It has run more than twice as long as the mean of its prefix, while slots are free and nothing else is ready.

It stops after `ERRORS` errors of its own, and says so in `StallLedger.statistics`. The same events fill the history
that reports are made of (`task_history`).
"""

from __future__ import annotations

import heapq
import itertools
import time
import traceback
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Protocol, TypeVarTuple

from dask_gpurt.observe.collect import wait_histogram
from dask_gpurt.observe.collect.causes import BARRIER, CENTRAL, WAITS
from dask_gpurt.observe.collect.task_history import TaskHistory
from dask_gpurt.observe.collect.worker_account import INDEX, WorkerAccount, as_json

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Hashable, Mapping, Sequence

    from distributed.scheduler import Scheduler, TaskState, WorkerState

    from dask_gpurt.observe.collect.worker_account import Reading

#: the newest outputs of shuffles that `StallLedger.statistics` tells
NEWEST_OUTPUTS = 200
#: running tasks looked at for skew: with more than that, it is not one task that the others wait for
LOOKED_AT = 64
#: pairs of prefix and worker that skew is counted for; with more, the half that cost least is forgotten
SKEWED = 1000
#: exceptions of our own until nothing is written any more
ERRORS = 10

_SCHEDULER, _QUEUED_ELSEWHERE = INDEX["scheduler"], INDEX["queued_elsewhere"]
#: states of a barrier that is still to be passed
_OPEN = ("waiting", "queued", "processing", "no-worker")
_Ts = TypeVarTuple("_Ts")


class Observer(Protocol):
    """What follows single runs by the ledger's events. The first exception ends that, not the ledger."""

    def graph_arrived(self, client: str, keys: Collection[Any], spans: Mapping[Any, Any]) -> None:
        """A client has asked for `keys`; `spans` are annotations of tasks."""

    def restarted(self) -> None:
        """The scheduler has forgotten all tasks."""

    @property
    def following(self) -> bool:
        """Whether it wants to hear of heartbeats now."""

    @property
    def wanted(self) -> Container[Hashable]:
        """Tasks of which it wants to hear that they left, besides those that failed."""

    def task_left(self, key: Hashable, finish: str) -> None:
        """A task is no longer assigned to a worker; `finish` is its state now."""

    def heard(
        self,
        ws: WorkerState,
        before: Reading,
        now: Reading,
        waits: Mapping[str, Sequence[int]],
        skewed: tuple[tuple[str, str], float] | None,
    ) -> None:
        """A heartbeat was taken in. Readings are of that worker; `waits` and `skewed` are what it added."""

    def worker_left(self, address: str, last: Reading) -> None:
        """A worker has left; `last` is the last reading of it."""


class StallLedger:
    """The ledger of one scheduler. Use on its event loop.

    Parameters
    ----------
    scheduler
        distributed's, or anything with its ``workers``, ``tasks``, ``queued`` and ``unrunnable``.
    planning
        Seconds that the scheduler has spent in our decisions so far.
    clock
        Seconds, never going back; for tests.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        planning: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._planning = planning
        self._clock = clock
        #: seconds per cause since the start, for one slot that had nothing all the time
        self._vector = [0.0] * len(CENTRAL)
        self._last = clock()
        #: Unix time
        self.started = time.time()
        self._now_cause = INDEX["no_work"]
        #: key -> (address, prefix, when assigned)
        self._running: dict[Hashable, tuple[str, str, float]] = {}
        self._barriers: set[Hashable] = set()
        #: assigned beyond the slots, over all workers
        self._backlog = 0
        #: the skewed task that the others wait for
        self._skewed: Hashable | None = None
        #: its prefix and worker, or those of the last one
        self._last_skewed: tuple[str, str] | None = None
        self._accounts: dict[str, WorkerAccount] = {}
        #: sums of workers that left
        self._gone: defaultdict[str, float] = defaultdict(float)
        #: tasks that have ended
        self.history = TaskHistory()
        #: (prefix, address) -> slot-seconds that others waited for its tasks
        self.skewed: dict[tuple[str, str], float] = {}
        #: how long single waits of slots were
        self.tails = wait_histogram.Tails()
        #: follows single runs; None: nobody does
        self.observer: Observer | None = None
        self.errors = 0
        self.last_traceback = ""
        for ws in scheduler.workers.values():
            self.worker_added(ws)
            for ts in ws.processing:
                self._enter(ts.key, ts, ws)
        for ts in scheduler.tasks.values():
            if _is_barrier(ts.key) and ts.state in _OPEN:
                self._barriers.add(ts.key)
        self._turn()

    # ------------------------------------------------------------------ events

    def guarded(self, event: Callable[[*_Ts], None], *args: *_Ts) -> None:
        """Call one of the events; never raises, and stops when that happens too often."""
        if self.errors >= ERRORS:
            return
        try:
            event(*args)
        except Exception:
            self.failed()

    def failed(self) -> None:
        """Count the exception that is being handled."""
        self.errors += 1
        self.last_traceback = traceback.format_exc()

    def _tell(self, event: Callable[[*_Ts], None], *args: *_Ts) -> None:
        """Call one of the observer's events; with its first exception it hears no more."""
        try:
            event(*args)
        except Exception:
            self.observer = None
            self.failed()

    def worker_added(self, ws: WorkerState) -> None:
        """A worker has come."""
        self._turn()
        self._accounts[ws.address] = WorkerAccount(ws.nthreads, list(self._vector), self._last, self._planning())
        self._accounts[ws.address].ended = self._last

    def worker_removed(self, address: str) -> None:
        """A worker has left: its sums stay, its tasks run no longer."""
        account = self._accounts.pop(address, None)
        if account is None:
            return
        if self.observer is not None:
            self._tell(self.observer.worker_left, address, account.reading())
        self._turn()
        self._backlog -= max(0, account.assigned - account.slots)
        for name, seconds in account.totals.items():
            self._gone[name] += seconds
        for key in [key for key, (where, _, _) in self._running.items() if where == address]:
            del self._running[key]

    def transition(self, key: Hashable, start: str, finish: str, details: Mapping[str, Any]) -> None:
        """A task went from one state to another."""
        if finish == "processing":
            ts = self._scheduler.tasks.get(key)
            ws = None if ts is None else ts.processing_on
            if ws is not None:
                self._enter(key, ts, ws)
        elif start == "processing":
            self._leave(key, finish, details)
        if type(key) is str and key.startswith(BARRIER):
            if finish in _OPEN:
                self._barriers.add(key)
            else:
                self._barriers.discard(key)
            self._turn()

    def moved(self, key: Hashable, victim: str, thief: str) -> None:
        """Work stealing has assigned a task to another worker."""
        for address in (victim, thief):
            ws = self._scheduler.workers.get(address)
            if ws is not None:
                self._touch(ws)
        if key in self._running:
            _, prefix, _ = self._running[key]
            self._running[key] = (thief, prefix, self._clock())
        self._turn()

    def graph_arrived(self, client: str, keys: Collection[Any], spans: Mapping[Any, Any]) -> None:
        """A client has asked for `keys`; their tasks have not begun."""
        if self.observer is not None:
            self._tell(self.observer.graph_arrived, client, keys, spans)

    def restarted(self) -> None:
        """The scheduler has forgotten all tasks."""
        if self.observer is not None:
            self._tell(self.observer.restarted)
        self._running.clear()
        self._barriers.clear()
        self._skewed = None
        for ws in self._scheduler.workers.values():
            self._touch(ws)
        self._turn()

    # ------------------------------------------------------------------ integrals

    def _turn(self) -> None:
        """Charge the time until now to the cause until now, and see which it is from now on."""
        now = self._clock()
        seconds = now - self._last
        if seconds > 0:
            self._vector[self._now_cause] += seconds
            self._last = now
        self._now_cause = INDEX[self._cause()]

    def _cause(self) -> str:
        """Why a slot has nothing to do now."""
        scheduler = self._scheduler
        if scheduler.queued:
            return "scheduler"
        if self._backlog > 0:
            return "queued_elsewhere"
        if self._skewed is not None:
            return "skew"
        if self._barriers:
            return "shuffle_barrier"
        return "no_ready_task" if self._running or scheduler.unrunnable else "no_work"

    def _touch(self, ws: WorkerState) -> None:
        """The number of tasks assigned to a worker may have changed. Also does what `_turn` does."""
        account = self._accounts.get(ws.address)
        if account is None:
            self._turn()
            return
        now = self._clock()
        vector = self._vector
        if now > self._last:
            vector[self._now_cause] += now - self._last
            self._last = now
        was_free = account.slots - account.assigned
        account.assigned = len(ws.processing) - len(ws.long_running)
        account.slots = ws.nthreads
        free = account.slots - account.assigned
        if free > 0 or free != was_free:
            if was_free > 0:
                at, sums = account.at, account.unassigned
                for i, seconds in enumerate(vector):
                    if seconds != at[i]:
                        sums[i] += was_free * (seconds - at[i])
            elif was_free < 0:
                self._backlog += was_free
            if free > 0:
                # A worker without free slots needs none: nothing is charged until it has one again.
                account.at = vector.copy()
            elif free < 0:
                self._backlog -= free
        # `_cause` without the call, for what it is nearly always.
        if self._scheduler.queued:
            self._now_cause = _SCHEDULER
        elif self._backlog > 0:
            self._now_cause = _QUEUED_ELSEWHERE
        else:
            self._now_cause = INDEX[self._cause()]

    def _enter(self, key: Hashable, ts: TaskState, ws: WorkerState) -> None:
        self._running[key] = (ws.address, ts.prefix.name, self._last)
        self._touch(ws)

    def _leave(self, key: Hashable, finish: str, details: Mapping[str, Any]) -> None:
        address, name, _ = self._running.pop(key, ("", "", 0.0))
        if key == self._skewed:
            self._turn()
            self._skewed = None
        ws = self._scheduler.workers.get(address)
        if ws is None:
            self._turn()
        else:
            self._touch(ws)
        if (account := self._accounts.get(address)) is not None:
            account.ended = self._last
        if finish == "memory":
            self.history.ended(address, name, details)
        if self.observer is not None and (finish == "erred" or key in self.observer.wanted):
            self._tell(self.observer.task_left, key, finish)

    def _find_skew(self) -> None:
        self._skewed = None
        if self._backlog > 0 or len(self._running) > LOOKED_AT or self._scheduler.queued:
            return
        now = self._clock()
        worst = 0.0
        for key, (address, name, since) in self._running.items():
            over = self.history.overdue_seconds(name, now - since)
            if over > worst and not _is_barrier(key):
                worst, self._skewed, self._last_skewed = over, key, (name, address)

    # ------------------------------------------------------------------ heartbeats

    def heartbeat(self, ws: WorkerState, figures: Mapping[str, Any] | None) -> None:
        """Take in what a worker reports of its slots; None: it runs without the extension.

        Figures come by Dask's heartbeats and with reports, so older ones may come after newer ones: they are left out.
        """
        account = self._accounts.get(ws.address)
        if account is None or not account.is_newer(figures):
            return
        self._touch(ws)
        self._find_skew()
        self._turn()
        observer = self.observer if self.observer is not None and self.observer.following else None
        before = None if observer is None else account.reading()
        skew = account.settle(figures, self._last, self._planning())
        more: dict[str, list[int]] = {}
        skewed = None
        if figures is not None and skew is not None:
            waits = figures.get(WAITS)
            if isinstance(waits, dict):
                more = wait_histogram.grown(waits, account.waits)
                self.tails.grow(more)
                account.waits = waits
            if skew > 0 and self._last_skewed is not None:
                skewed = (self._last_skewed, skew)
                add_skewed(self.skewed, *skewed)
        account.reported = figures or {}
        if observer is not None and before is not None:
            self._tell(observer.heard, ws, before, account.reading(), more, skewed)

    # ------------------------------------------------------------------ reading

    def readings(self) -> dict[str, Reading]:
        """What is known of each worker now."""
        return {address: account.reading() for address, account in self._accounts.items()}

    def progress(self) -> dict[str, dict[str, Any]]:
        """Address -> seconds since a task ``ended`` there, how many are ``running``, the ``oldest`` in seconds, its
        ``kind``."""
        now = self._clock()
        out: dict[str, dict[str, Any]] = {
            address: {"ended": now - account.ended, "running": 0, "oldest": 0.0, "kind": ""}
            for address, account in self._accounts.items()
        }
        for address, name, since in self._running.values():
            one = out.get(address)
            if one is not None:
                one["running"] += 1
                if now - since > one["oldest"]:
                    one["oldest"], one["kind"] = now - since, name
        return out

    def statistics(self) -> dict[str, Any]:
        """Plain JSON.

        ``slot_seconds``, ``busy_seconds``, ``causes`` (cause -> slot-seconds) over all workers that have reported;
        ``workers``: the same by address; ``waits``: how many single waits there were and how long, by cause, and
        ``unassigned`` for those that only the scheduler tells apart, see `wait_histogram`; ``tasks`` that ended;
        ``output_bytes``: sizes of the newest shuffle outputs, newest first, at most `NEWEST_OUTPUTS`; ``errors``,
        ``last_traceback``.
        """
        workers = {address: as_json(one.totals) for address, one in self._accounts.items() if one.totals["slots"] > 0}
        every = self._gone.copy()
        for account in self._accounts.values():
            for name, seconds in account.totals.items():
                every[name] += seconds
        return {
            **as_json(every),
            "workers": workers,
            "waits": wait_histogram.figures(self.tails.counts),
            "tasks": self.history.tasks_seen,
            "output_bytes": [n for _, n in itertools.islice(reversed(self.history.outputs), NEWEST_OUTPUTS)],
            "errors": self.errors,
            "last_traceback": self.last_traceback,
        }

    def details(self) -> dict[str, Any]:
        """What a report shows besides: plain JSON, bounded."""
        skewed = sorted(self.skewed.items(), key=lambda item: -item[1])
        return {
            **self.history.details(),
            "waits": self.tails.as_json(),
            "skewed": [[name, address, seconds] for (name, address), seconds in skewed[:10]],
        }


def add_skewed(sums: dict[tuple[str, str], float], where: tuple[str, str], seconds: float) -> None:
    """Add to one of the sums by prefix and worker; of more than `SKEWED` the smaller half is forgotten."""
    sums[where] = sums.get(where, 0.0) + seconds
    if len(sums) > SKEWED:  # workers that come and go have ever new addresses
        largest = heapq.nlargest(SKEWED // 2, sums.items(), key=lambda item: item[1])
        sums.clear()
        sums.update(largest)


def _is_barrier(key: Hashable) -> bool:
    return type(key) is str and key.startswith(BARRIER)
