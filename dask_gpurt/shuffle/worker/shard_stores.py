"""Where a worker's runs find their store, and where they count.

Theory of operation. The memory tiers are built by another part of the package that the shuffle does not import; whoever
wires the two calls `provide(worker, store)` once per worker. A run asks `store_of(worker)` when it is created and keeps
that store to its end, so a later `withdraw` never moves a run's shards. Without a provided store the worker gets a
plain in-memory one, which is counted: its shards cannot leave memory.

Workers are keyed weakly: many live and die in one process in tests and with in-process clusters.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import weakref
from typing import TYPE_CHECKING, Any

from dask_gpurt.model import Chunk, ShardStore
from dask_gpurt.shuffle.worker.send_log import Budget

if TYPE_CHECKING:
    from collections.abc import Hashable


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

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks held; a chunk counts in full until its last part is taken."""
        return sum(chunk.nbytes for chunks in self._chunks.values() for chunk in chunks.values())

    def __len__(self) -> int:
        """Chunks held."""
        return sum(map(len, self._chunks.values()))

    async def put(self, run: Hashable, chunk_id: Hashable, chunk: Chunk) -> bool:
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
        out = []
        chunks, left = self._chunks.get(run, {}), self._left.get(run, {})
        for chunk_id in sorted(self._chunks_of.get(run, {}).pop(part, ())):
            out.append(chunks[chunk_id].get(part))
            left[chunk_id] -= 1
            if not left[chunk_id]:
                del chunks[chunk_id], left[chunk_id]
        return out

    def drop(self, run: Hashable) -> None:
        self._chunks.pop(run, None)
        self._left.pop(run, None)
        self._chunks_of.pop(run, None)
        self._dropped[run] = None
        # Late messages come within seconds; run ids of old ones are refused by the run itself.
        while len(self._dropped) > 10_000:
            del self._dropped[next(iter(self._dropped))]


@dataclasses.dataclass
class Counters:
    """What the runs of one worker did. Bytes and seconds are sums over all runs since the worker started."""

    #: runs created
    runs: int = 0
    #: runs closed
    runs_closed: int = 0
    #: input partitions split
    inputs: int = 0
    #: output partitions assembled
    outputs: int = 0
    #: messages sent to peers, resends included
    messages_sent: int = 0
    #: shards (one input for one worker) sent to peers
    shards_sent: int = 0
    bytes_sent: int = 0
    #: bytes handed to this worker itself, without a comm
    bytes_self: int = 0
    messages_received: int = 0
    bytes_received: int = 0
    #: chunks put into the store
    chunks: int = 0
    #: shards that had been received before, and were dropped
    duplicates: int = 0
    #: messages refused because they did not parse or failed their checksum
    refused: int = 0
    #: messages that went by a transport of ours and not by distributed's comms
    messages_direct: int = 0
    bytes_direct: int = 0
    #: bytes that compression took off messages between hosts
    bytes_squeezed: int = 0
    #: messages sent again by distributed's comms, after a transport of ours lost or the peer refused them
    resent_safe: int = 0
    #: links between workers that ended out of order
    links_lost: int = 0
    #: messages by distributed's comms that came without credit (a retry, or one larger than the budget allows)
    uncredited: int = 0
    #: errors in a transport
    transport_errors: int = 0
    #: restarts of a whole shuffle asked for by this worker (an output asked for again, or lost on a tier)
    restarts: int = 0
    #: of those, such as the scheduler did not answer well: it had restarted or forgotten the shuffle already
    restarts_refused: int = 0
    #: inputs whose values could not be counted, so that a skew is reported without a value
    skew_unknown: int = 0
    #: errors while a run closed; what it kept is dropped all the same
    close_errors: int = 0
    #: times a run of this worker went on without a worker that was lost
    amendments: int = 0
    #: shards sent again because their receiver was lost
    shards_resent: int = 0
    #: outputs handed over to a less loaded worker
    outputs_handed: int = 0
    #: runs that had no tier store and used a plain one in memory
    fallbacks: int = 0
    seconds_partition: float = 0.0
    seconds_encode: float = 0.0
    seconds_send: float = 0.0
    #: in threads, of the sends
    seconds_squeeze: float = 0.0
    seconds_put: float = 0.0
    seconds_assemble: float = 0.0
    #: the last traceback of an error in our code, as text
    last_error: str = ""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._reasons: collections.Counter[str] = collections.Counter()

    def add(self, **amounts: float) -> None:
        """Add to counters; from any thread."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def restarted(self, shuffle_id: str) -> int:
        """Count one more reason to restart a shuffle; how many there were."""
        with self._lock:
            self._reasons[shuffle_id] += 1
            return self._reasons[shuffle_id]

    def heartbeat(self) -> dict[str, int]:
        """What rides on every heartbeat: flat, and none of it costs more than a look."""
        return {
            "shuffle_sent_bytes": self.bytes_sent,
            "shuffle_received_bytes": self.bytes_received,
            "shuffle_kept_bytes": self.bytes_self,
            "shuffle_active_runs": self.runs - self.runs_closed,
            "shuffle_outputs": self.outputs,
            "shuffle_restarts": self.restarts,
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        with self._lock:
            return dataclasses.asdict(self)


_stores: weakref.WeakKeyDictionary[Any, ShardStore] = weakref.WeakKeyDictionary()
_plain: weakref.WeakKeyDictionary[Any, MemoryShardStore] = weakref.WeakKeyDictionary()
_counters: weakref.WeakKeyDictionary[Any, Counters] = weakref.WeakKeyDictionary()
_retained: weakref.WeakKeyDictionary[Any, Budget] = weakref.WeakKeyDictionary()


def provide(worker: Any, store: ShardStore) -> None:
    """Give a worker's future runs their store. Running ones keep theirs."""
    if not isinstance(store, ShardStore):
        raise TypeError(
            f"store is {type(store).__name__}, must be a dask_gpurt.model.ShardStore (put, take, drop). "
            "Remedy: pass the tier's shard store"
        )
    _stores[worker] = store


def withdraw(worker: Any) -> None:
    """Forget a worker's store; future runs use a plain one in memory. No error when there is none."""
    _stores.pop(worker, None)


def store_of(worker: Any) -> tuple[ShardStore, bool]:
    """The store for a new run of this worker, and whether it is the plain one."""
    store = _stores.get(worker)
    if store is not None:
        return store, False
    return _plain.setdefault(worker, MemoryShardStore()), True


def counters_of(worker: Any) -> Counters:
    """The counters of a worker, made on first use."""
    return _counters.setdefault(worker, Counters())


def retained_of(worker: Any, share: float) -> Budget:
    """The budget of a worker for shards that were sent; `share` of its memory limit, nothing where it has none."""
    budget = _retained.setdefault(worker, Budget(0))
    budget.limit_bytes = int((worker.memory_manager.memory_limit or 0) * share)
    return budget
