"""`Losses`: what becomes of a key whose last copy here is unreadable.

The key is freed. The state machine then tells the scheduler (``release-worker-data``), which computes it again, or
fetches it from another holder. Tasks here that wait for it are freed and returned with a ``reschedule`` message each;
the scheduler ignores that message for those it has taken back itself.

A scattered key has no recipe, and freeing it would break the scheduler: its transition from memory to released puts
pure data back to "waiting" when a dependent is processing. So such a key stays here as LOST, and tasks that read it
fail with `LostData`, until no task here waits for it. Only the scheduler knows whether a key that was fetched here has
a recipe or another holder, so it is asked.

Uses the state machine's names that `seam` looks up.

Rejected: letting a task fail on lost data (wrong: the recipe exists); a ``missing-data`` message (no longer understood
by the scheduler).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from distributed.metrics import time
from distributed.protocol.serialize import ToPickle
from distributed.worker_state_machine import FreeKeysEvent

from dask_gpurt.model.known_as import known_as

if TYPE_CHECKING:
    from collections.abc import Callable

    from dask.typing import Key
    from distributed.worker import Worker

    from dask_gpurt.model.circuit_breaker import Guard
    from dask_gpurt.tiers.stores.task_store import TieredStore

_ENDED = {"error", "memory", "released", "forgotten"}


class Losses:
    """Gives up the lost keys of one store. Event loop only.

    Parameters
    ----------
    active
        Whether the store is still that of the worker.
    guard
        Counts failures to settle a loss, under "lost keys". They never switch this off: a task that reads a lost key
        fails, so the next key is worth another attempt.
    """

    def __init__(self, worker: Worker, store: TieredStore, guard: Guard, *, active: Callable[[], bool]) -> None:
        self._worker = worker
        self._store = store
        self._active = active
        self._guard = guard
        #: keys that were lost and given up to the scheduler
        self.keys = 0
        self._tasks: set[asyncio.Future[None]] = set()

    def lost(self, key: Key) -> None:
        """A key turned out to have no valid copy here: settle it in the background."""
        task = asyncio.ensure_future(self.settle(key))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self, key: Key) -> None:
        """Give the key up if it can be had elsewhere or computed again; else later, when no task here waits for it."""
        try:
            if not await self._recoverable(key):
                task = asyncio.ensure_future(self._give_up_when_unused(key))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif self._store.is_lost(key):
                self.give_up(key)
        except Exception:
            self._guard.failed("lost keys")

    async def _give_up_when_unused(self, key: Key) -> None:
        # First its dependents fail (`LostData`), then the scheduler hears of it, and the clients from the scheduler.
        while self._active() and self._store.is_lost(key):
            await asyncio.sleep(0.1)
            ts = self._worker.state.tasks.get(key)
            if ts is None or all(d.state in _ENDED for d in ts.dependents):
                if self._store.is_lost(key):
                    self.give_up(key)
                return

    async def _recoverable(self, key: Key) -> bool:
        ts = self._worker.state.tasks.get(key)
        if ts is None or ts.run_spec is not None:
            return True
        scheduler = self._worker.scheduler
        holders, here = await asyncio.gather(scheduler.who_has(keys=[key]), known_as(self._worker))
        # Not even here: the scheduler does not count on it, and may have forgotten the key.
        if list(holders.get(key, ())) != [here]:
            return True
        spec = await scheduler.get_runspec(key=key)
        # Only a scheduler of another process sends what is in it. In this one, no recipe comes as `ToPickle(None)`.
        return (spec.data if isinstance(spec, ToPickle) else spec) is not None

    def give_up(self, key: Key) -> None:
        """On the loop, outside of the state machine."""
        self.keys += 1
        state = self._worker.state
        ts = state.tasks.get(key)
        stimulus_id = f"gpurt-lost-{time()}"
        if ts is not None and ts.state == "memory":
            waiting = [d.key for d in ts.dependents if d.state in ("ready", "constrained", "waiting")]
            # Dependents first: the state machine's invariants want the inputs of a ready task to be here.
            self._worker.handle_stimulus(FreeKeysEvent(keys=[*waiting, key], stimulus_id=stimulus_id))
            for dependent in waiting:
                # After release-worker-data on the same stream: a task that the scheduler has taken back because of it
                # is no longer "processing" here, and it ignores this.
                self._worker.batched_send({"op": "reschedule", "key": dependent, "stimulus_id": stimulus_id})
        if self._store.entry(key) is not None:  # the state machine did not know it
            self._store.forget(key)
