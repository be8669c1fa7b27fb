"""Programs as users write them, with known answers, for a cluster of processes: `PROGRAMS`.

Each takes a client, a random generator and a folder for its files, and raises `AssertionError` for a wrong answer.
"""

from __future__ import annotations

import collections
import random
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import dask
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Event, Lock, Queue, Semaphore, Variable, as_completed, get_client, secede, wait, worker_client

from tests.stress.works import WORKS, check, make

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from distributed import Client

    Body = Callable[[Client, random.Random, Path], None]


class Program(NamedTuple):
    """A program, and what it stands."""

    body: Body
    #: a worker may be killed while it runs; programs whose state is in one worker do not stand that, nor with stock
    stands_kill: bool = True


def _piece(i: int, rows: int) -> pd.DataFrame:
    r = np.random.default_rng(i)
    text = pd.Series(r.integers(0, 50, rows)).map("name-{}".format)
    return pd.DataFrame({"k": r.integers(0, 500, rows), "x": r.random(rows), "n": r.integers(0, 1000, rows), "s": text})


def _frame(r: random.Random, mega: float = 8) -> tuple[Any, pd.DataFrame]:
    """Partitions of a few megabytes, `mega` on the average in all, and the same as one frame."""
    parts = r.randint(3, 12)
    rows = int(mega * 1e6 / 80 / parts * r.uniform(0.5, 1.5))
    lazy = dd.from_map(_piece, list(range(parts)), rows=rows, meta=_piece(0, 2).iloc[:0])
    return lazy, pd.concat([_piece(i, rows) for i in range(parts)])


def _random_work(client: Client, r: random.Random, _: Path) -> None:
    works = [make(r.choice(list(WORKS)), r) for _ in range(r.randint(1, 3))]
    # One by one: Dask gives the answers in another order where frames and delayed values are mixed (docs/upstream.md).
    futures = [client.compute(work.collection) for work in works]
    for work, future in zip(works, futures, strict=True):
        check(future.result(), work.want)


def _frame_answers(_: Client, r: random.Random, __: Path) -> None:
    lazy, whole = _frame(r)
    got = dask.compute(
        lazy.groupby("k").x.sum(),
        lazy.s.value_counts(),
        lazy.n.nunique(),
        lazy.drop_duplicates(subset=["k", "s"])[["k", "s"]],
        lazy[lazy.x > 0.9].n.sum(),
    )
    pd.testing.assert_series_equal(got[0].sort_index(), whole.groupby("k").x.sum(), check_names=False)
    assert got[1].to_dict() == whole.s.value_counts().to_dict()
    assert got[2] == whole.n.nunique()
    assert len(got[3]) == len(whole.drop_duplicates(subset=["k", "s"]))
    assert got[4] == whole[whole.x > 0.9].n.sum()


def _join_and_sort(_: Client, r: random.Random, __: Path) -> None:
    lazy, whole = _frame(r, 12)
    other, others = _frame(r, 0.3)
    joined = lazy.merge(other[["k", "n"]], on="k", suffixes=("", "_2"), how=r.choice(["inner", "left"]))
    want = whole.merge(others[["k", "n"]], on="k", suffixes=("", "_2"))
    assert int(joined.n_2.sum().compute()) == int(want.n_2.sum())
    ordered = lazy.sort_values("x").x.compute()
    assert ordered.is_monotonic_increasing
    assert len(ordered) == len(whole)
    index = lazy.set_index("n").x.sum().compute()
    assert np.isclose(index, whole.x.sum())


def _apply(_: Client, r: random.Random, __: Path) -> None:
    lazy, whole = _frame(r)
    got = lazy.groupby("k").apply(_spread, meta=("x", "f8")).compute()
    want = whole.groupby("k")[["x"]].apply(_spread)
    pd.testing.assert_series_equal(got.sort_index(), want.sort_index(), check_names=False)


def _spread(group: pd.DataFrame) -> float:
    return float(group.x.max() - group.x.min())


def _files(_: Client, r: random.Random, folder: Path) -> None:
    lazy, whole = _frame(r)
    lazy.to_parquet(folder / "p")
    assert dd.read_parquet(folder / "p").n.sum().compute() == whole.n.sum()
    lazy.to_csv(folder / "c" / "*.csv", index=False)
    assert dd.read_csv(folder / "c" / "*.csv").groupby("s").n.sum().compute().sum() == whole.n.sum()


