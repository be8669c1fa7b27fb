"""`Feed`: the figures of one cluster, gathered on its scheduler, for the dashboard.

`provide` gives a scheduler its feed, `of` returns it to a page, `withdraw` takes it away. Once a second a feed looks
at what heartbeats brought and at the scheduler's own statistics, and remembers ten minutes of it. There is one for
all pages: ten open pages cost no more than one. It looks only while a page is open: the first page starts it, and it
stops `UNSEEN_SECONDS` after the last one has asked. A look is O(workers), and nothing is sent.

Counters of a worker start over when it restarts, and are gone when it leaves. The history therefore adds up *growth*:
what a counter gained since the last look, or all of it where it is new or smaller than before. So the sum never
falls. Levels, such as bytes held, are remembered as they were. A plot gets as many points as it asks for, at most:
more than there are pixels would only cost the scheduler's loop, which writes them as text.

Rejected: a history per open page, as Dask's own plots have it (a second page would begin empty). Looking also when no
page is open (on a busy scheduler that is time that tasks wait for).
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
import traceback
import weakref
from typing import TYPE_CHECKING, Any

from dask_gpurt.model.node_class import key_of
from dask_gpurt.observe.collect.causes import BUSY, CAUSES
from dask_gpurt.observe.figures.shuffle_progress import Shuffles

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distributed import Scheduler
    from distributed.scheduler import WorkerState

logger = logging.getLogger("distributed.scheduler.gpurt")

#: key in ``WorkerState.metrics`` and name of the periodic callback
NAME = "gpurt"
CALLBACK = "gpurt-feed"
#: milliseconds between two looks, and looks remembered
INTERVAL_MS = 1000
KEEP = 600
#: seconds without a page that asks, after which it stops
UNSEEN_SECONDS = 10.0

#: worker counters whose growth is remembered
WORKER_COUNTERS = ("written_bytes", "read_bytes", "shuffle_sent_bytes", "shuffle_received_bytes")
#: scheduler counters, see `_placed`
SCHEDULER_COUNTERS = ("local", "moved", "stock", "fallbacks")
#: slot-seconds of the stall ledger, see `_slots`
USES = (BUSY, *CAUSES)
#: worker figures whose sum over all workers is remembered: tiers, fastest first; absent ones are not there
LEVELS = ("device_bytes", "host_bytes", "disk_bytes", "object_bytes")
#: worker counters whose growth within the last minute is shown worker by worker
SHUFFLED = ("shuffle_sent_bytes", "shuffle_received_bytes", "shuffle_kept_bytes")
#: seconds between two marks of them, and marks remembered: the oldest is a minute old
MARK_SECONDS, MARKS = 10.0, 7
#: threads of all workers x time, by the clock of the feed
THREADS = "thread_seconds"
#: what the scheduler's own counters are seen as, beside the addresses of workers
PLACED, SLOTS = "placed", "slots"
#: points of a line, unless the plot says otherwise
POINTS = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One look. Sums over the time that the feed runs; they never fall."""

    #: of the clock, in seconds
    time: float
    sums: dict[str, float]
    #: sums over all workers, as they were
    levels: dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker as its last heartbeat had it."""

    name: str
    address: str
    #: None: it runs without the extension
    figures: Mapping[str, Any] | None
    threads: int = 0
    #: the scheduler's, for `node_class`
    state: WorkerState | None = None

    @property
    def node_class(self) -> str:
        """The key of its `dask_gpurt.model.node_class.NodeClass`."""
        return key_of(self.state)


class Feed:
    """Figures of one cluster.

    Parameters
    ----------
    scheduler
        Anything with ``workers``: address -> object with ``name`` and ``metrics``.
    figures
        The scheduler's own statistics: plain JSON with ``placement`` and ``shuffle`` where installed.
    clock
        Seconds; for tests.
    """

    def __init__(
        self, scheduler: Scheduler, figures: Callable[[], dict[str, Any]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._workers = weakref.ref(scheduler)
        self._figures = figures
        self.clock = clock
        #: oldest first
        self.history: collections.deque[Sample] = collections.deque(maxlen=KEEP)
        #: the scheduler's statistics as of the last look
        self.latest: dict[str, Any] = {}
        #: looks that failed, and the last traceback
        self.errors = 0
        self.last_error = ""
        #: clock when a page last asked
        self.asked = clock()
        #: shuffles under way and the newest that have ended
        self.shuffles = Shuffles(clock)
        #: (clock, address -> its `SHUFFLED`), oldest first
        self._marks: collections.deque[tuple[float, dict[str, tuple[float, ...]]]] = collections.deque(maxlen=MARKS)
        #: looks so far
        self.looks = 0
        self._sums = dict.fromkeys((*WORKER_COUNTERS, *SCHEDULER_COUNTERS, SLOTS, *USES, THREADS), 0.0)
        #: address -> counters at the last look
        self._seen: dict[str, dict[str, float]] = {}

    def tick(self) -> None:
        """Look. Never raises: it runs on the scheduler's loop."""
        try:
            self._look()
        except Exception:
            self.failed()

    def failed(self) -> None:
        """Count the exception that is being handled."""
        self.errors += 1
        self.last_error = traceback.format_exc()
        if self.errors == 1:
            logger.warning("dask-gpurt: the dashboard's figures could not be gathered\n%s", self.last_error)

    def _look(self) -> None:
        self.latest = self._figures()
        seen: dict[str, dict[str, float]] = {}
        levels: dict[str, float] = {}
        threads = 0
        for row in self.rows():
            if row.figures is None:
                continue
            now = {key: float(row.figures.get(key) or 0) for key in WORKER_COUNTERS}
            self._grow(self._seen.get(row.address, {}), now)
            seen[row.address] = now
            threads += row.threads
            for key in LEVELS:
                if key in row.figures:
                    levels[key] = levels.get(key, 0.0) + float(row.figures[key] or 0)
        placed, slots = _placed(self.latest), _slots(self.latest)
        if SLOTS in self._seen:
            slots = _risen(self._seen[SLOTS], slots)
        self._grow(self._seen.get(PLACED, {}), placed)
        self._grow(self._seen.get(SLOTS, {}), slots)
        seen |= {PLACED: placed, SLOTS: slots}
        self._seen = seen
        if self.history:
            self._sums[THREADS] += threads * (self.clock() - self.history[-1].time)
        self.looks += 1
        self.history.append(Sample(self.clock(), dict(self._sums), levels))
        self._mark()
        # Last: it reads what belongs to Dask, and if that fails, all the rest has been remembered.
        scheduler = self._workers()
        if scheduler is not None:
            self.shuffles.look(scheduler)

    def _grow(self, before: Mapping[str, float], now: Mapping[str, float]) -> None:
        for key, value in now.items():
            old = before.get(key, 0.0)
            self._sums[key] += value - old if value >= old else value

    def _mark(self) -> None:
        now = self.clock()
        while self._marks and now - self._marks[0][0] > MARK_SECONDS * MARKS:
            self._marks.popleft()  # of a page that was closed since
        if not self._marks or now - self._marks[-1][0] >= MARK_SECONDS:
            self._marks.append((now, {row.address: _shuffled(row) for row in self.rows() if row.figures is not None}))

    def shuffled(self, row: WorkerRow) -> tuple[float, ...]:
        """Bytes that a worker sent, received and kept in the last minute; less where no page was open."""
        now = _shuffled(row)
        before = self._marks[0][1].get(row.address, ()) if self._marks else now
        # A worker that is new since then has counted from zero, one that was restarted begins again.
        before = before if before and all(n >= b for n, b in zip(now, before, strict=True)) else (0.0,) * len(now)
        return tuple(n - b for n, b in zip(now, before, strict=True))

    def rows(self) -> list[WorkerRow]:
        """All workers, in the order they joined."""
        scheduler = self._workers()
        return [] if scheduler is None else worker_rows(scheduler)

    def rates(
        self, keys: tuple[str, ...], over: int = 3, points: int = KEEP
    ) -> tuple[list[float], dict[str, list[float]]]:
        """(seconds before now, key -> growth per second), oldest first; each rate is over the last `over` looks.

        With more than `points` looks, some are left out, and each rate is over as many more looks.
        """
        history = list(self.history)
        now = self.clock()
        ago: list[float] = []
        out: dict[str, list[float]] = {key: [] for key in keys}
        every = self._every(points)
        for i in self._positions(every):
            old, new = history[max(0, i - max(over, every))], history[i]
            seconds = new.time - old.time
            if seconds <= 0:
                continue
            ago.append(max(0.0, now - new.time))
            for key in keys:
                out[key].append((new.sums[key] - old.sums[key]) / seconds)
        return ago, out

    def levels(self, points: int = POINTS) -> tuple[list[float], dict[str, list[float]]]:
        """(seconds before now, key -> sum over all workers), oldest first; keys that were ever there, of `LEVELS`."""
        history = list(self.history)
        now = self.clock()
        samples = [history[i] for i in (0, *self._positions(self._every(points)))] if history else []
        keys = [key for key in LEVELS if any(key in sample.levels for sample in samples)]
        ago = [max(0.0, now - sample.time) for sample in samples]
        return ago, {key: [sample.levels.get(key, 0.0) for sample in samples] for key in keys}

    def _every(self, points: int) -> int:
        return max(1, -(-len(self.history) // points))

    def _positions(self, every: int) -> list[int]:
        """Which of the history to show: every so many-th, always the same ones while they age, and the newest."""
        length = len(self.history)
        first = self.looks - length
        return [i for i in range(1, length) if (first + i) % every == 0 or i == length - 1]


def worker_rows(scheduler: Scheduler) -> list[WorkerRow]:
    """All workers of a scheduler, with or without the extension."""
    out = []
    for address, ws in scheduler.workers.items():
        figures = ws.metrics.get(NAME)
        has = isinstance(figures, dict) and bool(figures)
        reported = figures if has else None
        out.append(WorkerRow(str(ws.name), str(address), reported, int(getattr(ws, "nthreads", 0)), ws))
    return out


def _shuffled(row: WorkerRow) -> tuple[float, ...]:
    figures = row.figures or {}
    return tuple(float(figures.get(key) or 0) for key in SHUFFLED)


def _placed(figures: Mapping[str, Any]) -> dict[str, float]:
    """What became of the tasks: placed local or moved, left to stock on purpose, and by a fallback."""
    placement = figures.get("placement") or {}
    decisions = placement.get("decisions") or {}
    return {
        "local": float(decisions.get("local", 0)),
        "moved": float(decisions.get("moved", 0)),
        "stock": float(sum((placement.get("declined") or {}).values())),
        "fallbacks": float(fallbacks(placement)),
    }


def _slots(figures: Mapping[str, Any]) -> dict[str, float]:
    """Slot-seconds by use, and `SLOTS`, their sum; zero without a ledger."""
    ledger = figures.get("ledger") or {}
    causes = ledger.get("causes") or {}
    return {
        SLOTS: float(ledger.get("slot_seconds", 0.0)),
        BUSY: float(ledger.get("busy_seconds", 0.0)),
        **{cause: float(causes.get(cause, 0.0)) for cause in CAUSES},
    }


def _risen(before: Mapping[str, float], now: dict[str, float]) -> dict[str, float]:
    """A ledger without its small falls: what runs counts as work until it turns out to be something else.

    Only a ledger whose whole time has fallen was started anew.
    """
    if now[SLOTS] < before[SLOTS]:
        return now
    return {key: max(value, before[key]) for key, value in now.items()}


def fallbacks(placement: Mapping[str, Any]) -> int:
    """How often any part of placement gave way to Dask."""
    return sum(sum(reasons.values()) for reasons in (placement.get("fallbacks") or {}).values())


_feeds: weakref.WeakKeyDictionary[Any, Feed] = weakref.WeakKeyDictionary()


def provide(scheduler: Scheduler, figures: Callable[[], dict[str, Any]]) -> Feed:
    """Give a scheduler its feed; it starts with the first page. One that has a feed gets a new one."""
    withdraw(scheduler)
    feed = Feed(scheduler, figures)
    _feeds[scheduler] = feed
    return feed


def _start(scheduler: Scheduler, feed: Feed) -> None:
    from tornado.ioloop import PeriodicCallback

    def tick() -> None:
        if feed.clock() - feed.asked > UNSEEN_SECONDS:
            _stop(scheduler)
        else:
            feed.tick()

    feed.tick()
    # Among the scheduler's own, so that it stops with them when the scheduler closes.
    callback = PeriodicCallback(tick, INTERVAL_MS)
    scheduler.periodic_callbacks[CALLBACK] = callback
    callback.start()


def _stop(scheduler: Scheduler) -> None:
    callback = scheduler.periodic_callbacks.pop(CALLBACK, None)
    if callback is not None:
        callback.stop()


def withdraw(scheduler: Scheduler) -> None:
    """Stop the feed; the plots then say that nothing is installed. No error when there is none."""
    _feeds.pop(scheduler, None)
    _stop(scheduler)


def of(scheduler: Scheduler) -> Feed | None:
    """The feed of a scheduler, for a page, on the event loop: it looks from now on. None without the extension."""
    feed = _feeds.get(scheduler)
    if feed is not None:
        feed.asked = feed.clock()
        if CALLBACK not in getattr(scheduler, "periodic_callbacks", {CALLBACK: None}):
            _start(scheduler, feed)
    return feed
