"""Ours against stock, row for row, and against pandas."""

from __future__ import annotations

import asyncio
import decimal

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed.utils_test import gen_cluster

from dask_gpurt.shuffle.counters import worker_statistics
from dask_gpurt.shuffle.worker.shard_stores import MemoryShardStore
from tests.shuffle.helpers import NastyStore, held, left, mixed, ordered, right, same, source, taken_over, whole

pytestmark = pytest.mark.cluster


async def partitions(c, collection) -> list:
    return await asyncio.gather(*c.compute(collection.to_delayed()))


async def settle(stores) -> None:
    """Runs close in the background after the last output."""
    for _ in range(1500):
        if not any(map(held, stores)):
            break
        await asyncio.sleep(0.02)
    assert not any(map(held, stores))


async def both(c, s, workers, build, *, store=MemoryShardStore, runs=None, any_order=False):
    """Partitions by stock and by ours, checked to be the same and to leave nothing behind."""
    stock = await partitions(c, build())
    async with taken_over(s, workers, store) as (takeover, stores):
        ours = await partitions(c, build())
        await settle(stores)
        stats = takeover.statistics()
        assert stats["runs"] >= 1, stats
        assert not stats["fallbacks"], stats
        if runs is not None:
            assert stats["runs"] == runs
        await takeover.uninstall()
    assert len(stock) == len(ours)
    for x, y in zip(stock, ours, strict=True):
        same(x[list(y)] if any_order else x, y)
    return ours


def cluster(**kwargs):
    return gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 3, timeout=120, **kwargs)


@pytest.mark.parametrize("store", [MemoryShardStore, NastyStore])
def test_every_dtype(store):
    @cluster()
    async def check(c, s, *workers):
        out = await both(c, s, workers, lambda: source(mixed).shuffle("k", npartitions=7), store=store, runs=1)
        assert sum(map(len, out)) == 1200
        counts = [worker_statistics(w) for w in workers]
        assert sum(x["outputs"] for x in counts) == 7
        assert sum(x["bytes_self"] for x in counts) > 0
        # Every byte that was sent was received: nothing went around the counters.
        assert sum(x["bytes_sent"] for x in counts) == sum(x["bytes_received"] for x in counts) > 0
        assert not any(x["last_error"] or x["fallbacks"] for x in counts)

    check()


@pytest.mark.parametrize("how", ["inner", "left", "right", "outer"])
def test_merge(how):
    @cluster()
    async def check(c, s, *workers):
        def build():
            return source(left, 5).merge(source(right, 4), on="k", how=how, shuffle_method="p2p", broadcast=False)

        out = await both(c, s, workers, build, runs=2)
        want = whole(left, 5).merge(whole(right, 4), on="k", how=how)
        pd.testing.assert_frame_equal(ordered(pd.concat(out)), ordered(want), check_dtype=False)

    check()


def noted(frame: pd.DataFrame) -> pd.DataFrame:
    frame.attrs["of"] = "a user"
    return frame


MULTI = pd.MultiIndex.from_arrays([range(80), ["x", "y"] * 40])
FRAMES = {
    "named index": lambda i: left(i).set_index(pd.Index(np.arange(80) * 1.5, name="idx")),
    "text index": lambda i: left(i).set_index(pd.Index([f"r{j}" for j in range(80)])),
    "date index": lambda i: left(i).set_index(pd.date_range("2020", periods=80, tz="UTC", name="t")),
    "multi index": lambda i: left(i).set_index(MULTI.set_names(["u", "v"])),
    "unnamed multi index": lambda i: left(i).set_index(MULTI),
    "categorical index": lambda i: left(i).set_index(pd.CategoricalIndex(["x", "y"] * 40, name="ci")),
    "some empty": lambda i: left(i).iloc[: 0 if i % 2 else 80],
    "all empty": lambda i: left(i).iloc[:0],
    "one row": lambda i: left(i).iloc[: 1 if i == 2 else 0],
    "only the key": lambda i: left(i)[["k"]],
    "half null column": lambda i: left(i).assign(o=pd.Series([None if i % 2 else "x"] * 80, dtype="object")),
    "names of ours": lambda i: left(i).rename(columns={"a": "_worker_", "s": "__index_level_0__x"}),
    "columns in another order": lambda i: left(i)[["k", "a", "s"] if i % 2 == 0 else ["s", "k", "a"]],
    "int or float": lambda i: left(i).assign(a=np.arange(80, dtype="i8" if i % 2 else "f8")),
    "attributes": lambda i: noted(left(i)),
    "attributes beside a column that is not plain": lambda i: noted(left(i).astype({"s": "category"})),
    "decimals of two widths": lambda i: left(i).assign(a=[decimal.Decimal("1.5" if i % 2 else "10.25")] * 80),
}


