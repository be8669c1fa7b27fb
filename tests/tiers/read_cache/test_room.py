"""How much is kept: what is free on a worker, and nothing where values may have to leave."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from distributed import Client
from distributed.utils_test import async_poll_for

import dask_gpurt
from dask_gpurt.config import Settings
from dask_gpurt.memory.pages import pages
from dask_gpurt.tiers.limits import limits_of
from dask_gpurt.tiers.read_cache import files, seam
from dask_gpurt.tiers.read_cache.cache import ReadCache
from dask_gpurt.tiers.worker import memory_watch
from dask_gpurt.tiers.worker.memory_watch import MemoryWatch
from tests.tiers.read_cache.test_cache import Reader
from tests.tiers.test_limits import worker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.tiers.conftest import Rig, RunRig

LIMIT = 100_000_000


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SETTLED_SECONDS", 0)
    monkeypatch.setattr(seam, "CACHE", ReadCache())


@contextlib.contextmanager
def watching(rig: Rig, size: list[int], **settings: Any) -> Iterator[MemoryWatch]:
    fake = worker(LIMIT)
    fake.monitor = SimpleNamespace(get_process_memory=lambda: size[0] + pages.idle_bytes)
    tiers = Settings.load({f"tiers.{k}": v for k, v in settings.items()}).tiers
    watch = MemoryWatch(fake, rig.engine, limits_of(fake, tiers, shards_only=False))
    watch.stop()
    try:
        watch.look()
        yield watch
    finally:
        watch.stop()


def pass_seconds(watch: MemoryWatch) -> None:
    """Have `_READS_SECONDS` pass, and look."""
    watch._reads_free._since -= 60
    watch.look()


def allowed() -> int:
    return seam.CACHE.allowance_bytes


def test_a_share_of_the_limit_or_what_is_free_below_half_of_it(run_rig: RunRig) -> None:
    async def main(rig: Rig) -> None:
        size = [10_000_000]
        with watching(rig, size) as watch:
            assert allowed() == 20_000_000
            size[0] = 40_000_000
            watch.look()
            assert allowed() == 9_000_000  # to 0.7 of the 70 that values may fill the process up to
            size[0] = 50_000_000
            watch.look()
            assert allowed() == 0
            await watch.end()
        with watching(rig, [10_000_000], **{"read-cache": 0}) as watch:
            assert allowed() == 0
            assert not seam._users
            await watch.end()

    run_rig(main, budget=60_000_000)


def test_nothing_where_values_may_leave(run_rig: RunRig, tmp_path: Path) -> None:
    """What is written to disk while columns of it are kept frees nothing."""

    async def main(rig: Rig) -> None:
        reader = Reader(tmp_path / "x")
        with watching(rig, [30_000_000]) as watch:
            for _ in range(2):
                reader.read(seam.CACHE, ["a"])
            assert seam.CACHE.kept_bytes
            rig.store["x"] = bytes(31_000_000)  # more than half of the budget
            await async_poll_for(lambda: seam.CACHE.kept_bytes == 0, timeout=10)
            assert allowed() == 0
            watch.look()
            assert allowed() == 0
            del rig.store["x"]
            watch.look()
            assert allowed() == 0  # as much as was free all through the last seconds
            pass_seconds(watch)
            assert allowed() == 0
            pass_seconds(watch)
            assert allowed() == 19_000_000
            rig.store["x"] = bytes(31_000_000)
            await watch.end()
            await async_poll_for(lambda: rig.engine.eviction.pressed, timeout=10)
            assert not memory_watch._shares  # one that has ended says no more

    run_rig(main, budget=60_000_000)


def test_it_goes_before_values(run_rig: RunRig, tmp_path: Path) -> None:
    async def main(rig: Rig) -> None:
        reader = Reader(tmp_path / "x", rows=100_000)
        size = [30_000_000]
        with watching(rig, size) as watch:
            for _ in range(2):
                reader.read(seam.CACHE, ["a"])
            kept = seam.CACHE.kept_bytes
            assert kept > 1_000_000
            rig.store["x"] = bytes(5_000_000)
            size[0] = 70_000_000 + kept
            watch.look()
            assert seam.CACHE.kept_bytes == 0
            assert (watch.alarms, rig.engine.eviction.used_bytes) == (0, 5_000_000)
            await watch.end()

    run_rig(main, budget=60_000_000)


@pytest.mark.parametrize("limits", [{"shards_only": True, "reads_bytes": 0}, {"watch_high_bytes": None}])
def test_nothing_without_a_watch(run_rig: RunRig, tmp_path: Path, limits: dict[str, Any]) -> None:
    async def main(rig: Rig) -> None:
        reader = Reader(tmp_path / "x", rows=100_000)
        size = [30_000_000]
        with watching(rig, size) as watch:
            for _ in range(2):
                reader.read(seam.CACHE, ["a"])
            assert seam.CACHE.kept_bytes
            watch.set_limits(dataclasses.replace(watch._limits, **limits))
            watch._callback.stop()  # type: ignore[union-attr]
            watch.look()
            assert seam.CACHE.kept_bytes == allowed() == 0
            await watch.end()

    run_rig(main, budget=60_000_000)


def test_what_was_dropped_counts_as_free_until_the_allocator_has_given_it_back(
    run_rig: RunRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow's allocator keeps it, and values left for that."""
    release = threading.Event()
    released = threading.Semaphore(0)

    def wait() -> None:
        release.wait(60)
        released.release()

    monkeypatch.setattr(memory_watch, "_release_arrow", wait)

    async def main(rig: Rig) -> None:
        reader = Reader(tmp_path / "x", rows=1_000_000)
        size = [30_000_000]
        with watching(rig, size) as watch:
            for _ in range(2):
                reader.read(seam.CACHE, ["a"])
            kept = seam.CACHE.kept_bytes
            rig.store["x"] = bytes(5_000_000)
            size[0] = 68_000_000 + kept
            rig.engine.eviction.press()
            await async_poll_for(lambda: seam.CACHE.kept_bytes == 0, timeout=10)
            watch.look()
            assert (watch.alarms, rig.engine.eviction.used_bytes) == (0, 5_000_000)
            assert rig.engine.eviction._room_bytes == pytest.approx(7_000_000)
            release.set()
            await async_poll_for(lambda: watch._dropped_bytes == 0, timeout=10)
            assert released.acquire(timeout=10)
            await watch.end()

    run_rig(main, budget=60_000_000)


