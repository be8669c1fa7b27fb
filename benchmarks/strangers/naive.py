"""Programs as people write them before they have read any advice, and the same ones as Dask's guides advise.

`PAIRS` has both versions of each under one name; they give the same answer. Written in one go on 2026-11-30, before any
of them was run. `python -m benchmarks.strangers live --set naive` runs them.
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING, Any, NamedTuple

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
from dask import delayed

if TYPE_CHECKING:
    from collections.abc import Callable

#: of the command line
SET = "naive"
ROWS = 1_200_000
USERS = 5_000


class Pair(NamedTuple):
    """One question, asked in two ways. Both take a client and return numbers."""

    naive: Callable[[Any], object]
    advised: Callable[[Any], object]


PAIRS: dict[str, Pair] = {}
_waiting: dict[str, Callable[[Any], object]] = {}


def naive(function: Callable[[Any], object]) -> Callable[[Any], object]:
    """Register the first version of a pair under its name."""
    _waiting[function.__name__] = function
    return function


def advised(function: Callable[[Any], object]) -> Callable[[Any], object]:
    """Register the second version, ``NAME_advised``."""
    name = function.__name__.removesuffix("_advised")
    PAIRS[name] = Pair(_waiting.pop(name), function)
    return function


def programs() -> dict[str, Callable[[Any], object]]:
    """All of them by name, the two of a pair one after the other."""
    return {
        f"{name}{end}": run for name, pair in PAIRS.items() for end, run in zip(("", "_advised"), pair, strict=True)
    }


def pairs(entries: list[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Of the rows of a run: name -> seconds of both versions, under stock as it comes and under ours."""
    found = {e["name"]: e for e in entries}
    return {
        name: {
            f"{policy}{end}": found[f"{name}{end}"][policy]["median_s"]
            for end in ("", "_advised")
            for policy in ("stock", "gpurt")
        }
        for name in PAIRS
        if name in found and f"{name}_advised" in found
    }


def _sales(rows: int = ROWS, seed: int = 0) -> pd.DataFrame:
    """One user in 5,000 has six rows of ten."""
    draw = np.random.default_rng(seed)
    user = np.where(draw.random(rows) < 0.6, 7, draw.integers(0, USERS, rows))
    columns = {"user": user, "item": draw.integers(0, 400, rows), "amount": draw.integers(1, 10_000, rows) / 8}
    text = pd.Series(draw.choice([f"town {i:03}" for i in range(200)], rows), dtype="str")
    return pd.DataFrame({**columns, "town": text})


def _files(count: int) -> str:
    """The sales in so many CSV files; made once."""
    folder = os.path.join(tempfile.gettempdir(), f"gpurt-strangers-naive-{count}")
    if not os.path.exists(os.path.join(folder, "done")):
        os.makedirs(folder, exist_ok=True)
        sales = _sales()
        for i, part in enumerate(np.array_split(np.arange(ROWS), count)):
            sales.iloc[part].to_csv(os.path.join(folder, f"{i:04}.csv"), index=False)
        open(os.path.join(folder, "done"), "w").close()
    return os.path.join(folder, "*.csv")


def _users() -> pd.DataFrame:
    return pd.DataFrame({"user": np.arange(USERS), "region": np.arange(USERS) % 23})


def _spread(d: Any) -> Any:
    return float(d.amount.max() - d.amount.min())


# Partitions too small, too large, of the wrong shape


@naive
def many_small_files(client: Any) -> Any:
    return float(dd.read_csv(_files(300)).groupby("item").amount.mean().sum().compute())


@advised
def many_small_files_advised(client: Any) -> Any:
    return float(dd.read_csv(_files(8)).groupby("item").amount.mean().sum().compute())


@naive
def shuffle_of_small_files(client: Any) -> Any:
    d = dd.read_csv(_files(300))
    return float(d.merge(d.groupby("user").amount.sum().reset_index(), on="user").amount_y.sum().compute())


@advised
def shuffle_of_small_files_advised(client: Any) -> Any:
    d = dd.read_csv(_files(8))
    return float(d.merge(d.groupby("user").amount.sum().reset_index(), on="user").amount_y.sum().compute())


