"""One shuffle on one worker: split inputs, send, receive into the store, assemble outputs.

Theory of operation. Restarts, barrier, pinning of outputs and the budget for unsent bytes are inherited from
distributed's run; the row path is ours::

    task thread   _shard_partition    split + make parcels (no copy after the gather)
    event loop    _write_to_comm      our own shard straight into the store; others, small ones staged until they are
                                      worth a message (inside the send budget, by groups of neighbouring outputs), to
                                      distributed's send buffer
    event loop    send                one message of several parcels per peer, by the worker's `transport.Plane`;
                                      acknowledged when the peer has stored it
    any thread    unpack              checksums and views of a message that a transport brought
    event loop    accept, receive     `ShardStore.put`: its waiting is the brake, since the receive budget is only given
                                      back when a message is stored
    task thread   _get_output_partition   `ShardStore.take`, assemble

One concept a file: `splitter`, `sender`, `receiver`, `output_builder`; `amendment` is what is done when a worker is
lost.

Invariants
- The run id is in every message and in the store's key, so nothing of an old run is used; the worker plugin refuses
  stale run ids before we see them.
- `close` drops the run in the store first: whoever waits in `put` wakes up, and memory goes before the last resend
  ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import TYPE_CHECKING, Any

from dask_gpurt.memory.malloc import heap
from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.protocol import messages
from dask_gpurt.shuffle.protocol.recovery import State
from dask_gpurt.shuffle.worker.output_builder import OutputsRun
from dask_gpurt.shuffle.worker.receiver import submit
from dask_gpurt.shuffle.worker.send_log import Budget
from dask_gpurt.shuffle.worker.splitter import SplittingRun

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

#: what other workers ask, see `transport.plane.Plane.answer`
PEER_KINDS = ("open", "want")


class GpurtShuffleRun(SplittingRun, OutputsRun):
    """A dataframe shuffle on one worker.

    Parameters
    ----------
    secret
        What proves to others that a worker takes part in this run.
    memory_limit
        The worker's, bytes; None: it has none.
    state
        Workers lost in this run so far; None: none.
    retained
        For shards that were sent, of all runs of this worker; None: none are retained.
    kwargs
        `store`, `counters`, `plane` (see the parts), and those of distributed's `DataFrameShuffleRun`, `disk` excepted.
    """

    def __init__(
        self,
        *,
        secret: bytes,
        memory_limit: int | None = None,
        state: State | None = None,
        retained: Budget | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(state=state or State(), budget=retained or Budget(0), disk=False, **kwargs)
        self._plane.join(self, self._run_key, secret)
        self._counters.add(runs=1)
        heap.keep(memory_limit)

    async def receive(self, data: Any) -> Any:
        try:
            if not isinstance(data, dict):
                return await self._receive_message(data)
            if data.get(messages.KIND) in PEER_KINDS:
                self.raise_if_closed()
                return await self._plane.answer(self._run_key, data)
            message = messages.parse(data)
            return (await _ANSWERS[type(message)](self, message)).to_dict()
        except seam.P2PConsistencyError as e:
            return seam.error_message(e)

    async def count(self, asked: messages.AskHistogram) -> messages.HistogramAnswer:
        """The rows of outputs, of the inputs that were split here."""
        return self._histogram.answer(self._rate.best)

    async def close(self) -> None:
        if self.closed:
            await super().close()
            return
        self._counters.add(runs_closed=1)
        self._plane.leave(self, self._run_key)
        staged, self._staged = self._staged, {}
        await self._comm_buffer.memory_limiter.decrease(sum(batch.nbytes for batch in staged.values()))
        self._few.clear()
        self._store.drop(self._key)
        with contextlib.ExitStack() as stack:
            # A put that began before the drop and ends after it must not leave rows behind.
            # Not by way of this run, which would stay as long as the memory does.
            in_thread = functools.partial(submit, self.executor)
            stack.callback(heap.release, asyncio.get_running_loop().call_later, in_thread)
            stack.callback(self._store.drop, self._key)
            await super().close()


#: how a run answers the scheduler, by message
_ANSWERS: dict[type, Callable[[GpurtShuffleRun, Any], Awaitable[messages.Ok]]] = {
    messages.Amend: GpurtShuffleRun.amend,
    messages.Valid: GpurtShuffleRun.valid,
    messages.Reopen: GpurtShuffleRun.reopen,
    messages.Complete: GpurtShuffleRun.complete,
    messages.AskHistogram: GpurtShuffleRun.count,
}
