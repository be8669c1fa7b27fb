"""`StallLedger`: on the scheduler, the cause of every idle second of every slot.

Theory of operation. A worker knows why a slot that has a task is idle (`slots`); of the rest,
``unassigned``, it knows only how long. Why nothing was assigned is known here. Between two events the scheduler's state
is constant, so there is one cause at any time for a slot that has nothing (`_cause`), and per worker the integral of

    slots without an assigned task  x  cause

is kept exactly: a global vector of seconds per cause, and per worker what it was at the last change of the worker's
number of assigned tasks. An event of one task touches one worker, in about three microseconds. When a heartbeat comes,
the worker's new unassigned seconds U meet the integrals V[cause] since its last heartbeat:

* U > sum(V): the difference are slots that had a task assigned which had not arrived, or whose result had not been
  taken in here: ``scheduler``;
* U < sum(V): all V are scaled down (the worker was sent something in the last moment).

So the causes of a worker always sum to what it reported, which sums to slots x wall time. Of ``scheduler`` the part
``planning`` is split off by the share of the time that the scheduler spent in our own decisions.

A skewed task is looked for at heartbeats only (it needs a walk over what runs, and nothing but time makes a task long):
one that has run more than twice as long as the mean of its prefix, while slots are free and nothing else is ready.

The same events fill what reports are made of: the newest tasks (`rows`), durations by prefix, and sizes of shuffle
outputs. All of it is bounded.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

from dask_gpurt.observe.collect import wait_histogram
from dask_gpurt.observe.collect.causes import CAUSES, CENTRAL, CLOCK, LOCAL, UNASSIGNED, WAITS, heartbeat_key

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

#: tasks remembered for timelines
ROWS = 10_000
#: prefixes whose durations are kept; the rest has none
PREFIXES = 1000
#: outputs of shuffles whose size is remembered
OUTPUTS = 5000
#: the newest of them that `StallLedger.statistics` tells
NEWEST_OUTPUTS = 200
#: running tasks looked at for skew: with more than that, it is not one task that the others wait for
LOOKED_AT = 64
#: a task is skewed when it takes so many times as long as its prefix's mean, and this much longer in seconds
SKEW_FACTOR = 2.0
SKEW_SECONDS = 0.2
#: siblings that must have ended before a task is called skewed
SIBLINGS = 2
#: exceptions of our own until nothing is written any more
ERRORS = 10

_INDEX = {name: i for i, name in enumerate(CENTRAL)}
_SCHEDULER, _QUEUED_ELSEWHERE = _INDEX["scheduler"], _INDEX["queued_elsewhere"]
BARRIER = "shuffle-barrier-"
#: states of a barrier that is still to be passed
_OPEN = ("waiting", "queued", "processing", "no-worker")
#: prefixes of the tasks that take an output out of a shuffle of dask.dataframe
UNPACK = ("p2pshuffle", "hashjoinp2p")


class _Books:
    """One worker."""

    __slots__ = (
        *("assigned", "at", "clock", "figures", "name", "planned", "since", "slots", "totals", "unassigned", "waits"),
    )

    def __init__(self, name: str, slots: int, at: list[float]) -> None:
        self.name = name
        self.slots = slots
        #: tasks assigned that hold a slot
        self.assigned = 0
        #: the ledger's vector at the last change of `assigned`
        self.at = at
        #: slot-seconds without an assigned task, by cause, since the last heartbeat
        self.unassigned = [0.0] * len(CENTRAL)
        #: what the last heartbeat said
        self.figures: dict[str, float] = {}
        #: and when, by the worker's own clock
        self.clock = 0.0
        #: its histograms of waits
        self.waits: Mapping[str, list[int]] = {}
        #: slot-seconds by cause, and ``busy``, ``slots``
        self.totals: defaultdict[str, float] = defaultdict(float)
        #: clock, and seconds that were spent planning, at the last heartbeat
        self.since = 0.0
        self.planned = 0.0


class _Prefix:
    """Durations of the tasks of one prefix, in seconds."""

    __slots__ = ("count", "longest", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.longest = 0.0


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
        scheduler: Any,
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
        self._now_cause = _INDEX["no_work"]
        #: key -> (address, prefix, when assigned)
        self._running: dict[Hashable, tuple[str, str, float]] = {}
        self._barriers: set[Hashable] = set()
        #: assigned beyond the slots, over all workers
        self._backlog = 0
        #: the skewed task that the others wait for
        self._skewed: Hashable | None = None
        #: its prefix and worker, or those of the last one
        self._last_skewed: tuple[str, str] | None = None
        self._books: dict[str, _Books] = {}
        #: sums of workers that left
        self._gone: defaultdict[str, float] = defaultdict(float)
        self.prefixes: dict[str, _Prefix] = {}
        #: (address, prefix, start, stop, seconds of transfers before), newest last; times are Unix
        self.rows: deque[tuple[str, str, float, float, float]] = deque(maxlen=ROWS)
        #: (prefix, bytes) of shuffle outputs
        self.outputs: deque[tuple[str, int]] = deque(maxlen=OUTPUTS)
        self.outputs_seen = 0
        #: (prefix, address) -> slot-seconds that others waited for its tasks
        self.skewed: defaultdict[tuple[str, str], float] = defaultdict(float)
        #: how long single waits of slots were
        self.tails = wait_histogram.Tails()
        self.tasks_seen = 0
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

    def guarded(self, event: Callable[..., None], *args: Any) -> None:
        """Call one of the events; never raises, and stops when that happens too often."""
        if self.errors >= ERRORS:
            return
        try:
            event(*args)
        except Exception:
            self.errors += 1
            self.last_traceback = traceback.format_exc()

    def worker_added(self, ws: Any) -> None:
        self._turn()
        books = self._books[ws.address] = _Books(str(ws.name), ws.nthreads, list(self._vector))
        books.since, books.planned = self._last, self._planning()

    def worker_removed(self, address: str) -> None:
        books = self._books.pop(address, None)
        if books is None:
            return
        self._turn()
        self._backlog -= max(0, books.assigned - books.slots)
        for name, seconds in books.totals.items():
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

    def restarted(self) -> None:
        """The scheduler has forgotten all tasks."""
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
        self._now_cause = _INDEX[self._cause()]

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

    def _touch(self, ws: Any) -> None:
        """The number of tasks assigned to a worker may have changed. Also does what `_turn` does."""
        books = self._books.get(ws.address)
        if books is None:
            self._turn()
            return
        now = self._clock()
        vector = self._vector
        if now > self._last:
            vector[self._now_cause] += now - self._last
            self._last = now
        was_free = books.slots - books.assigned
        books.assigned = len(ws.processing) - len(ws.long_running)
        books.slots = ws.nthreads
        free = books.slots - books.assigned
        if free > 0 or free != was_free:
            if was_free > 0:
                at, sums = books.at, books.unassigned
                for i, seconds in enumerate(vector):
                    if seconds != at[i]:
                        sums[i] += was_free * (seconds - at[i])
            elif was_free < 0:
                self._backlog += was_free
            if free > 0:
                # A worker without free slots needs none: nothing is charged until it has one again.
                books.at = vector.copy()
            elif free < 0:
                self._backlog -= free
        # `_cause` without the call, for what it is nearly always.
        if self._scheduler.queued:
            self._now_cause = _SCHEDULER
        elif self._backlog > 0:
            self._now_cause = _QUEUED_ELSEWHERE
        else:
            self._now_cause = _INDEX[self._cause()]

    def _enter(self, key: Hashable, ts: Any, ws: Any) -> None:
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
        if finish != "memory":
            return
        worker = details.get("worker") or address
        transfers = 0.0
        begin = end = None
        for s in details.get("startstops") or ():
            if s["action"] == "compute":
                begin, end = s["start"], s["stop"]
            elif s["action"] == "transfer":
                transfers += s["stop"] - s["start"]
        if begin is None or end is None:
            return
        self.tasks_seen += 1
        self.rows.append((worker, name, begin, end, transfers))
        self._learn(name, max(0.0, end - begin))
        if name in UNPACK:
            self.outputs_seen += 1
            self.outputs.append((name, max(0, details.get("nbytes") or 0)))

    def _learn(self, name: str, seconds: float) -> None:
        prefix = self.prefixes.get(name)
        if prefix is None:
            if len(self.prefixes) >= PREFIXES:
                return
            prefix = self.prefixes[name] = _Prefix()
        prefix.count += 1
        prefix.total += seconds
        prefix.longest = max(prefix.longest, seconds)

    def _find_skew(self) -> None:
        self._skewed = None
        if self._backlog > 0 or len(self._running) > LOOKED_AT or self._scheduler.queued:
            return
        now = self._clock()
        worst = 0.0
        for key, (address, name, since) in self._running.items():
            prefix = self.prefixes.get(name)
            if prefix is None or prefix.count < SIBLINGS or _is_barrier(key):
                continue
            mean = prefix.total / prefix.count
            over = now - since - max(SKEW_FACTOR * mean, mean + SKEW_SECONDS)
            if over > worst:
                worst, self._skewed, self._last_skewed = over, key, (name, address)

    # ------------------------------------------------------------------ heartbeats

    def heartbeat(self, ws: Any, figures: Mapping[str, Any] | None) -> None:
        """A worker told what its slots did; None: it runs without the extension.

        Figures come by Dask's heartbeats and with reports, so older ones may come after newer ones: they are left out.
        """
        books = self._books.get(ws.address)
        clock = None if figures is None else figures.get(CLOCK)
        if books is None or (clock is not None and clock <= books.clock):
            return
        books.clock = clock or 0.0
        self._touch(ws)
        self._find_skew()
        self._turn()
        wall, books.since = self._last - books.since, self._last
        planned, books.planned = self._planning() - books.planned, self._planning()
        unassigned, books.unassigned = books.unassigned, [0.0] * len(CENTRAL)
        key = heartbeat_key(UNASSIGNED)
        if figures is None or key not in figures:
            return
        if figures.get(key, 0.0) < books.figures.get(key, 0.0):
            books.figures, books.waits = {}, {}  # it was attached anew
        waits = figures.get(WAITS)
        if isinstance(waits, dict):
            self.tails.grow(wait_histogram.grown(waits, books.waits))
            books.waits = waits
        growth: dict[str, float] = {}
        for name in ("slots", "busy", "running", UNASSIGNED, *LOCAL):
            name_key = heartbeat_key(name)
            value = float(figures.get(name_key) or 0.0)
            growth[name] = value - books.figures.get(name_key, 0.0)
            books.figures[name_key] = value
        totals = books.totals
        totals["slots"] += growth["slots"]
        # What runs is work until it turns out to be something else; so this may fall a little between two looks.
        totals["busy"] += growth["busy"] + growth["running"]
        for name in LOCAL:
            totals[name] += growth[name]
        idle = max(0.0, growth[UNASSIGNED])
        known = sum(unassigned)
        scale = min(1.0, idle / known) if known > 0 else 0.0
        for name, seconds in zip(CENTRAL, unassigned, strict=True):
            totals[name] += seconds * scale
        waited = unassigned[_INDEX["scheduler"]] * scale + (idle - known * scale)
        totals["scheduler"] += idle - known * scale
        planning = waited * min(1.0, planned / wall) if wall > 0 else 0.0
        totals["planning"] += planning
        totals["scheduler"] -= planning
        skew = unassigned[_INDEX["skew"]] * scale
        if skew > 0 and self._last_skewed is not None:
            self.skewed[self._last_skewed] += skew

    # ------------------------------------------------------------------ reading

    def statistics(self) -> dict[str, Any]:
        """Plain JSON.

        ``slot_seconds``, ``busy_seconds``, ``causes`` (cause -> slot-seconds) over all workers that ever told theirs;
        ``workers``: the same by address; ``waits``: by cause, and ``unassigned`` for those that only the scheduler
        tells apart, how many single waits there were and how long, see `wait_histogram`; ``tasks`` that ended;
        ``output_bytes``: sizes of the newest shuffle outputs,
        newest first, at most `NEWEST_OUTPUTS`; ``errors``, ``last_traceback``.
        """
        workers = {address: _told(books.totals) for address, books in self._books.items() if books.totals["slots"] > 0}
        every = self._gone.copy()
        for books in self._books.values():
            for name, seconds in books.totals.items():
                every[name] += seconds
        return {
            **_told(every),
            "workers": workers,
            "waits": wait_histogram.figures(self.tails.counts),
            "tasks": self.tasks_seen,
            "output_bytes": [n for _, n in itertools.islice(reversed(self.outputs), NEWEST_OUTPUTS)],
            "errors": self.errors,
            "last_traceback": self.last_traceback,
        }

    def details(self) -> dict[str, Any]:
        """What a report shows besides: plain JSON, bounded."""
        skewed = sorted(self.skewed.items(), key=lambda item: -item[1])
        return {
            "rows": list(self.rows),
            "waits": self.tails.told(),
            "outputs": list(self.outputs),
            "outputs_seen": self.outputs_seen,
            "skewed": [[name, address, seconds] for (name, address), seconds in skewed[:10]],
            "prefixes": {
                name: {"count": p.count, "seconds": p.total, "longest_seconds": p.longest}
                for name, p in sorted(self.prefixes.items(), key=lambda item: -item[1].total)[:50]
            },
        }


def _told(totals: Mapping[str, float]) -> dict[str, Any]:
    return {
        "slot_seconds": totals.get("slots", 0.0),
        "busy_seconds": totals.get("busy", 0.0),
        "causes": {name: max(0.0, totals.get(name, 0.0)) for name in CAUSES},
    }


def _is_barrier(key: Hashable) -> bool:
    return type(key) is str and key.startswith(BARRIER)
