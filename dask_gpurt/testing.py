"""Conformance checks for the protocols, for our tests and for those of anybody who implements one.

Each ``check_*`` takes a factory of fresh objects and raises AssertionError with what is wrong.
"""

from __future__ import annotations

import asyncio
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_gpurt.errors import CorruptData, LostData, TierFull
from dask_gpurt.model.shards import Buffer, ShardStore

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, MutableMapping, Sequence

__all__ = ["ArrayChunk", "check_mapping", "check_shard_store", "check_storage_tier"]


def check_mapping(make: Callable[[], MutableMapping[Any, Any]]) -> None:
    """What distributed relies on in ``worker.data``. A plain dict passes.

    Parameters
    ----------
    make
        Returns an empty mapping. Called on a running event loop if the mapping needs one.
    """
    data = make()
    assert len(data) == 0
    assert not data
    assert list(data) == []
    _raises(KeyError, lambda: data["absent"])
    _raises(KeyError, lambda: data.__delitem__("absent"))
    assert "absent" not in data
    assert data.get("absent", 7) == 7

    keys: list[Any] = ["a", ("b", 0), ("b", 1), b"c", 5, "with/slash \u00e9"]
    values: list[Any] = [1, None, "x" * 10_000, np.arange(5000.0), {"k": [1, 2]}, (np.ones(3), "y")]
    for key, value in zip(keys, values, strict=True):
        data[key] = value
    assert len(data) == len(keys)
    assert set(data) == set(keys) == set(data.keys())
    for key, value in zip(keys, values, strict=True):
        assert key in data
        _same(data[key], value)
        _same(data[key], value)  # reading takes nothing away
    _same(dict(data.items())["a"], 1)

    data["a"] = "new"
    assert data["a"] == "new"
    assert len(data) == len(keys)
    for key in list(data):  # deleting while a copy of the keys is walked
        del data[key]
        assert key not in data
        _raises(KeyError, functools.partial(data.__getitem__, key))
    assert len(data) == 0
    data["again"] = 1
    data.clear()
    assert len(data) == 0
    data["p"] = 3
    data.update({"q": 4})
    assert dict(data) == {"p": 3, "q": 4}


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
        return int(self._block.nbytes)

    @property
    def parts(self) -> Collection[int]:
        return self._slices.keys()

    def get(self, part: int) -> np.ndarray[Any, Any]:
        return self._block[self._slices[part]]

    def encode(self, part: int) -> Sequence[Buffer]:
        return [b"head", self.get(part).data.cast("B")]

    def decode(self, frames: Sequence[Buffer]) -> np.ndarray[Any, Any]:
        assert bytes(frames[0]) == b"head"
        return np.frombuffer(frames[1], "i8")

    def shell(self) -> ArrayChunk:
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

    async def wait() -> None:
        if settle is not None:
            await settle()

    store = make()
    assert isinstance(store, ShardStore)
    assert await store.take("r", 0) == [], "a run nobody sent anything for"

    # Ids out of order; part 3 in one chunk only; part 9 in none.
    # Chunks are made anew each time: a store may give back an object that somebody still holds, without reading.
    def chunk(i: int) -> ArrayChunk:
        if i == 2:
            return ArrayChunk({0: np.arange(5), 3: np.arange(7)})
        return ArrayChunk({p: np.arange(1000) + 10_000 * i + 100_000 * p for p in (0, 1)})

    for i in (3, 1, 2):
        assert await store.put("r", i, chunk(i)) is True
        assert await store.put("r", i, chunk(i)) is False, "the same id twice"
    assert await store.put("r2", 1, ArrayChunk({0: np.array([77])})) is True
    await wait()
    for part, ids in ((0, [1, 2, 3]), (3, [2]), (9, [])):
        got = await store.take("r", part)
        assert len(got) == len(ids), (part, got)
        for shard, i in zip(got, ids, strict=True):
            np.testing.assert_array_equal(shard, chunk(i).get(part))
        assert await store.take("r", part) == [], "taken twice"
    assert [a.tolist() for a in await store.take("r2", 0)] == [[77]], "runs are apart"
    got = await store.take("r", 1)
    np.testing.assert_array_equal(np.concatenate(got), np.concatenate([chunk(1).get(1), chunk(3).get(1)]))

    # A chunk without rows, and one with an output of no rows.
    assert await store.put("r", 10, ArrayChunk({})) is True
    assert await store.put("r", 11, ArrayChunk({5: np.empty(0, "i8"), 6: np.arange(3)})) is True
    await wait()
    assert [len(a) for a in await store.take("r", 5)] == [0]
    assert [len(a) for a in await store.take("r", 6)] == [3]

    # Many at once, taken at once.
    def wide(i: int) -> ArrayChunk:
        return ArrayChunk({p: np.full(500, 100 * i + p) for p in range(8)})

    assert all(await asyncio.gather(*(store.put("m", i, wide(i)) for i in range(20))))
    await wait()
    for part, shards in enumerate(await asyncio.gather(*(store.take("m", p) for p in range(8)))):
        np.testing.assert_array_equal(
            np.concatenate(shards), np.concatenate([np.full(500, 100 * i + part) for i in range(20)])
        )

    # Drop: now and for good.
    assert await store.put("d", 1, ArrayChunk({0: np.arange(1000)})) is True
    await wait()
    store.drop("d")
    assert await store.put("d", 2, ArrayChunk({0: np.arange(10)})) is False
    assert await store.take("d", 0) == []
    store.drop("never seen")
    assert await store.put("never seen", 1, ArrayChunk({0: np.arange(10)})) is False

    # Drop while a part is being taken: the shards, or LostData; nothing else.
    for i in range(5):
        assert await store.put("e", i, ArrayChunk({0: np.arange(1000) + i})) is True
    await wait()
    taking = asyncio.ensure_future(store.take("e", 0))
    await asyncio.sleep(0)
    store.drop("e")
    try:
        shards = await taking
    except LostData:
        pass
    else:
        for i, shard in enumerate(shards):
            np.testing.assert_array_equal(shard, np.arange(1000) + i)


