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

Invariants
- A shard (one input for one worker, or a cut of it, see `cut`) travels in one message, whole. `_arrivals` has its
  input id from the moment it came; a second copy (a resend after a lost acknowledgement, a transfer task that ran
  twice) waits for the first and is dropped. Race: (1) a message waits in `put`; (2) its comm breaks, the sender
  resends; (3) were the copy acknowledged at once, the barrier could pass and an output be assembled before (1) is
  stored.
- Shards with few rows per output wait in `_few` until they are worth a merge (see `merge`), at most `MERGE_BYTES` of
  them. They are acknowledged before: the first `_take`, which is after the barrier, stores the last of them and waits
  for merges under way, so no output is assembled without them.
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
import dataclasses
import functools
import sys
import time
import traceback
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import pandas as pd

from dask_gpurt.errors import LostData, WireError
from dask_gpurt.model.slots import NETWORK, UNSPILL, waiting
from dask_gpurt.shuffle import merge, seam, wire
from dask_gpurt.shuffle.amended import AmendedRun, Outgoing
from dask_gpurt.shuffle.assemble import Assembler
from dask_gpurt.shuffle.chunk import ReceivedChunk
from dask_gpurt.shuffle.cut import cut
from dask_gpurt.shuffle.heap import heap
from dask_gpurt.shuffle.partition import SHARD_BYTES, Layout, Shard, split
from dask_gpurt.shuffle.recovery import CUTS, Budget, State, shard_id
from dask_gpurt.shuffle.skew import Histogram
from dask_gpurt.shuffle.transport import records

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence
    from concurrent.futures import ThreadPoolExecutor

    import pyarrow as pa

    from dask_gpurt.model import ShardStore
    from dask_gpurt.shuffle.stores import Counters
    from dask_gpurt.shuffle.transport.plane import Plane
    from dask_gpurt.shuffle.wire import Parcel

#: messages of this many bytes or more are checked in a thread
OFFLOAD_BYTES = 1 << 18
#: small parcels for the same outputs of one peer wait for each other until they are this many bytes, or all inputs are
#: split
STAGE_BYTES = 1 << 21
#: groups of outputs in which parcels for all peers wait, about
STAGED_GROUPS = 16
#: shards with few rows per output are merged when they are so many bytes
MERGE_BYTES = 1 << 23
#: times a message is sent again after the peer refused it (checksum, schema not known there)
RESENDS = 3
#: restarts of one shuffle asked for by this worker; then the error is the user's
RESTARTS = 5


class Message:
    """The frames of one message, to be sent as they are: not pickled, not compressed, not split."""

    def __init__(self, frames: Sequence[Any], sender: str = "") -> None:
        self.frames = list(frames)
        #: address of the worker that made it
        self.sender = sender
        self.nbytes = sum(memoryview(f).nbytes for f in self.frames)


@seam.dask_serialize.register(Message)  # type: ignore[untyped-decorator]
def _message_to_frames(message: Message) -> tuple[dict[str, Any], list[Any]]:
    return {"sender": message.sender}, message.frames


@seam.dask_deserialize.register(Message)  # type: ignore[untyped-decorator]
def _message_from_frames(header: dict[str, Any], frames: list[Any]) -> Message:
    return Message(frames, str(header.get("sender", "")))


def _as_is(message: Message) -> Any:
    """The message in the form that distributed's comm sends without compressing or splitting its frames."""
    return seam.Serialized(*seam.serialize(message, serializers=("dask",), on_error="raise"))


def _submit(executor: ThreadPoolExecutor, function: Callable[[], object]) -> None:
    # The worker's pool may be shut down already when it closes with runs open; its memory goes with it.
    with contextlib.suppress(RuntimeError):
        executor.submit(function)


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


def _groups(parcels: list[Parcel], limit_bytes: int) -> Iterator[list[Parcel]]:
    """Parcels that travel together: at most `limit_bytes`, or one that is more than that."""
    group: list[Parcel] = []
    nbytes = 0
    for parcel in parcels:
        size = sys.getsizeof(parcel)
        if group and nbytes + size > limit_bytes:
            yield group
            group, nbytes = [], 0
        group.append(parcel)
        nbytes += size
    if group:
        yield group


