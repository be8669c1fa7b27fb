"""Take in what other workers have for a run: messages are checked, taken apart and stored, each shard once.

Invariants
- A shard (one input for one worker, or a cut of it, see `message_cut`) travels in one message, whole. `_arrivals` has
  its id from the moment it came. A second copy (a resend after a lost acknowledgement, a transfer task that ran twice)
  waits for the first and is dropped. Race: (1) a message waits in `put`; (2) its comm breaks, the sender resends; (3)
  were the copy acknowledged at once, the barrier could pass and an output be assembled before (1) is stored.
- A copy is one only if the ids of its input mean the same (`Shard.split`). Else rows would be missing or there twice,
  and which of the two attempts counts is not known here: the shuffle starts anew.
- Shards with few rows per output wait in `_few` until they are worth a merge (see `rows.coalesce`), `MERGE_BYTES` of
  them at most. They are acknowledged before that. `settle` stores the last of them and waits for merges under way; it
  comes before every `take`, so no output is assembled without them.
"""

from __future__ import annotations

import asyncio
import functools
import time
import traceback
from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import LostData, WireError
from dask_gpurt.memory.malloc import heap
from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.protocol.recovery import numbered, origin
from dask_gpurt.shuffle.rows import wire
from dask_gpurt.shuffle.rows.partition import SHARD_BYTES
from dask_gpurt.shuffle.transport.link import records
from dask_gpurt.shuffle.worker.host import RunHost, submit
from dask_gpurt.shuffle.worker.message import Message

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Sequence

    import pyarrow as pa

    from dask_gpurt.model import ShardStore
    from dask_gpurt.shuffle.counters import ShuffleCounters
    from dask_gpurt.shuffle.rows.kinds import RowKind
    from dask_gpurt.shuffle.rows.partition import Shard
    from dask_gpurt.shuffle.rows.slices import Piece
    from dask_gpurt.shuffle.transport.link.records import RunKey
    from dask_gpurt.shuffle.transport.plane import Plane

#: messages of this many bytes or more are checked in a thread
OFFLOAD_BYTES = 1 << 18
#: and those with a head of this many: it has 20 bytes for each buffer, which takes some microseconds
OFFLOAD_HEAD_BYTES = 1 << 15
#: bytes of shards with few rows per output that are worth a merge
MERGE_BYTES = 1 << 23


