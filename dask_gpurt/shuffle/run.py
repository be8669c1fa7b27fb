"""One shuffle on one worker: split inputs, send, receive into the store, assemble outputs.

Theory of operation. Restarts, barrier, pinning of outputs and the budget for unsent bytes are inherited from
distributed's run; the row path is ours::

    task thread   _shard_partition    split + make parcels (no copy after the gather)
    event loop    _write_to_comm      our own shard straight into the store; others, small ones staged until they are
                                      worth a message, to distributed's send buffer
    event loop    send                one message of several parcels per peer; acknowledged when the peer has stored it
    event loop    receive             checksums (in a thread when large), then `ShardStore.put`: its waiting is the
                                      brake, since the sender's budget is only given back by the acknowledgement
    task thread   _get_output_partition   `ShardStore.take`, assemble

Invariants
- A shard (one input for one worker) travels in one message, whole. `_arrivals` has its input id from the moment it
  came; a second copy (a resend after a lost acknowledgement, a transfer task that ran twice) waits for the first and is
  dropped. Race: (1) a message waits in `put`; (2) its comm breaks, the sender resends; (3) were the copy acknowledged
  at once, the barrier could pass and an output be assembled before (1) is stored.
- The run id is in every message and in the store's key, so nothing of an old run is used; the worker plugin refuses
  stale run ids before we see them.
- `take` removes. A frame merged with itself is one shuffle whose outputs are asked for twice by one task: the second
  time it gets the first frame again, found by a weak reference, within the same execution only (a retry must not see
  what the failed one changed). Any other output asked for again (its task failed after the take and is retried) can not
  be served, and an empty answer would be silently wrong: the whole shuffle is restarted, by the way upstream restarts
  an inconsistent one. Shards lost on a tier do the same. Both at most `RESTARTS` times per shuffle on one worker.
- `close` drops the run in the store first: whoever waits in `put` wakes up, and memory goes before the last resend
  ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import time
import traceback
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import pandas as pd

from dask_gpurt.errors import LostData, WireError
from dask_gpurt.model.slots import NETWORK, UNSPILL, waiting
from dask_gpurt.shuffle import seam, wire
from dask_gpurt.shuffle.assemble import Assembler
from dask_gpurt.shuffle.chunk import ReceivedChunk
from dask_gpurt.shuffle.partition import Layout, Shard, split

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import pyarrow as pa

    from dask_gpurt.model import ShardStore
    from dask_gpurt.shuffle.stores import Counters
    from dask_gpurt.shuffle.wire import Parcel

#: messages of this many bytes or more are checked in a thread
OFFLOAD_BYTES = 1 << 18
#: small parcels for one peer wait for each other until they are this many bytes, or until all inputs are split
STAGE_BYTES = 1 << 19
#: times a message is sent again after the peer refused it (checksum, schema not known there)
RESENDS = 3
#: restarts of one shuffle asked for by this worker; then the error is the user's
RESTARTS = 5


class Message:
    """The frames of one message, to be sent as they are: not pickled, not compressed, not split."""

    def __init__(self, frames: Sequence[Any]) -> None:
        self.frames = list(frames)
        self.nbytes = sum(memoryview(f).nbytes for f in self.frames)


@seam.dask_serialize.register(Message)  # type: ignore[untyped-decorator]
def _message_to_frames(message: Message) -> tuple[dict[str, Any], list[Any]]:
    return {}, message.frames


@seam.dask_deserialize.register(Message)  # type: ignore[untyped-decorator]
def _message_from_frames(header: dict[str, Any], frames: list[Any]) -> Message:
    return Message(frames)


def _as_is(message: Message) -> Any:
    """The message in the form that distributed's comm sends without compressing or splitting its frames."""
    return seam.Serialized(*seam.serialize(message, serializers=("dask",), on_error="raise"))


class Batch:
    """Parcels for one peer that wait together in distributed's send buffer."""

    def __init__(self) -> None:
        self.parcels: list[Parcel] = []
        self.nbytes = 0

    def append(self, parcel: Parcel) -> None:
        self.parcels.append(parcel)
        self.nbytes += sys.getsizeof(parcel)

    def __sizeof__(self) -> int:  # what the send buffer charges its limiter with
        return self.nbytes


