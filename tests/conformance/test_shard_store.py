"""Every `ShardStore` keeps the same contract, whether it spills or not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dask_gpurt.model import Chunk, ShardStore
from dask_gpurt.shuffle.worker.shard_stores import MemoryShardStore
from dask_gpurt.testing import ArrayChunk, check_shard_store
from dask_gpurt.tiers.engine.engine import Engine
from dask_gpurt.tiers.storage.disk.quota import Quota
from dask_gpurt.tiers.storage.disk.striped import Directories
from dask_gpurt.tiers.storage.disk.tier import DiskTier
from dask_gpurt.tiers.stores.shard_store import TierShardStore


def test_array_chunk_is_a_chunk() -> None:
    assert isinstance(ArrayChunk({}), Chunk)


def test_memory() -> None:
    assert isinstance(MemoryShardStore(), ShardStore)
    asyncio.run(check_shard_store(MemoryShardStore))


#: how a disk tier may lay out its files
DISKS: dict[str, dict[str, Any]] = {
    "segments": {},
    "compacted often": {"segment_bytes": 4000},
    "a file each": {"small_bytes": 0},
    "through the page cache": {"small_bytes": 0, "direct_io": "off"},
}


@pytest.mark.parametrize("disk", [*DISKS, "two folders"])
@pytest.mark.parametrize("budget", [None, 0, 30_000, 10**9])
def test_tiers(tmp_path: Any, budget: int | None, disk: str) -> None:
    def make() -> Any:
        if disk in DISKS:
            return DiskTier(str(tmp_path / "t"), **DISKS[disk])
        quota = Quota()
        return Directories([DiskTier(str(tmp_path / name), quota=quota) for name in ("t", "u")], quota)

    async def main() -> None:
        engine = Engine(make(), budget_bytes=budget)
        try:
            await check_shard_store(lambda: TierShardStore(engine), settle=engine.idle)
            engine.validate()
            if budget == 0:
                assert engine.counters.cumulative["disk-write", "count"] > 20
                assert engine.counters.cumulative["disk-read", "count"] > 20
            if budget in (None, 10**9):
                assert engine.counters.cumulative["disk-write", "count"] == 0
            assert not engine.counters.lost
        finally:
            await engine.close()

    asyncio.run(main())


def test_a_store_that_forgets_fails() -> None:
    class Forgetful(MemoryShardStore):
        async def take(self, run: Any, part: int) -> list[Any]:
            return (await super().take(run, part))[:2]

    with pytest.raises(AssertionError):
        asyncio.run(check_shard_store(Forgetful))


def test_a_store_that_takes_twice_fails() -> None:
    class Twice(MemoryShardStore):
        async def put(self, run: Any, chunk_id: Any, chunk: Any) -> bool:
            await super().put(run, chunk_id, chunk)
            return True

    with pytest.raises(AssertionError):
        asyncio.run(check_shard_store(Twice))
