"""What other workers have for a run: messages are checked, taken apart and stored, each shard once.

Invariants
- A shard (one input for one worker, or a cut of it, see `message_cut`) travels in one message, whole. `_arrivals` has
  its input id from the moment it came; a second copy (a resend after a lost acknowledgement, a transfer task that ran
  twice) waits for the first and is dropped. Race: (1) a message waits in `put`; (2) its comm breaks, the sender
  resends; (3) were the copy acknowledged at once, the barrier could pass and an output be assembled before (1) is
  stored.
- Shards with few rows per output wait in `_few` until they are worth a merge (see `coalesce`), at most `MERGE_BYTES` of
  them. They are acknowledged before: the first `_take`, which is after the barrier, stores the last of them and waits
  for merges under way, so no output is assembled without them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import traceback
from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import WireError
from dask_gpurt.memory.malloc import heap
from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.rows import coalesce, wire
from dask_gpurt.shuffle.rows.partition import SHARD_BYTES
from dask_gpurt.shuffle.rows.received_chunk import ReceivedChunk
from dask_gpurt.shuffle.transport.link import records
from dask_gpurt.shuffle.worker.sender import Message, SendingRun

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from concurrent.futures import ThreadPoolExecutor

    import pyarrow as pa

    from dask_gpurt.model import ShardStore
    from dask_gpurt.shuffle.rows.partition import Shard

#: messages of this many bytes or more are checked in a thread
OFFLOAD_BYTES = 1 << 18
#: shards with few rows per output are merged when they are so many bytes
MERGE_BYTES = 1 << 23


def submit(executor: ThreadPoolExecutor, function: Callable[[], object]) -> None:
    """Run a function in a thread of the worker, now or later."""
    # The worker's pool may be shut down already when it closes with runs open; its memory goes with it.
    with contextlib.suppress(RuntimeError):
        executor.submit(function)


class ReceivingRun(SendingRun):
    """The part of a run that receives.

    Parameters
    ----------
    store
        Where received shards wait for their outputs.
    """

    def __init__(self, *, store: ShardStore, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._store = store
        self._key: Hashable = (self.id, self.run_id)
        #: input id -> None once stored here, else what to wait for
        self._arrivals: dict[int, asyncio.Future[None] | None] = {}
        #: schemas received, by key
        self._schemas: dict[int, pa.Schema] = {}
        #: shards with few rows per output that wait to be merged; stored by the first `take` at the latest
        self._few: list[Shard] = []
        self._few_bytes = 0
        self._merging = asyncio.Lock()

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
        few = [s for s in shards if coalesce.worth(s)]
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
                shards = await self.offload(coalesce.merged, few)
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
        heap.look(functools.partial(submit, self.executor))