class GpurtShuffleRun(seam.DataFrameShuffleRun):
    """A dataframe shuffle on one worker.

    Parameters
    ----------
    store
        Where received shards wait for their outputs.
    counters
        What this worker's runs count.
    kwargs
        Those of distributed's `DataFrameShuffleRun`, `disk` excepted.
    """

    def __init__(self, *, store: ShardStore, counters: Counters, **kwargs: Any) -> None:
        super().__init__(disk=False, **kwargs)
        self._store = store
        self._counters = counters
        self._layout = Layout(kwargs["worker_for"])
        self._assemble = Assembler(self.meta.drop(columns=self.column) if self.drop_column else self.meta)
        self._tag = wire.run_tag(self.id)
        self._key: Hashable = (self.id, self.run_id)
        #: input id -> None once stored here, else what to wait for
        self._arrivals: dict[int, asyncio.Future[None] | None] = {}
        #: schemas received, by key
        self._schemas: dict[int, pa.Schema] = {}
        #: peer -> keys of the schemas it acknowledged
        self._known: dict[str, set[int]] = {}
        #: peer -> parcels that wait for more
        self._staged: dict[str, Batch] = {}
        #: outputs handed out
        self._taken: set[int] = set()
        #: output -> (weak reference to the frame it was given as, the execution that got it)
        self._given: dict[int, tuple[weakref.ref[pd.DataFrame], Any]] = {}
        self._sequence = 0
        counters.add(runs=1)

    # ---- task threads

    def _shard_partition(self, data: pd.DataFrame, partition_id: int, **kwargs: Any) -> dict[str, Any]:
        if not isinstance(data, pd.DataFrame):
            raise TypeError(
                f"input partition {partition_id} of shuffle {self.id} is a {type(data).__module__}."
                f"{type(data).__name__}, its meta is a pandas.DataFrame. Remedy: make partitions and meta agree"
            )
        start = time.perf_counter()
        shards = dict(split(data, self.column, self.drop_column, partition_id, self._layout))
        middle = time.perf_counter()
        out: dict[str, Any] = {}
        schema = None
        nbytes = 0
        for address, shard in shards.items():
            if address == self.local_address:
                out[address] = shard
                continue
            schema = schema or wire.schema_bytes(shard.table.schema)
            out[address] = parcel = wire.encode(shard, schema)
            nbytes += parcel.nbytes
        self._counters.add(inputs=1, seconds_partition=middle - start, seconds_encode=time.perf_counter() - middle)
        seam.context_meter.digest_metric("p2p-shards", nbytes, "bytes")
        seam.context_meter.digest_metric("p2p-shards", len(out), "count")
        return out

    def _get_output_partition(self, partition_id: int, key: Any, **kwargs: Any) -> pd.DataFrame:
        here = seam.execution()
        frame, execution = self._given.get(partition_id, (None, None))
        if frame is not None and here is not None and execution == here and (df := frame()) is not None:
            return df.copy()
        try:
            with waiting(UNSPILL):
                first, taken = seam.sync(self._loop, self._take, partition_id)
        except LostData as e:
            self._restart(f"output {partition_id} was lost: {e}", e)
        if not first:
            self._restart(f"output {partition_id} was asked for again")
        start = time.perf_counter()
        df = self._assemble(piece for pieces in taken for piece in pieces)
        self._given[partition_id] = (weakref.ref(df), here)
        self._counters.add(outputs=1, seconds_assemble=time.perf_counter() - start)
        return df

    def _restart(self, why: str, cause: BaseException | None = None) -> NoReturn:
        """Have the scheduler start this shuffle anew (run id + 1), and this task again."""
        self._counters.last_error = f"{self}: {why}"
        if self._counters.restarted(self.id) > RESTARTS:
            raise RuntimeError(f"{self} was restarted {RESTARTS} times by this worker: {why}") from cause
        self._counters.add(restarts=1)
        seam.sync(self._loop, self._ask_for_restart)
        raise seam.Reschedule

    # ---- event loop

    async def _ask_for_restart(self) -> None:
        try:
            await self.scheduler.shuffle_barrier(id=self.id, run_id=self.run_id, consistent=False)
        except Exception as e:
            # The scheduler knows no such run: it was restarted or forgotten meanwhile, and the message that closes it
            # here is under way. Then running the task again is right too.
            self._counters.last_error = f"{self}: {e!r}"

    async def _take(self, part: int) -> tuple[bool, list[Any]]:
        self.raise_if_closed()
        if part in self._taken:
            return False, []
        self._taken.add(part)
        return True, await self._store.take(self._key, part)

    async def _write_to_comm(self, data: dict[str, Any]) -> None:
        self.raise_if_closed()
        own = data.pop(self.local_address, None)
        full = {}
        for address, parcel in data.items():
            batch = self._staged.setdefault(address, Batch())
            batch.append(parcel)
            if batch.nbytes >= STAGE_BYTES:
                full[address] = self._staged.pop(address)
        if full:
            with waiting(NETWORK):  # until the budget for unsent bytes has room
                await super()._write_to_comm(full)
        if own is not None:
            chunk_bytes = own.table.get_total_buffer_size()
            self._counters.add(bytes_self=chunk_bytes)
            await self._keep([own], chunk_bytes)

    async def _flush_comm(self) -> None:
        self.raise_if_closed()
        staged, self._staged = self._staged, {}
        if staged:
            await super()._write_to_comm(staged)
        await super()._flush_comm()

    async def _send(self, address: str, shards: Any) -> Any:
        self.raise_if_closed()
        return await self.rpc(address).shuffle_receive(data=shards, shuffle_id=self.id, run_id=self.run_id)

    async def send(self, address: str, shards: list[Batch]) -> Any:
        parcels = [parcel for batch in shards for parcel in batch.parcels]
        known = self._known.setdefault(address, set())
        start = time.perf_counter()
        for _ in range(1 + RESENDS):
            self._sequence += 1
            frames = wire.pack(self._tag, self.run_id, self._sequence, parcels, known)
            message = Message(frames)
            response = await seam.retry(
                functools.partial(self._send, address, _as_is(message)),
                count=self.RETRY_COUNT,
                delay_min=self.RETRY_DELAY_MIN,
                delay_max=self.RETRY_DELAY_MAX,
                operation=f"P2P send to {address}",
            )
            refused = response.get("gpurt-refused")
            self._counters.add(messages_sent=1, bytes_sent=message.nbytes)
            if refused is None:
                break
            known.clear()
        else:
            raise WireError(
                f"{address} refused a message of {self} {RESENDS + 1} times: {refused}. Remedy: check that all workers "
                "run the same dask-gpurt, and the network for corruption"
            )
        if response["status"] == "OK":
            known.update(p.schema_key for p in parcels if p.schema)
            self._counters.add(shards_sent=len(parcels))
        self._counters.add(seconds_send=time.perf_counter() - start)
        return response

    async def receive(self, data: Any) -> Any:
        try:
            return await self._receive_message(data)
        except seam.P2PConsistencyError as e:
            return seam.error_message(e)

    async def _receive_message(self, message: Message) -> dict[str, Any]:
        self.raise_if_closed()
        if not isinstance(message, Message):
            raise TypeError(
                f"{self} received a {type(message).__name__}, must be a Message. Remedy: run one version of dask-gpurt "
                "on all workers"
            )
        self._counters.add(messages_received=1, bytes_received=message.nbytes)
        arguments = (message.frames, self._tag, self.run_id, self._schemas)
        try:
            if message.nbytes < OFFLOAD_BYTES:
                shards = wire.unpack(*arguments)
            else:
                shards = await self.offload(wire.unpack, *arguments)
        except WireError as e:
            self._counters.add(refused=1)
            self._counters.last_error = traceback.format_exc()
            return {"status": "OK", "gpurt-refused": str(e)}
        self.total_recvd += message.nbytes
        await self._keep(shards, message.nbytes)
        return {"status": "OK"}

    async def _keep(self, shards: list[Shard], nbytes: int) -> None:
        """Store shards that are new; return when every one of them, and every earlier copy of it, is stored."""
        fresh = [s for s in shards if s.input_id not in self._arrivals]
        earlier = {f for s in shards if (f := self._arrivals.get(s.input_id)) is not None}
        if duplicates := len(shards) - len(fresh):
            self._counters.add(duplicates=duplicates)
        if fresh:
            await self._put(fresh, nbytes if len(fresh) == len(shards) else None)
        for future in earlier:
            await asyncio.shield(future)

    async def _put(self, shards: list[Shard], nbytes: int | None) -> None:
        chunk = ReceivedChunk(shards, nbytes)
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for s in shards:
            self._arrivals[s.input_id] = stored
        start = time.perf_counter()
        try:
            kept = await self._store.put(self._key, chunk.chunk_id, chunk)
            if not kept:
                # Ids are new by `_arrivals`, so the run was dropped.
                self.raise_if_closed()
                raise seam.ShuffleClosedError(f"{self} was dropped by its store")
        except BaseException as e:
            for s in shards:
                self._arrivals.pop(s.input_id, None)
            stored.set_exception(e if isinstance(e, Exception) else seam.ShuffleClosedError(repr(e)))
            stored.exception()  # retrieved: nobody need wait for it
            if isinstance(e, Exception) and not self.closed:
                self._exception = e
            raise
        for s in shards:
            self._arrivals[s.input_id] = None
            self.received.add(s.input_id)
        stored.set_result(None)
        self._counters.add(chunks=1, seconds_put=time.perf_counter() - start)

    async def close(self) -> None:
        if self.closed:
            await super().close()
            return
        self._counters.add(runs_closed=1)
        self._staged.clear()
        self._store.drop(self._key)
        with contextlib.ExitStack() as stack:
            # A put that began before the drop and ends after it must not leave rows behind.
            stack.callback(self._store.drop, self._key)
            await super().close()
