"""Conformance checks for the protocols that can be implemented outside of this package.

`check_shard_store` is the contract of `dask_gpurt.model.shards.ShardStore`, `check_storage_tier` that of
`dask_gpurt.tiers.storage.protocol.StorageTier`; see docs/tiers-below.md. Each takes a factory of fresh objects and
raises AssertionError with what is wrong. `ArrayChunk` is a chunk to put into a store.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_gpurt.errors import CorruptData, LostData, TierFull
from dask_gpurt.model.shards import Buffer, ShardStore

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from dask_gpurt.tiers.storage.handle import Codec, Group, Handle
    from dask_gpurt.tiers.storage.protocol import StorageTier

__all__ = ["ArrayChunk", "check_shard_store", "check_storage_tier"]


class ArrayChunk:
    """The smallest real `Chunk`: one array of int64 per output partition, cut from one block.

    Parameters
    ----------
    parts
        Output partition to its rows, a one-dimensional int64 array.
    """

    def __init__(self, parts: dict[int, np.ndarray[Any, Any]]) -> None:
        self._block = np.concatenate([np.asarray(a, "i8") for a in parts.values()]) if parts else np.empty(0, "i8")
        self._slices: dict[int, slice] = {}
        start = 0
        for part, array in parts.items():
            self._slices[part] = slice(start, start + len(array))
            start += len(array)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return int(self._block.nbytes)

    @property
    def parts(self) -> Collection[int]:
        """The output partitions that it has rows of."""
        return self._slices.keys()

    def get(self, part: int) -> np.ndarray[Any, Any]:
        """The rows of a partition."""
        return self._block[self._slices[part]]

    def encode(self, part: int) -> Sequence[Buffer]:
        """The rows of a partition as frames."""
        return [b"head", self.get(part).data.cast("B")]

    def decode(self, frames: Sequence[Buffer]) -> np.ndarray[Any, Any]:
        """Rows from frames."""
        assert bytes(frames[0]) == b"head"
        return np.frombuffer(frames[1], "i8")

    def shell(self) -> ArrayChunk:
        """A chunk without rows that can decode."""
        return ArrayChunk({})


async def check_shard_store(make: Callable[[], ShardStore], *, settle: Callable[[], Any] | None = None) -> None:
    """The contract of `ShardStore`.

    Parameters
    ----------
    make
        Returns an empty store.
    settle
        Awaited after chunks were put, e.g. to wait until they have been moved to disk.
    """

    store = make()
    assert isinstance(store, ShardStore)
    await _check_put_and_take(store, settle or _nothing)
    await _check_empty_chunks(store, settle or _nothing)
    await _check_many_chunks(store, settle or _nothing)
    await _check_drop(store, settle or _nothing)


async def _nothing() -> None:
    pass


async def _check_put_and_take(store: ShardStore, settle: Callable[[], Any]) -> None:
    assert await store.take("r", 0) == [], "a run that nothing was sent for"

    # Ids out of order; part 3 in one chunk only; part 9 in none.
    # Chunks are made anew each time: a store may give back an object that is still in use, without reading.
    def chunk(i: int) -> ArrayChunk:
        if i == 2:
            return ArrayChunk({0: np.arange(5), 3: np.arange(7)})
        return ArrayChunk({p: np.arange(1000) + 10_000 * i + 100_000 * p for p in (0, 1)})

    for i in (3, 1, 2):
        assert await store.put("r", i, chunk(i)) is True
        assert await store.put("r", i, chunk(i)) is False, "the same id twice"
    assert await store.put("r2", 1, ArrayChunk({0: np.array([77])})) is True
    await settle()
    for part, ids in ((0, [1, 2, 3]), (3, [2]), (9, [])):
        got = await store.take("r", part)
        assert len(got) == len(ids), (part, got)
        for shard, i in zip(got, ids, strict=True):
            np.testing.assert_array_equal(shard, chunk(i).get(part))
        assert await store.take("r", part) == [], "taken twice"
    assert [a.tolist() for a in await store.take("r2", 0)] == [[77]], "runs are apart"
    got = await store.take("r", 1)
    np.testing.assert_array_equal(np.concatenate(got), np.concatenate([chunk(1).get(1), chunk(3).get(1)]))


async def _check_empty_chunks(store: ShardStore, settle: Callable[[], Any]) -> None:
    """A chunk without rows, and one with an output of no rows."""
    assert await store.put("r", 10, ArrayChunk({})) is True
    assert await store.put("r", 11, ArrayChunk({5: np.empty(0, "i8"), 6: np.arange(3)})) is True
    await settle()
    assert [len(a) for a in await store.take("r", 5)] == [0]
    assert [len(a) for a in await store.take("r", 6)] == [3]


async def _check_many_chunks(store: ShardStore, settle: Callable[[], Any]) -> None:
    """Many at once, taken at once."""

    def wide(i: int) -> ArrayChunk:
        return ArrayChunk({p: np.full(500, 100 * i + p) for p in range(8)})

    assert all(await asyncio.gather(*(store.put("m", i, wide(i)) for i in range(20))))
    await settle()
    for part, shards in enumerate(await asyncio.gather(*(store.take("m", p) for p in range(8)))):
        np.testing.assert_array_equal(
            np.concatenate(shards), np.concatenate([np.full(500, 100 * i + part) for i in range(20)])
        )


async def _check_drop(store: ShardStore, settle: Callable[[], Any]) -> None:
    """Now and for good. While a part is being taken: the shards, or LostData; nothing else."""
    assert await store.put("d", 1, ArrayChunk({0: np.arange(1000)})) is True
    await settle()
    store.drop("d")
    assert await store.put("d", 2, ArrayChunk({0: np.arange(10)})) is False
    assert await store.take("d", 0) == []
    store.drop("never seen")
    assert await store.put("never seen", 1, ArrayChunk({0: np.arange(10)})) is False

    for i in range(5):
        assert await store.put("e", i, ArrayChunk({0: np.arange(1000) + i})) is True
    await settle()
    taking = asyncio.ensure_future(store.take("e", 0))
    await asyncio.sleep(0)
    store.drop("e")
    try:
        shards = await taking
    except LostData:
        return
    for i, shard in enumerate(shards):
        np.testing.assert_array_equal(shard, np.arange(1000) + i)


def _raises(kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any]) -> None:
    try:
        result = call()
    except kind:
        return
    raise AssertionError(f"{kind} expected, got {result!r}")


def same(got: Any, want: object) -> None:
    """Raise AssertionError unless two values are equal, arrays in tuples and lists included."""
    if isinstance(want, np.ndarray):
        np.testing.assert_array_equal(got, want)
    elif isinstance(want, (tuple, list)):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            same(g, w)
    else:
        assert got == want, (got, want)


def check_storage_tier(
    make: Callable[[int | None], StorageTier], codec: Codec, *, damage: Callable[[Handle], None] | None = None
) -> None:
    """What the engine relies on in a tier (`dask_gpurt.tiers.storage.protocol.StorageTier`).

    Parameters
    ----------
    make
        Returns a fresh, empty tier with the given limit in bytes (None: none).
    codec
        Encodes NumPy arrays, strings and lists of them (`dask_gpurt.tiers.storage.handle.Codec`).
    damage
        Changes one byte of the last frame of the copy behind a handle. None: the tier is memory, which is not verified.
    """
    _check_copies(make(None), codec, damage)
    _check_limit(make(50_000))
    _check_threads(make(None))


def _check_copies(tier: StorageTier, codec: Codec, damage: Callable[[Handle], None] | None) -> None:
    """What is written can be read, whole and in parts; space is given back, by each copy once."""
    assert tier.used_bytes == 0
    assert tier.limit_bytes is None
    tier.probe()
    assert tier.used_bytes == 0, "probe leaves something behind"

    handles = _check_values(tier, codec)
    parted = tier.write(list(_PARTS.items()))
    _check_parts(parted)
    _check_foreign_errors(handles[0])
    if damage is not None:
        _check_damage(parted, handles[3], codec, damage)
    for handle in [*handles, parted]:
        handle.free()
    assert tier.used_bytes == 0
    _raises((OSError, CorruptData), lambda: handles[2].load(codec))
    tier.close()
    tier.close()


def _check_values(tier: StorageTier, codec: Codec) -> list[Handle]:
    """Whole values: empty frames, no frames of size, several, large ones, non-contiguous."""
    values: list[Any] = [
        None,
        b"",
        "x" * 100_000,
        np.arange(300_000.0),
        np.empty((0, 3)),
        [np.arange(n) for n in (0, 1, 7, 5000)],
        np.arange(10_000).reshape(100, 100)[::2, ::3],
        np.asfortranarray(np.ones((40, 30))),
    ]
    handles = [tier.write(codec.encode(v, None)) for v in values]
    assert tier.used_bytes == sum(h.nbytes for h in handles) > 0
    for handle, value in zip(handles * 2, values * 2, strict=True):  # twice: reading takes nothing away
        got, cost = handle.load(codec)
        same(got, value)
        assert cost.io_seconds >= 0
    array = handles[3].load(codec)[0]
    array[0] = -1.0  # as writeable as it was
    same(handles[3].load(codec)[0], values[3])  # and no view of the copy
    return handles


_PARTS: dict[int, list[Any]] = {0: [b"a", b"bc" * 500], 7: [b"", b"z" * 9000], 3: [np.arange(1000.0).data.cast("B")]}


def _check_parts(parted: Handle) -> None:
    """Parts, in any order."""
    for part in (3, 0, 7, 3):
        frames, _ = parted.load_part(part)
        assert [bytes(f) for f in frames] == [bytes(f) for f in _PARTS[part]]
    _raises(KeyError, lambda: parted.load_part(99))


class _Bad:
    """A codec of objects whose own code raises."""

    def encode(self, value: object, parts: Sequence[int] | None) -> list[Group]:
        raise ValueError("the object's own code")

    def decode(self, frames: list[memoryview]) -> Any:
        raise ValueError("the object's own code")


def _check_foreign_errors(handle: Handle) -> None:
    """What an object's own code raises is the cause of what `load` raises."""
    try:
        handle.load(_Bad())
    except Exception as e:
        if not isinstance(e.__cause__, ValueError):
            raise AssertionError("what the object's own code raised is not the cause") from e
    else:
        raise AssertionError("an object's own code raised, and load did not")