class GpurtShuffleRun(AmendedRun):
    """A dataframe shuffle on one worker.

    Parameters
    ----------
    store
        Where received shards wait for their outputs.
    counters
        What this worker's runs count.
    plane
        How messages travel to other workers.
    secret
        What proves to others that a worker takes part in this run.
    memory_limit
        The worker's, bytes; None: it has none.
    state
        Workers lost in this run so far; None: none.
    retained
        For shards that were sent, of all runs of this worker; None: none are retained.
    kwargs
        Those of distributed's `DataFrameShuffleRun`, `disk` excepted.
    """

    def __init__(
        self,
        *,
        store: ShardStore,
        counters: Counters,
        plane: Plane,
        secret: bytes,
        memory_limit: int | None = None,
        state: State | None = None,
        retained: Budget | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(state=state or State(), budget=retained or Budget(0), disk=False, **kwargs)
        self._store = store
        self._counters = counters
        self._layout = Layout(kwargs["worker_for"])
        self._assemble = Assembler(self.meta.drop(columns=self.column) if self.drop_column else self.meta)
        self._histogram = Histogram(max(kwargs["worker_for"], default=-1) + 1)
        self._tag = wire.run_tag(self.id)
        self._key: Hashable = (self.id, self.run_id)
        #: input id -> None once stored here, else what to wait for
        self._arrivals: dict[int, asyncio.Future[None] | None] = {}
        #: schemas received, by key
        self._schemas: dict[int, pa.Schema] = {}
        #: peer -> keys of the schemas it acknowledged
        self._known: dict[str, set[int]] = {}
        #: (peer, group of its outputs) -> parcels that wait for more
        self._staged: dict[tuple[str, int], Batch] = {}
        #: groups of one peer's outputs. What a message brings stays until the last of its outputs is taken, so rows for
        #: outputs that are made at about the same time travel together
        self._n_groups = self._layout.groups(STAGED_GROUPS)
        #: shards with few rows per output that wait to be merged; stored by the first `take` at the latest
        self._few: list[Shard] = []
        self._few_bytes = 0
        self._merging = asyncio.Lock()
        #: as inherited, but a dict: a look into a pandas series costs more than the rest of finding an output
        self._worker_for: dict[int, str] = dict(kwargs["worker_for"])
        #: outputs handed out
        self._taken: set[int] = set()
        #: output -> (weak reference to the frame it was given as, the execution that got it)
        self._given: dict[int, tuple[weakref.ref[pd.DataFrame], Any]] = {}
        self._sequence = 0
        self._plane = plane
        self._run_key = records.RunKey(self._tag, self.run_id)
        self._cut_bytes = plane.settings.cut_bytes
        plane.join(self, self._run_key, secret)
        #: bytes of a row of the outputs, about
        self._row_bytes = 0.0
        counters.add(runs=1)
        heap.keep(memory_limit)

    # ---- task threads

    def _shard_partition(self, data: pd.DataFrame, partition_id: int, **kwargs: Any) -> dict[str, Any]:
        if not isinstance(data, pd.DataFrame):
            raise TypeError(
                f"input partition {partition_id} of shuffle {self.id} is a {type(data).__module__}."
                f"{type(data).__name__}, its meta is a pandas.DataFrame. Remedy: make partitions and meta agree"
            )
        start = time.perf_counter()
        out = Outgoing()
        # Before the layout: an amendment in between is then found out.
        out.attempt = self._ledger.epoch
        out.partition, out.key, out.sent = partition_id, seam.this_key(), []
        first_id = shard_id(partition_id, out.attempt, out.attempt)
        shards = list(split(data, self.column, self.drop_column, first_id, self._layout))
        largest, rows = self._histogram.add(shard for _, shard in shards)
        try:
            self._histogram.look(data, self.column, largest, rows)
        except Exception:
            # A user's own type that can not be counted. What is said of the skew then names no value.
            self._counters.last_error = traceback.format_exc()
        middle = time.perf_counter()
        schema = None
        nbytes = 0
        for address, shard in shards:
            mine = out.setdefault(address, [])
            # Every shard and every cut of one has an id of its own; they sort by input first.
            shard = dataclasses.replace(shard, input_id=first_id + len(mine))
            if address == self.local_address:
                mine.append(shard)
                continue
            schema = schema or wire.schema_bytes(shard.table.schema)
            out.sent.append((address, shard))
            for piece in cut(shard, self._cut_bytes):
                parcel = wire.encode(piece, schema)
                mine.append(parcel)
                nbytes += parcel.nbytes
        if max(map(len, out.values()), default=0) > CUTS:
            raise OverflowError(f"input partition {partition_id} of {self} is more than {CUTS} messages for one worker")
        self._counters.add(inputs=1, seconds_partition=middle - start, seconds_encode=time.perf_counter() - middle)
        seam.context_meter.digest_metric("p2p-shards", nbytes, "bytes")
        seam.context_meter.digest_metric("p2p-shards", len(out), "count")
        return out

    def _get_assigned_worker(self, id: int) -> str:
        return self._worker_for[id]

    def get_output_partition(self, partition_id: int, key: Any, **kwargs: Any) -> pd.DataFrame:
        # As inherited, without its two round trips to the event loop where there is nothing to wait for there: the
        # output belongs here, and nothing is ever under way to a disk of ours.
        if partition_id not in self._worker_for:
            # It was in memory when this run began for the rest, and was lost since.
            self._restart(f"output {partition_id} is not of this run")
        if self._get_assigned_worker(partition_id) != self.local_address or not self.transferred or self.closed:
            out: pd.DataFrame = super().get_output_partition(partition_id, key, **kwargs)
            return out
        with (
            self._capture_metrics("foreground"),
            seam.context_meter.meter("p2p-get-output-noncpu"),
            seam.context_meter.meter("p2p-get-output-cpu", func=seam.thread_time),
        ):
            return self._get_output_partition(partition_id, key, **kwargs)

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
        df = self._assemble(self._counted([piece for pieces in taken for piece in pieces]))
        self._given[partition_id] = (weakref.ref(df), here)
        if len(df):
            if not self._row_bytes:
                self._row_bytes = float(df.memory_usage().sum()) / len(df)
            heap.freed(int(len(df) * self._row_bytes), functools.partial(_submit, self.executor))
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
        if not self._taken:
            self._ledger.settle()
        self._taken.add(part)
        if self._few or self._merging.locked():
            await self._merge()
        return True, await self._store.take(self._key, part)

    async def _write_to_comm(self, data: dict[str, Any]) -> None:
        self.raise_if_closed()
        assert isinstance(data, Outgoing)
        if await self._may_send(data):
            await self._stage(data)
            self._check_sent(data)

    async def _stage(self, data: Outgoing) -> None:
        self.raise_if_closed()
        own = data.pop(self.local_address, None)
        limiter = self._comm_buffer.memory_limiter
        for address, parcels in data.items():
            for parcel in parcels:
                place = address, self._layout.group(address, int(parcel.parts[0]), self._n_groups)
                batch = self._staged.setdefault(place, Batch())
                batch.append(parcel)
                limiter.increase(sys.getsizeof(parcel))
                if batch.nbytes >= STAGE_BYTES:
                    await self._unstage(list(self._staged) if limiter.full else [place])
        if limiter.full:
            # Nobody but us can make room by sending what is staged.
            await self._unstage(list(self._staged))
        if own is not None:
            chunk_bytes = sum(shard.nbytes for shard in own)
            self._counters.add(bytes_self=chunk_bytes)
            await self._keep(own, chunk_bytes)

    async def _flush_comm(self) -> None:
        self.raise_if_closed()
        await self._unstage(list(self._staged))
        await super()._flush_comm()

    async def _unstage(self, places: list[tuple[str, int]]) -> None:
        """Hand what is staged there to the send buffer; what it is charged moves along."""
        full = [(place[0], batch) for place in places if (batch := self._staged.pop(place, None)) is not None]
        # All of it first: what is staged can not be sent, so nobody may wait for room that only it would give.
        await self._comm_buffer.memory_limiter.decrease(sum(batch.nbytes for _, batch in full))
        for address, batch in full:
            with waiting(NETWORK):  # until the budget for unsent bytes has room
                await super()._write_to_comm({address: batch})

    async def _send(self, address: str, shards: Any) -> Any:
        self.raise_if_closed()
        if address in self._ledger.lost:
            raise seam.ShuffleClosedError(f"{address} is lost, {self} goes on without it")
        return await self.rpc(address).shuffle_receive(data=shards, shuffle_id=self.id, run_id=self.run_id)

    async def send(self, address: str, shards: list[Batch]) -> Any:
        return await self._unless_lost(address, self._send_all(address, shards))

    async def _send_all(self, address: str, shards: list[Batch]) -> Any:
        response: Any = {"status": "OK"}
        # A batch that is long enough is a message; only the rest of them share one. Either way what was staged or
        # buffered together may be more than the peer takes in one message.
        long = [batch.parcels for batch in shards if batch.nbytes >= STAGE_BYTES // 2]
        rest = [parcel for batch in shards if batch.nbytes < STAGE_BYTES // 2 for parcel in batch.parcels]
        for parcels in (group for some in (*long, rest) for group in _groups(some, self._cut_bytes)):
            response = await self._send_message(address, parcels)
            if response["status"] != "OK":
                return response
        for batch in shards:
            # The buffer's ten tasks keep what they sent last until they have something else to send.
            batch.parcels.clear()
        return response

    async def _send_message(self, address: str, parcels: list[Parcel]) -> Any:
        known = self._known.setdefault(address, set())
        start = time.perf_counter()
        for _ in range(1 + RESENDS):
            self._sequence += 1
            frames = wire.pack(self._tag, self.run_id, self._sequence, parcels, known)
            message = Message(frames, self.local_address)
            response = await self._plane.send(
                *(self, self._run_key, address, message.frames),
                functools.partial(self._retrying, address, message),
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

    async def ask(self, address: str, question: dict[str, Any]) -> Any:
        """Ask a peer's run something by distributed's comms; see `transport.Plane.answer`."""
        return await self._retrying(address, question)

    async def _retrying(self, address: str, data: Message | dict[str, Any]) -> Any:
        return await seam.retry(
            functools.partial(self._send, address, _as_is(data) if isinstance(data, Message) else data),
            count=self.RETRY_COUNT,
            delay_min=self.RETRY_DELAY_MIN,
            delay_max=self.RETRY_DELAY_MAX,
            operation=f"P2P send to {address}",
        )

    async def receive(self, data: Any) -> Any:
        try:
            if isinstance(data, dict):
                if data.get("gpurt") in ("amend", "valid"):
                    return await self.amend(data)
                if data.get("gpurt") == "histogram":
                    return {"status": "OK", **self._histogram.told()}
                self.raise_if_closed()
                return await self._plane.answer(self._run_key, data)
            return await self._receive_message(data)
        except seam.P2PConsistencyError as e:
            return seam.error_message(e)

    def unpack(self, frames: Sequence[Any]) -> list[Shard]:
        """Shards of a message, as views on its frames; any thread.

        Raises
        ------
        WireError
        """
        return wire.unpack(frames, self._tag, self.run_id, self._schemas)

    async def accept(self, shards: list[Shard], nbytes: int) -> None:
        """Store the shards of a message that a transport brought; returns when they are stored."""
        self.raise_if_closed()
        self._counters.add(messages_received=1, bytes_received=nbytes)
        self.total_recvd += nbytes
        await self._keep(shards, nbytes)

    async def _receive_message(self, message: Message) -> dict[str, Any]:
        self.raise_if_closed()
        if not isinstance(message, Message):
            raise TypeError(
                f"{self} received a {type(message).__name__}, must be a Message. Remedy: run one version of dask-gpurt "
                "on all workers"
            )
        stored = self._plane.arrive(self._run_key, message.sender, records.message_bytes(message.frames))
        try:
            if message.nbytes < OFFLOAD_BYTES:
                shards = self.unpack(message.frames)
            else:
                shards = await self.offload(self.unpack, message.frames)
            await self.accept(shards, message.nbytes)
        except WireError as e:
            self._counters.add(messages_received=1, bytes_received=message.nbytes, refused=1)
            self._counters.last_error = traceback.format_exc()
            return {"status": "OK", "gpurt-refused": str(e)}
        finally:
            stored()
        # The credit that this message has given back.
        return {"status": "OK", "granted": self._plane.granted(self._run_key, message.sender)}

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
        few = [s for s in shards if merge.worth(s)]
        if len(few) == len(shards):
            self._few += few
            self._few_bytes += sum(s.nbytes for s in few) if nbytes is None else nbytes
            for s in few:
                self._arrivals[s.input_id] = None
                self.received.add(s.input_id)
            if self._few_bytes >= MERGE_BYTES:
                await self._merge()
            return
        await self._store_shards(shards, nbytes)

    async def _merge(self) -> None:
        """Store what waits to be merged; returns when it, and what another call was about to store, is stored."""
        async with self._merging:
            few, self._few, self._few_bytes = self._few, [], 0
            if not few:
                return
            try:
                shards = await self.offload(merge.merged, few)
            except Exception as e:
                if not self.closed:
                    self._exception = e
                raise
            few.clear()
            for shard in shards:
                await self._store_shards([shard], None)

    async def _store_shards(self, shards: list[Shard], nbytes: int | None) -> None:
        large = [s for s in shards if s.nbytes >= SHARD_BYTES]
        small = [s for s in shards if s.nbytes < SHARD_BYTES]
        # A large shard is a chunk of its own: it can go, or leave memory, while the rest still waits.
        chunks = [ReceivedChunk([s], nbytes if len(shards) == 1 else None) for s in large]
        if small:
            chunks.append(ReceivedChunk(small, None if large else nbytes))
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for s in shards:
            self._arrivals[s.input_id] = stored
        start = time.perf_counter()
        kept = 0
        try:
            while chunks:
                chunk = chunks.pop()
                if not await self._store.put(self._key, chunk.chunk_id, chunk):
                    # Ids are new by `_arrivals`, so the run was dropped.
                    self.raise_if_closed()
                    raise seam.ShuffleClosedError(f"{self} was dropped by its store")
                kept += 1
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
        self._counters.add(chunks=kept, seconds_put=time.perf_counter() - start)
        heap.look(functools.partial(_submit, self.executor))

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
            submit = functools.partial(_submit, self.executor)
            stack.callback(heap.release, asyncio.get_running_loop().call_later, submit)
            stack.callback(self._store.drop, self._key)
            await super().close()
