"""The figures of one cluster, gathered on its scheduler, for the dashboard.

A `Feed` looks once a second at what heartbeats brought anyway and at the scheduler's own statistics, and remembers ten
minutes of it. It is one for all pages: ten open pages cost no more than one. It looks only while somebody does: the
first page that asks starts it, and it stops `UNSEEN_SECONDS` after the last one has asked. The look is O(workers);
nothing is sent.

Counters of a worker start over when it restarts, and are gone when it leaves. The history therefore adds up *growth*:
what a counter gained since the last look, or all of it where it is new or smaller than before. So the sum never falls.

Rejected: a history per open page, as Dask's own plots have it (a second page would begin empty); looking also when no
page is open (a tick a second for nobody, which on a busy scheduler is time that tasks wait for).
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
import traceback
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One look. Sums over the time that the feed runs; they never fall."""

    #: of the clock, in seconds
    time: float
    sums: dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker as its last heartbeat had it."""

    name: str
    address: str
    #: None: it runs without the extension
    figures: Mapping[str, Any] | None


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
        self, scheduler: Any, figures: Callable[[], dict[str, Any]], clock: Callable[[], float] = time.monotonic
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
        self._sums = dict.fromkeys((*WORKER_COUNTERS, *SCHEDULER_COUNTERS), 0.0)
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
        for row in self.rows():
            if row.figures is None:
                continue
            now = {key: float(row.figures.get(key) or 0) for key in WORKER_COUNTERS}
            self._grow(self._seen.get(row.address, {}), now)
            seen[row.address] = now
        placed = _placed(self.latest)
        self._grow(self._seen.get("", {}), placed)
        seen[""] = placed
        self._seen = seen
        self.history.append(Sample(self.clock(), dict(self._sums)))

    def _grow(self, before: Mapping[str, float], now: Mapping[str, float]) -> None:
        for key, value in now.items():
            old = before.get(key, 0.0)
            self._sums[key] += value - old if value >= old else value

    def rows(self) -> list[WorkerRow]:
        """All workers, in the order they joined."""
        scheduler = self._workers()
        return [] if scheduler is None else worker_rows(scheduler)

    def rates(self, keys: tuple[str, ...], over: int = 3) -> tuple[list[float], dict[str, list[float]]]:
        """(seconds before now, key -> growth per second), oldest first; each rate is over the last `over` looks."""
        history = list(self.history)
        now = self.clock()
        ago: list[float] = []
        out: dict[str, list[float]] = {key: [] for key in keys}
        for i in range(1, len(history)):
            old, new = history[max(0, i - over)], history[i]
            seconds = new.time - old.time
            if seconds <= 0:
                continue
            ago.append(max(0.0, now - new.time))
            for key in keys:
                out[key].append((new.sums[key] - old.sums[key]) / seconds)
        return ago, out


def worker_rows(scheduler: Any) -> list[WorkerRow]:
    """All workers of a scheduler, with or without the extension."""
    out = []
    for address, ws in scheduler.workers.items():
        figures = ws.metrics.get(NAME)
        has = isinstance(figures, dict) and bool(figures)
        out.append(WorkerRow(str(ws.name), str(address), figures if has else None))
    return out


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


def fallbacks(placement: Mapping[str, Any]) -> int:
    """How often any part of placement gave way to Dask."""
    return sum(sum(reasons.values()) for reasons in (placement.get("fallbacks") or {}).values())


_feeds: weakref.WeakKeyDictionary[Any, Feed] = weakref.WeakKeyDictionary()


def provide(scheduler: Any, figures: Callable[[], dict[str, Any]]) -> Feed:
    """Give a scheduler its feed; it starts with the first page. One that has a feed gets a new one."""
    withdraw(scheduler)
    feed = Feed(scheduler, figures)
    _feeds[scheduler] = feed
    return feed


def _start(scheduler: Any, feed: Feed) -> None:
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


def _stop(scheduler: Any) -> None:
    callback = scheduler.periodic_callbacks.pop(CALLBACK, None)
    if callback is not None:
        callback.stop()


def withdraw(scheduler: Any) -> None:
    """Stop the feed; the plots then say that nothing is installed. No error when there is none."""
    _feeds.pop(scheduler, None)
    _stop(scheduler)


def of(scheduler: Any) -> Feed | None:
    """The feed of a scheduler, for a page, on the event loop: it looks from now on. None without the extension."""
    feed = _feeds.get(scheduler)
    if feed is not None:
        feed.asked = feed.clock()
        if CALLBACK not in getattr(scheduler, "periodic_callbacks", {CALLBACK: None}):
            _start(scheduler, feed)
    return feed
