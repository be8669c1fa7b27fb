"""`Inputs`: bring what a task reads, or a peer asks for, into memory; and say when a task cannot run without.

While a task waits for its inputs, the state machine may cancel it, free the inputs, and want the task again. So after
the wait `Inputs.must_return` says whether an input is missing. Such a task is handed back, at most `MAX_RETURNS` times,
instead of failing with a KeyError that stock Dask could not have had.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from distributed.metrics import context_meter, time

from dask_gpurt.model.slots import UNSPILL, waiting

if TYPE_CHECKING:
    from collections.abc import Collection

    from dask.typing import Key
    from distributed.worker import Worker

    from dask_gpurt.tiers.engine.entry import Entry
    from dask_gpurt.tiers.stores.task_store import TieredStore
    from dask_gpurt.tiers.worker.lost_keys import Losses

#: times one task is handed back because an input was missing, before stock Dask reports the error
MAX_RETURNS = 5
#: tasks whose returns are remembered: most run elsewhere then, and are not heard of again
_REMEMBERED = 1000
#: shorter waits are not measured, in seconds
_LEAST_WAIT = 0.0001
#: stock Dask's threshold for showing a wait in the task stream, in seconds
_LEAST_SHOWN = 0.005


class Inputs:
    """Inputs of the tasks of one worker. Event loop only."""

    def __init__(self, worker: Worker, store: TieredStore, losses: Losses) -> None:
        self._worker = worker
        self._store = store
        self._losses = losses
        #: seconds that tasks waited for their inputs, the gate included, summed
        self.wait_seconds = 0.0
        #: tasks handed back because an input was not here after the wait
        self.returned_tasks = 0
        self._returns: Counter[Key] = Counter()

    def of(self, key: Key) -> list[Entry]:
        """Return the inputs of a task that are in the store."""
        ts = self._worker.state.tasks.get(key)
        found = [] if ts is None else [self._store.entry(d.key) for d in ts.dependencies]
        return [entry for entry in found if entry is not None]

    async def bring(self, key: Key) -> list[Entry]:
        """Bring the inputs of a task into memory and pin them; give the result to `TieredStore.release`."""
        ts = self._worker.state.tasks.get(key)
        if ts is None:  # forgotten while it waited for its turn
            return []
        pinned, seconds = await self.ensure([d.key for d in ts.dependencies])
        self.wait_seconds += seconds
        if seconds > _LEAST_SHOWN:  # orange, under the label of stock Dask
            now = time()
            ts.startstops.append({"action": "disk-read", "start": now - seconds, "stop": now})
        return pinned

    async def ensure(self, keys: Collection[Key]) -> tuple[list[Entry], float]:
        """Bring keys into memory and pin them; keys that turn out to be lost are given up.

        Returns
        -------
        tuple of list of Entry, float
            What was pinned, for `TieredStore.release`, and how many seconds it took.
        """
        absent = [e for e in map(self._store.entry, keys) if e is not None and not e.in_memory]
        start = time()
        if absent:
            with waiting(UNSPILL):
                pinned = await self._store.ensure(keys)
        else:
            pinned = await self._store.ensure(keys)
        seconds = time() - start
        for entry in pinned:
            if self._store.is_lost(entry.key):
                await self._losses.settle(entry.key)
        read = [e for e in absent if e.in_memory]
        if read:
            context_meter.digest_metric("disk-read", len(read), "count")
            context_meter.digest_metric("disk-read", sum(e.nbytes for e in read), "bytes")
        if seconds > _LEAST_WAIT:
            context_meter.digest_metric("disk-read", seconds, "seconds")
        return pinned, seconds

    def must_return(self, key: Key) -> bool:
        """Count and say whether a task lacks an input that was here when the state machine started it."""
        state = self._worker.state
        ts = state.tasks.get(key)
        if ts is None or ts.state not in ("executing", "long-running"):
            return False  # stock knows what to do with a cancelled one
        if all(d.key in state.data or d.key in state.actors for d in ts.dependencies):
            self._returns.pop(key, None)
            return False
        self._returns[key] += 1
        if self._returns[key] > MAX_RETURNS:
            del self._returns[key]
            return False
        while len(self._returns) > _REMEMBERED:
            del self._returns[next(iter(self._returns))]
        self.returned_tasks += 1
        return True
