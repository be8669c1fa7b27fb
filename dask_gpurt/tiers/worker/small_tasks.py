"""`SmallTasks`: the short way for tasks that have nothing to wait for, which are most tasks of most graphs.

While memory is relaxed (`eviction`) all values are in memory. A task that reads and returns little, by
`Turns.least_bytes`, then needs neither a turn (`task_admission`) nor room (`memory_gate`): its inputs are pinned, and
it runs. Nothing is awaited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed.worker_state_machine import ExecuteSuccessEvent

from dask_gpurt.tiers.engine.buffer_roots import as_bytes
from dask_gpurt.tiers.worker.task_admission import SMALL_RESULT_BYTES

if TYPE_CHECKING:
    from dask.typing import Key
    from distributed.worker import Worker
    from distributed.worker_state_machine import StateMachineEvent

    from dask_gpurt.model.circuit_breaker import Guard
    from dask_gpurt.tiers.engine.engine import Engine
    from dask_gpurt.tiers.engine.entry import Entry
    from dask_gpurt.tiers.stores.task_store import TieredStore
    from dask_gpurt.tiers.worker.task_admission import Turns


class SmallTasks:
    """Runs the small tasks of one worker. Event loop only. Failures in here count as those of ``execute``."""

    def __init__(self, worker: Worker, engine: Engine, store: TieredStore, turns: Turns, guard: Guard) -> None:
        self._worker = worker
        self._engine = engine
        self._store = store
        self._turns = turns
        self._guard = guard

    def hold(self, key: Key) -> list[Entry] | None:
        """Pin the inputs of a task that has nothing to wait for, for `TieredStore.release`; None if it may have to."""
        if self._engine.eviction.pressed:
            return None
        try:
            ts = self._worker.state.tasks.get(key)
            if ts is None:
                return None
            turns = self._turns
            least = turns.least_bytes
            # What is allocated for a result is twice its bytes, see `task_admission`.
            if not turns.outputs.small(ts.prefix, least / 2):
                return None
            if not ts.dependencies:
                return []
            entries: list[Entry] = []
            lends = False
            nbytes = 0
            entry_of, books = self._store.entry, self._engine.books
            for d in ts.dependencies:
                entry = entry_of(d.key)
                if entry is not None:
                    entries.append(entry)
                    nbytes += entry.nbytes
                    lends = lends or entry.handle is not None or books.shares(entry)
            if nbytes >= least:
                return None
            if lends:
                self._store.lend(key, entries)
        except Exception:
            self._guard.failed("execute", "small task")
            return None
        for entry in entries:
            self._engine.pin(entry)
        return entries

    def ended(self, event: StateMachineEvent) -> None:
        """Such a task has run: learn from a result that was larger than foreseen."""
        try:
            if type(event) is not ExecuteSuccessEvent:
                return
            nbytes = event.nbytes
            if type(nbytes) is not int:
                nbytes = as_bytes(nbytes) or 0
            if nbytes >= SMALL_RESULT_BYTES:
                self._turns.outputs.learn(event.key, self._store.host_bytes(event.value, event.nbytes))
        except Exception:
            self._guard.failed("execute", "small task")
