"""`LocalUses`: the next uses that a worker knows by itself, from the tasks that were sent to it and have not run yet.

A task is sent to a worker when all its inputs exist, so it runs soon: before any task that still waits on the
scheduler, whatever their priorities say. Priorities order graphs depth first, while tasks run when they are ready, and
the two drift apart (in a join by tasks, two thirds of the values evicted by priority alone were needed next). So an
input of such a task is *due* (`Entry.due`). Values that are due leave memory last, those of the last task in priority
order first. That needs no message, works without a scheduler of ours, and corrects hints where there are any.

It listens to the worker's transitions as a plugin, which is public interface, and only while memory is pressed
(`eviction`): else nothing is chosen by it. A use is due from ``waiting`` until the task has run. The number of a task
that is not pending any more is not *live*, so that it need not be searched for in the heaps of its inputs.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, Any

from distributed.core import Status
from distributed.diagnostics.plugin import WorkerPlugin

if TYPE_CHECKING:
    from collections.abc import Callable

    from dask.typing import Key
    from distributed.worker import Worker

    from dask_gpurt.model.circuit_breaker import Guard
    from dask_gpurt.tiers.engine.engine import Engine
    from dask_gpurt.tiers.engine.entry import Entry
    from dask_gpurt.tiers.stores.task_store import TieredStore

#: states of a task that will read its inputs here
PENDING = frozenset({"waiting", "ready", "constrained", "executing", "long-running"})
ENDING = frozenset({Status.closing, Status.closed})
#: tasks that are noted in one turn of the loop at the beginning, 10 us each
_AT_ONCE = 1000
#: its name among the worker's plugins
NAME = "gpurt-local-uses"


class LocalUses(WorkerPlugin):
    """Keeps `Entry.due` of one store. Loop thread only."""

    name = NAME

    def __init__(self, worker: Worker, engine: Engine, store: TieredStore, guard: Guard) -> None:
        self._worker = worker
        self._engine = engine
        self._store = store
        self._guard = guard
        self._part = guard.part("local uses", on_retired=self._retire)
        self._numbers = itertools.count()
        #: key of a pending task -> its number, and those of its inputs that are here
        self._pending: dict[Key, tuple[int, list[Entry]]] = {}
        self._live: set[int] = set()
        #: tasks that were here at `install`, and are still to be noted
        self._unseen: list[Key] = []
        #: called with each task that was sent here: its priority, its number, its key
        self.on_pending: Callable[[tuple[float, ...], int, Key], None] | None = None

    def install(self) -> None:
        """Begin to listen; tasks that are here already are noted. A second call does nothing."""
        if self._worker.plugins.get(NAME) is self or self._part.retired is not None:
            return
        self._worker.plugins[NAME] = self
        self._store.on_add.append(self._added)
        self._unseen = list(self._worker.state.tasks)
        self._note_more()

    def _note_more(self) -> None:
        """Note some of the tasks that were here at `install`, and the others in later turns of the loop."""
        some, self._unseen = self._unseen[-_AT_ONCE:], self._unseen[:-_AT_ONCE]
        tasks = self._worker.state.tasks
        for key in reversed(some):
            if key in tasks:
                self.transition(key, "released", tasks[key].state)
        if self._unseen:
            self._engine.io.loop.call_soon(self._note_more)

    def uninstall(self) -> None:
        """Stop listening, and forget all. A second call does nothing."""
        if self._added in self._store.on_add:
            # A worker that closes goes through a list of its plugins and would miss one that is gone.
            if self._worker.status not in ENDING and self._worker.plugins.get(NAME) is self:
                del self._worker.plugins[NAME]
            self._store.on_add.remove(self._added)
        self._unseen = []
        for key in list(self._pending):
            try:
                self._end(key)
            except Exception:
                self._failed()

    # ------------------------------------------------------------------ events

    def transition(self, key: Key, start: str, finish: str, **kwargs: object) -> None:
        """See `WorkerPlugin.transition`; raises nothing."""
        try:
            if finish in PENDING:
                if key not in self._pending:
                    self._begin(key)
            elif key in self._pending:
                self._end(key)
        except Exception:
            self._failed()

    def executed(self, key: Key) -> None:
        """A task has read its inputs. Before they are unpinned, so that they are judged by what comes after."""
        try:
            if key in self._pending:
                self._end(key)
        except Exception:
            self._failed()

    def _begin(self, key: Key) -> None:
        ts = self._worker.state.tasks.get(key)
        if ts is None or ts.priority is None:
            return
        number = next(self._numbers)
        entries = [e for e in (self._store.entry(d.key) for d in ts.dependencies) if e is not None]
        self._pending[key] = number, entries
        self._live.add(number)
        for entry in entries:
            self._push(entry, ts.priority, number)
        if entries and self.on_pending is not None:
            self.on_pending(ts.priority, number, key)

    def _end(self, key: Key) -> None:
        number, entries = self._pending.pop(key)
        self._live.discard(number)
        for entry in entries:
            if not entry.gone:
                self._refresh(entry)

    def _added(self, entry: Entry) -> None:
        try:
            ts = self._worker.state.tasks.get(entry.key)
            for dependent in ts.dependents if ts is not None else ():
                pending = self._pending.get(dependent.key)
                if pending is not None:
                    pending[1].append(entry)
                    self._push(entry, dependent.priority, pending[0])
        except Exception:
            self._failed()

    def _push(self, entry: Entry, priority: tuple[float, ...], number: int) -> None:
        if entry.dues is None:
            entry.dues = []
        dues = entry.dues
        heapq.heappush(dues, (priority, number))
        # Tasks that have run leave from the front only. Behind one that waits for days they would pile up.
        if len(dues) > 2 * len(self._live) + 64:
            dues[:] = [due for due in dues if due[1] in self._live]
            heapq.heapify(dues)
        self._refresh(entry)

    def _refresh(self, entry: Entry) -> None:
        dues = entry.dues or []
        while dues and dues[0][1] not in self._live:
            heapq.heappop(dues)
        due = dues[0][0] if dues else None
        if due != entry.due:
            self._engine.books.set_due(entry, due)

    def _failed(self) -> None:
        self._guard.failed(self._part.name)

    def _retire(self) -> None:
        # Later: the worker may be going through its plugins now.
        self._engine.io.loop.call_soon(self.uninstall)

    def statistics(self) -> dict[str, Any]:
        """Return counts as plain JSON."""
        return {
            "pending_tasks": len(self._pending),
            **self._part.statistics(),
        }
