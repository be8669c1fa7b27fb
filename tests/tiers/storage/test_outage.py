"""An object store that does not deliver: its copies stay, and are read once it does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import threading
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from distributed.utils_test import async_poll_for

from dask_gpurt import errors
from dask_gpurt.errors import CorruptData
from dask_gpurt.tiers import backoff
from dask_gpurt.tiers.engine.engine import Engine
from dask_gpurt.tiers.engine.entry import State
from dask_gpurt.tiers.storage.object import client as bucket_module
from dask_gpurt.tiers.storage.object import tier as tier_module
from dask_gpurt.tiers.storage.object.client import Bucket
from dask_gpurt.tiers.storage.object.tier import ObjectTier
from dask_gpurt.tiers.stores.task_store import TieredStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

DOWN = [OSError(5, "503 Slow Down"), PermissionError(13, "403: ExpiredToken")]


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "BACK_OFF_SECONDS", 0.001)
    monkeypatch.setattr(backoff, "LONGEST_PAUSE_SECONDS", 0.001, raising=False)


def array(i: int, n: int = 10_000) -> np.ndarray[Any, Any]:
    return np.full(n, i, "u1")


class Rig:
    """A store with the values 0 and 1 in a folder, which fails as often as `failures` says."""

    def __init__(self, folder: Path) -> None:
        self.tier = ObjectTier(Bucket(folder.as_uri()), f"gpurt/c/{1:016x}")
        self.engine = Engine(self.tier, budget_bytes=None)
        self.lost: list[Any] = []
        self.store = TieredStore(self.engine, on_lost=self.lost.append)
        self.error: Exception = DOWN[0]
        self.failures = 0
        self._fill = self.tier.bucket._store.fill
        self.tier.bucket._store.fill = self.fill  # type: ignore[method-assign]

    def fill(self, *args: Any) -> int:
        if self.failures > 0:
            self.failures -= 1
            raise self.error
        return self._fill(*args)


@contextlib.asynccontextmanager
async def stored(folder: Path) -> AsyncIterator[Rig]:
    rig = Rig(folder)
    rig.store[0], rig.store[1] = array(0), array(1)
    rig.engine.shrink(1 << 40)
    await rig.engine.idle()
    rig.engine.shrink(0)
    # An I/O thread holds what it wrote last until it takes up something else; as long it could be revived.
    barrier = threading.Barrier(rig.engine.io.threads)
    pool = rig.engine.io._writers
    await asyncio.gather(*(asyncio.wrap_future(pool.submit(barrier.wait)) for _ in range(rig.engine.io.threads)))
    try:
        yield rig
    finally:
        await rig.engine.close()


async def read(rig: Rig) -> None:
    entries = await asyncio.wait_for(rig.store.ensure([0, 1]), 30)
    for i in range(2):
        np.testing.assert_array_equal(rig.store[i], array(i))
    rig.store.release(entries)
    assert rig.lost == []
    assert len(rig.tier.files()) == 2
    rig.engine.validate()


@pytest.mark.parametrize("error", DOWN, ids=["down", "refused"])
def test_an_outage_loses_no_copy(error: Exception, tmp_path: Path) -> None:
    """After eight requests, or a single refusal, intact objects were deleted, and scattered data were gone for good."""

    async def main() -> None:
        async with stored(tmp_path) as rig:
            rig.error, rig.failures = error, 40
            await read(rig)
            assert rig.failures == 0

    asyncio.run(main())


def test_an_outage_loses_no_part_of_a_chunk(tmp_path: Path) -> None:
    async def main() -> None:
        async with stored(tmp_path) as rig:
            rig.failures = 40
            entry = rig.store.entry(1)
            assert entry is not None
            frames = await asyncio.wait_for(rig.engine.load_part(entry, 0), 30)
            assert sum(f.nbytes for f in frames) >= 10_000
            assert entry.state is State.STORED
            assert rig.lost == []

    asyncio.run(main())


@pytest.mark.parametrize("ends", ["of the read", "of the store"])
def test_after_some_minutes_the_read_fails_and_the_copy_stays(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff if ends == "of the read" else tier_module, "PATIENCE_SECONDS", 0.0, raising=False)

    async def main() -> None:
        async with stored(tmp_path) as rig:
            for error in DOWN:
                rig.error, rig.failures = error, 1 << 30
                rig.store.release(await asyncio.wait_for(rig.store.ensure([0]), 30))
                entry = rig.store.entry(0)
                assert entry is not None
                kept = each = entry.load_error
                while each is not None:
                    for frame, _ in traceback.walk_tb(each.__traceback__):
                        assert not {"buffers", "buffer", "run", "piece"} & set(frame.f_locals), "its memory stays"
                    each = each.__cause__
                with pytest.raises(errors.Undelivered, match="read") as raised:
                    rig.store[0]
                again = pickle.loads(pickle.dumps(raised.value))
                assert str(again) == str(kept) == str(raised.value)
                with pytest.raises(errors.Undelivered):  # at once, by what reads on the loop
                    rig.store[0]
                rig.failures = 0
                await read(rig)
                rig.engine.shrink(1 << 40)
                await rig.engine.idle()
                rig.engine.shrink(0)

    asyncio.run(main())


def test_an_outage_lasts_until_a_read_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads thousands of values one by one, to give a worker back, must not wait some minutes for each."""

    async def main() -> None:
        now = [1000.0]
        async with stored(tmp_path) as rig:
            handles = [rig.store.entry(i).handle for i in range(2)]  # type: ignore[union-attr]
            monkeypatch.setattr(tier_module.time, "monotonic", lambda: now[0])
            lasting = []
            for seconds in (0.0, backoff.PATIENCE_SECONDS - 1, 2.0):
                now[0] += seconds
                rig.failures = 4
                with pytest.raises(errors.Undelivered) as raised:
                    handles[0].load_part(0)  # type: ignore[union-attr]
                lasting.append(raised.value.lasting)
            handles[1].load_part(0)  # type: ignore[union-attr]
            rig.failures = 4
            with pytest.raises(errors.Undelivered) as raised:
                handles[0].load_part(0)  # type: ignore[union-attr]
            assert [*lasting, raised.value.lasting] == [False, False, True, False]
            monkeypatch.undo()

    asyncio.run(main())