def _arrays(_: Client, r: random.Random, __: Path) -> None:
    n = r.choice([600, 1200, 1800])
    whole = np.random.default_rng(1).random((n, n))
    x = da.from_array(whole, chunks=(n // r.choice([2, 3, 4]), n // r.choice([1, 3, 5])))
    np.testing.assert_allclose((x @ x.T).sum(axis=0).compute(), (whole @ whole.T).sum(axis=0))
    np.testing.assert_allclose(x.rechunk((n, n // 6)).cumsum(axis=0).compute(), whole.cumsum(axis=0))
    np.testing.assert_allclose(da.fft.fft(x.rechunk({1: n}), axis=1).compute(), np.fft.fft(whole, axis=1))
    smooth = x.map_overlap(lambda b: b - b.mean() * 0, depth=2, boundary="reflect")
    np.testing.assert_allclose(smooth.compute(), whole)
    tall = x[:, : n // 6].rechunk((n // 3, n // 6))
    _, s, _ = da.linalg.svd(tall)
    np.testing.assert_allclose(s.compute(), np.linalg.svd(whole[:, : n // 6], compute_uv=False))


def _persisted(client: Client, r: random.Random, _: Path) -> None:
    n, chunk = r.randint(10, 40), r.choice([200_000, 1_000_000])
    x = da.arange(n * chunk, chunks=chunk, dtype="f8")
    x = x.persist()
    for power in range(r.randint(2, 5)):
        assert np.isclose((x * power).mean().compute(), power * (n * chunk - 1) / 2)
    kept = client.compute(x.sum())
    del x
    assert kept.result() == n * chunk * (n * chunk - 1) / 2


def _larger_than_memory(client: Client, r: random.Random, _: Path) -> None:
    limits = [w["memory_limit"] for w in client.scheduler_info(n_workers=-1)["workers"].values()]
    parts = min(int(sum(limits) * r.uniform(0.6, 1.2) / 16e6), 150)
    x = da.ones((parts * 2_000_000,), chunks=2_000_000).map_blocks(_numbered, dtype="f8").persist()
    wait(x)
    got = (x[::-1][: len(x)] + x).sum().compute()
    assert np.isclose(got, 2 * sum(i * 2_000_000 for i in range(parts)))


def _numbered(block: np.ndarray, block_info: Any = None) -> np.ndarray:
    return block * block_info[None]["chunk-location"][0] if block_info else block


def _futures(client: Client, r: random.Random, _: Path) -> None:
    n = r.randint(20, 300)
    first = client.map(lambda i: i + 1, range(n), pure=False)
    second = client.map(lambda a, b: a + b, first, first[::-1], pure=False)
    total, adding = 0, as_completed(second)
    more = r.randint(0, 20)
    for future in adding:
        total += future.result()
        if more:
            more -= 1
            adding.add(client.submit(lambda: 0, pure=False))
    assert total == n * (n + 1)


def _failing(client: Client, r: random.Random, _: Path) -> None:
    n = r.randint(10, 80)
    futures = client.map(_divide, range(n), pure=False)
    wait(futures)
    assert [f.status for f in futures].count("error") == 1
    assert sum(client.gather(futures[1:])) == sum(100 // i for i in range(1, n))
    behind = client.submit(sum, futures, pure=False)
    assert isinstance(behind.exception(), ZeroDivisionError)
    flaky = client.map(_flaky, range(n), pure=False, retries=40)
    assert client.gather(flaky) == list(range(n))


def _divide(i: int) -> int:
    return 100 // i


def _flaky(i: int) -> int:
    if random.random() < 0.3:
        raise ValueError("by chance")
    return i


def _submitting(client: Client, r: random.Random, _: Path) -> None:
    n = r.randint(3, 12)
    asked = client.map(_fib, [r.randint(5, 9) for _ in range(n)], pure=False)
    assert all(f.result() in (5, 8, 13, 21, 34) for f in asked)
    assert client.submit(_seceding, n, pure=False).result() == n * (n - 1)


def _fib(n: int) -> int:
    if n < 2:
        return n
    with worker_client() as client:
        return sum(client.gather([client.submit(_fib, n - 1), client.submit(_fib, n - 2)]))


def _seceding(n: int) -> int:
    client = get_client()
    futures = client.map(lambda i: 2 * i, range(n), pure=False)
    secede()
    return sum(client.gather(futures))


def _coordination(client: Client, r: random.Random, _: Path) -> None:
    name = f"soak-{r.random()}"
    queue, variable, event = Queue(name), Variable(name), Event(name)
    done = client.map(_locked, range(r.randint(4, 20)), name=name, pure=False)
    variable.set(7)
    event.set()
    assert sum(client.gather(done)) == 7 * len(done)
    assert sorted(queue.get(timeout=30) for _ in done) == list(range(len(done)))


def _locked(i: int, name: str) -> int:
    assert Event(name).wait(60)
    with Lock(name), Semaphore(2, f"{name}-2"):
        Queue(name).put(i)
        return int(Variable(name).get(timeout=60))


class _Counter:
    def __init__(self) -> None:
        self.n = 0

    def add(self, k: int) -> int:
        self.n += k
        return self.n


def _actors(client: Client, r: random.Random, _: Path) -> None:
    counter = client.submit(_Counter, actor=True).result()
    n = r.randint(5, 100)
    calls = [counter.add(1) for _ in range(n)]
    assert max(call.result() for call in calls) == n


def _scattered(client: Client, r: random.Random, _: Path) -> None:
    values = [np.full(r.randint(10, 200_000), i) for i in range(r.randint(2, 8))]
    futures = client.scatter(values, broadcast=r.random() < 0.5)
    columns = [[future] * len(values) for future in futures]
    got = client.gather(client.map(lambda i, *vs: int(vs[i][0]), range(len(values)), *columns))
    assert got == list(range(len(values)))
    client.rebalance(futures)
    assert sum(int(v.sum()) for v in client.gather(futures)) == sum(int(v.sum()) for v in values)


def _cancelled(client: Client, r: random.Random, _: Path) -> None:
    lazy, whole = _frame(r, 6)
    joined = lazy.merge(lazy[["k", "n"]].drop_duplicates("k"), on="k")
    for _ in range(r.randint(1, 4)):
        future = client.compute(joined.x.sum())
        time.sleep(r.random() * 0.5)
        future.cancel() if r.random() < 0.5 else future.release()
    assert np.isclose(lazy.x.sum().compute(), whole.x.sum())
    assert np.isclose(joined.x.sum().compute(), whole.x.sum())


def _annotated(client: Client, r: random.Random, _: Path) -> None:
    workers = list(client.scheduler_info(n_workers=-1)["workers"])
    with dask.annotate(priority=r.choice([-10, 10]), retries=5):
        a = da.ones(500_000, chunks=20_000).sum()
    with dask.annotate(workers=workers[:1], allow_other_workers=True):
        b = da.ones(500_000, chunks=20_000).sum()
    got = client.gather(client.compute([a, b], optimize_graph=False))
    assert got == [500_000, 500_000]


def _bags(_: Client, r: random.Random, __: Path) -> None:
    words = [f"w{r.randint(0, 30)}" for _ in range(r.randint(100, 3000))]
    bag = db.from_sequence(words, npartitions=r.randint(2, 12))
    want = collections.Counter(words)
    assert dict(bag.frequencies().compute()) == dict(want)
    assert dict(bag.foldby(lambda w: w, lambda n, _: n + 1, 0, lambda a, b: a + b).compute()) == dict(want)
    assert {k: len(v) for k, v in bag.groupby(lambda w: w).compute()} == dict(want)


def _published(client: Client, r: random.Random, _: Path) -> None:
    name = f"soak-{r.random()}"
    x = da.arange(200_000, chunks=10_000).persist()
    client.publish_dataset(x, name=name)
    del x
    assert client.get_dataset(name).sum().compute() == 200_000 * 199_999 // 2
    client.unpublish_dataset(name)


def _uneven(client: Client, r: random.Random, _: Path) -> None:
    lengths = [r.choice([0.001, 0.01, 0.05, 0.4]) for _ in range(r.randint(20, 80))]
    done = client.map(_sleep, lengths, pure=False)
    halves = [client.submit(max, *done[i : i + 2], pure=False) for i in range(0, len(done) - 1, 2)]
    assert max(client.gather(halves)) == max(lengths[: len(halves) * 2])


def _sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


PROGRAMS: dict[str, Program] = {
    "random-work": Program(_random_work),
    "frame-answers": Program(_frame_answers),
    "join-and-sort": Program(_join_and_sort),
    "apply": Program(_apply),
    "files": Program(_files),
    "arrays": Program(_arrays),
    "persisted": Program(_persisted),
    "larger-than-memory": Program(_larger_than_memory, stands_kill=False),
    "futures": Program(_futures),
    "failing": Program(_failing, stands_kill=False),
    "submitting": Program(_submitting, stands_kill=False),
    "coordination": Program(_coordination, stands_kill=False),
    "actors": Program(_actors, stands_kill=False),
    "scattered": Program(_scattered, stands_kill=False),
    "cancelled": Program(_cancelled),
    "annotated": Program(_annotated),
    "bags": Program(_bags),
    "published": Program(_published),
    "uneven": Program(_uneven),
}
