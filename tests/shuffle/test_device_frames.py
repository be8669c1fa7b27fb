"""Device frames on clusters, over the stand-in `HostFrames`: partitions as stock's, and nothing left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import dask
import numpy as np
import pandas as pd
import pytest
from distributed import Client, LocalCluster, wait
from distributed.utils_test import gen_cluster

pytest.importorskip("rmm")

from dask_gpurt.config import ShuffleSettings
from dask_gpurt.shuffle.counters import worker_statistics
from dask_gpurt.shuffle.scheduler.takeover import ShuffleTakeover
from dask_gpurt.shuffle.worker.shard_stores import MemoryShardStore
from tests.backends import host_frames
from tests.backends.host_frames import HostFrame, HostFrames
from tests.backends.lazy_memory import LazyMemory
from tests.shuffle.helpers import NastyStore, held, left, ordered, right, same, source, taken_over, whole
from tests.shuffle.test_amendment import THREE, N, amended, gate, lose, same_rows, transferred, until, vouched

pytestmark = pytest.mark.cluster


def settings(**kwargs: Any) -> ShuffleSettings:
    return ShuffleSettings(**{"enabled": True, "transport": "rpc", "device_frames": True, **kwargs})


ON = settings()


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The device memory of this process: nothing was read too early, and all of it is given back."""
    fresh = LazyMemory()
    monkeypatch.setattr(host_frames, "MEMORY", fresh)
    yield fresh
    assert not fresh.faults


def host(d: Any) -> Any:
    """Partitions that a shuffle takes for ones in device memory."""
    return d.map_partitions(HostFrame, meta=HostFrame(d._meta))


def cluster(**kwargs: Any) -> Any:
    return gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 3, timeout=120, **kwargs)


async def partitions(c: Any, collection: Any) -> list[Any]:
    return await asyncio.gather(*c.compute(collection.to_delayed()))


async def given_back(memory: LazyMemory, stores: Any) -> None:
    def settled() -> bool:
        memory.drain()
        return not any(map(held, stores)) and memory.allocated_bytes() == 0

    await until(settled)


def plain(i: int, n: int = 200) -> pd.DataFrame:
    """Every dtype that is kept, and a key of about 40 values."""
    rng = np.random.default_rng(i)
    ints = rng.integers(0, 1000, n)
    stamp = pd.Timestamp("2020-01-01")
    out = pd.DataFrame(
        {
            "k": rng.integers(0, 40, n),
            "i1": ints.astype("i1"),
            "u2": ints.astype("u2"),
            "f4": ints.astype("f4"),
            "f8": np.where(ints % 5 == 0, np.nan, ints),
            "b": ints % 2 == 0,
            "text": pd.Series([None if j % 5 == 0 else f"w{j}" for j in ints], dtype="str"),
            "ns": pd.Series([pd.NaT if j % 5 == 0 else stamp + pd.Timedelta(int(j), "h") for j in ints]).astype(
                "M8[ns]"
            ),
            "us": pd.Series([stamp + pd.Timedelta(int(j), "h") for j in ints], dtype="M8[us]"),
            "td": pd.Series(pd.to_timedelta(ints, unit="min")),
        }
    )
    return out.set_index(pd.Index(ints[::-1] * 0.5, name="idx")) if n else out


def wider(i: int) -> pd.DataFrame:
    """Numbers that are wider than in the meta, which is that of the first partition."""
    return plain(i).astype({"i1": "f8", "u2": "i4"} if i in (2, 3) else {})


BUILDS = {
    "every dtype": (lambda s: s(plain).shuffle("k", npartitions=7), True),
    "wider numbers": (lambda s: s(wider).shuffle("k", npartitions=40), True),
    "some outputs": (lambda s: s(plain).shuffle("k", npartitions=7).partitions[[1, 4]], True),
    "some empty": (lambda s: s(lambda i: left(i).iloc[: 0 if i % 2 else 80]).shuffle("k", npartitions=7), True),
    "all empty": (lambda s: s(lambda i: left(i).iloc[:0]).shuffle("k", npartitions=3), True),
    "set_index": (lambda s: s(left).set_index("a", divisions=[0.0, 0.3, 0.6, 1.0]), False),
    "merge": (lambda s: s(left).merge(s(right, 4), on="k", how="outer", shuffle_method="p2p", broadcast=False), False),
    "groupby": (lambda s: s(left).groupby("k").agg({"a": "sum", "s": "max"}, split_out=3), False),
    "drop_duplicates": (lambda s: s(left)[["k", "s"]].drop_duplicates(split_out=3), False),
}


