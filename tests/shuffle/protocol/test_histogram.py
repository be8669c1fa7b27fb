"""Uneven outputs are counted, told and named."""

from __future__ import annotations

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed.utils_test import gen_cluster

from dask_gpurt.shuffle.protocol.histogram import Histogram, add_up, skewed, value_behind
from dask_gpurt.shuffle.rows.partition import OutputLayout, split
from tests.shuffle.helpers import taken_over, until


def uneven(i: int, n: int = 8000) -> pd.DataFrame:
    r = np.random.default_rng(i)
    k = np.where(r.random(n) < 0.6, 7, r.integers(0, 10_000, n))
    return pd.DataFrame({"k": k, "same": "x", "v": r.random(n)})


def test_rows_are_added_up_over_inputs_and_workers():
    layout = OutputLayout(dict.fromkeys(range(5), "w"))
    told = []
    for worker in range(2):
        histogram = Histogram(5)
        for i in range(3):
            parts = np.array([0] * 10 + [4] * (i + worker))
            df = pd.DataFrame({"v": np.arange(len(parts)), "p": parts})
            shards = [s for _, s in split(df, "p", True, i, layout)]
            assert histogram.add(shards) == (0, 10)
        told.append(histogram.answer())
    rows, nbytes, values = add_up(told)
    assert rows.tolist() == [60, 0, 0, 0, 9]
    assert nbytes == 69 * 16
    assert values == {}


def test_large_outputs():
    rows = np.array([100, 50_000, 20_000, 100, 100, *[100] * 95])
    large = skewed(rows, 10**6, len(rows))
    assert [one.part for one in large] == [1, 2]
    assert large[0].ratio == pytest.approx(50_000 / rows.mean())
    assert large[0].share == pytest.approx(50_000 / rows.sum())
    assert "k = 7" in large[0].text("abc", "tcp://x", "k = 7 (99%)")
    assert skewed(np.array([9_999, 0, 0, 0, 0, 0]), 10, 6) == []
    assert skewed(np.array([30_000] * 6), 10, 6) == []
    assert skewed(np.zeros(0, np.int64), 0, 0) == []


def test_the_value_behind_is_that_of_the_output_not_of_all_rows():
    df = uneven(0).assign(p=lambda d: np.where(d.k == 7, 3, d.k % 3), l=[[1]] * 8000)
    assert value_behind(df, "p", 3).startswith("k = ")
    assert "7" in value_behind(df, "p", 3)
    assert value_behind(df.drop(columns="k"), "p", 3) == ""


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, timeout=120)
async def test_a_skewed_shuffle_is_told(c, s, a, b):
    async with taken_over(s, [a, b]) as (takeover, _):
        d = dd.from_map(uneven, list(range(6)), meta=uneven(0).iloc[:0])
        out = c.persist(d.shuffle("k", npartitions=20))
        await until(lambda: takeover.statistics()["skew"]["skewed"] == 1)
        skew = takeover.statistics()["skew"]
        assert skew["largest_ratio"] > 10
        assert "k = 7" in skew["latest"][0].replace("np.int64(7)", "7")
        assert takeover.statistics()["errors"] == 0
        del out
