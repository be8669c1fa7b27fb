"""Which replica goes when there are more than needed: the one in the worst place.

Upstream's `ReduceReplicas` says how many replicas of a key may go, and the memory manager lets the worker with most
memory in use drop each. How many stays upstream's. Which is ours, best to drop first:

1. on a worker that is paused or retiring: it wants to get rid of data;
2. on the worst tier known: the share of the worker's data that is spilled is how likely this replica is on disk, unless
   residence per key is known (`disk_residency`), which is then the answer;
3. on the fullest worker, relative to its memory limit: absolute bytes say nothing where limits differ.

A worker that has a dependent of the key in processing keeps it, as upstream has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed.active_memory_manager import ReduceReplicas, Suggestion
from distributed.core import Status

from dask_gpurt.model.circuit_breaker import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Hashable

    from distributed.scheduler import Scheduler, TaskState, WorkerState

    from dask_gpurt.model.circuit_breaker import Guard

NAME = "replicas"


def no_residence(key: Hashable, address: str) -> int | None:
    """Nobody knows on which tier a replica is."""
    return None


def badness(ws: WorkerState, tier: int | None, memory: float) -> tuple[bool, float, float]:
    """How little a replica on a worker is worth; larger goes first. `memory` is bytes in use there."""
    data = ws.memory
    spilled = float(data.spilled)
    managed = float(data.managed)
    where = float(tier) if tier is not None else spilled / (spilled + managed) if spilled + managed > 0 else 0.0
    fullness = memory / ws.memory_limit if ws.memory_limit else memory * 1e-15
    return ws.status is not Status.running, where, fullness


class WorstReplicas(ReduceReplicas):
    """As upstream's policy, but names the replica to drop.

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
        #: replicas named; the ones of them that were not the fullest worker's
        self.named = 0
        self.otherwise = 0

    def run(self) -> Generator[Suggestion, Any, None]:
        part = self._guard.parts.setdefault(NAME, Part(NAME))
        stock = super().run()
        answer: Any = None
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

    def _name(self, ts: TaskState) -> Any:
        pending = self.manager.pending.get(ts)
        dropping = pending[1] if pending else ()
        needed = {waiter.processing_on for waiter in ts.waiters or ()}
        candidates = [ws for ws in ts.who_has or () if ws not in dropping and ws not in needed]
        if len(candidates) < 2:
            return None  # no choice: upstream has rules for that
        memory = self.manager.workers_memory
        worst = max(candidates, key=lambda ws: badness(ws, self._residence(ts.key, ws.address), memory.get(ws, 0)))
        self.named += 1
        if worst is not max(candidates, key=lambda ws: (ws.status is not Status.running, memory.get(ws, 0))):
            self.otherwise += 1
        return worst


class ReplicaDrops:
    """Puts `WorstReplicas` in the place of `ReduceReplicas`, and back."""

    def __init__(self, scheduler: Scheduler, guard: Guard) -> None:
        self.scheduler = scheduler
        self.guard = guard
        self.policy: WorstReplicas | None = None
        self._taken: list[ReduceReplicas] = []

    def install(self) -> bool:
        """False when the memory manager is off or runs no `ReduceReplicas`."""
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
        manager = self.scheduler.extensions.get("amm")
        if self.policy is not None and manager is not None:
            manager.policies.discard(self.policy)
            for p in self._taken:
                manager.add_policy(p)
        self.policy, self._taken = None, []
