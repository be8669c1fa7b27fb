"""On a worker: what a losing copy of a task computes is never read there. See `speculation` for the copies.

The race. The other copy has won, and this worker was told to free the key while its own run of it goes on in a thread.
Now a dependent is sent here: the state machine puts the key from *cancelled* to *resumed*, to be fetched from the
winner. When the run ends first, Dask takes its value instead of fetching. That saves a transfer and is right as long as
both runs return the same; a task that draws a random number or reads a clock would have two values in one graph.

So a run that ends in *resumed* is answered as a task that raised ``Reschedule``: the state machine forgets the value
and fetches. Dask by itself comes there only when a cancelled key is asked for again on another worker, where the fetch
is as right as the value; telling the two apart would mean reading the state machine's log.

Rejected: tracking the ``free-keys`` messages of the scheduler's half (another wrapper on every event, for a case that
the state at the end already shows); keeping dependents off the loser (it never says when a cancelled run has ended).

Taken over: ``worker.execute``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed.worker_state_machine import RescheduleEvent

from dask_gpurt.model.wrapped import Wrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable


class WorkerCopies(Wrapped):
    """Of one worker."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        #: values of losing copies that were not taken
        self.discarded = 0
        super().__init__(worker, "execute")

    def _wrap(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        tasks = self._worker.state.tasks

        async def execute(key: Hashable, *, stimulus_id: str) -> Any:
            event = await stock(key, stimulus_id=stimulus_id)
            ts = tasks.get(key)
            if ts is not None and ts.state == "resumed" and ts.next == "fetch" and self._active:
                self.discarded += 1
                return RescheduleEvent(key=key, stimulus_id=stimulus_id)
            return event

        return execute

    def statistics(self) -> dict[str, int]:
        return {"discarded": self.discarded}