def _check_damage(parted: Handle, handle: Handle, codec: Codec, damage: Callable[[Handle], None]) -> None:
    damage(parted)
    failed = 0
    for part in _PARTS:
        try:
            parted.load_part(part)
        except CorruptData:
            failed += 1
    assert failed == 1, "exactly the damaged part is refused"
    damage(handle)
    _raises(CorruptData, lambda: handle.load(codec))


def _check_limit(tier: StorageTier) -> None:
    """What does not fit is refused before anything is written; the space of what was freed counts again."""
    assert tier.limit_bytes is not None
    room = tier.limit_bytes
    data = os.urandom(room)  # a tier may compress
    first = tier.write([(0, [data[: room // 2]])])
    before = tier.used_bytes
    _raises(TierFull, lambda: tier.write([(0, [data])]))
    assert tier.used_bytes == before
    first.free()
    tier.write([(0, [data[: room // 2]])]).free()
    assert tier.used_bytes == 0
    tier.close()


def _check_threads(tier: StorageTier) -> None:
    """From several threads at once."""
    with ThreadPoolExecutor(8) as pool:
        many = list(pool.map(lambda i: tier.write([(0, [bytes([i]) * (1000 * i)])]), range(1, 60)))
        read = list(pool.map(lambda h: h.load_part(0)[0], many))
        assert [bytes(f[0]) for f in read] == [bytes([i]) * (1000 * i) for i in range(1, 60)]
        list(pool.map(lambda h: h.free(), many))
    assert tier.used_bytes == 0
    tier.close()
