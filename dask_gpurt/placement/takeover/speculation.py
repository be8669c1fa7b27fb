"""`Speculation`: run a second copy of a task on another worker; the first result counts. See `seam` for the rules.

`start` starts a copy. The plugin reports events to `entered_processing`, `left_processing`, `unwanted`,
`worker_removed` and `restarted`. *Stock* means Dask's own code.

How it works, and why that is safe with distributed's state machines:

1. *Start.* The second worker gets the ordinary ``compute-task`` message with a run id of its own. The scheduler's state
   is not touched: the task is in processing on the first worker with the first run id. Whatever fails here, the first
   copy finishes as always.
2. *The first copy finishes first.* Stock handles it. The second worker is sent ``free-keys``, once. It forgets what it
   computes or has computed, and sends nothing more about it.
3. *The second copy finishes first.* ``task-finished`` arrives from that worker with that run id, while the task is in
   processing. The task is re-assigned to the second worker as work stealing does it (``processing_on`` and both
   workers' ``processing``) and gets the second run id. Then stock's handler runs: for it the task finishes where it was
   assigned. The first worker is sent ``free-keys``. If its own result is on its way already, it has an old run id.
4. *A message of the losing copy*, sent before ``free-keys`` reached it, is swallowed. Stock would answer a stale result
   with a second ``free-keys``. That could reach the worker after it has fetched the same key as the input of a
   dependent. The message is not swallowed when the task is assigned to that worker again: then stock needs it, and
   starts the task anew.
5. *An error of the second copy* ends only that copy. An error of the first is the task's, as always. After an error, or
   the death of its worker, the task has no further copy: it may be what fails, or kills, one worker after the other.
6. *The first worker dies.* Stock assigns the task anew. The second copy stays: its result counts by rule 3, wherever
   the task is assigned by then. If that is the second worker itself, the copy is *adopted*: from then on only its run
   id is accepted as the task's, and nothing is freed. *The second worker dies*: the copy is forgotten. The scheduler
   never assigned the task to that worker, so it does not count the death against the task.
7. *The task is cancelled*, released or has another recipe: the copy is freed. A `TaskState` that is not the same object
   with the same ``run_spec`` never takes a copy's result.
8. *Inputs of a copy.* The scheduler does not know that the second worker needs them, so active memory management would
   drop them there as superfluous replicas. A worker that drops an input of a running task raises, and closes. So such a
   request is not sent while the copy runs.
9. *One value per key.* A losing copy that still runs when a dependent is sent to its worker would leave its own value
   there as that dependent's input. `worker_copies` on the worker discards it.

Taken over: the entries ``task-finished`` and ``task-erred`` of ``scheduler.stream_handlers`` (an instance's dict), and
``scheduler.request_remove_replicas``.

Rejected: a second task under an internal name (the graph, the clients and every dashboard would see it, and its result
has the wrong key); re-assigning at the start (the first result would be thrown away as stale, and the first worker
would count as idle while it computes).
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

from dask_gpurt.model.wrapped import Wrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from distributed.scheduler import Scheduler, TaskState, WorkerState

    from dask_gpurt.model.circuit_breaker import Guard

logger = logging.getLogger("distributed.scheduler.gpurt")

NAME = "copies"
#: losers remembered whose last message may still be on its way
LOSERS = 10_000


class Copy:
    """A second copy that is running."""

    __slots__ = ("address", "adopted", "first_address", "run_id", "run_spec", "ts", "worker")

    def __init__(self, ts: TaskState, worker: WorkerState, run_id: int) -> None:
        self.ts = ts
        #: the recipe it was started with
        self.run_spec = ts.run_spec
        #: WorkerState it runs on, and its address
        self.worker = worker
        self.address: str = worker.address
        self.run_id = run_id
        #: address of the worker that the scheduler assigned the task to
        self.first_address: str = ts.processing_on.address
        #: whether the task is assigned to this copy's worker by now
        self.adopted = False


class Speculation:
    """All second copies of one scheduler."""

    def __init__(self, scheduler: Scheduler, guard: Guard) -> None:
        self.scheduler = scheduler
        self.guard = guard
        #: key -> copy
        self.copies: dict[Hashable, Copy] = {}
        #: address -> copies that run there
        self.per_worker: Counter[str] = Counter()
        #: copies by outcome: started, won, lost, erred, worker lost, cancelled, swallowed
        self.counts: Counter[str] = Counter()
        #: prefix -> copies that won less those that lost
        self.gained: Counter[str] = Counter()
        #: tasks of which a copy failed or went down with its worker: there is no other
        self.failed: weakref.WeakSet[TaskState] = weakref.WeakSet()
        #: called with (key, address of the first copy, address of the second) when the second one has won
        self.on_won: Callable[[Hashable, str, str], None] = lambda key, first, second: None
        self._losers: dict[tuple[Hashable, str | None, int | None], None] = {}
        self._stock: dict[str, Callable[..., None]] = {}
        self._ours: dict[str, Callable[..., None]] = {}
        self._removals: _Removals | None = None

    def install(self) -> None:
        """Override the handlers of finished and failed tasks, and the removal of replicas."""
        part = self.guard.part(NAME)
        handlers = self.scheduler.stream_handlers
        finished, erred = handlers["task-finished"], handlers["task-erred"]

        # The message as it comes: this is called for every task, and a copy of it costs more than all the rest.
        def task_finished(**msg: Any) -> None:
            if self.copies or self._losers:
                key = msg.get("key")
                if key in self.copies or self._losers:
                    try:
                        if not self._may_finish(key, msg["worker"], msg.get("run_id")):
                            return
                    except Exception:
                        self.guard.failed(part.name)
                        self._drop(key, "cancelled")
            finished(**msg)

        def task_erred(key: Hashable, stimulus_id: str, **msg: Any) -> None:
            if key in self.copies or self._losers:
                try:
                    if not self._may_err(key, msg.get("worker"), msg.get("run_id")):
                        return
                except Exception:
                    self.guard.failed(part.name)
            erred(key=key, stimulus_id=stimulus_id, **msg)

        self._stock = {"task-finished": finished, "task-erred": erred}
        self._ours = {"task-finished": task_finished, "task-erred": task_erred}
        handlers.update(self._ours)
        self._removals = _Removals(self.scheduler, self)
        self._removals.install()

    def uninstall(self) -> None:
        """Cancel all copies and restore the scheduler's handlers. An override put over ours since is left."""
        for key in list(self.copies):
            self._drop(key, "cancelled")
        handlers = self.scheduler.stream_handlers
        for name, ours in self._ours.items():
            if handlers.get(name) is ours:
                handlers[name] = self._stock[name]
            else:
                logger.warning("the handler %s was overridden after placement took it over; left as it is", name)
        self._ours, self._stock = {}, {}
        if self._removals is not None:
            self._removals.uninstall()
            self._removals = None
        self._losers.clear()

    # ------------------------------------------------------------------ acting

    def start(self, ts: TaskState, ws: WorkerState) -> bool:
        """Start a second copy of a task in processing on another worker; False when that makes no sense now."""
        scheduler = self.scheduler
        if (
            ts.state != "processing"
            or ts.processing_on is None
            or ts.processing_on is ws
            or ts.key in self.copies
            or ts in self.failed
            or scheduler.workers.get(ws.address) is not ws
            or not all(d.who_has for d in ts.dependencies)
        ):
            return False
        first_run = ts.run_id
        # The class's own: ours would take it for a message to the first worker. It gives the task a new run id.
        msg = type(scheduler)._task_to_msg(scheduler, ts)
        second_run, ts.run_id = ts.run_id, first_run
        self.copies[ts.key] = Copy(ts, ws, second_run)
        self.per_worker[ws.address] += 1
        self.counts["started"] += 1
        scheduler.worker_send(ws.address, msg)
        return True

    def _forget(self, key: Hashable) -> Copy | None:
        copy = self.copies.pop(key, None)
        if copy is not None:
            self.per_worker[copy.address] -= 1
            if self.per_worker[copy.address] <= 0:
                del self.per_worker[copy.address]
        return copy

    def _drop(self, key: Hashable, why: str) -> None:
        """End a copy: free the key on its worker, and swallow what that worker still sends about it."""
        copy = self._forget(key)
        if copy is None:
            return
        self.counts[why] += 1
        if why == "erred":
            self.failed.add(copy.ts)
        if why == "lost":
            self.gained[copy.ts.prefix.name] -= 1
        if copy.adopted:
            return  # the copy is the task itself
        self._lose(key, copy.address, copy.run_id)
        if self.scheduler.workers.get(copy.address) is copy.worker:
            self._free(key, copy.address)

    def _free(self, key: Hashable, address: str) -> None:
        self.scheduler.worker_send(address, {"op": "free-keys", "keys": [key], "stimulus_id": f"gpurt-copy-{key}"})

    def _lose(self, key: Hashable, address: str, run_id: int) -> None:
        if len(self._losers) >= LOSERS:
            del self._losers[next(iter(self._losers))]
        self._losers[key, address, run_id] = None

    # ------------------------------------------------------------------ messages

    def _swallowed(self, key: Hashable, worker: str | None, run_id: int | None) -> bool:
        if (key, worker, run_id) in self._losers:
            ts = self.scheduler.tasks.get(key)
            if ts is not None and ts.processing_on is not None and ts.processing_on.address == worker:
                return False
            del self._losers[key, worker, run_id]
            self.counts["swallowed"] += 1
            return True
        return False

    def _may_finish(self, key: Hashable, worker: str, run_id: int | None) -> bool:
        """Whether stock should hear of a result; the winning copy's task is re-assigned first."""
        if self._swallowed(key, worker, run_id):
            return False
        copy = self.copies.get(key)
        if copy is None or (copy.address, copy.run_id) != (worker, run_id):
            return True
        scheduler, ts, ws = self.scheduler, copy.ts, copy.worker
        first = ts.processing_on
        if (
            scheduler.tasks.get(key) is not ts
            or ts.run_spec is not copy.run_spec
            or scheduler.workers.get(worker) is not ws
        ):
            # Another task by now. Stock would take it for a stale run; the copy is freed instead.
            self._drop(key, "cancelled")
            self._losers.pop((key, worker, run_id), None)
            return False
        if ts.state != "processing" or first is None:
            # Between the first worker's death and the new assignment (waiting for an input that was lost with it).
            self._drop(key, "cancelled")
            self._losers.pop((key, worker, run_id), None)
            return False
        self._forget(key)
        self.counts["won"] += 1
        self.gained[ts.prefix.name] += 1
        address = first.address
        if first is not ws:
            stealing = scheduler.extensions.get("stealing")
            if stealing is not None:
                stealing.remove_key_from_stealable(ts)
            self._lose(key, address, ts.run_id)
            ts.processing_on = ws
            first.remove_from_processing(ts)
            ws.add_to_processing(ts)
            if scheduler.workers.get(address) is first:
                scheduler.check_idle_saturated(first)
                self._free(key, address)
        elif ts.run_id != run_id:
            # Adopted, and finished before the new assignment's message came: the worker has the result already and
            # answers that message with it once more, under the new run id. Stock would take that for a stale run, free
            # the key and compute it again.
            self._lose(key, worker, ts.run_id)
        ts.run_id = run_id
        self._report_win(key, address, worker)
        return True

    def _report_win(self, key: Hashable, first: str, second: str) -> None:
        try:
            self.on_won(key, first, second)
        except Exception:
            self.guard.failed(NAME)

    def _may_err(self, key: Hashable, worker: str | None, run_id: int | None) -> bool:
        if self._swallowed(key, worker, run_id):
            return False
        copy = self.copies.get(key)
        if copy is None or (copy.address, copy.run_id) != (worker, run_id):
            return True
        ts = copy.ts
        if ts.state == "processing" and ts.processing_on is copy.worker:
            self._forget(key)
            ts.run_id = run_id
            return True
        self._drop(key, "erred")
        self._losers.pop((key, worker, run_id), None)  # this was its last word
        return False

    # ------------------------------------------------------------------ events

    def entered_processing(self, key: Hashable) -> None:
        """Note that a task which has a copy was assigned again, or stolen."""
        copy = self.copies.get(key)
        if copy is not None and copy.ts.processing_on is not None:
            copy.first_address = copy.ts.processing_on.address
            copy.adopted = copy.ts.processing_on is copy.worker

    def left_processing(self, key: Hashable, finish: str) -> None:
        """End the copy of a task that left processing for the state `finish`, unless its worker died (rule 6)."""
        copy = self.copies.get(key)
        if copy is None:
            return
        if finish == "released" and not copy.adopted and copy.first_address not in self.scheduler.workers:
            return  # its worker died: rule 6
        if copy.adopted and finish == "memory":
            # The copy was the task, and began under the run id of the new assignment.
            self._forget(key)
            self.counts["won"] += 1
            return
        self._drop(key, "lost" if finish in ("memory", "erred") else "cancelled")

    def unwanted(self, key: Hashable) -> None:
        """End the copy of a task that was released or forgotten without being in processing."""
        if key in self.copies:
            self._drop(key, "cancelled")

    def worker_removed(self, address: str) -> None:
        """Forget the copies that ran on a worker that is gone."""
        for key in [k for k, c in self.copies.items() if c.address == address]:
            self.failed.add(self.copies[key].ts)
            self._forget(key)
            self.counts["worker lost"] += 1
        for entry in [e for e in self._losers if e[1] == address]:
            del self._losers[entry]

    def restarted(self) -> None:
        """Forget all copies: the scheduler has forgotten all tasks."""
        self.copies.clear()
        self.per_worker.clear()
        self._losers.clear()


class _Removals(Wrapped):
    """``scheduler.request_remove_replicas``: inputs of running copies are left out."""

    def __init__(self, scheduler: Scheduler, copies: Speculation) -> None:
        self._copies = copies
        super().__init__(scheduler, "request_remove_replicas")

    def _wrap(self, stock: Callable[..., None]) -> Callable[..., None]:
        copies = self._copies

        def request_remove_replicas(addr: str, keys: list[Any], *, stimulus_id: str) -> None:
            kept = keys
            if self._active and addr in copies.per_worker:
                try:
                    needed = {d.key for c in copies.copies.values() if c.address == addr for d in c.ts.dependencies}
                    kept = [key for key in keys if key not in needed]
                    copies.counts["inputs kept"] += len(keys) - len(kept)
                except Exception:
                    copies.guard.failed(NAME)
            if kept:
                stock(addr, kept, stimulus_id=stimulus_id)

        return request_remove_replicas
