"""What a run does when another worker is lost: the acting part of `recovery`, on a worker.

Theory of operation. The scheduler asks in two steps, by distributed's comms (`AmendedRun.amend`):

1. ``amend``: new owners of the lost outputs. The layout changes, what the lost worker was sent is sent again to the new
   owners, in the background; inputs whose split is under way are split again. The answer says which inputs this worker
   vouches for.
2. ``valid``: which attempts count. Between the steps no input is sent: whether an input counts already, by an attempt
   of another worker, is only known then.

Outputs that are bound late (`rebalance_plan`) are told by the same two steps: the old owner hands them over in the
background, too (`_hand_over`).

After the barrier there is a third, ``complete``: what was opened may be made. Until then its tasks are sent back to the
scheduler, which has them wait. This worker's other outputs are made all the while.

What is retained stays until the run is over, within its budget; a worker at its memory limit gets it back
(`model.spare`), and then a loss costs more.

Sends to a lost worker end at once and well: nobody waits for them, and what they held is sent again.

All methods on the event loop unless said otherwise. `_layout` and `_attempt` change together with the owners; a split
that began before is found out by its attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import traceback
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_gpurt.memory import reclaim
from dask_gpurt.memory.malloc import heap
from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.protocol.recovery import CUTS, Counting, Validity, shard_id
from dask_gpurt.shuffle.rows import wire
from dask_gpurt.shuffle.rows.message_cut import cut
from dask_gpurt.shuffle.rows.partition import OutputLayout, Shard, by_owner, separate
from dask_gpurt.shuffle.rows.slices import Slice
from dask_gpurt.shuffle.worker.send_log import Ledger

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from dask_gpurt.shuffle.protocol.recovery import State
    from dask_gpurt.shuffle.rows.slices import Piece
    from dask_gpurt.shuffle.worker.send_log import Budget
    from dask_gpurt.shuffle.worker.shard_stores import Counters

#: what the scheduler answers a barrier task that has to wait for transfer tasks; and what stands for a worker's address
#: when the task of an output asks for what was handed out before
AGAIN = "again"
#: a send that failed waits so long for the news that its peer is gone
NEWS_SECONDS = 30.0
#: and so long if the error does not look like it. A worker that closes may answer with anything: what it needs for its
#: answer is closed already
ODD_SECONDS = 3.0


#: runs that retain shards
_retaining: weakref.WeakSet[AmendedRun] = weakref.WeakSet()


def _give_back() -> None:
    """A worker is at its memory limit: what is retained goes. Any thread."""
    for run in list(_retaining):
        run._loop.add_callback(run._ledger.settle)


reclaim.register(_give_back)


class Outgoing(dict[str, Any]):
    """What one input became: worker address -> parcels (own: shards), and whose it is."""

    partition: int = -1
    key: Any = None
    attempt: int = 0
    #: (address, shard) of all other workers, and shards of this one, to retain
    sent: list[tuple[str, Shard]]
    own: list[Shard]


class AmendedRun(seam.DataFrameShuffleRun):
    """A run that outlives workers; see `run.GpurtShuffleRun`, the only subclass.

    Parameters
    ----------
    state
        Amendments so far.
    budget
        For shards kept to be sent again.
    counters
        What this worker's runs count.
    """

    _cut_bytes: int
    _comm_buffer: Any

    def __init__(self, *, state: State, budget: Budget, counters: Counters, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._counters = counters
        self._layout = OutputLayout(kwargs["worker_for"])
        #: as inherited, but a dict: a look into a pandas series costs more than the rest of finding an output
        self._worker_for: dict[int, str] = dict(kwargs["worker_for"])
        self._ledger: Ledger[Shard] = Ledger(budget, separate)
        self._ledger.epoch = state.epoch
        self._ledger.lost |= set(state.lost)
        self._counting = Counting(state.opened, state.validity, dict(state.bound))
        if state.opened is not None:
            self._layout = self._opened_layout(state.opened)
        _retaining.add(self)
        #: set while it is known which attempts count
        self._settled = asyncio.Event()
        if not state.epoch or (state.validity is not None and state.validity.epoch == state.epoch):
            self._settled.set()
        self._resending: set[asyncio.Task[None]] = set()
        #: send buffers that were closed by a flush before an amendment
        self._flushed: list[Any] = []
        #: peer -> done when it is lost
        self._losses: dict[str, asyncio.Future[None]] = {}

    # ---- splitting

    async def _may_send(self, data: Outgoing) -> bool:
        """Enter an input in the ledger before it is sent; False when it counts already.

        Raises
        ------
        ShuffleClosedError
            It was split for owners that have changed: the task has to run again.
        """
        while not self._settled.is_set():
            await self._settled.wait()
            self.raise_if_closed()
        if data.attempt != self._ledger.epoch:
            raise seam.ShuffleClosedError(f"{self} was amended while input {data.partition} was split")
        validity = self._counting.validity
        if validity is not None and data.partition in validity.attempts:
            return False
        nbytes = sum(shard.nbytes for _, shard in data.sent)
        own_nbytes = sum(shard.nbytes for shard in data.own)
        self._ledger.ran(data.partition, data.key, data.attempt, data.sent, nbytes, data.own, own_nbytes)
        return True

    def _check_sent(self, data: Outgoing) -> None:
        """An amendment may have forgotten the input while it was sent; then its task must not end well."""
        if not self._ledger.vouches(data.partition, data.attempt):
            raise seam.ShuffleClosedError(f"{self} was amended while input {data.partition} was sent")

    # ---- sending

    async def _unless_lost(self, address: str, sending: Any) -> Any:
        """Await a send; one to a worker that is lost, or turns out to be, counts as done."""
        if address in self._ledger.lost:
            sending.close()
            return {"status": "OK"}
        lost = self._losses.get(address)
        if lost is None:
            lost = self._losses[address] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(sending)
        # Not cancelled when the peer is lost: a transport may be in the middle of it. Its retries see the loss.
        await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            task.add_done_callback(lambda t: t.cancelled() or t.exception())
            return {"status": "OK"}
        error = task.exception()
        if (error is not None or task.result()["status"] == "error") and not self.closed:
            leaving = isinstance(error, (OSError, seam.ShuffleClosedError, seam.P2PConsistencyError)) or error is None
            # Whether a peer is gone is the scheduler's to say.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(lost), NEWS_SECONDS if leaving else ODD_SECONDS)
                return {"status": "OK"}
        return task.result()

    # ---- amendments

    async def amend(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer the scheduler; see the head of this file."""
        self.raise_if_closed()
        epoch = int(question["epoch"])
        if question["gpurt"] == "valid":
            if epoch == self._ledger.epoch:
                self._counting.validity = Validity(epoch, dict(question["attempts"]))
                self._settled.set()
            return {"status": "OK"}
        if question["gpurt"] == "reopen":
            if epoch == self._ledger.epoch:
                self._reopen()
            return {"status": "OK"}
        if question["gpurt"] == "complete":
            if epoch == self._ledger.epoch:
                self._counting.complete()
            return {"status": "OK"}
        if epoch > self._ledger.epoch:
            self._settled.clear()
            opened = None if question["opened"] is None else frozenset(question["opened"])
            self._counting.amend(opened, [p for p, owner in self._worker_for.items() if owner == self.local_address])
            before, handing = self._counting.bound, dict(question["handing"])
            self._counting.bound = dict(question["bound"])
            fresh = {part for part, since in self._counting.bound.items() if since > before.get(part, 0)}
            moved = dict(question["moved"])
            giving = self._rebound([part for part in handing if part in fresh], handing, moved)
            void = fresh - set(handing)
            # Where this worker has their rows: told of a move only when it was void, under the old owner.
            owners = {self._worker_for[part] for part in void}
            self._void(void)
            self._worker_for.update(moved)
            self._layout = OutputLayout(self._worker_for) if opened is None else self._opened_layout(opened)
            for address in set(question["lost"]) - self._ledger.lost:
                # Else what is on its way there would connect for as long as Dask does, and its rows stay in memory.
                self.rpc.remove(address)
            again = self._ledger.amend(epoch, question["lost"], void, owners, self.local_address in owners)
            for address in self._ledger.lost:
                if (lost := self._losses.get(address)) is not None and not lost.done():
                    lost.set_result(None)
            self._reopen()
            self._counters.add(amendments=1, shards_resent=len(again))
            if again:
                self._resending.add(asyncio.create_task(self._resend(epoch, self._reroute(again))))
            if giving:
                self._resending.add(asyncio.create_task(self._hand_over(epoch, giving)))
        return {"status": "OK", "epoch": self._ledger.epoch, "vouched": self._ledger.vouched()}

    def _rebound(self, parts: list[int], handing: dict[int, str], moved: dict[int, str]) -> list[tuple[int, int]]:
        """Enter outputs that are bound late; returns (output, its place among the moves) of those to hand over."""
        places = {part: place for place, part in enumerate(handing)}
        groups: dict[tuple[str, str], list[int]] = {}
        for part in parts:
            groups.setdefault((handing[part], moved[part]), []).append(part)
        for (source, target), some in groups.items():
            self._ledger.bound(some, source, target, own=source == self.local_address)
        return [(part, places[part]) for part in parts if handing[part] == self.local_address]

    def _void(self, parts: Collection[int]) -> None:
        """Rows that came for these outputs until now count no more."""
        raise NotImplementedError

    async def _hand_over(self, epoch: int, giving: list[tuple[int, int]]) -> None:
        """Give the new owners the rows of outputs that this worker had; see `handover`."""
        raise NotImplementedError

    def _opened_layout(self, opened: frozenset[int]) -> OutputLayout:
        """Inputs are split for what is open only; the other outputs have their rows."""
        return OutputLayout({part: self._worker_for[part] for part in sorted(opened)})

    def _reopen(self) -> None:
        """Take inputs again, should a flush have closed the send buffer."""
        self.transferred = False
        old = self._comm_buffer
        if not old._accepts_input:
            self._flushed.append(old)
            with seam.context_meter.clear_callbacks(), self._capture_metrics("background-comms"):
                self._comm_buffer = seam.CommShardsBuffer(
                    send=self.send,
                    max_message_size=old.max_message_size,
                    memory_limiter=old.memory_limiter,
                    concurrency_limit=old.concurrency_limit,
                )

    def _reroute(self, again: Iterable[tuple[int, int, Shard]]) -> list[tuple[int, int, str, Shard]]:
        """(partition, attempt, address, shard): shards of lost workers by their outputs' owners; views.

        An output that was not opened still belongs to the lost one. Its rows are not sent but stay retained.
        """
        out: list[tuple[int, int, str, Shard]] = []
        for partition, attempt, shard in again:
            for address, piece in by_owner(shard, lambda part: self._worker_for[part]):
                if address not in self._ledger.lost:
                    out.append((partition, attempt, address, piece))
                self._ledger.rerouted(partition, address, piece, own=address == self.local_address)
        return out

    async def _resend(self, epoch: int, routed: list[tuple[int, int, str, Shard]]) -> None:
        counts: dict[tuple[int, str], int] = {}
        try:
            for partition, attempt, address, shard in routed:
                if address in self._ledger.lost:
                    continue  # lost since; sent again by the amendment that said so
                k = counts.get((partition, address), 0)
                pieces = await self.offload(self._pieces, shard, address, shard_id(partition, attempt, epoch), k)
                counts[partition, address] = k + len(pieces)
                data = Outgoing()
                data[address] = pieces
                await self._stage(data)
        except Exception as e:
            # Without these rows the outputs of the new owners are wrong; the barrier tells it.
            if not self.closed:
                self._exception = e

    def _pieces(self, shard: Shard, address: str, first_id: int, k: int) -> list[Any]:
        """In memory of its own, cut and encoded for a peer; any thread."""
        import pyarrow as pa
        import pyarrow.compute as pc

        rows = pa.array(np.arange(shard.table.num_rows))
        shard = dataclasses.replace(
            shard,
            input_id=first_id + k,
            table=pc.take(shard.table, rows, boundscheck=False, memory_pool=heap.pool),
        )
        if address == self.local_address:
            return [shard]
        schema = wire.schema_bytes(shard.table.schema)
        pieces = cut(shard, self._cut_bytes)
        if k + len(pieces) > CUTS:
            raise OverflowError(f"an input of {self} is more than {CUTS} messages for {address}")
        return [
            wire.encode(dataclasses.replace(piece, input_id=first_id + k + i), schema) for i, piece in enumerate(pieces)
        ]

    async def _stage(self, data: Outgoing) -> None:
        raise NotImplementedError

    async def barrier(self, run_ids: Sequence[int]) -> int:
        self.raise_if_closed()
        consistent = all(run_id == self.run_id for run_id in run_ids)
        answer = await self.scheduler.shuffle_barrier(id=self.id, run_id=self.run_id, consistent=consistent)
        if answer == AGAIN:
            raise seam.Reschedule
        return self.run_id

    async def inputs_done(self) -> None:
        epoch = self._ledger.epoch
        while self._resending:
            await asyncio.gather(*self._resending)
            self._resending = {task for task in self._resending if not task.done()}
            if self._ledger.epoch != epoch:
                return  # asked before a worker was lost: inputs are taken again, and who asked will ask once more
        if self._exception is not None:
            raise self._exception
        await super().inputs_done()
        for buffer in self._flushed:
            await buffer.flush()
            buffer.raise_on_exception()

    # ---- outputs

    def _counted(self, part: int, pieces: list[Piece]) -> list[Piece]:
        """An output's pieces of attempts that count."""
        validity = self._counting.of(part)
        if validity is None:
            return pieces
        out: list[Piece] = []
        for input_id, rows in pieces:
            inputs = rows.inputs
            if inputs is None:
                if validity.valid(input_id):
                    out.append((input_id, rows))
                continue
            some, inverse = np.unique(inputs, return_inverse=True)
            keep = np.array([validity.valid(int(i)) for i in some])[inverse]
            if keep.all():
                out.append((input_id, rows))
            elif keep.any():
                out.append((int(inputs[keep].min()), Slice.whole(rows.table().filter(keep), None, inputs[keep])))
        return out

    async def close(self) -> None:
        for task in self._resending:
            task.cancel()
        self._settled.set()
        for lost in self._losses.values():
            if not lost.done():
                lost.set_result(None)
        if not self.closed:
            for buffer in self._flushed:
                try:
                    await buffer.close()
                except Exception:
                    self._counters.add(close_errors=1)
                    self._counters.last_error = traceback.format_exc()
            _retaining.discard(self)
            self._ledger.settle()
        await super().close()