def test_workers_of_one_process_share_what_the_fullest_allows(run_rig: RunRig) -> None:
    async def main(rig: Rig) -> None:
        first, second = [10_000_000], [45_000_000]
        with watching(rig, first) as one, watching(rig, second) as two:
            assert allowed() == 4_000_000
            await two.end()
            pass_seconds(one)
            assert allowed() == 20_000_000
            await one.end()
        assert not memory_watch._shares
        assert allowed() == 0

    run_rig(main, budget=60_000_000)


@pytest.mark.cluster
@pytest.mark.parametrize("share", [0.2, 0])
def test_on_a_cluster(tmp_path: Path, share: float) -> None:
    dd = pytest.importorskip("dask.dataframe")
    path = str(tmp_path / "t")
    n = 20_000
    data = pd.DataFrame({"k": np.arange(n) % 7, "x": np.arange(n) * 0.5})
    dd.from_pandas(data, npartitions=4).to_parquet(path)
    expected = data.groupby("k").x.sum()
    settings = {"tiers.read-cache": share}
    with (
        dask_gpurt.local_cluster(n_workers=1, threads_per_worker=2, settings=settings) as cluster,
        Client(cluster) as client,
    ):

        def settle() -> None:
            from dask_gpurt.tiers.read_cache import files

            files.SETTLED_SECONDS = 0

        client.run(settle)

        def figures() -> dict[str, int]:
            (worker,) = dask_gpurt.status(client).workers.values()
            found: dict[str, int] = worker["tiers"]["read_cache"]
            return found

        for turn in range(60):
            table = dd.read_parquet(path)
            got = table.groupby("k").x.sum().compute()
            pd.testing.assert_series_equal(got, expected, check_dtype=True, check_index_type=False)
            if figures()["hits"] or (not share and turn == 4):
                break
        found = figures()
        assert found["errors"] == 0
        assert (found["kept_bytes"] > 0) == (found["hits"] > 0) == bool(share)
