"""Columns of pandas' Arrow dtypes come out as they went in, also those that stock turns into objects or fails on."""

from __future__ import annotations

import asyncio
import datetime
import decimal

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from distributed.utils_test import gen_cluster

from dask_gpurt.shuffle.rows import arrow_dtypes
from dask_gpurt.shuffle.rows.assemble import general
from tests.shuffle.helpers import NastyStore, ordered, taken_over

N = 60
DAY = datetime.date(2020, 1, 1)
NOON = datetime.datetime(2020, 1, 1, 12, tzinfo=datetime.UTC)
DECIMALS = [decimal.Decimal(j) / 4 for j in range(N)]

#: column -> (values, Arrow type)
COLUMNS = {
    "money": (DECIMALS, pa.decimal128(15, 2)),
    "wide money": (DECIMALS, pa.decimal256(40, 2)),
    "lists": ([[j, 1] for j in range(N)], pa.list_(pa.int64())),
    "structs": ([{"a": j, "b": "x"} for j in range(N)], pa.struct([("a", pa.int64()), ("b", pa.string())])),
    "maps": ([[("a", j)] for j in range(N)], pa.map_(pa.string(), pa.int64())),
    "text": ([f"t{j}" for j in range(N)], pa.string()),
    "large text": ([f"t{j}" for j in range(N)], pa.large_string()),
    "bytes": ([b"%d" % j for j in range(N)], pa.binary()),
    "two bytes": ([b"ab"] * N, pa.binary(2)),
    "zoned": ([NOON] * N, pa.timestamp("us", "Europe/Paris")),
    "day": ([DAY + datetime.timedelta(j) for j in range(N)], pa.date32()),
    "time": ([datetime.time(10, j) for j in range(N)], pa.time64("us")),
    "span": ([datetime.timedelta(hours=j) for j in range(N)], pa.duration("us")),
    "small": (list(range(N)), pa.int8()),
    "whole": (list(range(N)), pa.uint64()),
    "real": ([j / 2 for j in range(N)], pa.float32()),
    "truth": ([j % 2 == 0 for j in range(N)], pa.bool_()),
    "nothing": ([None] * N, pa.null()),
}


def column(values, kind, holes: bool) -> pd.arrays.ArrowExtensionArray:
    values = [None if holes and j % 7 == 3 else value for j, value in enumerate(values)]
    return pd.array(values, dtype=pd.ArrowDtype(kind))


def frame(i: int, columns=tuple(COLUMNS)) -> pd.DataFrame:
    """Holes in every other input."""
    key = np.random.default_rng(i).permutation(N) + i * N
    data = {name: column(*COLUMNS[name], holes=i % 2 == 0) for name in columns}
    return pd.DataFrame({"before": key * 1.5, "k": pd.array(key, dtype="int64[pyarrow]"), **data, "after": "x"})


def in_dictionary(i: int) -> pd.DataFrame:
    words = pa.array([f"{i}-{j % 40}" for j in range(N)]).dictionary_encode()
    small = words.cast(pa.dictionary(pa.int8(), pa.string()))
    return frame(i, ()).assign(words=pd.Series(pd.arrays.ArrowExtensionArray(small)))


async def shuffled(c, make, n: int = 4) -> list[pd.DataFrame]:
    with dask.config.set({"dataframe.convert-string": False}):
        source = dd.from_map(make, list(range(n)), meta=make(0).iloc[:0])
        out = source.shuffle("k", npartitions=5, shuffle_method="p2p").to_delayed()
    return await asyncio.gather(*c.compute(out))


@pytest.mark.cluster
@pytest.mark.parametrize("names", [tuple(COLUMNS), *((name,) for name in COLUMNS)], ids=lambda names: "+".join(names))
def test_dtypes_values_and_holes(names):
    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
    async def check(c, s, *workers):
        async with taken_over(s, workers, NastyStore) as (takeover, _):
            out = await shuffled(c, lambda i: frame(i, names))
            assert takeover.statistics()["runs"] == 1
        want = pd.concat([frame(i, names) for i in range(4)])
        for got in out:
            pd.testing.assert_series_equal(got.dtypes, want.dtypes)
        rows = pd.concat(out).sort_values("k", ignore_index=True)
        pd.testing.assert_frame_equal(rows, want.sort_values("k", ignore_index=True))

    check()


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_dictionaries_of_more_words_than_the_meta_can_count(c, s, *workers):
    async with taken_over(s, workers):
        out = await shuffled(c, in_dictionary)
    want = pd.concat([in_dictionary(i).astype({"words": "str"}) for i in range(4)])
    for got in out:
        assert isinstance(got.words.dtype, pd.ArrowDtype)
        assert pa.types.is_dictionary(got.words.dtype.pyarrow_dtype)
    pd.testing.assert_frame_equal(ordered(pd.concat([g.astype({"words": "str"}) for g in out])), ordered(want))


def arrow(df: pd.DataFrame) -> pa.Table:
    return pa.Table.from_pandas(df, preserve_index=True)


def test_other_digits_than_the_meta_says():
    meta = pd.DataFrame({"d": column(DECIMALS, pa.decimal128(15, 2), False)}).iloc[:0]
    narrow = pd.DataFrame({"d": column(DECIMALS, pa.decimal128(10, 2), True)})
    assert general([arrow(narrow)], meta).d.dtype == meta.d.dtype
    fine = pd.DataFrame({"d": column([decimal.Decimal("0.0001")] * N, pa.decimal128(18, 4), True)})
    got = general([arrow(fine), arrow(narrow)], meta)
    assert pa.types.is_decimal(got.d.dtype.pyarrow_dtype)
    assert got.d.tolist() == [*fine.d, *narrow.d]


def test_another_kind_than_the_meta_says_is_left_to_stocks_conversion():
    meta = pd.DataFrame({"d": column(DECIMALS, pa.decimal128(15, 2), False)}).iloc[:0]
    table = arrow(pd.DataFrame({"d": [1.5, np.nan]}))
    assert arrow_dtypes.columns(table, meta) == {}
    assert general([table], meta).d.tolist()[0] == 1.5


@pytest.mark.parametrize("names", [["money"], list(COLUMNS)])
def test_names_and_index(names):
    data = pd.DataFrame({name: column(*COLUMNS[name], holes=True) for name in names})
    data = data.set_index(pd.Index(np.arange(N) * 2, name="i")).rename_axis(columns="c")
    got = general([arrow(data.iloc[:20]), arrow(data.iloc[20:])], data.iloc[:0])
    pd.testing.assert_frame_equal(got, data)


def test_an_index_with_the_name_of_a_column():
    data = pd.DataFrame({"money": column(*COLUMNS["money"], holes=True), "x": np.arange(N)})
    data = data.set_index(pd.Index(np.arange(N) * 2, name="money"))
    got = general([arrow(data.iloc[:20]), arrow(data.iloc[20:])], data.iloc[:0])
    pd.testing.assert_frame_equal(got, data)