@naive
def two_large_partitions(client: Any) -> Any:
    return _large_partitions(2)


@advised
def two_large_partitions_advised(client: Any) -> Any:
    return _large_partitions(16)


def _large_partitions(count: int) -> Any:
    each = 4_800_000 // count
    d = dd.from_map(_numbers, [(i, each) for i in range(count)])
    d = d[d.value > 0.1]
    d["level"] = d.value * 10 // 1
    return float(d.groupby("level").value.sum().sum().compute().round(3))


def _numbers(part: tuple[int, int]) -> pd.DataFrame:
    at = np.arange(part[0] * part[1], (part[0] + 1) * part[1])
    return pd.DataFrame({"key": at % 1_013, "value": (at * 7919 % 10_007) / 10_007, "other": at / 2})


@naive
def slivers_of_an_array(client: Any) -> Any:
    x = da.ones((8_000, 4_000), chunks=(8_000, 20))
    x = x * da.arange(4_000, chunks=20)
    return float((x - x.mean(axis=1, keepdims=True)).std(axis=1).sum().compute())


@advised
def slivers_of_an_array_advised(client: Any) -> Any:
    x = da.ones((8_000, 4_000), chunks=(1_000, 4_000))
    x = x * da.arange(4_000, chunks=4_000)
    return float((x - x.mean(axis=1, keepdims=True)).std(axis=1).sum().compute())


@naive
def little_is_left_of_many(client: Any) -> Any:
    d = dd.read_csv(_files(300))
    few = d[d.item == 3]
    return float(few.merge(d[d.item == 4], on=["user", "town"]).amount_x.sum().compute())


@advised
def little_is_left_of_many_advised(client: Any) -> Any:
    d = dd.read_csv(_files(300))
    few, others = d[d.item == 3].repartition(npartitions=2), d[d.item == 4].repartition(npartitions=2)
    return float(few.merge(others, on=["user", "town"]).amount_x.sum().compute())


# Work that is done again


@naive
def one_question_after_another(client: Any) -> Any:
    d = dd.read_csv(_files(24))
    d = d[d.amount > 100].assign(net=lambda x: x.amount * 0.8)
    questions = (d.net.sum(), d.net.max(), d.item.nunique(), d.town.value_counts().max(), d.net.std(), d.shape[0])
    return [float(q.compute()) for q in questions]


@advised
def one_question_after_another_advised(client: Any) -> Any:
    d = dd.read_csv(_files(24))
    d = d[d.amount > 100].assign(net=lambda x: x.amount * 0.8)
    questions = (d.net.sum(), d.net.max(), d.item.nunique(), d.town.value_counts().max(), d.net.std(), d.shape[0])
    return [float(q) for q in dask.compute(*questions)]


@naive
def a_loop_over_groups(client: Any) -> Any:
    d = dd.read_csv(_files(24))
    return [float(d[d.item == i].amount.sum().compute()) for i in range(12)]


@advised
def a_loop_over_groups_advised(client: Any) -> Any:
    sums = dd.read_csv(_files(24)).groupby("item").amount.sum().compute()
    return [float(sums[i]) for i in range(12)]


@naive
def an_index_for_each_question(client: Any) -> Any:
    d = dd.read_csv(_files(24))
    return [float(d.set_index("user").loc[low : low + 100].amount.sum().compute()) for low in (100, 900, 2_000, 4_100)]


@advised
def an_index_for_each_question_advised(client: Any) -> Any:
    d = dd.read_csv(_files(24)).set_index("user").persist()
    return [float(d.loc[low : low + 100].amount.sum().compute()) for low in (100, 900, 2_000, 4_100)]


@naive
def looking_around(client: Any) -> Any:
    d = dd.read_csv(_files(24)).merge(dd.from_pandas(_users(), npartitions=4), on="user")
    sizes = len(d), len(d.columns), len(d.head(20)), d.region.nunique().compute()
    return [
        *map(float, sizes),
        float(d.amount.mean().compute()),
        float(d.groupby("region").amount.max().compute().sum()),
    ]


