"""A thread that waits for descriptors, for time, and for calls from other threads.

`IoLoop.call` runs a function in the thread, soon. In the thread, `later` and `at_end` put off work to the next turn or
the end of this one. `on_event` has what is called for a descriptor, `on_tick` what is called every `TICK_SECONDS`.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import threading
import time
import traceback
from typing import TYPE_CHECKING, TypeVarTuple

if TYPE_CHECKING:
    from collections.abc import Callable

TICK_SECONDS = 0.25
_here = threading.local()
_Ts = TypeVarTuple("_Ts")


def current_loop() -> IoLoop | None:
    """The loop whose turn this is, in its thread; what is given to its `at_end` now is called soon."""
    return getattr(_here, "loop", None)


class IoLoop:
    """The thread.

    Parameters
    ----------
    failed
        Called with the traceback of an error in any function; the loop goes on.
    """

    def __init__(self, name: str, failed: Callable[[str], None]) -> None:
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self.poll = select.epoll()  # closes itself, where there is no descriptor left for the next one
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.poll.register(self._wake, select.EPOLLIN)
        #: descriptor -> called with its events
        self.on_event: dict[int, Callable[[int], None]] = {}
        #: called with the time, seconds of the monotonic clock
        self.on_tick: Callable[[float], None] = lambda now: None
        #: called before every wait; False: do not wait, there is more to do
        self.may_wait: Callable[[], bool] = lambda: True
        self._failed = failed
        self._lock = threading.Lock()
        self._stopping = self._ended = False
        #: whether the thread waits, or is about to, and knows nothing of calls that came since
        self._waiting = False
        self._at_end: dict[Callable[[], None], None] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Run it in the thread, soon; at once, and here, when the loop has ended."""
        if threading.current_thread() is self._thread:
            function()
            return
        with self._lock:
            # Under the lock: a descriptor closed meanwhile may be another file by now.
            if not self._ended:
                self._calls.append(function)
                if self._waiting:  # a thread that is awake finds it by itself: a wake-up costs more than a message
                    self._waiting = False
                    os.eventfd_write(self._wake, 1)
                return
        self._safely(function)

    def later(self, function: Callable[[], None]) -> None:
        """Run it in the next turn, without waiting for anything before; in the thread only."""
        self._calls.append(function)

    def at_end(self, function: Callable[[], None]) -> None:
        """Run it once at the end of this turn, however often it is asked for; in the thread only."""
        self._at_end[function] = None

    def stop(self, last: Callable[[], None]) -> None:
        """Run `last` in the thread and end it."""

        def end() -> None:
            self._stopping = True
            last()

        self.call(end)
        if threading.current_thread() is not self._thread:
            self._thread.join(10)

    def _run(self) -> None:
        ticked = time.monotonic()
        _here.loop = self
        try:
            while not self._stopping:
                events = self.poll.poll(self._patience())
                self._waiting = False
                for fd, event in events:
                    if fd == self._wake:
                        with contextlib.suppress(BlockingIOError):
                            os.eventfd_read(self._wake)
                    elif (handler := self.on_event.get(fd)) is not None:
                        self._safely(handler, event)
                # Those that are there now; what they add comes in the next turn, after the others' descriptors.
                for _ in range(len(self._calls)):
                    self._safely(self._calls.popleft())
                self._end_turn()
                if (now := time.monotonic()) - ticked >= TICK_SECONDS:
                    ticked = now
                    self._safely(self.on_tick, now)
                    self._end_turn()
        finally:
            _here.loop = None
            self._end_turn()
            with self._lock:
                self._ended = True
                self.poll.close()
                os.close(self._wake)
            # What came after the end finds everything closed, and ends as lost.
            while self._calls:
                self._safely(self._calls.popleft())

    def _patience(self) -> float:
        """How long the next wait may be."""
        wait = self._may_wait()
        self._end_turn()
        with self._lock:
            self._waiting = wait and not self._calls
            return TICK_SECONDS if self._waiting else 0

    def _may_wait(self) -> bool:
        try:
            return self.may_wait()
        except Exception:
            self._failed(traceback.format_exc())
            return True

    def _end_turn(self) -> None:
        while self._at_end:
            ends, self._at_end = self._at_end, {}
            for function in ends:
                self._safely(function)

    def _safely(self, function: Callable[[*_Ts], None], *args: *_Ts) -> None:
        """An error in one link must not end the thread of all of them."""
        try:
            function(*args)
        except Exception:
            self._failed(traceback.format_exc())
