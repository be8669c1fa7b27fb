"""Virtual time: an event queue that is also an asyncio event loop, as far as a policy needs one.

* `VirtualLoop` is the running loop while a simulation runs. ``call_soon``, ``call_later``, tasks, futures and
  ``asyncio.sleep`` of the code under test therefore work on virtual time, and the simulator needs no special case for
  any policy that uses them. `run_in_executor` runs its function at once: off the loop means at no cost to the loop.
* `patched` gives the modules that decide a virtual clock instead of the real one. Without it a slow machine would
  change decisions (budgets, guards) and no run could be repeated. Only these modules' globals are exchanged, for the
  time of the simulation; the ``time`` module itself stays, other threads keep the real time.

The processor time of a decision is not taken from the real clock, or no run could be repeated: `Cluster.scheduler` says
for how long the scheduler is busy with a message. `Result.scheduler_seconds` is real time, measured outside.

Rejected: patching ``time.time`` in the module ``time`` (changes it for every thread of the process, and misses
``from time import time``).
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import sys
import time
import types
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import distributed.metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from contextvars import Context

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

#: Unix time at the start of every simulation
EPOCH = 1.7e9
#: modules whose clocks are exchanged; with a dot at the end: all below
DECIDING = (
    "distributed.scheduler",
    "distributed.stealing",
    "distributed.active_memory_manager",
    "dask_gpurt.placement.",
    "dask_gpurt.topology.",
)


class VirtualLoop:
    """Events in order of their virtual time; those of one instant in the order in which they were added."""

    def __init__(self) -> None:
        #: virtual seconds since the start
        self.now = 0.0
        #: of them, those for which the scheduler's thread was at work
        self.worked_seconds = 0.0
        self._heap: list[tuple[float, int, Callable[..., object], tuple[object, ...], bool]] = []
        self._ready: deque[asyncio.Handle] = deque()
        self._sequence = itertools.count()
        self._instant_end: list[Callable[[], None]] = []
        #: events waiting that are not mere ticking (heartbeats, balancing)
        self.pending = 0
        #: events run
        self.count = 0
        self._failure: BaseException | None = None

    # ------------------------------------------------------------------ for the simulator

    def at(self, when: float, function: Callable[[*_Ts], object], *args: *_Ts) -> None:
        """Call at a virtual time; a time that has passed means now."""
        self.pending += 1
        heapq.heappush(self._heap, (max(when, self.now), next(self._sequence), function, args, True))

    def after(self, seconds: float, function: Callable[[*_Ts], object], *args: *_Ts) -> None:
        """Call so many virtual seconds from now."""
        self.at(self.now + seconds, function, *args)

    def tick(self, seconds: float, function: Callable[[*_Ts], object], *args: *_Ts) -> None:
        """As `after`, for what recurs forever and does not keep a simulation alive."""
        heapq.heappush(self._heap, (self.now + seconds, next(self._sequence), function, args, False))

    def at_instant_end(self, function: Callable[[], None]) -> None:
        """Call once, after all events of this instant and before time moves on."""
        self._instant_end.append(function)

    def step(self) -> bool:
        """Run what is due next. False when there is nothing left at all."""
        if self._ready:
            while self._ready:
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
            self._raise()
            return True
        if self._instant_end and (not self._heap or self._heap[0][0] > self.now):
            ends, self._instant_end = self._instant_end, []
            for end in ends:
                end()
            return True
        if not self._heap:
            return False
        when, _, function, args, counted = heapq.heappop(self._heap)
        if when < self.now:
            raise AssertionError(f"the virtual clock would go back from {self.now} to {when}")
        self.now = when
        self.count += 1
        if counted:
            self.pending -= 1
        function(*args)
        return True

    def complete(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on this loop to its end."""
        with self.running():
            task = self.create_task(coroutine)
            while not task.done():
                if not self.step():
                    raise RuntimeError("a coroutine waits for something that does not exist on the virtual clock")
        return task.result()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Be the running loop of this thread."""
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(self)  # type: ignore[arg-type]
        try:
            yield
        finally:
            asyncio._set_running_loop(outer)

    # ------------------------------------------------------------------ for the code under test: asyncio's names

    def time(self) -> float:
        """asyncio's: virtual seconds."""
        return self.now

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """asyncio's."""
        handle = asyncio.Handle(callback, args, self, context)  # type: ignore[arg-type]
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """asyncio's, at a virtual time."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)  # type: ignore[arg-type]
        # As a tick: a timer does not say whether it stands for work or recurs for ever.
        self.tick(max(0.0, when - self.now), self._timer, handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """asyncio's, after virtual seconds."""
        return self.call_at(self.now + delay, callback, *args, context=context)

    def _timer(self, handle: asyncio.TimerHandle) -> None:
        if not handle.cancelled():
            handle._run()
        self._raise()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # it stays in the queue and does nothing

    def create_future(self) -> asyncio.Future[Any]:
        """asyncio's."""
        return asyncio.Future(loop=self)  # type: ignore[arg-type]

    def create_task(self, coroutine: Coroutine[Any, Any, _T], **kwargs: Any) -> asyncio.Task[_T]:
        """asyncio's."""
        return asyncio.Task(coroutine, loop=self, **kwargs)  # type: ignore[arg-type]

    def run_in_executor(self, executor: object, function: Callable[[*_Ts], _T], *args: *_Ts) -> asyncio.Future[_T]:
        """asyncio's; the function is run at once."""
        future: asyncio.Future[_T] = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as e:
            future.set_exception(e)
        return future

    def get_debug(self) -> bool:
        """asyncio's."""
        return False

    def is_running(self) -> bool:
        """asyncio's."""
        return True

    def is_closed(self) -> bool:
        """asyncio's."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """asyncio's; the exception leaves the next `step`."""
        # A callback that raises would be logged by asyncio and forgotten; a simulation must not hide it.
        self._failure = context.get("exception") or RuntimeError(context.get("message"))

    def _raise(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure


_busy = False


@contextlib.contextmanager
def patched(loop: VirtualLoop, *modules: str) -> Iterator[None]:
    """Give the deciding modules, and `modules`, the virtual clock."""
    global _busy
    if _busy:
        raise RuntimeError("a simulation runs in this process already; use one process for each")
    virtual = _clock(loop)
    exchange: dict[int, Any] = {id(time): virtual}
    for owner in (time, distributed.metrics):
        for name in ("time", "monotonic", "perf_counter"):
            if hasattr(owner, name):
                exchange[id(getattr(owner, name))] = getattr(virtual, name)
    for name in ("time_ns", "monotonic_ns", "perf_counter_ns"):
        exchange[id(getattr(time, name))] = getattr(virtual, name)
    undo: list[tuple[dict[str, Any], str, Any]] = []
    below = tuple(name for name in (*DECIDING, *modules) if name.endswith("."))
    exactly = {*DECIDING, *modules}
    _busy = True
    try:
        for module_name, module in list(sys.modules.items()):
            if module_name in exactly or module_name.startswith(below):
                scope = vars(module)
                for name, value in list(scope.items()):
                    if id(value) in exchange:
                        undo.append((scope, name, value))
                        scope[name] = exchange[id(value)]
        yield
    finally:
        for scope, name, value in undo:
            scope[name] = value
        _busy = False


def _clock(loop: VirtualLoop) -> types.SimpleNamespace:
    def now() -> float:
        return loop.now

    def unix() -> float:
        return EPOCH + loop.now

    def worked() -> float:
        return loop.worked_seconds

    def nanoseconds() -> int:
        return round(loop.now * 1e9)

    def unix_nanoseconds() -> int:
        return round((EPOCH + loop.now) * 1e9)

    return types.SimpleNamespace(
        **{k: v for k, v in vars(time).items() if not k.startswith("_")}
        | {
            "time": unix,
            "monotonic": now,
            "perf_counter": now,
            "thread_time": worked,
            "time_ns": unix_nanoseconds,
            "monotonic_ns": nanoseconds,
            "perf_counter_ns": nanoseconds,
        }
    )
