"""Keep a run after its outputs were made, for as long as what is made of them may be lost. On the scheduler.

Theory of operation. Dask releases a barrier when the last of its outputs is in memory, and the run ends. When a worker
is lost a moment later, the outputs that it had are wanted again, and so is everything before them: on three workers all
inputs are split anew for a third of the outputs. So the barrier's result is held, as a client would (Dask's variables
and queues do the same), until every task that depends on the outputs has ended, or `HOLD_SECONDS` have passed since the
last output was made. Until then a lost worker costs what it does before (`reopen`): its own part.

What a run holds meanwhile are the rows that its workers retained, within their budget. Runs whose outputs were all made
give way first (`send_log.RetainBudget`).

A join's first side may have to wait long for the other, and only one worker has its barrier's result until outputs are
made. Were that lost, all inputs of the side would be split anew; so other workers get copies (`_copy`). Dask's memory
manager leaves them there as long as outputs wait. Once those are made it drops all but one, every two seconds; then
they are made again, which is a number and two messages a worker. Rejected: to tell the memory manager, which has no
way to say that a replica is wanted but a policy of one's own: its suggestion to replicate and Dask's to drop would
alternate just so. Rejected: `Scheduler.gather_on_worker`. That puts a value into a worker beside whatever fetches it
there for an output; if it is dropped before that fetch has ended, Dask's state machine raises, and the worker ends.

Not kept: a run whose query is over. A result that is lost between the end of its task and the moment the client has it
is made from the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from distributed.comm import CommClosedError

from dask_gpurt.shuffle import seam

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from distributed.scheduler import Scheduler, TaskState

    from dask_gpurt.shuffle.scheduler.runs import RunRecord, Runs

#: the "client" that wants the barriers
HOLDER = "gpurt-shuffle"
#: a run is kept so long after its last output was made, at most
HOLD_SECONDS = 60.0
#: workers that have the result of a barrier for which outputs wait; and how often they are asked to copy it
COPIES = 3
TRIES = 3
#: between two requests: while outputs wait, and once all were made
COPY_SECONDS = 5.0
AGAIN_SECONDS = 0.5
#: between two looks
LOOK_SECONDS = 0.05
#: tasks looked at in one turn of the loop
STEPS = 2000
#: states of a task that will not run for now
_ENDED = ("memory", "erred", "released", "forgotten")


class Holder:
    """Holds the runs of one scheduler."""

    def __init__(self, scheduler: Scheduler, runs: Runs) -> None:
        self._scheduler = scheduler
        self._runs = runs
        #: what our client wants: key of a barrier -> the run that it is held for, which may just have ended
        self._held: dict[Hashable, RunRecord] = {}

    def begin(self, record: RunRecord) -> None:
        """Hold a run whose barrier has passed."""
        barrier = self._runs.barrier_of(record.id)
        if barrier is None or self._held.get(barrier.key) is record:
            return
        self._held[barrier.key] = record
        self._scheduler.client_desires_keys([barrier.key], HOLDER)
        seam.in_background(self._scheduler, self._watch, record, barrier)

    def lost(self) -> None:
        """A worker was lost. A barrier's result that went with it is not computed again if nothing waits for it."""
        for key, record in list(self._held.items()):
            barrier = self._scheduler.tasks.get(key)
            if barrier is None or (barrier.state != "memory" and not barrier.waiters):
                self._release(key, record)

    def unwanted(self) -> None:
        """A client has left: hold nothing whose query it took with it.

        Its cluster may close before the next look. A barrier that is held still would be reported as lost with its
        worker, which reads like a failure at the end of a run that went well.
        """
        for key, record in list(self._held.items()):
            barrier = self._scheduler.tasks.get(key)
            if barrier is None or not barrier.dependents:
                self._release(key, record)

    def let_go(self) -> None:
        """Hold no run any more of which all outputs were made."""
        for key, record in list(self._held.items()):
            if self.over(record) or not self._runs.current(record):
                self._release(key, record)

    def over(self, record: RunRecord) -> bool:
        """Whether all outputs of a run that are wanted were made."""
        barrier = self._runs.barrier_of(record.id)
        return record.passed and barrier is not None and not barrier.waiters

    async def _watch(self, record: RunRecord, barrier: TaskState) -> None:
        deadline, again, tries = 0.0, 0.0, TRIES
        tasks: Iterator[TaskState | None] | None = None
        try:
            while barrier.dependents and not record.failed and self._runs.current(record):
                now = time.monotonic()
                if barrier.state != "memory" or barrier.waiters:
                    tasks = None
                    if barrier.state == "memory" and tries and now > again and self._copy(record, barrier):
                        tries -= 1
                        again = now + COPY_SECONDS
                else:
                    if tasks is None:
                        tasks, deadline, again = _last(barrier), now + HOLD_SECONDS, 0.0
                        running = None
                    # One task that has not ended will do; then the next is looked for.
                    for _ in range(STEPS):
                        if running is not None and running.state not in _ENDED:
                            break
                        if (running := next(tasks, barrier)) is barrier:
                            return
                    if now > deadline:
                        return
                    if now > again and self._copy(record, barrier):
                        again = now + AGAIN_SECONDS
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            self._release(barrier.key, record)

    def _without(self, barrier: TaskState, record: RunRecord) -> list[str]:
        """Workers that should have a copy of a barrier's result, too."""
        holders = {ws.address for ws in barrier.who_has}
        others = [a for a in sorted(record.participants) if a in self._scheduler.workers and a not in holders]
        return others[: max(0, COPIES - len(holders))]

    def _copy(self, record: RunRecord, barrier: TaskState) -> bool:
        """Ask for the copies that are missing. Returns whether any was; they are in `who_has` once they have come."""
        addresses = self._without(barrier, record)
        record.copied_to.update(addresses)
        for address in addresses:
            # To a worker that fetches it already this changes nothing. One whose stream is closed is about to leave.
            with contextlib.suppress(CommClosedError):
                self._scheduler.request_acquire_replicas(address, [barrier.key], stimulus_id=f"{HOLDER}-{barrier.key}")
        return bool(addresses)

    def ended(self, record: RunRecord) -> None:
        """Have each worker that was asked for a copy drop it, as the run is over, and before there can be another run.

        Also those that the scheduler knows no copy of: the message that it has come may be under way.
        """
        for address in record.copied_to & self._scheduler.workers.keys():
            self._forget(seam.barrier_key(record.id), address)

    def _forget(self, key: Hashable, address: str) -> None:
        message = {"op": "free-keys", "keys": [key], "stimulus_id": f"{HOLDER}-{key}"}
        self._scheduler.worker_send(address, message)

    def _release(self, key: Hashable, record: RunRecord) -> None:
        if self._held.get(key) is not record:
            return  # held for a later run
        del self._held[key]
        if HOLDER in self._scheduler.clients:
            self._scheduler.client_releases_keys([key], HOLDER, f"{HOLDER}-{key}")
            if not self._scheduler.clients[HOLDER].wants_what:
                del self._scheduler.clients[HOLDER]


def _last(barrier: TaskState) -> Iterator[TaskState | None]:
    """The tasks behind a barrier that nothing depends on; None for every other one, as finding them takes its time."""
    seen = {barrier}
    stack = list(barrier.dependents)
    while stack:
        ts = stack.pop()
        if ts in seen:
            continue
        seen.add(ts)
        stack.extend(ts.dependents)
        yield None if ts.dependents else ts