@advised
def looking_around_advised(client: Any) -> Any:
    d = dd.read_csv(_files(24)).merge(_users(), on="user").persist()
    sizes = len(d), len(d.columns), len(d.head(20)), d.region.nunique().compute()
    return [
        *map(float, sizes),
        float(d.amount.mean().compute()),
        float(d.groupby("region").amount.max().compute().sum()),
    ]


# Skew, and more work than the question needs


@naive
def join_on_a_skewed_key(client: Any) -> Any:
    users = dd.from_pandas(_users(), npartitions=8)
    d = dd.read_csv(_files(24)).merge(users, on="user")
    return float(d.groupby("region").amount.sum().compute().max())


@advised
def join_on_a_skewed_key_advised(client: Any) -> Any:
    d = dd.read_csv(_files(24)).merge(_users(), on="user")
    return float(d.groupby("region").amount.sum().compute().max())


@naive
def a_function_for_skewed_groups(client: Any) -> Any:
    d = dd.read_csv(_files(24))[["user", "amount"]]
    return float(d.groupby("user").apply(_spread, meta=("spread", "f8")).sum().compute())


@advised
def a_function_for_skewed_groups_advised(client: Any) -> Any:
    groups = dd.read_csv(_files(24)).groupby("user").amount.agg(["max", "min"]).compute()
    return float((groups["max"] - groups["min"]).sum())


@naive
def sort_for_the_largest(client: Any) -> Any:
    return float(dd.read_csv(_files(24)).sort_values("amount").tail(10, compute=True).amount.sum())


@advised
def sort_for_the_largest_advised(client: Any) -> Any:
    return float(dd.read_csv(_files(24)).amount.nlargest(10).sum().compute())


@naive
def all_to_the_client(client: Any) -> Any:
    return float(dd.read_csv(_files(24)).compute().groupby("town").amount.median().sum())


@advised
def all_to_the_client_advised(client: Any) -> Any:
    d = dd.read_csv(_files(24))[["town", "amount"]]
    return float(d.compute().groupby("town").amount.median().sum())


# Data in the graph, and waiting for each result


@naive
def table_for_each_task(client: Any) -> Any:
    table = np.arange(1_000_000.0)
    return float(sum(dask.compute(*[delayed(_looked_up)(table, i) for i in range(40)])))


@advised
def table_for_each_task_advised(client: Any) -> Any:
    table = client.scatter(np.arange(1_000_000.0), broadcast=True)
    return float(sum(client.gather(client.map(_looked_up, [table] * 40, range(40)))))


def _looked_up(table: Any, i: int) -> float:
    return float(np.sort(table[i::7])[i])


@naive
def frame_in_the_graph(client: Any) -> Any:
    d = dd.from_pandas(_sales(), npartitions=60)
    return [float(d.amount.sum().compute()), float(d.item.nunique().compute()), float(d.amount.std().compute())]


@advised
def frame_in_the_graph_advised(client: Any) -> Any:
    d = dd.from_pandas(_sales(), npartitions=8).persist()
    return [float(x) for x in dask.compute(d.amount.sum(), d.item.nunique(), d.amount.std())]


@naive
def result_by_result(client: Any) -> Any:
    return sum(client.submit(_primes_below, 3_000 + i).result() for i in range(120))


@advised
def result_by_result_advised(client: Any) -> Any:
    return sum(client.gather(client.map(_primes_below, range(3_000, 3_120))))


def _primes_below(n: int) -> int:
    sieve = bytearray([1]) * n
    for i in range(2, int(n**0.5) + 1):
        if sieve[i]:
            sieve[i * i :: i] = bytes(len(range(i * i, n, i)))
    return sum(sieve) - 2


@naive
def through_the_client(client: Any) -> Any:
    parts = [delayed(_part)(i).compute() for i in range(12)]
    return float(delayed(_total)(parts).compute())


@advised
def through_the_client_advised(client: Any) -> Any:
    return float(delayed(_total)([delayed(_part)(i) for i in range(12)]).compute())


def _part(i: int) -> Any:
    return np.full(500_000, float(i))


def _total(parts: list[Any]) -> float:
    return float(sum(part.mean() for part in parts))
