"""Columns of Python objects on a live cluster: equal to stock where stock works, true to the input where it fails."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import threading
from typing import TYPE_CHECKING, Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed.utils_test import gen_cluster

from dask_gpurt.shuffle.counters import worker_statistics
from tests.shuffle.helpers import NastyStore, same, source, taken_over
from tests.shuffle.rows.test_pickled_columns import Pair, objects, typed

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.cluster

D = decimal.Decimal
DAY, MOMENT = datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1, 5)

#: column -> (values of a partition by its number, whether stock can do it)
COLUMNS: dict[str, tuple[Callable[[int], list[Any]], bool]] = {
    "int and str": (lambda i: [1, "x", i, "y"], False),
    "int, then str": (lambda i: [1, 2, 3, 4] if i % 2 else list("abcd"), False),
    "int and float": (lambda i: [1, 2.5, i, None], True),
    "bool and None": (lambda i: [True, None, False, None], True),
    "tuples": (lambda i: [(1, 2), (3,), (), None], True),
    "tuples of mixed types": (lambda i: [(1, "a"), (i,), (), None], False),
    "lists": (lambda i: [[1, 2], [i], [], None], True),
    "lists of mixed types": (lambda i: [[1, "a"], [i], [], None], False),
    "dicts": (lambda i: [{"a": 1}, {"a": i}, None, {"a": 3}], True),
    "nested dicts": (lambda i: [{"a": {"b": [1, i]}}, {"a": {"b": []}}, None, {"a": None}], True),
    "dicts of mixed types": (lambda i: [{"a": 1}, {"a": "x"}, None, {}], False),
    "dict and array": (lambda i: [{"foo": "bar"}, {1, i}, {"foo": "baz"}, {2}], False),
    "Decimal": (lambda i: [D("1.5"), D("2.25"), None, D(i)], True),
    "Decimal of any width": (lambda i: [D(10) ** 90, D(1), None, D("1e-50")], False),
    "dates and None": (lambda i: [DAY, None, DAY + datetime.timedelta(i), None], True),
    "datetimes": (lambda i: [MOMENT, None, MOMENT + datetime.timedelta(i), None], True),
    "Period": (lambda i: [pd.Period("2020-01", "M"), pd.Period("2020-01-03", "D"), None, None], False),
    "Interval": (lambda i: [pd.Interval(0, 1), pd.Interval(0, i + 1), None, None], False),
    "instances of a class": (lambda i: [Pair(1), Pair("a"), None, Pair(i)], False),
    "NA and int": (lambda i: [pd.NA, 1, i, None], True),
    "NA and str": (lambda i: [pd.NA, "a", i, None], False),
    "None, then str": (lambda i: [None] * 4 if i % 2 else list("abcd"), True),
    "large int": (lambda i: [2**70, 1, i, -3], False),
}


def make(values: Callable[[int], list[Any]]) -> Callable[[int], pd.DataFrame]:
    return lambda i: pd.DataFrame({"k": np.arange(4) + i, "o": objects(values(i)), "x": np.arange(4) / 2})


def base(i: int) -> pd.DataFrame:
    return pd.DataFrame({"k": np.arange(4) + i, "x": np.arange(4) / 2})


FRAMES: dict[str, tuple[Callable[[int], pd.DataFrame], bool]] = {
    **{name: (make(values), works) for name, (values, works) in COLUMNS.items()},
    "categories differ": (lambda i: base(i).assign(c=pd.Categorical([f"c{i}", "z", None, "z"])), True),
    "categories of mixed types": (
        lambda i: base(i).assign(c=pd.Categorical(pd.Index([1, "z", 1, "z"], dtype=object))),
        False,
    ),
    "an index of int and str": (lambda i: base(i).set_index(pd.Index([i, "a", 2, "b"], dtype=object)), False),
    "a level of int and str": (
        lambda i: base(i).set_index(pd.MultiIndex.from_arrays([[1, "a", i, "b"], [1, 2, 3, 4]])),
        False,
    ),
    "two columns": (lambda i: base(i).assign(o=objects([1, "a", i, "b"]), p=objects([[1], b"a", "x", None])), False),
}


def sorted_categories(frame: pd.DataFrame) -> pd.DataFrame:
    """Categories in an order that does not depend on which input came first, as it does with stock, too."""
    columns = frame.select_dtypes("category").columns
    return frame.assign(**{c: frame[c].cat.set_categories(sorted(frame[c].cat.categories)) for c in columns})


def cluster(**kwargs: Any) -> Any:
    return gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, timeout=120, **kwargs)


async def partitions(c: Any, frames: Callable[[int], pd.DataFrame], method: str = "p2p") -> list[pd.DataFrame]:
    with dask.config.set({"dataframe.convert-string": False}):
        shuffled = source(frames, 5).shuffle("k", npartitions=3, shuffle_method=method)
        futures = c.compute(shuffled.to_delayed())
        try:
            return list(await asyncio.gather(*futures))
        finally:
            # A failed task whose traceback is still held would answer for the next one of its name.
            await c.cancel(futures)


@pytest.mark.parametrize("names", [sorted(FRAMES)[i::4] for i in range(4)], ids=["1", "2", "3", "4"])
def test_stock_beside_ours(names: list[str]) -> None:
    @cluster()
    async def check(c: Any, s: Any, *workers: Any) -> None:
        stock = {}
        for name in names:
            frames, works = FRAMES[name]
            if works:
                stock[name] = await partitions(c, frames)
            else:
                with pytest.raises(RuntimeError, match=r"P2P .* failed during (transfer|unpack) phase$"):
                    await partitions(c, frames)
        async with taken_over(s, workers, NastyStore) as (takeover, _):
            for name in names:
                frames, works = FRAMES[name]
                before = [worker_statistics(w)["values_pickled"] for w in workers]
                ours = await partitions(c, frames)
                if works:
                    for x, y in zip(stock[name], ours, strict=True):
                        same(sorted_categories(x), sorted_categories(y))
                    assert [worker_statistics(w)["values_pickled"] for w in workers] == before
                else:
                    want = pd.concat([frames(i) for i in range(5)])
                    rows = [row for out in ours for row in typed(out)]  # pandas 2 joins nothing but NA and None to NaN
                    assert sorted(map(repr, rows)) == sorted(map(repr, typed(want))), name
                    for out in ours:
                        assert list(out.dtypes[["k", "x"]]) == list(want.dtypes[["k", "x"]])
            stats = takeover.statistics()
            assert stats["runs"] == len(names)
            assert stats["errors"] == 0

    check()


@cluster()
async def test_rows_of_tasks_shuffle(c: Any, s: Any, *workers: Any) -> None:
    """The same outputs as a shuffle by tasks, which never leaves pickle; text beside bytes, which stock gets wrong."""
    frames = make(lambda i: ["x", b"y", i, None] if i % 2 else ["x", b"x", "z", None])
    want = await partitions(c, frames, "tasks")
    async with taken_over(s, workers):
        got = await partitions(c, frames)
        assert sum(worker_statistics(w)["values_pickled"] for w in workers) == 20
    for x, y in zip(want, got, strict=True):
        assert sorted(map(repr, typed(x))) == sorted(map(repr, typed(y)))


@cluster()
async def test_the_first_line_names_the_cause(c: Any, s: Any, *workers: Any) -> None:
    frames = make(lambda i: [1, "a", threading.Lock() if i == 3 else 2, None])
    async with taken_over(s, workers) as (takeover, _):
        with pytest.raises(RuntimeError) as e:
            await partitions(c, frames)
        assert takeover.statistics()["errors"] == 0
    # A client without the package has to be able to unpickle it.
    assert type(e.value) is RuntimeError
    assert type(e.value.__cause__) is TypeError
    line = str(e.value)
    assert line.startswith("P2P ")
    for part in (
        "failed during transfer phase: input partition 3: TypeError: column 'o' (int, str, _thread.lock, NoneType): ",
        "row 2 has a _thread.lock, which neither Arrow nor pickle can hold",
        "Remedy: drop the column",
    ):
        assert part in line


@cluster(config={"dataframe.convert-string": False})
async def test_types_that_the_meta_does_not_have(c: Any, s: Any, *workers: Any) -> None:
    """Stock's errors, with their cause in the line."""
    frames = make(lambda i: [1, 2, 3, 4] if i % 2 else list("abcd"))

    async def run() -> None:
        meta = frames(1).iloc[:0].astype({"o": "int64"})
        shuffled = dd.from_map(frames, list(range(5)), meta=meta).shuffle("k", shuffle_method="p2p")
        futures = c.compute(shuffled.to_delayed())
        try:
            await asyncio.gather(*futures)
        finally:
            await c.cancel(futures)

    with pytest.raises(RuntimeError, match=r"failed during unpack phase$"):
        await run()
    while s.plugins["shuffle"].active_shuffles:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    async with taken_over(s, workers):
        with pytest.raises(
            RuntimeError, match=r"failed during unpack phase: output partition \d+: ArrowTypeError: .*Field o has"
        ):
            await run()
