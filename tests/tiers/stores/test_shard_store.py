"""What the tier shard store promises beyond the contract: ranged reads, one budget, and loss that is told."""

# ruff: noqa: ASYNC230, SIM115
from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from typing import TYPE_CHECKING
from unittest.mock import Mock

import numpy as np
import pytest

from dask_gpurt.errors import LostData
from dask_gpurt.testing import ArrayChunk
from dask_gpurt.tiers.engine import loading
from dask_gpurt.tiers.engine.entry import State
from dask_gpurt.tiers.stores.shard_store import TierShardStore

if TYPE_CHECKING:
    from tests.tiers.conftest import Rig

RunRig = Callable[..., None]


def chunk(i: int, parts: int = 10, rows: int = 1000) -> ArrayChunk:
    return ArrayChunk({p: np.arange(rows) + 1000 * p + 100_000 * i for p in range(parts)})


def test_take_reads_one_part_only(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        shards = TierShardStore(rig.engine)
        await shards.put("r", 0, chunk(0))
        await rig.settle()
        assert rig.engine.states()["stored"] == 1
        (got,) = await shards.take("r", 3)
        np.testing.assert_array_equal(got, np.arange(1000) + 3000)
        assert rig.engine.counters.cumulative["disk-read", "bytes"] == 8000 + 4
        rig.validate()

    run_rig(test, budget=0)


def test_taken_parts_are_not_written(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        shards = TierShardStore(rig.engine)
        await shards.put("r", 0, chunk(0))
        for p in range(9):
            await shards.take("r", p)
        rig.spill_all()
        await rig.settle()
        assert rig.engine.counters.cumulative["disk-write", "bytes"] < 2 * 8000
        (got,) = await shards.take("r", 9)
        np.testing.assert_array_equal(got, np.arange(1000) + 9000)
        await rig.settle()
        assert rig.disk.files() == []
        assert len(shards) == 0
        rig.validate()

    run_rig(test)


def test_one_budget_with_task_results_but_other_metrics(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        shards = TierShardStore(rig.engine)
        for i in range(10):
            await shards.put("r", i, chunk(i))
            rig.store[i] = np.ones(10_000)
        await rig.settle()
        assert rig.engine.resident_bytes <= 400_000
        assert (
            rig.store.spilled_total.memory + shards._account.stored_memory_bytes
            == 1_600_000 - rig.engine.resident_bytes + sum(rig.store.entry(i).nbytes - 80_000 for i in range(10))
        )
        assert len(rig.store.slow) == rig.store._account.stored
        rig.validate()

    run_rig(test, budget=400_000)


def test_put_waits_for_the_disk(run_rig: RunRig) -> None:
    """Backpressure: what is in memory stays near the budget however fast chunks arrive."""

    async def test(rig: Rig) -> None:
        shards = TierShardStore(rig.engine)
        peak = 0

        async def send(i: int) -> None:
            nonlocal peak
            await shards.put("r", i, chunk(i))
            peak = max(peak, rig.engine.resident_bytes)

        await asyncio.gather(*(send(i) for i in range(100)))
        assert peak <= 400_000 * 1.25 + 80_000
        assert rig.engine.gate.waits > 0
        for p in range(10):
            got = await shards.take("r", p)
            np.testing.assert_array_equal(np.concatenate(got), np.concatenate([chunk(i).get(p) for i in range(100)]))
        await rig.settle()
        rig.validate()

    run_rig(test, budget=400_000)


def test_damaged_part_is_lost_data(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        shards = TierShardStore(rig.engine)
        await shards.put("r", 0, chunk(0))
        await shards.put("r", 1, chunk(1))
        await rig.settle()
        path = os.path.join(rig.disk.directory, rig.disk.files()[0])
        data = bytearray(open(path, "rb").read())
        data[-4000] ^= 1  # in the last part
        open(path, "wb").write(data)
        assert len(await shards.take("r", 0)) == 2, "other parts of the file are intact"
        with pytest.raises(LostData):
            await shards.take("r", 9)
        assert rig.engine.counters.checksum_failures == 1
        assert rig.engine.states()["lost"] == 1
        shards.drop("r")
        await rig.settle()
        assert rig.disk.files() == []
        rig.validate()

    run_rig(test, budget=0)


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "x"), MemoryError()], ids=["descriptors", "memory"])
def test_a_part_that_cannot_be_read_for_now_costs_no_other(
    run_rig: RunRig, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output is made anew, as after a loss; but the file is good, and nothing is said of it."""

    async def test(rig: Rig) -> None:
        shards = TierShardStore(rig.engine)
        await shards.put("r", 0, chunk(0))
        await rig.settle()
        with monkeypatch.context() as short:
            short.setattr(loading, "retry", Mock(side_effect=error))
            with pytest.raises(LostData, match="part 3"):
                await shards.take("r", 3)
        assert rig.engine.counters.lost == 0
        (got,) = await shards.take("r", 4)
        np.testing.assert_array_equal(got, np.arange(1000) + 4000)
        rig.validate()

    run_rig(test, budget=0)


def test_disk_full_keeps_chunks_in_memory(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        shards = TierShardStore(rig.engine)
        for i in range(5):
            await asyncio.wait_for(shards.put("r", i, chunk(i)), 30)
        await rig.settle()
        assert rig.engine.states()["resident"] == 5
        assert len(await shards.take("r", 4)) == 5
        rig.validate()

    run_rig(test, budget=0, limit_bytes=1000)


def test_shards_in_use_bring_back_their_chunk_for_nothing(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        shards = TierShardStore(rig.engine)
        c = chunk(0)
        await shards.put("r", 0, c)
        rig.spill_all()
        await rig.settle()
        entry = next(iter(shards._left))
        assert entry.state is State.STORED
        (got,) = await shards.take("r", 1)
        assert got.base is c._block
        assert rig.engine.counters.cumulative["disk-read", "count"] == 0

    run_rig(test)
