"""Find the store of a worker's runs: `provide` one, `withdraw` it, `store_of` a worker.

Theory of operation. The memory tiers are another part of the package, which the shuffle does not import. They are
connected by `provide(worker, store)`, once per worker. A run asks `store_of(worker)` when it is created and keeps that
store to its end, so `withdraw` never moves a run's shards. Without a provided store a worker gets a `MemoryShardStore`,
whose shards cannot leave memory; such runs are counted.

Many workers live and die in one process in tests and with in-process clusters. A store that was provided refers to its
worker, so it is kept in an attribute of that worker: a table of them, weakly keyed by worker, would keep both for good.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from dask_gpurt.model import Chunk, ShardStore

if TYPE_CHECKING:
    from collections.abc import Hashable

    from distributed.worker import Worker


class MemoryShardStore:
    """A `ShardStore` that keeps everything in memory and never waits. All methods on the event loop."""

    def __init__(self) -> None:
        #: run -> chunk id -> chunk; a chunk stays until all its parts were taken
        self._chunks: dict[Hashable, dict[Any, Chunk]] = {}
        #: run -> chunk id -> how many of its parts were not taken yet
        self._left: dict[Hashable, dict[Any, int]] = {}
        #: run -> part -> ids of the chunks that have rows for it
        self._chunks_of: dict[Hashable, dict[int, list[Any]]] = {}
        #: runs that ended, and so take no more chunks
        self._dropped: dict[Hashable, None] = {}

    async def put(self, run: Hashable, chunk_id: Hashable, chunk: Chunk) -> bool:
        """Keep a chunk; False when its id is there already or its run was dropped."""
        if run in self._dropped:
            return False
        chunks = self._chunks.setdefault(run, {})
        if chunk_id in chunks:
            return False
        chunks[chunk_id] = chunk
        self._left.setdefault(run, {})[chunk_id] = len(chunk.parts)
        chunks_of = self._chunks_of.setdefault(run, {})
        for part in chunk.parts:
            chunks_of.setdefault(part, []).append(chunk_id)
        return True

    async def take(self, run: Hashable, part: int) -> list[Any]:
        """Remove and return the rows of one output, by chunk."""
        out = []
        chunks, left = self._chunks.get(run, {}), self._left.get(run, {})
        for chunk_id in sorted(self._chunks_of.get(run, {}).pop(part, ())):
            out.append(chunks[chunk_id].get(part))
            left[chunk_id] -= 1
            if not left[chunk_id]:
                del chunks[chunk_id], left[chunk_id]
        return out

    def drop(self, run: Hashable) -> None:
        """Forget a run; later chunks of it are refused."""
        self._chunks.pop(run, None)
        self._left.pop(run, None)
        self._chunks_of.pop(run, None)
        self._dropped[run] = None
        # Late messages come within seconds; run ids of old ones are refused by the run itself.
        while len(self._dropped) > 10_000:
            del self._dropped[next(iter(self._dropped))]


#: where a worker has the store that was provided
_ATTRIBUTE = "_gpurt_shard_store"
_plain: weakref.WeakKeyDictionary[Worker, MemoryShardStore] = weakref.WeakKeyDictionary()


def provide(worker: Worker, store: ShardStore) -> None:
    """Give a worker's future runs their store. Running ones keep theirs.

    Raises
    ------
    TypeError
        It is not a `dask_gpurt.model.ShardStore`.
    """
    if not isinstance(store, ShardStore):
        raise TypeError(
            f"store is {type(store).__name__}, must be a dask_gpurt.model.ShardStore (put, take, drop). "
            "Remedy: pass the tier's shard store"
        )
    setattr(worker, _ATTRIBUTE, store)


def withdraw(worker: Worker) -> None:
    """Forget a worker's store; future runs use a plain one in memory. No error when there is none."""
    vars(worker).pop(_ATTRIBUTE, None)


def store_of(worker: Worker) -> tuple[ShardStore, bool]:
    """The store for a new run of this worker, and whether it is the plain one."""
    store: ShardStore | None = getattr(worker, _ATTRIBUTE, None)
    if store is not None:
        return store, False
    return _plain.setdefault(worker, MemoryShardStore()), True