@pytest.mark.parametrize("then", ["deleted", "read at once", "closed"])
def test_what_happens_to_a_value_between_two_attempts(
    then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff, "LONGEST_PAUSE_SECONDS", 1000.0)
    monkeypatch.setattr(backoff, "rest_seconds", lambda failures: 1000.0)

    async def main() -> None:
        async with stored(tmp_path) as rig:
            rig.failures = 4
            entry = rig.store.entry(0)
            assert entry is not None
            waiting = asyncio.ensure_future(rig.store.ensure([0]))
            await async_poll_for(lambda: rig.failures == 0 and not entry.readers, timeout=30)
            assert entry.state is State.LOADING
            rig.engine.validate()
            if then == "deleted":
                del rig.store[0]
            elif then == "closed":
                await rig.engine.close()
            else:
                np.testing.assert_array_equal(rig.store[0], array(0))
            rig.store.release(await asyncio.wait_for(waiting, 30))
            if then == "deleted":
                await rig.engine.idle()
                assert rig.tier.files() == ["1"]
            if then != "closed":
                rig.engine.validate()

    asyncio.run(main())


@pytest.mark.parametrize("what", ["link", "pipe", "folder", "nothing", "shorter"])
def test_what_is_no_copy_is_no_outage(what: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with stored(tmp_path) as rig:
            path = tmp_path / rig.tier.prefix / "0"
            moved = path.rename(tmp_path / "moved")
            if what == "link":
                path.symlink_to(moved)
            elif what == "pipe":
                os.mkfifo(path)
            elif what == "folder":
                path.mkdir()
            elif what == "shorter":
                path.write_bytes(moved.read_bytes()[:100])
            handle = rig.store.entry(0).handle  # type: ignore[union-attr]
            assert handle is not None
            with pytest.raises((CorruptData, FileNotFoundError)):
                handle.load_part(0)
            rig.store.release(await asyncio.wait_for(rig.store.ensure([0]), 30))
            await asyncio.sleep(0)
            assert rig.lost == [0]

    asyncio.run(main())