@pytest.mark.parametrize("store", [MemoryShardStore, NastyStore])
@pytest.mark.parametrize("name", BUILDS)
def test_equal_to_stock(name: str, store: Any, memory: LazyMemory) -> None:
    build, is_host = BUILDS[name]

    def device(make: Any, n: int = 6) -> Any:
        return host(source(make, n))

    @cluster()
    async def check(c: Any, s: Any, *workers: Any) -> None:
        with dask.config.set({"dataframe.shuffle.method": "p2p"}):
            stock = await partitions(c, build(source))
            async with taken_over(s, workers, store, ON) as (takeover, stores):
                ours = await partitions(c, build(device))
                assert len(stock) == len(ours)
                for x, y in zip(stock, ours, strict=True):
                    assert type(y) is HostFrame or not is_host
                    y = pd.DataFrame(y)
                    same(x, y[list(x)] if name == "merge" else y)
                del ours, y
                await given_back(memory, stores)
                stats = takeover.statistics()
                assert stats["runs"] >= 1
                assert not stats["fallbacks"], stats
                assert stats["errors"] == 0, stats["last_error"]
                counts = [worker_statistics(w) for w in workers]
                assert not any(x["last_error"] for x in counts), counts
                assert sum(x["bytes_sent"] for x in counts) == sum(x["bytes_received"] for x in counts)
                await takeover.uninstall()
        assert (memory.copied_bytes > 0) is (name != "all empty")

    check()


@cluster()
async def test_what_device_frames_do_not_keep_is_left_to_stock(c: Any, s: Any, *workers: Any) -> None:
    def categorical(i: int) -> pd.DataFrame:
        return left(i).astype({"s": pd.CategoricalDtype(list("012345678"))})

    async with taken_over(s, workers, settings=ON) as (takeover, _):
        out = await partitions(c, host(source(categorical)).shuffle("k", npartitions=3))
        same_rows(pd.concat(out).astype({"s": "str"}), 6)
        stats = takeover.statistics()
        assert stats["runs"] == 0
        assert stats["fallbacks"] == {"meta is tests.backends.host_frames.HostFrame, and s is category": 1}


@cluster()
async def test_off_by_default(c: Any, s: Any, *workers: Any) -> None:
    assert not ShuffleSettings(enabled=True).device_frames
    async with taken_over(s, workers, settings=settings(device_frames=False)) as (takeover, _):
        out = await partitions(c, host(source(left)).shuffle("k", npartitions=3))
        same_rows(pd.concat(out), 6)
        reason = "meta is tests.backends.host_frames.HostFrame, and gpurt.shuffle.device-frames is false"
        assert takeover.statistics()["fallbacks"] == {reason: 1}


@pytest.mark.parametrize("retain", [0.1, 0.0])
def test_survivors_of_a_loss_go_on(retain: float, memory: LazyMemory) -> None:
    @gen_cluster(**THREE)
    async def check(c: Any, s: Any, *workers: Any) -> None:
        async with taken_over(s, workers, settings=settings(retain=retain)) as (takeover, _):
            g, d = gate(6)
            f = c.compute(host(d).shuffle("k", npartitions=7))
            await until(lambda: g.begun == g.first + 3 and transferred(s) >= 1)
            victim = max(workers, key=vouched)
            await lose(victim)
            await until(lambda: amended(s, takeover, victim))
            g.go.set()
            same_rows(pd.DataFrame(await f))
            stats = takeover.statistics()
            assert stats["errors"] == 0, stats["last_error"]
            assert (stats["runs"], stats["recovery"]["restarted"], stats["recovery"]["amended"]) == (1, 0, 1)

    check()


@gen_cluster(**THREE)
async def test_a_worker_is_lost_after_the_barrier(c: Any, s: Any, *workers: Any) -> None:
    async with taken_over(s, workers, settings=ON) as (takeover, _):
        out = c.persist(host(source(left, N)).shuffle("k", npartitions=7))
        await wait(out)
        await lose(workers[1])
        await until(lambda: workers[1].address not in s.workers)
        same_rows(pd.DataFrame(await c.compute(out)))
        stats = takeover.statistics()
        assert stats["errors"] == 0, stats["last_error"]


def skewed(i: int) -> pd.DataFrame:
    rng = np.random.default_rng(i)
    n = 20_000
    k = np.where(rng.random(n) < 0.7, 3, rng.integers(0, 1000, n))
    return pd.DataFrame({"k": k, "a": rng.random(n), "t": pd.Series(k).astype("str")})


