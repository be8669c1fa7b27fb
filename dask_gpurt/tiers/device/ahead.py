"""`DeviceAhead`: brings inputs of tasks that will run soon back to the device, while others compute.

A task that was sent here (`hints.pending_tasks`) has all its inputs somewhere. Those of which the value has left the
device come back in the order of the tasks' priorities, and only into room that is there: below the limit of kept
values, and with the low-water mark still free by the allocator's count. Nothing leaves for it, so it moves no byte
more than without it. One comes at a time: the next one is begun when that is done, or when something has left.

A value that has to leave again before its use was brought for nothing. `BAD_IN_A_ROW` of these in a row stop it for a
second, doubled each time up to a minute. `hints.prefetch` does the same from disk to host memory, where a victim may
make room.
"""

from __future__ import annotations

import asyncio
import heapq
from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import LostData
from dask_gpurt.model.tier import Tier
from dask_gpurt.tiers.backoff import BackOff
from dask_gpurt.tiers.device.box import Box, BoxState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dask.typing import Key
    from distributed.worker_state_machine import TaskState

    from dask_gpurt.model.circuit_breaker import Guard
    from dask_gpurt.tiers.engine.engine import Engine
    from dask_gpurt.tiers.engine.entry import Entry

BAD_IN_A_ROW = 3
_SOON = frozenset({"waiting", "ready", "constrained"})


class DeviceAhead:
    """Event loop only. `pending`, `pump`, `used` and `moved` may be called at any time; they never raise.

    Parameters
    ----------
    tasks
        The worker's ``state.tasks``.
    find
        Key -> its entry, or None.
    room_bytes
        That could come to the device now without anything leaving.
    """

    def __init__(
        self,
        engine: Engine,
        tasks: Mapping[Key, TaskState],
        find: Callable[[Key], Entry | None],
        room_bytes: Callable[[], int],
        guard: Guard,
    ) -> None:
        self._engine = engine
        self._tasks = tasks
        self._find = find
        self._room_bytes = room_bytes
        self._guard = guard
        self._part = guard.part("device prefetch", on_retired=self.stop)
        self._queue: list[tuple[tuple[float, ...], int, Key]] = []
        #: came, and were not used yet
        self._ahead: dict[Box, None] = {}
        self._coming: asyncio.Task[None] | None = None
        self._scheduled = False
        self._stopped = False
        self._rest = BackOff(BAD_IN_A_ROW)
        self.started = 0
        self.started_bytes = 0
        self.used_in_time = 0
        #: brought, and gone from the device before any use
        self.left_again = 0

    def stop(self) -> None:
        """Bring nothing any more. A second call does nothing."""
        self._stopped = True
        self._queue.clear()
        self._ahead.clear()

    def pending(self, priority: tuple[float, ...], number: int, key: Key) -> None:
        """A task was sent here."""
        if not self._stopped:
            heapq.heappush(self._queue, (priority, number, key))
            self.pump()

    def pump(self) -> None:
        """Something has changed: look, soon, whether a value can come."""
        if self._queue and not self._scheduled and self._coming is None and not self._stopped:
            self._scheduled = True
            self._engine.io.loop.call_soon(self._pump)

    def used(self, box: Box) -> None:
        """A task is about to read it."""
        if box in self._ahead:
            del self._ahead[box]
            self.used_in_time += 1
            self._rest = BackOff(BAD_IN_A_ROW)

    def removed(self, box: Box) -> None:
        """Its key is gone: the task that was to read it was cancelled, or runs elsewhere."""
        self._ahead.pop(box, None)

    def moved(self, box: Box) -> None:
        """It has left the device, or come back."""
        if box in self._ahead and box.tier is not Tier.DEVICE:
            del self._ahead[box]
            self.left_again += 1
            self._rest.failed(self._engine.books.clock())
        self.pump()

    def _pump(self) -> None:
        self._scheduled = False
        if self._coming is not None or self._stopped or self._engine.io.closed:
            return
        try:
            if self._rest.until > self._engine.books.clock():
                return  # called again with the next task or move
            box = self._due()
            if box is not None and box.nbytes <= self._room_bytes():
                self.started += 1
                self.started_bytes += box.nbytes
                self._coming = asyncio.create_task(self._bring(box))
        except Exception:
            self._guard.failed(self._part.name)
            self._queue.clear()  # tasks bring what they need themselves

    def _due(self) -> Box | None:
        """What the next task that was sent here lacks on the device."""
        while self._queue:
            ts = self._tasks.get(self._queue[0][2])
            if ts is not None and ts.state in _SOON:
                for dependency in ts.dependencies:
                    entry = self._find(dependency.key)
                    box = None if entry is None else entry.value
                    if type(box) is Box and box.state is BoxState.BELOW:
                        return box
            heapq.heappop(self._queue)
        return None

    async def _bring(self, box: Box) -> None:
        self._ahead[box] = None
        try:
            await self._engine.offload(box.get)
        except (LostData, MemoryError):  # said where a task reads it; counted by the device
            self._ahead.pop(box, None)
            self._queue.clear()
        except Exception:
            self._ahead.pop(box, None)
            self._queue.clear()
            self._guard.failed(self._part.name)
        finally:
            self._coming = None
            self.pump()

    def statistics(self) -> dict[str, Any]:
        """Return counts as plain JSON."""
        return {
            "ahead_started": self.started,
            "ahead_started_bytes": self.started_bytes,
            "ahead_in_time": self.used_in_time,
            "ahead_left_again": self.left_again,
        }
