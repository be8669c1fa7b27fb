"""`Prefetch`: reads the inputs of tasks that will run soon, while others compute.

A task that was sent here (`pending_tasks`) has all its inputs somewhere. Those on a lower tier are read ahead, in the
order of the tasks' priorities.

Reading ahead must never move more bytes than without it, or keep others waiting:

1. a value is read ahead only into room that is there, or that a victim needed later than it makes (`Eviction.yields`);
2. nothing is read ahead while a request waits at the gate: a task that runs comes before one that runs soon;
3. one reader thread is left free, so that a task that needs a value now finds one;
4. values read ahead and not used yet take at most `share` of the budget, and no more than they need to be in time
   (`Prefetch.window_bytes`), as they cost as much as if the budget were so much smaller. A value that lay here for
   longer than `EARLY` times what it took to read makes the window smaller, one that was late larger.

How each ended (`ReadAhead`) is counted, and a bad end makes it slower:

==========  ===============================================================  ======
outcome     meaning
==========  ===============================================================  ======
in_time     it was in memory when its user came                              good
late        it was still being read: that part of the reading was hidden     good
early       it had to leave again before its use: read twice                 bad
wasted      it went away without having been used                            bad
==========  ===============================================================  ======

`BAD_IN_A_ROW` bad ends without a good one between them stop it for a second, doubled each time up to a minute. A good
one restores the full pace.

Measured on a matrix product on four workers, against the bytes that Belady's rule moves: 1.18 with all of `share` and
no window, 1.07 without reading ahead. Rejected: to read, after these, what the scheduler says is used next (`worker`),
though no task here waits for it. In a matrix product, of every ten such values six had to leave again before they were
used; elsewhere next to nothing was read so.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, Any

from dask_gpurt.tiers.backoff import BackOff
from dask_gpurt.tiers.engine.entry import ReadAhead, State

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from dask.typing import Key
    from distributed.worker_state_machine import TaskState

    from dask_gpurt.model.circuit_breaker import Guard
    from dask_gpurt.tiers.engine.engine import Engine
    from dask_gpurt.tiers.engine.entry import Entry

#: bad ends after which it rests
BAD_IN_A_ROW = 3
#: a value that lies here, unused, for so many times what its reading took came early
EARLY = 6.0
#: of its bytes by which the window shrinks then; one that is late makes it grow by all of them
_SHRINK = 0.25
_SOON = frozenset({"waiting", "ready", "constrained"})


class Prefetch:
    """Loop thread only. `pending` and `pump` may be called at any time; they never raise.

    Parameters
    ----------
    tasks
        The worker's ``state.tasks``.
    find
        Key -> its entry, or None.
    share
        Of the budget, for values that were read ahead and not used yet; 0: never read ahead.
    """

    def __init__(
        self,
        engine: Engine,
        tasks: Mapping[Key, TaskState],
        find: Callable[[Key], Entry | None],
        share: float,
        guard: Guard,
    ) -> None:
        self._engine = engine
        self._tasks = tasks
        self._find = find
        self.share = share
        #: nothing more is read ahead for now: safe mode
        self.paused = False
        self._guard = guard
        self.part = guard.part("prefetch", on_retired=self.uninstall)
        #: (priority, number of the task, its key)
        self._queue: list[tuple[tuple[float, ...], int, Key]] = []
        #: value -> when its reading began, and when it ended (0: not yet), in seconds
        self._ahead: dict[Entry, tuple[float, float]] = {}
        #: what may be read ahead and not used yet, in bytes; one value always may. Never more than `share` allows
        self.window_bytes = math.inf
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._rest = BackOff(BAD_IN_A_ROW)
        #: bytes read ahead, or being read, and not used yet
        self.ahead_bytes = 0
        self._in_flight = 0
        self.started = 0
        self.started_bytes = 0
        #: outcome -> values, and their bytes; see the module
        self.outcomes = dict.fromkeys(ReadAhead, 0)
        self.outcome_bytes = dict.fromkeys(ReadAhead, 0)
        #: times it stopped because it had been wrong
        self.rests = 0

    # ------------------------------------------------------------------ what happens

    def install(self) -> None:
        """Begin."""
        self._engine.books.on_prefetch_end = self.ended
        self._engine.books.on_change = self.pump

    def uninstall(self) -> None:
        """Read nothing ahead any more. A second call does nothing."""
        self.share = 0
        self.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def pending(self, priority: tuple[float, ...], number: int, key: Key) -> None:
        """A task was sent here."""
        if self.share and self.part.retired is None and not self.paused:
            heapq.heappush(self._queue, (priority, number, key))
            self.pump()

    def ended(self, entry: Entry, outcome: ReadAhead) -> None:
        """A value that was read ahead was used, or left."""
        entry.prefetched = False
        self.ahead_bytes -= entry.nbytes
        self.outcomes[outcome] += 1
        self.outcome_bytes[outcome] += entry.nbytes
        began, loaded = self._ahead.pop(entry)
        if outcome is ReadAhead.LATE:
            self.window_bytes = min(self.window_bytes + entry.nbytes, self._most_bytes)
        elif loaded and self._engine.books.clock() - loaded > EARLY * (loaded - began):
            self.window_bytes = max(0.0, min(self.window_bytes, self._most_bytes) - _SHRINK * entry.nbytes)
        if outcome in (ReadAhead.IN_TIME, ReadAhead.LATE):
            self._rest = BackOff(BAD_IN_A_ROW)
        else:
            self._rest.failed(self._engine.books.clock())
            self.rests += self._rest.failures >= BAD_IN_A_ROW
        self.pump()

    def pump(self) -> None:
        """Something has changed: look, soon, whether a value can be read ahead."""
        if not self._queue or self._scheduled or self._engine.io.closed:
            return
        self._scheduled = True
        self._engine.io.loop.call_soon(self._pump)

    # ------------------------------------------------------------------ decisions

    def _pump(self) -> None:
        self._scheduled = False
        with self._engine.counters.loop_time:
            try:
                self._read_ahead()
            except Exception:
                self._guard.failed(self.part.name)
                self.clear()  # the tasks read what they need themselves

    def _read_ahead(self) -> None:
        engine = self._engine
        if engine.budget_bytes is None or engine.io.closed or self.paused:
            self.clear()
            return
        rest = self._rest.until - engine.books.clock()
        if rest > 0:
            self._later(rest)
            return
        while (entry := self._due()) is not None:
            if (
                self._in_flight >= engine.io.threads
                or len(engine.gate)
                or (self.ahead_bytes + entry.nbytes > min(self.window_bytes, self._most_bytes) and self._ahead)
                or entry.nbytes > self._most_bytes
                or not engine.eviction.yields(entry)
            ):
                return  # `pump` is called again when that may have changed
            self._start(entry)

    @property
    def _most_bytes(self) -> float:
        return self.share * (self._engine.budget_bytes or 0)

    def _due(self) -> Entry | None:
        """What the next task that was sent here lacks."""
        while self._queue:
            ts = self._tasks.get(self._queue[0][2])
            entry = None if ts is None or ts.state not in _SOON else self._next_input(ts)
            if entry is not None:
                return entry
            heapq.heappop(self._queue)
        return None

    def _next_input(self, ts: TaskState) -> Entry | None:
        for dependency in ts.dependencies:
            entry: Entry | None = self._find(dependency.key)
            if entry is not None and _readable(entry):
                return entry
        return None

    def _start(self, entry: Entry) -> None:
        if not self._engine.loading.prefetch(entry):
            return  # the object was still alive: nothing had to be read
        entry.prefetched = True
        self.started += 1
        self.started_bytes += entry.nbytes
        self.ahead_bytes += entry.nbytes
        self._in_flight += 1
        waiter = entry.waiter
        assert waiter is not None
        self._ahead[entry] = (self._engine.books.clock(), 0.0)
        waiter.add_done_callback(lambda _: self._loaded(entry))
        self._engine.balance()

    def _loaded(self, entry: Entry) -> None:
        self._in_flight -= 1
        if entry in self._ahead:
            self._ahead[entry] = (self._ahead[entry][0], self._engine.books.clock())
        self.pump()

    def clear(self) -> None:
        """Forget the tasks that were sent here so far."""
        self._queue.clear()

    def _later(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._engine.io.loop.call_later(seconds, self.pump)

    def statistics(self) -> dict[str, Any]:
        """Return counts as plain JSON."""
        return {
            "share": self.share,
            "queue": len(self._queue),
            "ahead_bytes": self.ahead_bytes,
            "window_bytes": min(self.window_bytes, self._most_bytes),
            "started": self.started,
            "started_bytes": self.started_bytes,
            **{outcome.value: n for outcome, n in self.outcomes.items()},
            "bytes": {outcome.value: n for outcome, n in self.outcome_bytes.items()},
            "rests": self.rests,
            **self.part.statistics(),
        }


def _readable(entry: Entry) -> bool:
    return entry.state is State.STORED and not entry.gone and not entry.pins and entry.load_error is None
