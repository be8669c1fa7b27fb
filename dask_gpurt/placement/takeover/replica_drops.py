"""`ReplicaDrops`: which replica is dropped when a key has more than it needs: the one in the worst place.

Dask's `ReduceReplicas` says how many replicas of a key may go. Its memory manager then lets the worker with most memory
in use drop each. How many stays Dask's choice. Which one is chosen here (`badness`); the first to go is a replica

1. on a worker that is paused or retiring, as that worker has to get rid of data;
2. else on the worst tier. The share of the worker's data that is spilled says how likely the replica is on disk, unless
   its tier is known;
3. else on the worker that is fullest relative to its memory limit. Absolute bytes say nothing where limits differ.

As in Dask, a worker that has a dependent of the key in processing keeps it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed.active_memory_manager import ReduceReplicas, Suggestion
from distributed.core import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Hashable

    from distributed.scheduler import Scheduler, TaskState, WorkerState

    from dask_gpurt.model.circuit_breaker import Guard

NAME = "replicas"


def no_residence(key: Hashable, address: str) -> int | None:
    """The default of `WorstReplicas`: the tier of a replica is unknown."""
    return None


def badness(ws: WorkerState, tier: int | None, memory: float) -> tuple[bool, float, float]:
    """Sort key of a replica on a worker; the largest goes first.

    Parameters
    ----------
    ws
        The worker.
    tier
        Of the replica, larger is worse; None: unknown.
    memory
        Bytes in use on the worker.
    """
    data = ws.memory
    spilled = float(data.spilled)
    managed = float(data.managed)
    where = float(tier) if tier is not None else spilled / (spilled + managed) if spilled + managed > 0 else 0.0
    fullness = memory / ws.memory_limit if ws.memory_limit else memory * 1e-15
    return ws.status is not Status.running, where, fullness


class WorstReplicas(ReduceReplicas):
    """Dask's policy `ReduceReplicas`, which also names the replica to drop.

    Parameters
    ----------
    guard
        Counts failures; a failure leaves the choice to the memory manager.
    residence
        ``(key, address) -> tier`` (larger is worse), None: unknown.
    """

    def __init__(self, guard: Guard, residence: Callable[[Hashable, str], int | None] = no_residence) -> None:
        self._guard = guard
        self._residence = residence
        #: replicas named; and those of them that the memory manager would not have dropped
        self.named = 0
        self.otherwise = 0

    def run(self) -> Generator[Suggestion, WorkerState | None, None]:
        """Yield Dask's suggestions, with a worker named in each that drops a replica."""
        part = self._guard.part(NAME)
        stock = super().run()
        answer: WorkerState | None = None
        while True:
            try:
                suggestion = stock.send(answer)
            except StopIteration:
                return
            if part.retired is None and suggestion.op == "drop" and suggestion.candidates is None:
                try:
                    named = self._name(suggestion.ts)
                    if named is not None:
                        suggestion = Suggestion("drop", suggestion.ts, {named})
                except Exception:
                    self._guard.failed(NAME)
            answer = yield suggestion

    def _name(self, ts: TaskState) -> WorkerState | None:
        pending = self.manager.pending.get(ts)
        dropping = pending[1] if pending else ()
        needed = {waiter.processing_on for waiter in ts.waiters or ()}
        candidates = [ws for ws in ts.who_has or () if ws not in dropping and ws not in needed]
        if len(candidates) < 2:
            return None  # no choice: left to Dask
        memory = self.manager.workers_memory
        worst = max(candidates, key=lambda ws: badness(ws, self._residence(ts.key, ws.address), memory.get(ws, 0)))
        self.named += 1
        if worst is not max(candidates, key=lambda ws: (ws.status is not Status.running, memory.get(ws, 0))):
            self.otherwise += 1
        return worst


class ReplicaDrops:
    """Replaces `ReduceReplicas` by `WorstReplicas` in the scheduler's memory manager, and back."""

    def __init__(self, scheduler: Scheduler, guard: Guard) -> None:
        self.scheduler = scheduler
        self.guard = guard
        self.policy: WorstReplicas | None = None
        self._taken: list[ReduceReplicas] = []

    def install(self) -> bool:
        """Take over. Return False, with nothing changed, when the memory manager is off or runs no `ReduceReplicas`."""
        manager = self.scheduler.extensions.get("amm")
        taken = [p for p in getattr(manager, "policies", ()) if type(p) is ReduceReplicas]
        if manager is None or not taken:
            return False
        self.policy, self._taken = WorstReplicas(self.guard), taken
        for p in taken:
            manager.policies.discard(p)
        manager.add_policy(self.policy)
        return True

    def uninstall(self) -> None:
        """Put the replaced policies back."""
        manager = self.scheduler.extensions.get("amm")
        if self.policy is not None and manager is not None:
            manager.policies.discard(self.policy)
            for p in self._taken:
                manager.add_policy(p)
        self.policy, self._taken = None, []