@pytest.mark.parametrize("name", FRAMES)
def test_frames(name):
    make = FRAMES[name]

    @cluster()
    async def check(c, s, *workers):
        def build():
            return source(make).shuffle("k", npartitions=5)

        # Stock takes the order of the columns from the input that happened to arrive first.
        any_order = name == "columns in another order"
        await both(c, s, workers, build, store=NastyStore, runs=1, any_order=any_order)

    check()


@cluster()
async def test_filtered_outputs(c, s, *workers):
    def build():
        return source(mixed).shuffle("k", npartitions=9).partitions[[6, 2, 3]]

    out = await both(c, s, workers, build, runs=1)
    assert len(out) == 3
    assert all(len(x) for x in out)


@cluster()
async def test_one_output(c, s, *workers):
    out = await both(c, s, workers, lambda: source(left).shuffle("k", npartitions=1), runs=1)
    assert len(out[0]) == 480


@cluster()
async def test_more_outputs_than_a_byte_holds(c, s, *workers):
    def build():
        return source(left, 2).shuffle("k", npartitions=300).partitions[list(range(0, 300, 7))]

    assert len(await both(c, s, workers, build, runs=1)) == 43


def test_many_small_partitions_travel_in_few_messages():
    n = 50

    def make(i):
        return pd.DataFrame({"k": np.arange(i, i + 5), "v": float(i)})

    @cluster()
    async def check(c, s, *workers):
        async with taken_over(s, workers) as (_, stores):
            out = await partitions(c, source(make, n).shuffle("k", npartitions=n))
            await settle(stores)
        counts = [worker_statistics(w) for w in workers]
        pd.testing.assert_frame_equal(ordered(pd.concat(out)), ordered(whole(make, n)))
        assert 10 * sum(x["messages_sent"] for x in counts) < sum(x["shards_sent"] for x in counts)

    check()


@cluster()
async def test_categoricals_beyond_a_byte(c, s, *workers):
    """Stock fails here (dask/distributed#8489); `tasks` gives the reference."""

    def build(method):
        d = source(lambda i: pd.DataFrame({"k": range(500), "s": [f"{i}-{j % 100}" for j in range(500)]}), 4)
        return d.assign(s=d.s.astype("category")).shuffle("k", npartitions=3, shuffle_method=method)

    want = await partitions(c, build("tasks"))
    async with taken_over(s, workers, NastyStore) as (takeover, stores):
        got = await partitions(c, build("p2p"))
        await settle(stores)
        assert takeover.statistics()["runs"] == 1
    assert sum(len(g["s"].cat.categories) for g in got) >= 3 * 256
    for w, g in zip(want, got, strict=True):
        pd.testing.assert_frame_equal(
            ordered(w.astype({"s": "str"})), ordered(g.astype({"s": "str"})), check_dtype=True
        )


@cluster()
async def test_refused_as_stock_refuses(c, s, *workers):
    async with taken_over(s, workers):
        for df, error in (
            (pd.DataFrame({1: [1], "b": [1]}), "column names to be str"),
            (pd.DataFrame({"b": [1j]}), "complex"),
            (pd.DataFrame({"b": pd.arrays.SparseArray([1, 0])}), "sparse"),
        ):
            with pytest.raises(TypeError, match=error):
                dd.from_pandas(df, npartitions=1).shuffle("b", shuffle_method="p2p")
        with pytest.raises(AttributeError, match="dtype"):  # names that occur twice: dask itself, before any task
            dd.from_pandas(pd.DataFrame([[1, 2, 3]], columns=["k", "a", "a"]), npartitions=1).shuffle("k")


@cluster()
async def test_two_shuffles_at_once(c, s, *workers):
    async with taken_over(s, workers, NastyStore) as (_, stores):
        a, b = source(left).shuffle("k", npartitions=5), source(right).shuffle("k", npartitions=4)
        got = await asyncio.gather(partitions(c, a), partitions(c, b))
        await settle(stores)
    for parts, make in zip(got, (left, right), strict=True):
        want = ordered(whole(make, 6)).astype({"s": parts[0]["s"].dtype})
        pd.testing.assert_frame_equal(ordered(pd.concat(parts)), want)


@cluster()
async def test_a_frame_merged_with_itself(c, s, *workers):
    """One shuffle, every output asked for twice by one task."""

    def build():
        d = source(left)[["k", "a"]]
        return d.merge(d, on="k", how="outer", indicator=True, shuffle_method="p2p", broadcast=False)

    out = await both(c, s, workers, build, store=NastyStore, runs=1)
    want = whole(left, 6)[["k", "a"]]
    want = want.merge(want, on="k", how="outer", indicator=True)
    pd.testing.assert_frame_equal(ordered(pd.concat(out)), ordered(want))
    assert not sum(worker_statistics(w)["restarts"] for w in workers)
