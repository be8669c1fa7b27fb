"""`WorkerCopies`: on a worker, discard what a losing copy of a task computes. See `speculation` for the copies.

The race: the other copy has won, and this worker was asked to free the key while its own run goes on in a thread. Now a
dependent is sent here. The state machine puts the key from *cancelled* to *resumed*, to be fetched from the winner. If
the run ends first, Dask takes its value instead of fetching. That saves a transfer and is right as long as both runs
return the same value. A task that draws a random number or reads a clock would have two values in one graph.

So a run that ends in *resumed* is answered as a task that raised ``Reschedule``: the state machine forgets the value
and fetches. Without copies this state arises only when a cancelled key is asked for again on another worker. There the
fetch is as right as the value, and telling the two cases apart would mean reading the state machine's log.

Taken over: ``worker.execute``.

Rejected: tracking the scheduler's ``free-keys`` messages (another wrapper on every event, for a case that the final
state already shows); keeping dependents off the loser (it never reports when a cancelled run has ended).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed.worker_state_machine import RescheduleEvent

from dask_gpurt.model.wrapped import Wrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from distributed.worker import Worker
    from distributed.worker_state_machine import StateMachineEvent


class WorkerCopies(Wrapped):
    """Overrides ``execute`` on one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        #: values of losing copies that were discarded
        self.discarded = 0
        super().__init__(worker, "execute")

    def _wrap(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        tasks = self._worker.state.tasks

        async def execute(key: Hashable, *, stimulus_id: str) -> StateMachineEvent:
            event = await stock(key, stimulus_id=stimulus_id)
            ts = tasks.get(key)
            if ts is not None and ts.state == "resumed" and ts.next == "fetch" and self._active:
                self.discarded += 1
                return RescheduleEvent(key=key, stimulus_id=stimulus_id)
            return event

        return execute

    def statistics(self) -> dict[str, int]:
        """Counts since the start, as plain JSON."""
        return {"discarded": self.discarded}
