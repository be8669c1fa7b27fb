"""`Fetches`: on a worker, a fetch from a worker that has left fails at once, not after the time to connect.

The race. One batch of messages from the scheduler brings a task with an input on a peer, and then the news that the
peer was removed. Both are handled in one turn of the loop. The fetch that the first message has begun runs only after
it, when the connections to the peer have been cut. It connects anew, and Dask repeats that for
``distributed.comm.timeouts.connect`` (30 s), though every attempt is refused.

It costs more than the fetch. Meanwhile the scheduler has the input computed again, perhaps here; but a key that is
being fetched is *resumed* only when its fetch has ended. So the task and all that depends on it wait the 30 s. The
tiers can hold a fetch back as well, for memory.

A fetch therefore looks first. Every peer that a key can be fetched from is in ``has_what``, and a peer that was
removed is not. The event then is the one that a refused connection ends in.

Rejected: a shorter time to connect. It is the user's, and right for a peer that is busy.

Taken over: ``worker.gather_dep``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from distributed.worker_state_machine import GatherDepNetworkFailureEvent

from dask_gpurt.extension import seam
from dask_gpurt.model.wrapped import Wrapped

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Worker


class Fetches(Wrapped):
    """The wrapper of one worker."""

    def __init__(self, worker: Worker) -> None:
        seam.check_fetches(worker)
        self._worker = worker
        #: fetches that were not begun
        self.spared = 0
        super().__init__(worker, "gather_dep")

    def _wrap(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        has_what = self._worker.state.has_what

        async def gather_dep(worker: str, to_gather: Any, total_nbytes: int, *, stimulus_id: str) -> Any:
            if self._active and worker not in has_what:
                self.spared += 1
                return GatherDepNetworkFailureEvent(
                    worker=worker, total_nbytes=total_nbytes, stimulus_id=f"gpurt-peer-left-{time.time()}"
                )
            return await stock(worker, to_gather, total_nbytes, stimulus_id=stimulus_id)

        return gather_dep

    def statistics(self) -> dict[str, int]:
        """Plain JSON values."""
        return {"spared": self.spared}
