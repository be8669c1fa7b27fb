"""`WorkerCopies`: on a worker, discard what a losing copy of a task computes. See `speculation` for the copies.

The race: the other copy has won, and this worker was asked to free the key while its own run goes on in a thread. Now a
dependent is sent here. The state machine puts the key from *cancelled* to *resumed*, to be fetched from the winner. If
the run ends first, Dask takes its value instead of fetching. That saves a transfer and is right as long as both runs
return the same value. A task that draws a random number or reads a clock would have two values in one graph.

So a run that ends in *resumed* is answered as a task that raised ``Reschedule``: the state machine forgets the value
and fetches. Without copies this state arises only when a cancelled key is asked for again on another worker. There the
fetch is as right as the value, and telling the two cases apart would mean reading the state machine's log.

Taken over: ``worker.handle_stimulus``.

Rejected: ``worker.execute``, whose end is handled one turn of the event loop after it has returned. Messages in between
put the key to *resumed* after the check (seen: a dependent computed with the loser's value). Keeping dependents off
the loser: it never reports when a cancelled run has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed.worker_state_machine import ExecuteDoneEvent, RescheduleEvent

from dask_gpurt.model.wrapped import Wrapped

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed.worker import Worker
    from distributed.worker_state_machine import StateMachineEvent


class WorkerCopies(Wrapped):
    """Overrides how the ends of runs are handled on one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        #: values of losing copies that were discarded
        self.discarded = 0
        super().__init__(worker, "handle_stimulus")

    def _wrap(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        tasks = self._worker.state.tasks

        def handle_stimulus(*stims: StateMachineEvent) -> None:
            # The end of a run comes alone.
            if len(stims) == 1 and isinstance(event := stims[0], ExecuteDoneEvent) and self._active:
                ts = tasks.get(event.key)
                if ts is not None and ts.state == "resumed" and ts.next == "fetch":
                    self.discarded += 1
                    stims = (RescheduleEvent(key=event.key, stimulus_id=event.stimulus_id),)
            stock(*stims)

        return handle_stimulus

    def statistics(self) -> dict[str, int]:
        """Counts since the start, as plain JSON."""
        return {"discarded": self.discarded}
