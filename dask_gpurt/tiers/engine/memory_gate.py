"""`Gate`: a queue for those that bring more bytes into memory.

The start of a task, the loading of its inputs, a fetch and the arrival of a shuffle chunk wait here for room
(`Gate.admit`). What is granted stays reserved until it is released, that is, until its bytes are counted elsewhere.

Rules:

1. First come, first served: small requests cannot starve a large one.
2. The head of the queue waits while memory is above the mark (the budget and `SLACK`, less where the process has no
   room for that) *and* writes are under way or can be started. So it waits for our own I/O only, which always ends, and
   before that, for 10 ms, for values that are about to be freed (`eviction`). It never waits for other tasks: a running
   task may itself wait for the one in the queue (``worker_client``, ``secede``), which would be a deadlock.
3. Otherwise it is let in, whatever memory looks like: a value larger than the budget must be computable, as in stock
   Dask.

Why there is a gate: a worker whose loop is busy writing cannot start another task. Without synchronous spilling tasks
run ahead of the disk, until the process is paused or killed. (That is why upstream shelved its asynchronous buffer.)
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

from dask_gpurt.model.slots import MEMORY, waiting
from dask_gpurt.tiers.engine.buffer_roots import as_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


class Reservation:
    """Bytes promised to one request. A context manager; `release` twice is harmless."""

    __slots__ = ("_gate", "nbytes")

    def __init__(self, gate: Gate, nbytes: int) -> None:
        self._gate: Gate | None = gate
        self.nbytes = nbytes
        gate.reserved_bytes += nbytes

    def release(self) -> None:
        """Give the room back. A second call does nothing."""
        if self._gate is not None:
            gate, self._gate = self._gate, None
            gate.reserved_bytes -= self.nbytes
            gate.wake()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class Gate:
    """The queue of requests for room in memory.

    Parameters
    ----------
    over
        ``over(nbytes)``: would memory be above the mark with `nbytes` more than what is counted and reserved?
    progress
        ``progress(nbytes)``: begin to move that much out of memory if that can be done; are writes under way then?
    """

    def __init__(self, over: Callable[[int], bool], progress: Callable[[int], bool]) -> None:
        self._over = over
        self._progress = progress
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        #: granted, not yet released
        self.reserved_bytes = 0
        #: seconds that requests waited, summed
        self.wait_seconds = 0.0
        #: requests that had to wait
        self.waits = 0
        #: requests let in above the mark, because nothing could be moved out
        self.forced = 0

    def __len__(self) -> int:
        return len(self._queue)

    async def admit(self, nbytes: int) -> Reservation:
        """Wait for room for `nbytes`; see the module for when that ends."""
        nbytes = as_bytes(nbytes) or 0  # a task's ``sizeof`` may have said anything
        if not self._queue and not self._blocked(nbytes):
            return Reservation(self, nbytes)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        item = (nbytes, future)
        self._queue.append(item)
        self.waits += 1
        start = time.monotonic()
        try:
            # `wake` takes granted items out of the queue and turns their bytes into reserved ones at once: between the
            # result of the future and the resumption of this coroutine no other request may get them.
            with waiting(MEMORY):
                await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.reserved_bytes -= nbytes  # granted, but the request is cancelled
            else:
                self._queue.remove(item)
            self.wake()
            raise
        finally:
            self.wait_seconds += time.monotonic() - start
        self.reserved_bytes -= nbytes  # it is counted once more by the Reservation
        return Reservation(self, nbytes)

    def wake(self) -> None:
        """Let in what fits; call it when memory went down or a write ended."""
        while self._queue:
            nbytes, future = self._queue[0]
            if future.done():  # cancelled; its own handler has not run yet
                return
            if self._blocked(nbytes):
                return
            self._queue.popleft()
            self.reserved_bytes += nbytes
            future.set_result(None)

    def _blocked(self, nbytes: int) -> bool:
        if not self._over(nbytes):
            return False
        progress = self._progress(nbytes)
        if not self._over(nbytes):  # clean copies were dropped, at once
            return False
        if progress:
            return True
        self.forced += 1
        return False