def _raises(kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any]) -> None:
    try:
        result = call()
    except kind:
        return
    raise AssertionError(f"{kind} expected, got {result!r}")


def _same(got: Any, want: Any) -> None:
    if isinstance(want, np.ndarray):
        np.testing.assert_array_equal(got, want)
    elif isinstance(want, (tuple, list)):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            _same(g, w)
    else:
        assert got == want, (got, want)


def check_storage_tier(
    make: Callable[[int | None], Any], codec: Any, *, damage: Callable[[Any], None] | None = None
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
    tier = make(None)
    assert tier.used_bytes == 0
    assert tier.limit_bytes is None
    tier.probe()
    assert tier.used_bytes == 0, "probe leaves something behind"

    # Whole values: empty frames, no frames of size, several, large ones, non-contiguous.
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
        _same(got, value)
        assert cost.io_seconds >= 0
    array = handles[3].load(codec)[0]
    array[0] = -1.0  # as writeable as it was
    _same(handles[3].load(codec)[0], values[3])  # and no view of the copy

    # Parts, in any order.
    parts: dict[int, list[Any]] = {0: [b"a", b"bc" * 500], 7: [b"", b"z" * 9000], 3: [np.arange(1000.0).data.cast("B")]}
    parted = tier.write(list(parts.items()))
    for part in (3, 0, 7, 3):
        frames, _ = parted.load_part(part)
        assert [bytes(f) for f in frames] == [bytes(f) for f in parts[part]]
    _raises(KeyError, lambda: parted.load_part(99))

    class Bad:
        def encode(self, value: Any, parts: Any) -> Any:
            raise NotImplementedError

        def decode(self, frames: Any) -> Any:
            raise ValueError("the object's own code")

    try:
        handles[0].load(Bad())
    except Exception as e:
        if not isinstance(e.__cause__, ValueError):
            raise AssertionError("what the object's own code raised is not the cause") from e
    else:
        raise AssertionError("an object's own code raised, and load did not")
    if damage is not None:
        damage(parted)
        failed = 0
        for part in parts:
            try:
                parted.load_part(part)
            except CorruptData:
                failed += 1
        assert failed == 1, "exactly the damaged part is refused"
        damage(handles[3])
        _raises(CorruptData, lambda: handles[3].load(codec))
    # Space is given back, by each copy once.
    for handle in [*handles, parted]:
        handle.free()
    assert tier.used_bytes == 0
    _raises((OSError, CorruptData), lambda: handles[2].load(codec))
    tier.close()
    tier.close()

    # The limit: refused before anything is written, and the space of what was freed counts again.
    tier = make(50_000)
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

    # From several threads at once.
    tier = make(None)
    with ThreadPoolExecutor(8) as pool:
        many = list(pool.map(lambda i: tier.write([(0, [bytes([i]) * (1000 * i)])]), range(1, 60)))
        read = list(pool.map(lambda h: h.load_part(0)[0], many))
        assert [bytes(f[0]) for f in read] == [bytes([i]) * (1000 * i) for i in range(1, 60)]
        list(pool.map(lambda h: h.free(), many))
    assert tier.used_bytes == 0
    tier.close()
