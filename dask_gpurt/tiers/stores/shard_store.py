"""`TierShardStore`: the shuffle's chunks under the same budget as task results.

A chunk (`dask_gpurt.model.shards`) is one entry. In memory it gives each output partition a view. Under pressure the
engine writes it part by part into one file, from which `take` reads only what it needs. Parts already taken are not
written. The entry goes when its last part was taken.

Nothing is forced to disk: a shuffle that fits in memory never writes. Dask's own passes every byte through the disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import LostData
from dask_gpurt.model.slots import UNSPILL, waiting
from dask_gpurt.tiers.engine.entry import Account

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from dask_gpurt.model.shards import Chunk
    from dask_gpurt.tiers.engine.engine import Engine
    from dask_gpurt.tiers.engine.entry import Entry
    from dask_gpurt.tiers.storage.handle import Group

#: dropped runs that are remembered, so that a late message does not bring one back
_REMEMBERED_RUNS = 10_000


class _ChunkCodec:
    def encode(self, value: Chunk, parts: Sequence[int] | None) -> list[Group]:
        return [(part, value.encode(part)) for part in (value.parts if parts is None else parts)]

    def decode(self, frames: list[memoryview]) -> Any:
        raise TypeError("a chunk is read back part by part, never as a whole")


class TierShardStore:
    """Implements `dask_gpurt.model.ShardStore` over an `Engine`. Loop thread only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        #: run -> chunk id -> entry
        self._runs: dict[Hashable, dict[Any, Entry]] = {}
        #: run -> part that was not taken yet -> (chunk id, entry) with rows for it; without it each of thousands of
        #: parts would need a look through all chunks
        self._entries_of: dict[Hashable, dict[int, list[tuple[Any, Entry]]]] = {}
        #: parts of an entry that were not taken yet
        self._left: dict[Entry, set[int]] = {}
        self._dropped: dict[Hashable, None] = {}
        self._account = Account(
            "shards",
            _ChunkCodec(),
            parts=lambda entry: sorted(self._left.get(entry, ())),
            shell=lambda chunk: chunk.shell(),
        )

    def __len__(self) -> int:
        """Chunks kept, on all tiers."""
        return len(self._left)

    @property
    def spilled_bytes(self) -> int:
        """Bytes of chunks on disk."""
        return self._account.stored_disk_bytes

    async def put(self, run: Hashable, chunk_id: Hashable, chunk: Chunk) -> bool:
        """See `ShardStore.put`."""
        if not self._wanted(run, chunk_id):
            return False
        with await self._engine.admit(chunk.nbytes):
            if not self._wanted(run, chunk_id):  # while we waited
                return False
            parts = set(chunk.parts)
            if parts:
                entry = self._engine.add(self._account, (run, chunk_id), chunk, chunk.nbytes, balance=False)
                self._left[entry] = parts
                self._runs.setdefault(run, {})[chunk_id] = entry
                entries_of = self._entries_of.setdefault(run, {})
                for part in parts:
                    entries_of.setdefault(part, []).append((chunk_id, entry))
                self._engine.balance()  # not before: the parts to write are read from _left
            else:
                self._runs.setdefault(run, {})  # no rows: nothing to keep, but the run is known
        return True

    def _wanted(self, run: Hashable, chunk_id: Hashable) -> bool:
        return run not in self._dropped and chunk_id not in self._runs.get(run, ())

    async def take(self, run: Hashable, part: int) -> list[Any]:
        """See `ShardStore.take`."""
        mine = sorted(self._entries_of.get(run, {}).pop(part, ()), key=lambda item: item[0])
        shards: list[Any] = []
        try:
            for chunk_id, entry in mine:
                # One after the other: a chunk may leave memory, or the run be dropped, while another is read.
                shards.append(await self._take_one(run, chunk_id, entry, part))
        finally:
            for _, entry in mine:
                self._taken(entry, part)
        return shards

    async def _take_one(self, run: Hashable, chunk_id: Hashable, entry: Entry, part: int) -> Any:
        if entry.gone:
            raise LostData(f"run {run!r} was dropped while part {part} was read")
        if entry.in_memory:
            self._engine.touch(entry)
            return entry.value.get(part)
        alive = entry.weak() if entry.weak is not None else None
        if alive is not None:  # shards given out before are views that keep the block
            return alive.get(part)
        shell: Chunk = entry.value
        with waiting(UNSPILL):
            frames = await self._engine.load_part(entry, part)
            try:
                return await self._engine.offload(_decode, shell, frames)
            except Exception as e:
                raise LostData(f"part {part} of chunk {chunk_id!r} of run {run!r} could not be decoded: {e!r}") from e

    def _taken(self, entry: Entry, part: int) -> None:
        left = self._left.get(entry)
        if left is None:
            return
        left.discard(part)
        if not left:
            del self._left[entry]
            self._engine.remove(entry)

    def drop(self, run: Hashable) -> None:
        """See `ShardStore.drop`."""
        self._dropped[run] = None
        while len(self._dropped) > _REMEMBERED_RUNS:
            del self._dropped[next(iter(self._dropped))]
        self._entries_of.pop(run, None)
        for entry in self._runs.pop(run, {}).values():
            if self._left.pop(entry, None) is not None:
                self._engine.remove(entry)


def _decode(chunk: Chunk, frames: Sequence[memoryview]) -> Any:
    # A shell of its own: `decode` may keep state, and two parts may be decoded at once.
    return chunk.shell().decode(frames)