@pytest.mark.parametrize("transport", ["rpc", "tcp"])
def test_a_large_output_is_cut_into_messages(transport: str) -> None:
    @cluster()
    async def check(c: Any, s: Any, *workers: Any) -> None:
        on = settings(transport=transport, receive_budget=1 << 17)
        async with taken_over(s, workers, NastyStore, on) as (takeover, stores):
            out = await partitions(c, host(source(skewed)).shuffle("k", npartitions=5))
            await given_back(host_frames.MEMORY, stores)
            counts = [worker_statistics(w) for w in workers]
            assert sum(x["messages_sent"] for x in counts) > 20
            assert not any(x["uncredited"] or x["last_error"] for x in counts)
            assert takeover.statistics()["errors"] == 0
            await takeover.uninstall()
        stock = await partitions(c, source(skewed).shuffle("k", npartitions=5))
        for x, y in zip(stock, out, strict=True):
            same(x, pd.DataFrame(y))

    check()


def test_less_device_memory_than_rows(memory: LazyMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for its output makes room."""
    total = sum(skewed(i).memory_usage().sum() for i in range(10))
    short = LazyMemory(int(total * 0.6))
    monkeypatch.setattr(host_frames, "MEMORY", short)

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], timeout=120)
    async def check(c: Any, s: Any, a: Any) -> None:
        async with taken_over(s, [a], settings=ON) as (takeover, stores):
            out = await partitions(c, host(source(skewed, 10)).shuffle("a", npartitions=24))
            same_rows_of(pd.concat(out), whole(skewed, 10))
            await given_back(short, stores)
            assert takeover.statistics()["errors"] == 0

    check()
    assert short.peak_bytes() <= total * 0.6
    assert not short.faults


def test_an_output_that_found_no_device_memory_is_made_of_the_rows_that_were_taken(
    memory: LazyMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    concat, failures = HostFrames.concat, iter(range(2))

    def failing(self: HostFrames, tables: Any) -> Any:
        if next(failures, None) is not None:
            raise MemoryError("on purpose")
        return concat(self, tables)

    monkeypatch.setattr(HostFrames, "concat", failing)

    @cluster()
    async def check(c: Any, s: Any, *workers: Any) -> None:
        async with taken_over(s, workers, settings=ON) as (takeover, _):
            f = c.compute(host(source(left, N)).shuffle("k", npartitions=7), retries=3)
            same_rows(pd.DataFrame(await f))
            assert next(failures, None) is None
            stats = takeover.statistics()
            assert (stats["runs"], stats["errors"], stats["recovery"]["outputs_opened"]) == (1, 0, 0), stats
            assert not any(worker_statistics(w)["restarts"] for w in workers)

    check()


def same_rows_of(got: pd.DataFrame, want: pd.DataFrame) -> None:
    got, want = ordered(pd.DataFrame(got)), ordered(want)
    pd.testing.assert_frame_equal(got, want.astype(dict(got.dtypes)))


def test_worker_processes() -> None:
    """By tcp; the other ways are in `test_device_ways`."""
    on = settings(transport="tcp")

    async def install(dask_scheduler: Any) -> None:
        await ShuffleTakeover.install(dask_scheduler, on)

    def statistics(dask_scheduler: Any) -> dict[str, Any]:
        return dask_scheduler.plugins["shuffle"].takeover.statistics()

    def copied() -> tuple[int, list[str]]:
        return host_frames.MEMORY.copied_bytes, host_frames.MEMORY.faults

    with (
        LocalCluster(n_workers=2, threads_per_worker=2, processes=True, dashboard_address=":0") as lc,
        Client(lc) as client,
    ):
        client.run_on_scheduler(install)
        joined = host(source(left)).merge(host(source(right)), on="k", shuffle_method="p2p", broadcast=False).compute()
        same_rows_of(joined, whole(left, 6).merge(whole(right, 6), on="k"))
        out = host(source(plain)).shuffle("k", npartitions=7).compute()
        assert type(out) is HostFrame
        assert len(out) == 1200
        # To ask for one partition would sort without a shuffle.
        out = pd.concat(dask.compute(*host(source(left)).sort_values(["k", "a"]).to_delayed()))
        assert out["k"].is_monotonic_increasing
        same_rows_of(out, whole(left, 6))
        out = pd.concat(dask.compute(*host(source(left)).set_index("a").to_delayed()))
        assert out.index.is_monotonic_increasing
        same_rows_of(out.reset_index()[["k", "a", "s"]], whole(left, 6))
        stats = client.run_on_scheduler(statistics)
        assert (stats["runs"], stats["fallbacks"], stats["errors"]) == (5, {}, 0)
        for nbytes, faults in client.run(copied).values():
            assert nbytes > 0
            assert not faults
