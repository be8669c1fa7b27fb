"""One shuffle on one worker: `GpurtShuffleRun`, which distributed's worker plugin makes, and its parts.

Theory of operation. Restarts, the barrier, the pinning of outputs and the budget for unsent bytes are inherited from
distributed's run. The path of a row is made of parts that each do one thing::

    task thread   Splitter.split         split, make parcels (no copy after the gather)
    event loop    Amendment.may_send     is this attempt the one that counts?
    event loop    Sender.stage           own shards to the receiver; small ones of others wait until they are worth a
                                         message, then distributed's send buffer takes them (within its budget)
    event loop    Sender.send            one message of several parcels, by the worker's `transport.plane.Plane`;
                                         acknowledged when the peer has stored it
    any thread    Receiver.unpack        checksums and views of a message
    event loop    Receiver.accept        into the store; its waiting is the brake, as the receive budget is given back
                                         only when a message is stored
    task thread   OutputBuilder.build    out of the store, assemble

When a worker is lost, or outputs change hands, `Amendment` has `Resender` and `Handover` send rows again. `Owners`,
`Counting` and `SendLog` are what the parts know in common: who owns which output, which attempts count, and what was
sent. Parts know each other only through what their constructors take; none knows the run but as a `RunHost`.

Invariants
- The run id is in every message and in the store's key, so nothing of an old run is used. distributed's worker plugin
  refuses stale run ids before they come here.
- `close` drops the run in the store first: what waits in `put` wakes up, and memory goes before the last resend ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from typing import TYPE_CHECKING, Any

from dask_gpurt.memory.malloc import heap
from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.protocol import messages
from dask_gpurt.shuffle.protocol.recovery import Counting, State
from dask_gpurt.shuffle.rows import wire
from dask_gpurt.shuffle.rows.partition import Shard, separate
from dask_gpurt.shuffle.transport.link.records import RunKey
from dask_gpurt.shuffle.transport.plane import QUESTIONS
from dask_gpurt.shuffle.worker import retained
from dask_gpurt.shuffle.worker.amendment import Amendment
from dask_gpurt.shuffle.worker.flushed_buffers import FlushedBuffers
from dask_gpurt.shuffle.worker.handover import Handover
from dask_gpurt.shuffle.worker.host import submit
from dask_gpurt.shuffle.worker.join_filter import JoinRows
from dask_gpurt.shuffle.worker.output_builder import OutputBuilder
from dask_gpurt.shuffle.worker.owners import Owners
from dask_gpurt.shuffle.worker.peer_calls import NEWS_SECONDS, PeerCalls
from dask_gpurt.shuffle.worker.phases import phase
from dask_gpurt.shuffle.worker.receiver import Receiver
from dask_gpurt.shuffle.worker.resend import Resender
from dask_gpurt.shuffle.worker.scheduler_calls import SchedulerCalls
from dask_gpurt.shuffle.worker.send_log import RetainBudget, SendLog
from dask_gpurt.shuffle.worker.sender import Sender
from dask_gpurt.shuffle.worker.splitter import Splitter

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from dask_gpurt.model import ShardStore
    from dask_gpurt.shuffle.counters import ShuffleCounters
    from dask_gpurt.shuffle.protocol.join_plan import JoinSide
    from dask_gpurt.shuffle.rows.kinds import RowKind
    from dask_gpurt.shuffle.transport.plane import Plane
    from dask_gpurt.shuffle.worker.message import Batch, Message, Outgoing

#: between two looks whether a run takes inputs again
REOPEN_SECONDS = 0.02


class GpurtShuffleRun(seam.DataFrameShuffleRun):
    """A dataframe shuffle on one worker.

    Parameters
    ----------
    worker_for
        Output -> owner; those of one worker in the order in which it makes them.
    secret
        What proves to others that a worker takes part in this run.
    memory_limit
        Of the worker, bytes; None: it has none.
    kwargs
        Those of distributed's `DataFrameShuffleRun`, `disk` excepted.
    """

    _comm_buffer: seam.CommShardsBuffer

    def __init__(
        self,
        *,
        worker_for: Mapping[int, str],
        rows: RowKind,
        store: ShardStore,
        counters: ShuffleCounters,
        plane: Plane,
        secret: bytes,
        memory_limit: int | None,
        state: State,
        join: JoinSide | None,
        budget: RetainBudget,
        **kwargs: Any,
    ) -> None:
        super().__init__(worker_for=worker_for, disk=False, **kwargs)
        self._counters, self._plane, self._rows = counters, plane, rows
        self._key = RunKey(wire.run_tag(self.id), self.run_id)
        self._join = JoinRows(join, self.meta, counters)
        self._make_parts(worker_for, store, state, budget)
        #: set before `closed` is, which inherited `close` sets last
        self._closing = False
        retained.begin(self._log, self._loop)
        plane.join(self._receiver, self._key, secret)
        counters.add(runs=1)
        heap.keep(memory_limit)

    def _make_parts(self, worker_for: Mapping[int, str], store: ShardStore, state: State, budget: RetainBudget) -> None:
        key, plane, rows, counters = self._key, self._plane, self._rows, self._counters
        self._owners = owners = Owners(self.local_address, worker_for, state.opened)
        self._counting = counting = Counting(state.opened, state.validity, dict(state.bound))
        self._log: SendLog[Shard] = SendLog(budget, separate, state.epoch, state.lost)
        self._peers = PeerCalls(self, self._log.lost, functools.partial(plane.forget, key))
        self._scheduler_calls = SchedulerCalls(self.scheduler, self.id, self.run_id, counters)
        self._splitter = Splitter(
            self,
            owners=owners,
            log=self._log,
            column=self.column,
            rows=rows,
            join=self._join,
            direct=lambda addresses: seam.sync(self._loop, self._sender.direct, addresses),
            counters=counters,
        )
        self._receiver = Receiver(
            self,
            key=key,
            store=store,
            rows=rows,
            credit=plane,
            restart=self._scheduler_calls.restart,
            counters=counters,
        )
        self._sender = Sender(
            self,
            key=key,
            plane=plane,
            owners=owners,
            peers=self._peers,
            write=super()._write_to_comm,
            keep=self._receiver.keep,
            counters=counters,
        )
        self._outputs = OutputBuilder(
            self,
            sync=functools.partial(seam.sync, self._loop),
            rows=rows,
            owners=owners,
            counting=counting,
            receiver=self._receiver,
            scheduler=self._scheduler_calls,
            lost=self._log.lost,
            made_all=self._log.idle,
            counters=counters,
        )
        self._flushed = FlushedBuffers(counters)
        self._amendment = self._make_amendment(state)

    def _make_amendment(self, state: State) -> Amendment:
        owners, counting, log, counters = self._owners, self._counting, self._log, self._counters
        resender = Resender(self, owners=owners, log=log, sender=self._sender, rows=self._rows)
        handover = Handover(
            self,
            owners=owners,
            counting=counting,
            receiver=self._receiver,
            resender=resender,
            restart=self._scheduler_calls.restart,
            counters=counters,
        )
        return Amendment(
            self,
            state=state,
            owners=owners,
            counting=counting,
            log=log,
            peers=self._peers,
            resender=resender,
            handover=handover,
            void=self._outputs.void,
            reopen=self._reopen,
            counters=counters,
        )

    # ---- inputs; task threads

    def add_partition(self, data: Any, partition_id: int, **kwargs: Any) -> int:
        """Split an input and send it. As inherited, with a cheaper way to the event loop."""
        with phase(self, "transfer", f"input partition {partition_id}"):
            self.raise_if_closed()
            if self.transferred:
                seam.sync(self._loop, self._takes_inputs)
            self.validate_data(data)
            with self._capture_metrics("foreground"):
                with (
                    seam.context_meter.meter("p2p-shard-partition-noncpu"),
                    seam.context_meter.meter("p2p-shard-partition-cpu", func=seam.thread_time),
                ):
                    shards = self._shard_partition(data, partition_id)
                seam.sync(self._loop, self._write_to_comm, shards)
        return self.run_id

    async def _takes_inputs(self) -> None:
        """Wait for the message that opens the run: what a lost worker had split may run again before it comes.

        Raises
        ------
        RuntimeError
            It does not come within `NEWS_SECONDS`.
        """
        deadline = time.monotonic() + NEWS_SECONDS
        while self.transferred:
            self.raise_if_closed()
            if time.monotonic() > deadline:
                raise RuntimeError(f"Cannot add more partitions to {self}")
            await asyncio.sleep(REOPEN_SECONDS)

    def _shard_partition(self, data: Any, partition_id: int, **kwargs: Any) -> Outgoing:
        return self._splitter.split(data, partition_id)

    # ---- outputs; task threads

    def _get_assigned_worker(self, id: int) -> str:
        return self._owners.worker_for[id]

    def get_output_partition(self, partition_id: int, key: Hashable, **kwargs: Any) -> Any:
        """Make an output. As inherited, without its two round trips to the event loop.

        The first is made only for an output that does not belong here; the second waits for writes to a disk, of which
        this run has none.
        """
        with phase(self, "unpack", f"output partition {partition_id}"):
            self._outputs.check_place(partition_id, key)
            # Opened again, a run takes inputs once more while it makes the outputs that were complete.
            if not self.transferred and self._counting.opened is None:
                raise RuntimeError("`get_output_partition` called before barrier task")
            with (
                self._capture_metrics("foreground"),
                seam.context_meter.meter("p2p-get-output-noncpu"),
                seam.context_meter.meter("p2p-get-output-cpu", func=seam.thread_time),
            ):
                return self._get_output_partition(partition_id, key, **kwargs)

    def _get_output_partition(self, partition_id: int, key: Hashable, **kwargs: Any) -> Any:
        return self._outputs.build(partition_id, key)

    # ---- event loop

    async def _write_to_comm(self, data: Outgoing) -> None:
        self.raise_if_closed()
        if await self._amendment.may_send(data):
            await self._sender.stage(data.parcels, data.own)
            self._amendment.check_sent(data)

    async def _flush_comm(self) -> None:
        self.raise_if_closed()
        await self._sender.flush()
        # Not set any more: a worker was lost meanwhile, and the run takes inputs again (`_reopen`). The buffer, which
        # was open then and was kept, has to stay open for them; the flush of the new epoch closes it.
        if self.transferred:
            await super()._flush_comm()

    async def send(self, address: str, shards: list[Batch]) -> Any:
        """Send batches to a peer; distributed's send buffer calls it."""
        return await self._sender.send(address, shards)

    def _reopen(self) -> None:
        self.transferred = False
        with seam.context_meter.clear_callbacks(), self._capture_metrics("background-comms"):
            self._comm_buffer = self._flushed.reopened(self._comm_buffer, self.send)

    async def barrier(self, run_ids: Sequence[int]) -> int:
        """Tell the scheduler that all inputs are split, and wait until the barrier has passed."""
        with phase(self, "barrier"):
            self.raise_if_closed()
            await self._scheduler_calls.barrier(all(run_id == self.run_id for run_id in run_ids))
        return self.run_id

    async def inputs_done(self) -> None:
        """Send the rest of what was split, and wait until all is acknowledged."""
        if not await self._amendment.settle():
            return  # asked before a worker was lost: inputs are taken again, and the scheduler asks once more
        if self._exception is not None:
            raise self._exception
        await super().inputs_done()
        await self._flushed.flush()
        if self._closing:
            # What was staged is gone, and sends have ended as if all had arrived: the barrier must not pass on this.
            raise seam.ShuffleClosedError(f"{self} closes")

    async def receive(self, data: Message | dict[str, Any]) -> Any:
        """Answer a peer's message or question, or a message of the scheduler."""
        try:
            if not isinstance(data, dict):
                return await self._receiver.receive(data)
            if data.get(messages.KIND) in QUESTIONS:
                self.raise_if_closed()
                return await self._plane.answer(self._key, data)
            message = messages.parse(data)
            if isinstance(message, messages.AskHistogram):
                return self._splitter.histogram.answer(self._sender.fastest).to_dict()
            if isinstance(message, messages.Flush):
                if message.epoch >= self._log.epoch:
                    await self.inputs_done()
                return messages.Ok().to_dict()
            if type(message) in JoinRows.ANSWERS:
                return (await self._join.answer(message, self.offload)).to_dict()
            return self._amendment.answer(message).to_dict()
        except seam.P2PConsistencyError as e:
            return seam.error_message(e)

    def heartbeat(self) -> dict[str, Any]:
        """Figures of the run, in the form of distributed's."""
        self.total_recvd = self._receiver.received_bytes
        figures: dict[str, Any] = super().heartbeat()
        return figures

    async def close(self) -> None:
        """End the run: drop its rows, end what is under way."""
        if self.closed:
            await super().close()
            return
        self._closing = True
        self._counters.add(runs_closed=1)
        self._plane.leave(self._receiver, self._key)
        self._join.close()
        await self._sender.drop()
        self._receiver.drop()
        with contextlib.ExitStack() as stack:
            # A put that began before the drop and ends after it must not leave rows behind.
            # Not by way of this run, which would stay as long as the memory does.
            in_thread = functools.partial(submit, self.executor)
            stack.callback(heap.release, asyncio.get_running_loop().call_later, in_thread)
            stack.callback(self._receiver.drop)
            self._amendment.close()
            await self._flushed.close()
            retained.end(self._log)
            await super().close()
