"""`NextUsePlugin`: tells workers when the keys that they hold are used next. `worker` is the other half.

Only the scheduler knows: a worker hears of a dependent when all inputs of it are ready, which is too late to choose a
victim by (it knows the next use of 8 to 29 % of its keys). With it, eviction is close to Belady's optimum.

For a key in memory the *uses* are the priorities of its unfinished dependents (``TaskState.waiters``), soonest first,
at most `KEEP`; none means that only a client holds it. Events mark keys as dirty. A flush every `FLUSH_SECONDS` sends
each worker one message with what has changed for it:

1. a task is in memory: it is dirty, and so are its inputs, which have one use less;
2. a task begins to wait, or is given up before it finished: its inputs have one use more or less;
3. a worker asks for the first time, or again: all it holds is dirty.

Workers ask while their memory is pressed (`worker`). While none does, nothing is noted. Every `LOOK_SECONDS` the plugin
looks for workers that begin or end to ask.

A worker takes away by itself the uses that it executes. `_sent` follows what each worker believes. A message is due
only when the soonest use it believes in is not the right one, or when it is about to run out of uses. Of a key that
more than `MANY_HOLDERS` workers hold it is due when one is about to run out, and when no use is left: each use ends
with one task somewhere, and would be news for all of them.

An unknown op closes a worker. So only those get messages whose last heartbeat, since the start, carried our `PROTOCOL`.
A worker may remove its part, on the word of another connection, while messages are under way. So `stop` ends the stream
of each worker that has ever asked with a message that the worker waits for.

Public names only: ``worker_send``, ``waiters``, ``priority``, ``who_has``, ``metrics``.

Rejected: sending on every transition (several messages per task); all waiters' priorities (a broadcast key has as many
as there are tasks); a score instead of priorities (stale at the next event, and the worker could not subtract).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING, Any

from distributed.scheduler import TaskState, WorkerState

from dask_gpurt.model.checks import require_call, require_names
from dask_gpurt.model.events import Sink, null_sink
from dask_gpurt.model.no_hook import ignored
from dask_gpurt.tiers.hints.protocol import HEARTBEAT_FIELD, KEEP, OP, PROTOCOL, Uses, without
from dask_gpurt.tiers.scheduler_plugin import TierPlugin, speaks, unsay

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dask.typing import Key
    from distributed.scheduler import Scheduler

#: between the first event and the message about it
FLUSH_SECONDS = 0.01
#: between two looks for workers that ask
LOOK_SECONDS = 0.1
#: workers in one look: of more, each sends heartbeats more rarely than its turn comes
LOOK_WORKERS = 200
#: keys looked at in one flush; the others wait for the next, so that the loop is never held for long
FLUSH_KEYS = 500
#: a worker that knows fewer uses than this gets more, if there are more
LOW = 2
#: more waiters than this are kept sorted instead of being sorted anew for every message
MANY_WAITERS = 64
#: more holders than this hear only what they need
MANY_HOLDERS = 8

_ATTRIBUTES = (
    (TaskState, "TaskState", ("dependencies", "key", "priority", "waiters", "who_has")),
    (WorkerState, "WorkerState", ("address", "has_what", "metrics")),
)
#: states of a task that still wants its inputs
_UNFINISHED = frozenset({"waiting", "processing", "queued", "no-worker"})


class NextUsePlugin(TierPlugin):
    """Sends next uses to workers. `start` it on a scheduler, `stop` it to end."""

    name = "gpurt-next-use"

    def __init__(self, *, sink: Sink = null_sink) -> None:
        super().__init__("next-use hints", look=self._meet, look_seconds=LOOK_SECONDS, stop=self.stop, sink=sink)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: tasks whose holders may need a message, oldest event first
        self._dirty: dict[TaskState, None] = {}
        #: task -> worker -> the uses it believes in; None: it has used them up
        self._sent: dict[TaskState, dict[WorkerState, Uses | None]] = {}
        #: task with many waiters -> its waiters, latest use first; those that wait no more are dropped when met
        self._sorted: dict[TaskState, list[TaskState]] = {}
        #: workers that ask, and whose keys are noted
        self._ready: set[WorkerState] = set()
        #: those that got no message about a pause
        self._streams: set[WorkerState] = set()
        #: workers that are to be looked at before the next round of all
        self._unseen: list[WorkerState] = []
        #: those that have ever asked, and are here
        self._met: set[WorkerState] = set()
        #: (key, uses) pairs that were sent
        self.sent_hints = 0
        self.sent_messages = 0
        self._transitions = 0
        self._transition_seconds = 0.0
        self._flushes = 0
        self._flush_seconds = 0.0
        self._listen()

    # ------------------------------------------------------------------ life

    def _prepare(self, scheduler: Scheduler) -> None:
        require_call(getattr(scheduler, "worker_send", None), "Scheduler.worker_send", "address", {})
        for names in _ATTRIBUTES:
            require_names(*names)
        require_names(scheduler, "Scheduler", ("tasks", "workers"))
        self._loop = asyncio.get_running_loop()
        # A worker that asked before a detach asks anew, in a heartbeat. Until then it would close at our first message.
        unsay(scheduler, HEARTBEAT_FIELD)

    def stop(self) -> None:
        """End, and tell the workers that nothing follows. A second call does nothing."""
        scheduler = self._end()
        if scheduler is None:
            return
        for address, ws in list(scheduler.workers.items()):
            if ws in self._met or speaks(ws, HEARTBEAT_FIELD, PROTOCOL):
                try:
                    scheduler.worker_send(address, {"op": OP, "items": [], "stop": True})
                except Exception:  # it is gone
                    self._failed("stop")
        self._forget()

    async def close(self) -> None:
        """The scheduler closes: its workers hear that from itself."""
        self._end()
        self._forget()

    def _end(self) -> Scheduler | None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return super()._end()

    def _forget(self) -> None:
        for table in (self._dirty, self._sent, self._sorted, self._ready):
            table.clear()
        self._listen()

    def _listen(self) -> None:
        """Hear of transitions only while a worker asks; call it when `_ready` has changed."""
        if self._ready:
            self.__dict__.pop("transition", None)
        else:
            self.__dict__["transition"] = ignored

    def _meet(self, scheduler: Scheduler) -> None:
        """Meet workers that ask, and end the streams of those that no longer do."""
        if not self._unseen:
            self._unseen = list(scheduler.workers.values())
        some, self._unseen = self._unseen[-LOOK_WORKERS:], self._unseen[:-LOOK_WORKERS]
        for ws in some:
            if self._understands(ws):
                self._streams.add(ws)
                self._met.add(ws)
            elif ws in self._streams:
                self._streams.discard(ws)
                scheduler.worker_send(ws.address, {"op": OP, "items": [], "pause": True})
        if not self._ready:
            self._forget()
        self._set_timer()

    def _set_timer(self) -> None:
        if self._dirty and self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(FLUSH_SECONDS, self._flush)

    def statistics(self) -> dict[str, Any]:
        """Counts since `start`, as plain JSON."""
        return {
            "installed": self._scheduler is not None,
            "workers": len(self._ready),
            "sent": {"hints": self.sent_hints, "messages": self.sent_messages},
            "transitions": self._transitions,
            "transition_us": self._transition_seconds / max(1, self._transitions) * 1e6,
            "flushes": self._flushes,
            # what a transition costs in all: its own hook, and its share of the messages
            "total_us_per_transition": (self._transition_seconds + self._flush_seconds)
            / max(1, self._transitions)
            * 1e6,
            "tables": {"dirty": len(self._dirty), "sent": len(self._sent), "sorted": len(self._sorted)},
            **self.part.statistics(),
        }

    # ------------------------------------------------------------------ events

    def transition(self, key: Key, start: str, finish: str, *args: object, stimulus_id: str, **kwargs: Any) -> None:
        """See `SchedulerPlugin.transition`; raises nothing."""
        before = time.perf_counter()
        try:
            if finish != "processing":
                self._note(key, start, finish, kwargs.get("worker"))
        except Exception:
            self._failed("transition")
        self._transitions += 1
        self._transition_seconds += time.perf_counter() - before

    def _note(self, key: Key, start: str, finish: str, worker: str | None) -> None:
        scheduler = self._scheduler
        ts = None if scheduler is None else scheduler.tasks.get(key)
        if scheduler is None or ts is None:
            return
        dirty = self._dirty
        if finish == "memory":
            dirty[ts] = None
            executed_on = scheduler.workers.get(worker)
            for dts in ts.dependencies:
                if dts.who_has and self._used(dts, ts.priority, executed_on):
                    dirty[dts] = None
        elif finish == "waiting" or start in _UNFINISHED:
            for dts in ts.dependencies:
                if dts.who_has:
                    dirty[dts] = None
                    if finish == "waiting" and (order := self._sorted.get(dts)) is not None:
                        _insert(order, ts)
        if start == "memory":
            dirty.pop(ts, None)
            self._sent.pop(ts, None)
            self._sorted.pop(ts, None)
        self._set_timer()

    def _used(self, dts: TaskState, use: tuple[float, ...], ws: WorkerState | None) -> bool:
        """Follow what `ws` believes now that it has executed a dependent of `dts`; whether a message may be due."""
        sent = self._sent.get(dts)
        if sent is None:
            return True
        uses = sent.get(ws)
        if uses is None or use not in uses:
            return True
        left = without(uses, use)
        sent[ws] = left or None
        return len(left) < LOW or 1 < len(dts.who_has) <= MANY_HOLDERS

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: object) -> None:
        """Forget a worker."""
        for table in (self._ready, self._streams, self._met):
            table -= {ws for ws in table if ws.address == worker}
        self._listen()

    def restart(self, scheduler: Scheduler) -> None:
        """Forget all tasks."""
        self._forget()

    # ------------------------------------------------------------------ messages

    def _flush(self) -> None:
        self._timer = None
        if self._scheduler is None:
            return
        before = time.perf_counter()
        messages: dict[str, list[tuple[Key, Uses]]] = {}
        # All at once: a dict keeps the places of what was taken out, and each look for the first would pass them all.
        for ts in list(itertools.islice(self._dirty, FLUSH_KEYS)):
            del self._dirty[ts]
            try:
                self._collect(ts, messages)
            except Exception:
                self._sent.pop(ts, None)  # so that all is sent at its next event
                self._failed("collect")
                if self._scheduler is None:
                    return
        for address, items in messages.items():
            try:
                self._scheduler.worker_send(address, {"op": OP, "items": items})
                self.sent_hints += len(items)
                self.sent_messages += 1
            except Exception:
                self._failed("send")
                if self._scheduler is None:
                    return
        self._set_timer()
        self._flushes += 1
        self._flush_seconds += time.perf_counter() - before

    def _collect(self, ts: TaskState, messages: dict[str, list[tuple[Key, Uses]]]) -> None:
        holders, scheduler = ts.who_has, self._scheduler
        if not holders or scheduler is None or scheduler.tasks.get(ts.key) is not ts:
            self._sent.pop(ts, None)
            self._sorted.pop(ts, None)
            return
        sent = self._sent.get(ts)
        if sent is not None and len(sent) > len(holders):
            sent = self._sent[ts] = {ws: uses for ws, uses in sent.items() if ws in holders}
        now: Uses | None = None
        for ws in holders:
            if not self._understands(ws):
                continue
            if now is None:
                now = self._uses(ts)
            if sent is None:
                sent = self._sent.setdefault(ts, {})
            believed = sent.get(ws)
            if believed is None or len(believed) < min(LOW, len(now)):
                due = True
            else:
                due = believed[:1] != now[:1] and (len(holders) <= MANY_HOLDERS or not now)
            if due:
                messages.setdefault(ws.address, []).append((ts.key, now))
                sent[ws] = now

    def _uses(self, ts: TaskState) -> Uses:
        waiters = ts.waiters
        if not waiters:
            return ()
        if len(waiters) <= MANY_WAITERS:
            self._sorted.pop(ts, None)
            return tuple(sorted(_priorities(waiters))[:KEEP])
        order = self._sorted.get(ts)
        if order is None or len(order) > 2 * len(waiters):  # absent, or mostly of tasks that were given up
            order = [w for w in waiters if w.priority is not None]
            order.sort(key=lambda w: w.priority, reverse=True)
            self._sorted[ts] = order
        uses: list[tuple[float, ...]] = []
        while order and order[-1] not in waiters:
            order.pop()
        for w in reversed(order):
            if w in waiters:
                uses.append(tuple(w.priority))
                if len(uses) == KEEP:
                    break
        return tuple(uses)

    def _understands(self, ws: WorkerState) -> bool:
        scheduler = self._scheduler
        here = scheduler is not None and scheduler.workers.get(ws.address) is ws
        if not here or not speaks(ws, HEARTBEAT_FIELD, PROTOCOL):
            if ws in self._ready:
                self._ready.discard(ws)
                self._listen()
            return False
        if ws not in self._ready:
            self._ready.add(ws)
            self._listen()
            for ts in ws.has_what:
                self._dirty[ts] = None
                sent = self._sent.get(ts)
                if sent is not None:
                    sent.pop(ws, None)
        return True


def _insert(order: list[TaskState], ts: TaskState) -> None:
    """Put a task in its place among waiters, the latest first. One with the priority of another may be there twice."""
    if ts.priority is None:
        return
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        if order[middle].priority > ts.priority:
            low = middle + 1
        else:
            high = middle
    if low == len(order) or order[low] is not ts:
        order.insert(low, ts)


def _priorities(tasks: Iterable[TaskState]) -> list[tuple[float, ...]]:
    return [tuple(t.priority) for t in tasks if t.priority is not None]
