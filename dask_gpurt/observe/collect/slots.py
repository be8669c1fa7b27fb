"""`SlotMeter`: what the slots of one worker do, second by second.

Theory of operation. The state of a worker is constant between two events of its state machine, so its integral over
time is exact: before each change, the time since the last one is charged to what the slots did until now. Nothing is
sampled and nothing ticks; a change costs about two microseconds. In each state every slot has one use::

    slots = executing + idle
    idle  = paused -> memory | tasks that wait for inputs -> network | constrained -> resources | the rest -> unassigned

``unassigned`` is for the scheduler to explain (`stall_ledger`). What executes is split by the tasks
themselves: code on behalf of a task says that it waits (`dask_gpurt.model.slots`), the task's own start and stop come
with its result, and what remains of its time on the slot is ``serialisation`` (preparing it, storing its result, the
event loop). So, always and by construction::

    slots x time = busy + running + serialisation + network + unspill + memory + ... + unassigned

A message with a task is decoded on the event loop, which stands still while that imports the task's modules. The slot
has nothing meanwhile, as far as the state machine knows. So the time for which the loop had stood still when the task
came is moved from ``unassigned`` to ``serialisation``, but for what was read already: it only grows.

``running`` is the time of tasks that have not ended, which is a gauge: part of it may turn out to be serialisation.
All the others only grow.

Invariants: a task counts from the start to the end of ``Worker.execute``, which lies inside its time in the state
machine's set ``executing``; a task that secedes gives its slot back and counts as ended. What a watched task says after
its end is ignored.

Waits that happen in another process are not seen: a task that waits for a peer which reads the input from its disk is
waiting for the network, as far as this worker knows.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from dask_gpurt.observe.collect.causes import BARRIER, UNASSIGNED
from dask_gpurt.observe.collect.wait_histogram import Tails

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

_IDLE = ("memory", "network", "resources", UNASSIGNED)
#: a loop that stands still for less, or for longer (a machine that slept), was not held up by decoding a task
_STANDING_SECONDS = (0.05, 60.0)


class RunningTask:
    """A task on a slot. Implements `dask_gpurt.model.slots.Slot`; from any thread."""

    __slots__ = ("_meter", "_since", "_waits", "closed", "in_thread", "key", "start", "waited")

    def __init__(self, meter: SlotMeter, key: Hashable, now: float) -> None:
        self._meter = meter
        self.key = key
        self.start = now
        #: seconds of finished waits, and those of them that began in the task's own thread
        self.waited = 0.0
        self.in_thread = 0.0
        self.closed = False
        #: open waits as [cause, began in a thread], innermost last; a list is its own token
        self._waits: list[list[Any]] = []
        #: since when the first of them is open
        self._since = 0.0

    def enter(self, cause: str) -> list[Any]:
        """The task begins to wait for a cause; returns the token for `leave`."""
        token = [cause, threading.get_ident() != self._meter.thread]
        with self._meter.lock:
            if not self.closed:
                now = self._meter.advance()
                self._switch(-1)
                if not self._waits:
                    self._since = now
                self._waits.append(token)
                self._switch(+1)
        return token

    def leave(self, token: list[Any]) -> None:
        """That wait has ended."""
        with self._meter.lock:
            if self.closed or not self._waits:
                return
            now = self._meter.advance()
            self._switch(-1)
            cause, in_thread = self._waits[0]
            self._waits = [wait for wait in self._waits if wait is not token]
            if not self._waits:
                self.waited += now - self._since
                self._meter.tails.add(cause, now - self._since)
                if in_thread:
                    self.in_thread += now - self._since
            self._switch(+1)

    @property
    def has_waits(self) -> bool:
        """Whether it waits now."""
        return bool(self._waits)

    def _switch(self, amount: int) -> None:
        if self._waits:
            counts = self._meter.waits
            cause = self._waits[-1][0]
            counts[cause] = counts.get(cause, 0) + amount

    def close(self, now: float) -> None:
        """The task is no longer on its slot. With the lock, after `SlotMeter.advance`."""
        self._switch(-1)
        if self._waits:
            self.waited += now - self._since
            self._meter.tails.add(self._waits[0][0], now - self._since)
            if self._waits[0][1]:
                self.in_thread += now - self._since
            self._waits = []

    def running(self, now: float) -> float:
        """Seconds until now, without waits."""
        return now - self.start - self.waited - (now - self._since if self._waits else 0.0)


class SlotMeter:
    """The integrals of one worker.

    Parameters
    ----------
    slots
        Threads of the worker.
    clock
        Seconds, never going back; for tests.
    """

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._slots = slots
        self._executing = 0
        #: arguments of the last `state`: most events change none of them, and need not call it
        self.now: tuple[int, int, bool, int, int] | None = None
        #: idle slots now, by `_IDLE`; and those of them that are any: (index, slots)
        self._idle = (0, 0, 0, slots)
        self._idle_now = [(len(_IDLE) - 1, slots)]
        #: when each of them became idle for that, oldest first; which slot it is does not matter
        self._idle_since: tuple[deque[float], ...] = tuple(deque() for _ in _IDLE)
        self._idle_since[-1].extend([self._last] * slots)
        #: lengths of waits that have ended, by cause
        self.tails = Tails()
        self._idle_seconds = [0.0] * len(_IDLE)
        #: of ``unassigned``, in which a task was decoded
        self._decoding_seconds = 0.0
        #: what was read of ``unassigned`` last
        self._unassigned_read = 0.0
        self._wait_seconds: dict[str, float] = {}
        self._slot_seconds = 0.0
        self._executing_seconds = 0.0
        self._busy_seconds = 0.0
        self._tasks: dict[Hashable, RunningTask] = {}
        #: guards everything; held for microseconds
        self.lock = threading.Lock()
        #: the event loop's
        self.thread = threading.get_ident()
        #: cause -> tasks that wait for it now
        self.waits: dict[str, int] = {}

    # ------------------------------------------------------------------ events

    def advance(self) -> float:
        """Charge the time until now; with the lock. Returns now."""
        now = self._clock()
        seconds = now - self._last
        if seconds > 0:
            self._last = now
            self._slot_seconds += self._slots * seconds
            if self._executing:
                self._executing_seconds += self._executing * seconds
            for i, count in self._idle_now:
                self._idle_seconds[i] += count * seconds
            if self.waits:
                for cause, count in self.waits.items():
                    if count:
                        self._wait_seconds[cause] = self._wait_seconds.get(cause, 0.0) + count * seconds
        return self._last

    def state(
        self,
        slots: int,
        executing: int,
        paused: bool = False,
        waiting: int = 0,
        constrained: int = 0,
        standing: float = 0.0,
    ) -> None:
        """The state machine has changed: so many tasks execute, wait for inputs, or wait for resources.

        `standing`: seconds since the event loop ran last.
        """
        with self.lock:
            self.advance()
            self.now = (slots, executing, paused, waiting, constrained)
            slots = max(slots, executing)
            self._slots, self._executing = slots, executing
            idle = slots - executing
            if paused:
                by_cause = (idle, 0, 0, 0)
            else:
                network = min(idle, waiting)
                resources = min(idle - network, constrained)
                by_cause = (0, network, resources, idle - network - resources)
            if by_cause != self._idle:
                if by_cause[-1] < self._idle[-1] and _STANDING_SECONDS[0] < standing < _STANDING_SECONDS[1]:
                    since = itertools.islice(self._idle_since[-1], self._idle[-1] - by_cause[-1])
                    unread = self._idle_seconds[-1] - self._decoding_seconds - self._unassigned_read
                    self._decoding_seconds += min(unread, sum(min(standing, self._last - one) for one in since))
                self._turn(by_cause)

    def _turn(self, idle: tuple[int, int, int, int]) -> None:
        """Slots become idle for other reasons, or busy."""
        now, old = self._last, self._idle
        for i, count in enumerate(idle):
            if count == old[i]:
                continue
            since = self._idle_since[i]
            while len(since) > count:
                self.tails.add(_IDLE[i], now - since.popleft())
            while len(since) < count:
                since.append(now)
        self._idle = idle
        self._idle_now = [(i, count) for i, count in enumerate(idle) if count]

    def started(self, key: Hashable) -> RunningTask:
        """A task begins to be executed."""
        # No integral changes: `state` has counted it among those that execute.
        task = self._tasks[key] = RunningTask(self, key, self._clock())
        if type(key) is str and key.startswith(BARRIER):
            task.enter("shuffle_barrier")
        return task

    def ended(self, task: RunningTask, seconds: float | None = None) -> None:
        """It ends; `seconds`: of its own work, where they are known. A second call changes nothing."""
        with self.lock:
            if task.closed:
                return
            now = self._clock()
            if task.has_waits:
                now = self.advance()
                task.close(now)
            task.closed = True
            if self._tasks.get(task.key) is task:
                del self._tasks[task.key]
            longest = now - task.start - task.waited
            own = longest if seconds is None else min(longest, seconds - task.in_thread)
            self._busy_seconds += max(0.0, own)

    def seceded(self, key: Hashable) -> None:
        """A task leaves its slot to others and goes on beside them."""
        task = self._tasks.get(key)
        if task is not None:
            self.ended(task)

    # ------------------------------------------------------------------ reading

    def seconds(self) -> dict[str, float]:
        """Cumulative slot-seconds by use, until now.

        ``slots`` is the sum of all others: ``busy``, ``running`` (a gauge, see the module), ``serialisation``,
        ``network``, ``unspill``, ``memory``, ``shuffle_barrier``, ``resources``, ``unassigned``.
        """
        with self.lock:
            now = self.advance()
            running = sum(task.running(now) for task in self._tasks.values())
            waits = dict(self._wait_seconds)
            idle = dict(zip(_IDLE, self._idle_seconds, strict=True))
            idle[UNASSIGNED] -= self._decoding_seconds
            self._unassigned_read = idle[UNASSIGNED]
            rest = self._executing_seconds - sum(waits.values()) - running - self._busy_seconds
            out = {
                "slots": self._slot_seconds,
                "busy": self._busy_seconds,
                "running": running,
                # Rounding of sums of millions of terms may leave it below zero.
                "serialisation": max(0.0, rest) + self._decoding_seconds,
            }
        for cause in ("network", "unspill", "memory", "shuffle_barrier", "resources", UNASSIGNED):
            out[cause] = waits.pop(cause, 0.0) + idle.get(cause, 0.0)
        return {**out, **waits}  # an unknown cause is shown, not dropped