class Receiver:
    """Receives for one run. All on the event loop, but `unpack`.

    Parameters
    ----------
    credit
        Whom to tell of messages by distributed's comms.
    restart
        Has the shuffle start anew.
    """

    def __init__(
        self,
        host: RunHost,
        *,
        key: RunKey,
        store: ShardStore,
        rows: RowKind,
        credit: Plane,
        restart: Callable[[], Awaitable[None]],
        counters: ShuffleCounters,
    ) -> None:
        self._host, self._key = host, key
        self._store, self._rows, self._credit = store, rows, credit
        self._restart, self._counters = restart, counters
        self._store_key: Hashable = (host.id, host.run_id)
        #: bytes of all messages
        self.received_bytes = 0
        #: id of a shard -> None once it is stored here, else what to wait for
        self._arrivals: dict[int, asyncio.Future[None] | None] = {}
        #: input, attempt and epoch -> what its ids mean here
        self._splits: dict[int, int] = {}
        #: schemas received, by key
        self._schemas: dict[int, pa.Schema] = {}
        #: shards with few rows per output that wait to be merged
        self._few: list[Shard] = []
        self._few_bytes = 0
        self._merging = asyncio.Lock()
        #: why shards that were acknowledged are not stored
        self._lost: Exception | None = None

    def unpack(self, frames: Sequence[Any]) -> list[Shard]:
        """Shards of a message, as views on its frames; any thread.

        Raises
        ------
        WireError
            It does not parse, is of another run, or fails a checksum.
        """
        return wire.unpack(frames, self._key.tag, self._key.run_id, self._schemas, self._rows.adopt)

    async def accept(self, shards: list[Shard], nbytes: int) -> None:
        """Store the shards of a message of `nbytes`; returns when they are stored."""
        self._host.raise_if_closed()
        self._counters.add(messages_received=1, bytes_received=nbytes)
        self.received_bytes += nbytes
        await self.keep(shards, nbytes)

    async def receive(self, message: Message) -> dict[str, Any]:
        """Store a message that came by distributed's comms; returns the answer."""
        self._host.raise_if_closed()
        if not isinstance(message, Message):
            raise TypeError(
                f"{self._host} received a {type(message).__name__}, must be a Message. Remedy: run one version of "
                "dask-gpurt on all workers"
            )
        stored = self._credit.arrive(self._key, message.sender, records.message_bytes(message.frames))
        try:
            head = records.size_of(message.frames[0]) if message.frames else 0
            if message.nbytes < OFFLOAD_BYTES and head < OFFLOAD_HEAD_BYTES:
                shards = self.unpack(message.frames)
            else:
                shards = await self._host.offload(self.unpack, message.frames)
            await self.accept(shards, message.nbytes)
        except WireError as e:
            self._counters.add(messages_received=1, bytes_received=message.nbytes, refused=1)
            self._counters.last_error = traceback.format_exc()
            return {"status": "OK", "gpurt-refused": str(e)}
        finally:
            stored()
        # The credit that this message has given back.
        return {"status": "OK", "granted": self._credit.granted(self._key, message.sender)}

    async def keep(self, shards: list[Shard], nbytes: int) -> None:
        """Store shards that are new; return when every one of them, and every earlier copy of it, is stored.

        Raises
        ------
        ShuffleClosedError
            An input came in two ways: the shuffle starts anew.
        """
        for s in shards:
            if s.split and self._splits.setdefault(numbered(s.input_id), s.split) != s.split:
                why = f"{self._host}: input {origin(s.input_id)[0]} was split twice, in different ways"
                self._counters.last_error = why
                self._counters.add(restarts=1)
                await self._restart()
                raise seam.ShuffleClosedError(why)
        # An input that was split twice by one worker (its task was released and came back) may be twice in one message.
        fresh = list({s.input_id: s for s in shards if s.input_id not in self._arrivals}.values())
        earlier = {f for s in shards if (f := self._arrivals.get(s.input_id)) is not None}
        if duplicates := len(shards) - len(fresh):
            self._counters.add(duplicates=duplicates)
        if fresh:
            await self._put(fresh, nbytes if len(fresh) == len(shards) else None)
        for future in earlier:
            await asyncio.shield(future)

    async def settle(self) -> None:
        """Store what waits to be merged, and wait for a merge under way.

        Raises
        ------
        LostData
            That has failed before: rows of any output may be missing, and after the barrier nothing else says so.
        """
        if self._few or self._merging.locked():
            await self._merge()
        if self._lost is not None:
            raise LostData(f"rows could not be merged or stored: {self._lost!r}") from self._lost

    async def take(self, part: int) -> list[list[Piece]]:
        """Remove and return the pieces of an output, by chunk. `settle` first.

        Raises
        ------
        LostData
            Some of them could not be read back.
        """
        return await self._store.take(self._store_key, part)

    def drop(self) -> None:
        """Forget all rows: the run closes. What waits in the store for room ends."""
        self._few.clear()
        self._store.drop(self._store_key)

    async def _put(self, shards: list[Shard], nbytes: int | None) -> None:
        worth = self._rows.few
        few = [s for s in shards if worth(s)]
        if len(few) < len(shards):
            await self._store_shards(shards, nbytes)
            return
        self._few += few
        self._few_bytes += sum(s.nbytes for s in few) if nbytes is None else nbytes
        self._arrivals.update((s.input_id, None) for s in few)
        if self._few_bytes >= MERGE_BYTES:
            await self._merge()

    async def _merge(self) -> None:
        """Store what waits to be merged; returns when it, and what another call was about to store, is stored."""
        async with self._merging:
            few, self._few, self._few_bytes = self._few, [], 0
            if not few:
                return
            try:
                shards = await self._host.offload(self._rows.merged, few)
                few.clear()
                for shard in shards:
                    await self._store_shards([shard], None)
            except Exception as e:
                self._lost = e
                self._host.fail(e)
                raise

    async def _store_shards(self, shards: list[Shard], nbytes: int | None) -> None:
        large = [s for s in shards if s.nbytes >= SHARD_BYTES]
        small = [s for s in shards if s.nbytes < SHARD_BYTES]
        # A large shard is a chunk of its own: it can go, or leave memory, while the rest still waits.
        chunks = [self._rows.chunk([s], nbytes if len(shards) == 1 else None) for s in large]
        if small:
            chunks.append(self._rows.chunk(small, None if large else nbytes))
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arrivals.update((s.input_id, stored) for s in shards)
        start = time.perf_counter()
        kept = 0
        try:
            while chunks:
                chunk = chunks.pop()
                if not await self._store.put(self._store_key, chunk.chunk_id, chunk):
                    # Ids are new by `_arrivals`, so the run was dropped.
                    self._host.raise_if_closed()
                    raise seam.ShuffleClosedError(f"{self._host} was dropped by its store")
                kept += 1
        except BaseException as e:
            for s in shards:
                self._arrivals.pop(s.input_id, None)
            stored.set_exception(e if isinstance(e, Exception) else seam.ShuffleClosedError(repr(e)))
            stored.exception()  # retrieved: perhaps nothing waits for it
            if isinstance(e, Exception):
                self._host.fail(e)
            raise
        self._arrivals.update((s.input_id, None) for s in shards)
        stored.set_result(None)
        self._counters.add(chunks=kept, seconds_put=time.perf_counter() - start)
        heap.look(functools.partial(submit, self._host.executor))
