"""When the device has no memory: make room and try again, then run the task alone, then report what holds the memory.

::

    allocation fails ── callback: spill, RMM tries again ── ... ── nothing is left to spill ── MemoryError in the task
    task fails with it ── `RetryAlone`: wait until no other task runs here, spill all ── run it once more ── report

`SpillOnFailure` is the callback. RMM calls it in the thread that allocates, and tries again as long as it returns True,
without a limit of its own. So it returns True only if the allocator got memory back, which ends by itself: also where
the count shows room and no piece of it is long enough (fragmentation), which a pool of a fixed size has all the time.
It never raises: an exception would travel through C++ that does not expect it.

Each call waits for the whole device once. So it makes more room than was asked for, down to a low-water mark: the next
allocations find it.

Tasks are idempotent by contract (Dask itself runs them again when a worker is lost), so one may run once more. The
second run waits `WAIT_SECONDS` at most for the others: one of them may wait for this one (``worker_client``).
"""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from dask.utils import format_bytes
from distributed.protocol import to_serialize
from distributed.protocol.pickle import dumps, loads
from distributed.worker_state_machine import ExecuteFailureEvent

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from distributed.worker_state_machine import StateMachineEvent

    from dask_gpurt.tiers.device.space import DeviceSpace

#: how a task ended
Outcome = TypeVar("Outcome")
#: to wait for other tasks before a task is run alone
WAIT_SECONDS = 60.0


class SpillOnFailure:
    """The callback of RMM's ``FailureCallbackResourceAdaptor``.

    Parameters
    ----------
    space
        Whose values may leave.
    headroom_bytes
        Bytes that the allocator could still give, by its own count; None: it does not know.
    low_water_bytes
        Room to make at each call, at least.
    """

    def __init__(
        self, space: DeviceSpace, headroom_bytes: Callable[[], int | None], *, low_water_bytes: int = 0
    ) -> None:
        self._space = space
        self._headroom_bytes = headroom_bytes
        self._low_water_bytes = low_water_bytes
        self._local = threading.local()
        #: allocations that failed
        self.calls = 0
        #: calls while the same thread was in one already: refused
        self.reentered = 0
        #: calls that freed nothing
        self.given_up = 0
        #: allocations that failed although there was room by the count
        self.fragmented = 0
        #: that the allocator got back
        self.made_bytes = 0
        self.exceptions = 0
        self.last_error = ""

    def __call__(self, nbytes: int) -> bool:
        """`nbytes` could not be allocated; True: try again."""
        local = self._local
        if getattr(local, "inside", False):
            self.reentered += 1
            return False
        local.inside = True
        try:
            return self._make_room(nbytes)
        except BaseException as e:
            self.exceptions += 1
            self.last_error = f"{type(e).__name__}: {e}"
            return False
        finally:
            local.inside = False

    def _make_room(self, nbytes: int) -> bool:
        self.calls += 1
        headroom = self._headroom_bytes()
        need = nbytes
        if headroom is not None and headroom < nbytes:
            need = nbytes - headroom
        elif headroom is not None:
            self.fragmented += 1
        made = self._space.make_room(max(need, self._low_water_bytes))
        self.made_bytes += made
        if not made:
            self.given_up += 1
        return made > 0

    def statistics(self) -> dict[str, Any]:
        """Return counts as plain JSON."""
        return {
            "calls": self.calls,
            "reentered": self.reentered,
            "given_up": self.given_up,
            "fragmented": self.fragmented,
            "made_bytes": self.made_bytes,
            "exceptions": self.exceptions,
            "last_error": self.last_error,
        }


class RetryAlone:
    """Runs a task again, alone, that failed for want of device memory. Event loop only.

    `others`: how many other tasks run on this worker now.
    """

    def __init__(self, space: DeviceSpace, others: Callable[[], int], *, wait_seconds: float = WAIT_SECONDS) -> None:
        self._space = space
        self._others = others
        self._wait_seconds = wait_seconds
        self._alone = asyncio.Lock()
        self._entry = asyncio.Event()
        self._entry.set()
        self.retried = 0
        self.succeeded = 0
        self.failed = 0

    async def enter(self) -> None:
        """Wait while another task runs alone; for a task that is about to begin."""
        if not self._entry.is_set():
            try:
                await asyncio.wait_for(self._entry.wait(), self._wait_seconds)
            except TimeoutError:
                return  # the one that runs alone may be waiting for this one

    async def again(
        self,
        run: Callable[[], Awaitable[Outcome]],
        failed: Callable[[Outcome], bool],
        annotate: Callable[[Outcome, str], Outcome],
    ) -> Outcome:
        """What `run` gives when no other task runs here and all values that can leave have left the device.

        If it `failed` for want of memory again, the outcome gets a report as a note (`annotate`).
        """
        async with self._alone:
            self.retried += 1
            self._entry.clear()
            try:
                deadline = asyncio.get_running_loop().time() + self._wait_seconds
                while self._others() and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)  # polled: Dask has no event for "a task has ended"
                await asyncio.to_thread(self._free_all)
                outcome = await run()
            finally:
                self._entry.set()
        if not failed(outcome):
            self.succeeded += 1
            return outcome
        self.failed += 1
        return annotate(outcome, self.report())

    def _free_all(self) -> None:
        # Dask's task error and its traceback refer to each other: what the failed runs had on the device stays until
        # the next collection. It stops other threads for as long, on a worker that runs no task now.
        gc.collect()
        self._space.spill(1 << 62)

    def report(self) -> str:
        """What holds the device's memory, for people."""
        space = self._space
        kept = space.device_bytes
        outside = space.outside_bytes
        held = 0 if space.held is None else space.held.nbytes
        total = space.backend.allocated_bytes()
        rest = max(0, total - kept + outside - held)
        lines = [
            (
                f"dask-gpurt: the device has no memory for this task, even alone. Allocated {format_bytes(total)}, of "
                f"which {format_bytes(kept - outside)} are results kept on this worker, {format_bytes(held)} rows of "
                f"shuffles, and {format_bytes(rest)} belong to running tasks and libraries. "
                f"{format_bytes(outside)} of results are in memory that does not come from RMM. Largest results:"
            )
        ]
        lines += [
            f"  {format_bytes(n):>12}  {key}{'  (in use)' if pinned else ''}" for key, n, pinned in space.largest()
        ] or ["  none"]
        lines.append("Remedy: smaller partitions or chunks, fewer threads per worker, or a device with more memory")
        return "\n".join(lines)

    def statistics(self) -> dict[str, Any]:
        """Return counts as plain JSON."""
        return {"retried_alone": self.retried, "succeeded": self.succeeded, "failed": self.failed}


def out_of_memory(event: StateMachineEvent) -> BaseException | None:
    """What a task failed with, if that was a want of device memory. (The event has it pickled, for the scheduler.)"""
    if not isinstance(event, ExecuteFailureEvent):
        return None
    # RMM's and cuDF's words; a MemoryError of NumPy is one of host memory, and none of our business.
    if "bad_alloc" not in event.exception_text and "OutOfMemory" not in event.exception_text:
        return None
    error = loads(event.exception.data)
    # torch's is a RuntimeError. Tasks of shuffles raise one, too, with the name and text of what has failed.
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return error if known or "MemoryError: std::bad_alloc" in str(error) else None


def with_note(event: StateMachineEvent, note: str) -> StateMachineEvent:
    """Add a note to what a task failed with, which was a want of device memory; changes the event."""
    error = out_of_memory(event)
    assert error is not None
    error.add_note(note)
    event.exception = to_serialize(dumps(error))
    return event
