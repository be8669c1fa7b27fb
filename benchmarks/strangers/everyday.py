"""What users of Dask do on a day: text, CSV files, images, futures that make more futures. For real clusters only.

Written in one go on 2026-11-25, before any of it was run, as a look at work of kinds that the other programs lack. All
of them are looked at since.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
from dask import delayed
from distributed import Lock, as_completed, worker_client

from benchmarks.strangers.ports import port


def _folder(name: str) -> str:
    path = os.path.join(tempfile.gettempdir(), f"gpurt-strangers-{name}")
    os.makedirs(path, exist_ok=True)
    return path


def _texts() -> str:
    """16 files of 8,000 lines of 12 words."""
    folder = _folder("text")
    draw, words = random.Random(0), [f"w{i}" for i in range(2000)]
    for i in range(16):
        path = os.path.join(folder, f"{i}.txt")
        if not os.path.exists(path):
            lines = [" ".join(draw.choices(words, k=12)) + "\n" for _ in range(8000)]
            with open(path, "w", encoding="utf-8") as file:
                file.writelines(lines)
    return os.path.join(folder, "*.txt")


def _sales() -> str:
    """24 CSV files of 20,000 rows."""
    folder, draw, n = _folder("csv"), np.random.default_rng(0), 20_000
    for i in range(24):
        path = os.path.join(folder, f"{i:02}.csv")
        if not os.path.exists(path):
            when = pd.date_range("2024-01-01", periods=n, freq="3min").strftime("%Y-%m-%d %H:%M")
            columns = {"user": draw.integers(0, 500, n), "item": draw.integers(0, 40, n)}
            pd.DataFrame({**columns, "amount": draw.random(n).round(3), "when": when}).to_csv(path, index=False)
    return os.path.join(folder, "*.csv")


@port
def words_of_texts(client: Any) -> Any:
    words = db.read_text(_texts()).str.split().flatten()
    return words.frequencies().topk(20, key=1).compute()[0][1]


@port
def fold_of_a_bag(client: Any) -> Any:
    pairs = db.from_sequence(range(60_000), npartitions=48).map(lambda x: (x % 37, x * x % 101))
    sums = pairs.foldby(lambda t: t[0], lambda a, t: a + t[1], 0, lambda a, b: a + b, 0).compute()
    return sum(total for _, total in sums)


@port
def report_of_sales(client: Any) -> Any:
    d = dd.read_csv(_sales())
    d["day"] = dd.to_datetime(d["when"]).dt.dayofyear
    by_item = d.groupby(["user", "item"]).amount.agg(["sum", "count"])
    by_day = d.groupby("day").amount.mean()
    large = d[d.amount > 0.9].user.value_counts()
    by_item, by_day, large = dask.compute(by_item, by_day, large)
    return float(by_item["sum"].sum() + by_day.sum() + large.sum())


@port
def sales_to_parquet(client: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        dd.read_csv(_sales()).to_parquet(folder)
        d = dd.read_parquet(folder).set_index("user")
        return float(d.groupby("user").amount.sum().nlargest(10).sum().compute())


@port
def function_of_groups(client: Any) -> Any:
    d = dd.read_csv(_sales())
    medians = d.groupby("item").apply(lambda g: pd.Series({"m": float(np.median(g.amount) * len(g))}), meta={"m": "f8"})
    return float(medians.m.sum().compute())


@port
def pivot_of_sales(client: Any) -> Any:
    d = dd.read_csv(_sales()).categorize(columns=["item"])
    return float(d.pivot_table(index="user", columns="item", values="amount", aggfunc="mean").sum().sum().compute())


@port
def distinct_sales(client: Any) -> Any:
    d = dd.read_csv(_sales(), usecols=["user", "item"])
    return len(dd.concat([d, d[d.user < 100]]).drop_duplicates(split_out=4))


@port
def nearest_in_time(client: Any) -> Any:
    at = pd.date_range("2024-01-01", periods=400_000, freq="1s")
    a = dd.from_pandas(pd.DataFrame({"x": np.arange(400_000) % 7}, index=at), npartitions=12)
    b = dd.from_pandas(pd.DataFrame({"y": np.arange(40_000) % 5}, index=at[::10]), npartitions=8)
    return float(dd.merge_asof(a, b, left_index=True, right_index=True).y.sum().compute())


@port
def smooth_images(client: Any) -> Any:
    x = da.random.default_rng(1).integers(0, 255, (40, 512, 512), chunks=(2, 512, 512)).astype("f4")

    def smooth(b: Any) -> Any:
        return (np.roll(b, 1, 1) + np.roll(b, -1, 1) + np.roll(b, 1, 2) + np.roll(b, -1, 2)) / 4

    y = x.map_overlap(smooth, depth={1: 2, 2: 2}, boundary="reflect")
    return float((y - x).std(axis=0).max().compute())


@port
def array_to_files(client: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        da.to_npy_stack(folder, da.random.default_rng(2).random((4000, 4000), chunks=500), axis=0)
        return float(da.from_npy_stack(folder).sum().compute())


@port
def rows_by_number(client: Any) -> Any:
    x = da.arange(4_000_000, chunks=100_000)
    rows = np.random.default_rng(0).permutation(4_000_000)[:200_000]
    return float(x[rows].sum().compute() + x[::7].sum().compute() + x[x % 5 == 0].sum().compute())


@port
def logistic_regression(client: Any) -> Any:
    x = da.random.default_rng(5).random((6000, 200), chunks=(500, 200)).persist()
    y, w = (x.sum(axis=1) > 100).astype("f8").persist(), np.zeros(200)
    for _ in range(12):
        w = w - 1e-4 * (x.T @ (1 / (1 + da.exp(-(x @ w))) - y)).compute()
    return float(w.sum())


def _fibonacci(n: int) -> int:
    if n < 2:
        return n
    with worker_client() as client:
        futures = [client.submit(_fibonacci, n - i, pure=False) for i in (1, 2)]
        return sum(client.gather(futures))


@port
def tasks_that_submit(client: Any) -> Any:
    return client.submit(_fibonacci, 8, pure=False).result()


def _score(x: float) -> float:
    time.sleep(0.01 + 0.01 * (int(x * 97) % 5))
    return -((x - 3.3) ** 2)


@port
def random_search(client: Any) -> Any:
    draw, seen = random.Random(3), 0
    running = as_completed([client.submit(_score, draw.uniform(0, 10), pure=False) for _ in range(6)])
    for _ in running:
        seen += 1
        if seen < 120:
            running.add(client.submit(_score, draw.uniform(0, 10), pure=False))
        elif running.is_empty():
            break
    return seen


@port
def model_for_many(client: Any) -> Any:
    model = client.scatter(np.ones((1500, 1500)), broadcast=True)
    return sum(client.gather(client.map(lambda i, m: float(m[i].sum() + i), range(300), m=model, pure=False)))


@port
def scattered_chunks(client: Any) -> Any:
    chunks = client.scatter([np.full(200_000, i, dtype="f8") for i in range(24)])
    twice = client.map(lambda a: a * 2, chunks, pure=False)
    return sum(client.gather(client.map(lambda a, b: float((a + b).sum()), twice, chunks, pure=False)))


def _flaky(i: int) -> int:
    if random.random() < 0.2:
        raise OSError("flaky")
    return i


@port
def tasks_that_fail(client: Any) -> Any:
    return sum(client.gather(client.map(_flaky, range(400), retries=20, pure=False)))


def _nap(i: int) -> int:
    time.sleep(0.01)
    return i


@port
def two_priorities(client: Any) -> Any:
    low = client.map(_nap, range(150), priority=-10, pure=False)
    high = client.map(_nap, range(50), priority=10, pure=False)
    return sum(client.gather(high)) + sum(client.gather(low))


def _locked(i: int) -> int:
    with Lock("strangers"):
        time.sleep(0.002)
    return i


@port
def one_lock(client: Any) -> Any:
    return sum(client.gather(client.map(_locked, range(100), pure=False)))


@port
def load_clean_measure(client: Any) -> Any:
    @delayed(pure=False)  # type: ignore[untyped-decorator]
    def load(i: int) -> Any:
        time.sleep(0.02)
        return np.random.default_rng(i).random(300_000)

    @delayed(pure=False)  # type: ignore[untyped-decorator]
    def clean(x: Any) -> Any:
        return x[x > 0.1]

    @delayed(pure=False)  # type: ignore[untyped-decorator]
    def measure(x: Any) -> Any:
        time.sleep(0.01)
        return float(x.mean() + x.std() + len(x))

    return delayed(sum)([measure(clean(load(i))) for i in range(80)]).compute()


@port
def chains_of_steps(client: Any) -> Any:
    ends = []
    for k in range(20):
        value = delayed(lambda a: a, pure=False)(k)
        for _ in range(30):
            value = delayed(lambda a: a + 1, pure=False)(value)
        ends.append(value)
    return delayed(sum)(ends).compute()
