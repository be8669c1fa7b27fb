"""`HintReceiver`: next uses as a worker hears of them from `scheduler`. Sets `Entry.next_use`, which `victims` goes by.

What is known about a value, from best to worst:

* the scheduler's word: the next priorities at which it is read, or that no task will (`NEVER`). When a task has read
  it here, that priority is dropped and the next one stands; the scheduler follows and sends only what we cannot know;
* a guess, for `GUESS_SECONDS`, until that word comes:

  - a value that was fetched is read by the tasks that wait for it here;
  - one that was computed here is read soon after its own priority, as Dask orders graphs depth first;
  - one whose last known use has just passed is about to be freed, or a message about it is under way;
  - one that a peer has fetched has passed to it the use that was next;

* nothing: its place is by the time of its last use.

The word is a few milliseconds away, or the value goes by then. So what is guessed about leaves memory after all that is
foretold (`_held`), in the order of the guesses. (By their priorities alone, one write in seven of a matrix product was
of a value that was then freed unread.) Guesses are made only while a scheduler sends hints, else this would not be LRU
any more. A guess that is not confirmed in time is dropped, so that a silent scheduler costs nothing.

A worker asks for hints, by a field of its heartbeats, only while memory is pressed (`eviction`): else nothing would be
chosen by them. When it stops asking, a message with "pause" says that nothing more is under way, and what was said is
forgotten.

The op must stay known as long as a message may be under way, since an unknown one closes the worker. `uninstall` waits
for the message that says "stop", if the scheduler has reason to send one. If it does not come, a handler that does
nothing stays behind (harmless; replaced by the next `install`).

The handler runs in the loop that reads the scheduler's stream. An exception there would end this worker, so the handler
raises nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from distributed.worker_state_machine import ExecuteSuccessEvent, TaskState

from dask_gpurt.model.no_hook import ignored
from dask_gpurt.tiers.engine.entry import NEVER
from dask_gpurt.tiers.hints.protocol import HEARTBEAT_FIELD, KEEP, OP, PROTOCOL, without

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dask.typing import Key
    from distributed.worker import Worker
    from distributed.worker_state_machine import StateMachineEvent

    from dask_gpurt.model.circuit_breaker import Guard
    from dask_gpurt.tiers.engine.engine import Engine
    from dask_gpurt.tiers.engine.entry import Entry
    from dask_gpurt.tiers.stores.task_store import TieredStore

logger = logging.getLogger("distributed.worker.gpurt")

#: a guess holds for so long
GUESS_SECONDS = 2.0
#: to wait for the last message before the handler is removed
STOP_SECONDS = 1.0

_ATTRIBUTES = ("priority", "run_spec", "waiters")


class HintReceiver:
    """Hears the scheduler on behalf of one store. Use on the loop's thread. Call `want`, or nothing comes."""

    def __init__(
        self,
        worker: Worker,
        engine: Engine,
        store: TieredStore,
        guard: Guard,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._engine = engine
        self._store = store
        self._clock = clock
        self._guard = guard
        self.part = guard.part("hints", on_retired=self._retire)
        #: it is installed; "off: why" when this distributed is not one we know
        self.state = "off"
        #: they would be of use
        self._wanted = False
        #: the scheduler sends hints
        self._hinted = False
        #: a heartbeat has asked for hints, so there may be some under way
        self._asked = False
        self._stopped = asyncio.Event()
        #: (time when it ends, entry), oldest first
        self._guesses: deque[tuple[float, Entry]] = deque()
        #: (key, uses) pairs that came, and those for keys that are not here any more
        self.received = 0
        self.unknown_keys = 0
        #: uses that passed here and left a next one, without a message
        self.advanced = 0
        self.guessed = 0
        self.expired = 0

    # ------------------------------------------------------------------ life

    def install(self) -> None:
        """Begin to listen. Hints are dispensable: where this cannot be, it says so and the tiers work without."""
        if self.part.retired is not None:
            return
        handlers = getattr(self._worker, "stream_handlers", None)
        missing = [name for name in _ATTRIBUTES if not hasattr(TaskState, name)]
        if not isinstance(handlers, dict) or missing:
            self.state = f"off: distributed's worker has no {missing[0] if missing else 'stream_handlers'}"
        elif OP in handlers and handlers[OP] is not ignored:
            self.state = f"off: {handlers[OP]!r} handles {OP} already"
        else:
            handlers[OP] = self._heard
            self._store.on_add.append(self._added)
            self.state = "on"
            return
        logger.warning("next-use hints are %s", self.state)

    async def uninstall(self) -> None:
        """Take the handler out, when nothing can come any more. A second call does nothing."""
        if self.state != "on":
            return
        self.state = "off"
        handlers = self._worker.stream_handlers
        handlers[OP] = self._last_ones
        self._forget()
        if self._asked:
            try:
                await asyncio.wait_for(self._stopped.wait(), STOP_SECONDS)
            except TimeoutError:
                handlers[OP] = ignored
                return
        handlers.pop(OP, None)

    def want(self, wanted: bool) -> None:
        """Ask for hints from now on, or no longer."""
        # With the next regular heartbeat: one more of them, beside one that is under way, ends a worker (`spans`).
        self._wanted = wanted

    def heartbeat(self) -> dict[str, Any]:
        """Tells the scheduler that hints are welcome. Called for a heartbeat that is about to leave."""
        if self.state != "on" or not self._wanted:
            return {}
        self._asked = True
        return {HEARTBEAT_FIELD: PROTOCOL}

    def statistics(self) -> dict[str, Any]:
        """Counts since `install`, as plain JSON. What they were good for is in ``evictions``: see `decided_share`."""
        return {
            "state": self.state,
            "wanted": self._wanted,
            "active": self._hinted,
            "received": self.received,
            "unknown_keys": self.unknown_keys,
            "advanced": self.advanced,
            "guessed": self.guessed,
            "expired": self.expired,
            "evictions_by_hint_share": decided_share(self._engine.decided_by),
            **self.part.statistics(),
        }

    # ------------------------------------------------------------------ from the scheduler

    def _heard(
        self,
        items: Iterable[tuple[Key, Sequence[Sequence[float]]]] = (),
        stop: bool = False,
        pause: bool = False,
        **_: object,
    ) -> None:
        try:
            if stop or pause:
                if stop:
                    self._stopped.set()
                self._forget()
                return
            self._hinted = True
            self._stopped.clear()
            self._expire()
            for key, uses in items:
                self.received += 1
                entry = self._store.entry(key)
                if entry is None:
                    self.unknown_keys += 1
                    continue
                # float: what cannot be compared must fail here, not in the order of victims
                now = tuple(tuple(map(float, use)) for use in uses)
                for use in entry.passed:
                    # The message had left before the scheduler heard that this task has run.
                    now = without(now, use)
                entry.passed = ()
                if uses and not now:
                    self._passed_last(entry, entry.uses[-1] if entry.uses else tuple(map(float, uses[-1])))
                    entry.uses = ()
                    continue
                if entry.uses[:1] != now[:1] and entry.uses:
                    entry.sent = 0  # the scheduler has heard of what a peer did with it
                entry.uses, entry.guessed = now, False
                self._stand(entry)
        except Exception:
            self._failed()

    def _last_ones(self, stop: bool = False, **_: object) -> None:
        if stop:
            self._stopped.set()

    def _forget(self) -> None:
        """Go back to the order of last use: from now on no message says when a use has passed."""
        self._hinted = False
        self._guesses.clear()
        for entry in self._engine.books.entries:
            # Asked first: of 100,000 on a worker most have none of it.
            if entry.uses or entry.passed or entry.sent or entry.guessed:
                entry.uses, entry.passed, entry.sent, entry.guessed = (), (), 0, False
            if entry.next_use is not None:
                self._engine.hint(entry, None)

    # ------------------------------------------------------------------ from this worker

    def executed(self, key: Key, inputs: Iterable[Entry], event: StateMachineEvent) -> None:
        """A task has run with these inputs; `event` is how it ended. Before they are unpinned."""
        if not self._hinted or not isinstance(event, ExecuteSuccessEvent):
            return  # one that failed may run again, and the scheduler counts it as a use to come
        try:
            ts = self._worker.state.tasks.get(key)
            if ts is None or ts.priority is None:
                return
            use = _as_sent(ts.priority)
            for entry in inputs:
                entry.passed = (*entry.passed[-KEEP:], use)
                if use in entry.uses:
                    entry.uses = without(entry.uses, use)
                elif entry.uses or not entry.guessed:
                    continue
                if entry.uses:
                    self.advanced += 1
                    self._stand(entry)
                else:
                    self._passed_last(entry, use)
        except Exception:
            self._failed()

    def sent(self, entries: Iterable[Entry]) -> None:
        """A peer has fetched them, for a task that will run there. Before they are unpinned."""
        if not self._hinted:
            return
        try:
            for entry in entries:
                entry.sent += 1
                if entry.uses:
                    self._stand(entry)
        except Exception:
            self._failed()

    def _stand(self, entry: Entry) -> None:
        """By its uses. The soonest, one for each peer that fetched it, pass there; the scheduler says later which."""
        left = entry.uses[entry.sent :]
        if entry.sent and entry.uses:
            if left:
                self._guess(entry, left[0], held=False)
            else:
                self._passed_last(entry, entry.uses[-1])
        else:
            self._engine.hint(entry, left[0] if left else NEVER)

    def _passed_last(self, entry: Entry, use: tuple[float, ...]) -> None:
        # Freed in a moment, or kept for a client only: a clean one costs nothing as a victim either way.
        self._guess(entry, NEVER if entry.handle is not None else use)

    def _added(self, entry: Entry) -> None:
        if not self._hinted:
            return
        try:
            self._expire()
            use = self._local(entry, fresh=True)
            if use is not None:
                self._guess(entry, use)
        except Exception:
            self._failed()

    def _local(self, entry: Entry, *, fresh: bool) -> tuple[float, ...] | None:
        """What this worker knows of the next use."""
        if entry.due is not None:  # else thousands of waiters are looked at, again for each task that has run
            return _as_sent(entry.due)
        ts = self._worker.state.tasks.get(entry.key)
        if ts is None:
            return None
        waiting = [_as_sent(d.priority) for d in ts.waiters if d.priority is not None]
        if waiting:
            return min(waiting)
        return _as_sent(ts.priority) if fresh and ts.run_spec is not None and ts.priority is not None else None

    def _guess(self, entry: Entry, use: tuple[float, ...], *, held: bool = True) -> None:
        self.guessed += 1
        entry.guessed = True
        self._engine.hint(entry, _held(use) if held and use != NEVER else use)
        self._guesses.append((self._clock() + GUESS_SECONDS, entry))

    def _expire(self) -> None:
        now = self._clock()
        while self._guesses and self._guesses[0][0] <= now:
            _, entry = self._guesses.popleft()
            if entry.gone or not entry.guessed:
                continue
            use = self._local(entry, fresh=False)
            entry.sent = 0
            if entry.uses:  # a peer has not used it yet
                entry.guessed = False
                self._engine.hint(entry, entry.uses[0])
            elif use is not None:
                self._guess(entry, use)
            else:
                self.expired += 1
                entry.guessed = False
                self._engine.hint(entry, None)

    def _failed(self) -> None:
        self._guard.failed(self.part.name)

    def _retire(self) -> None:
        """Too many failures: ask for nothing more, and forget what was said. Messages under way are ignored."""
        if self.state == "on":
            self._worker.stream_handlers[OP] = ignored
        self.state = f"off: {self.part.retired}"
        self._forget()


def decided_share(decided_by: dict[str, int]) -> float | None:
    """Share of the victims that the scheduler's word chose; None before the first."""
    total = sum(decided_by.values())
    return decided_by.get("hint", 0) / total if total else None


def _held(use: tuple[float, ...]) -> tuple[float, ...]:
    """Before all that is foretold; among themselves by their uses."""
    return (-math.inf, *use)


def _as_sent(priority: tuple[Any, ...]) -> tuple[float, ...]:
    # The worker appends a number of its own to what the scheduler sends.
    return tuple(priority[:-1])
