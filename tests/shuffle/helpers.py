"""What the shuffle's tests share: clusters with and without the takeover, a nasty store, frames of every dtype."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import decimal
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import dask.dataframe as dd
import numpy as np
import pandas as pd

from dask_gpurt.config import ShuffleSettings
from dask_gpurt.shuffle.scheduler.takeover import ShuffleTakeover
from dask_gpurt.shuffle.transport.link.receiver import ReceiverLink
from dask_gpurt.shuffle.worker.shard_stores import MemoryShardStore, provide
from tests.shuffle.invariants import check_runs

if TYPE_CHECKING:
    from collections.abc import Iterable

#: over distributed's comms, which many tests listen in on
ON = ShuffleSettings(enabled=True, transport="rpc")


def went_on(takeover: Any) -> dict[str, Any]:
    """What a takeover tells of the one run that it had, which was neither restarted nor had an error of ours."""
    stats: dict[str, Any] = takeover.statistics()
    assert stats["errors"] == 0, stats["last_error"]
    assert stats["runs"] == 1
    assert stats["recovery"]["restarted"] == 0
    return stats


def receipt_of(transport: Any, *message: Any) -> Future[Any]:
    """The receipt of a message (peer, header, buffers), for those who wait in a thread."""
    future: Future[Any] = Future()
    # That it ended is told once or more; the first time counts.
    transport.submit(lambda receipt: future.done() or future.set_result(receipt), *message)
    return future


def spoil_arrivals(monkeypatch: Any, spoil: Any) -> None:
    """Have `spoil(record, body)` say what arrives at every link of a transport, before it is looked at."""
    inner = ReceiverLink.receive

    def receive(self: Any, record: Any, body: Any, *given: Any, **named: Any) -> Any:
        return inner(self, *spoil(record, body), *given, **named)

    monkeypatch.setattr(ReceiverLink, "receive", receive)


def held(store: MemoryShardStore) -> list[Any]:
    """The chunks in a store; each is there until its last part is taken."""
    return [chunk for chunks in store._chunks.values() for chunk in chunks.values()]


class NastyStore(MemoryShardStore):
    """Sends every shard through encode and decode on a fresh shell, as a tier that has spilled all of it would."""

    async def put(self, run: Any, chunk_id: Any, chunk: Any) -> bool:
        return await super().put(run, chunk_id, _Encoded(chunk))


class _Encoded:
    def __init__(self, chunk: Any) -> None:
        self.parts, self.nbytes = list(chunk.parts), chunk.nbytes
        self._frames = {part: [bytes(frame) for frame in chunk.encode(part)] for part in self.parts}
        self._shell = chunk.shell()

    def get(self, part: int) -> Any:
        return self._shell.decode(self._frames.pop(part))

    def encode(self, part: int) -> Any:
        raise AssertionError("encoded once already")

    def decode(self, frames: Any) -> Any:
        raise AssertionError("not the shell")

    def shell(self) -> Any:
        raise AssertionError("not the shell")


@contextlib.asynccontextmanager
async def taken_over(scheduler: Any, workers: Any = (), store: Any = MemoryShardStore, settings: Any = ON):
    """The takeover on a running in-process cluster; gives (takeover, stores)."""
    stores = []
    for worker in workers:
        stores.append(store())
        provide(worker, stores[-1])
    takeover = await ShuffleTakeover.install(scheduler, settings)
    yield takeover, stores
    check_runs(takeover._plugin.runs)


async def until(condition: Any) -> None:
    """Poll on the event loop; fails after a minute."""
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not become true")


async def drained(stores: Iterable[Any]) -> None:
    """Poll on the event loop until no store holds rows; fails after half a minute."""
    for _ in range(1500):
        if not any(map(held, stores)):
            return
        await asyncio.sleep(0.02)
    raise AssertionError([[chunk.nbytes for chunk in held(s)] for s in stores])


def mixed(i: int, n: int = 200) -> pd.DataFrame:
    """A partition with a column of every kind that P2P takes, nulls in most, and a key ``k`` of about 40 values."""
    rng = np.random.default_rng(i)
    null = rng.random(n) < 0.2
    words = np.array([f"w{j}" for j in range(50)])
    ints = rng.integers(0, 1000, n)
    day = datetime.date(2020, 1, 1)
    stamp = pd.Timestamp("2020-01-01")

    def holes(values: Any, empty: Any = None) -> list[Any]:
        return [empty if hole else value for value, hole in zip(values, null, strict=True)]

    return pd.DataFrame(
        {
            "k": rng.integers(0, 40, n),
            "i8": ints.astype("i1"),
            "u2": ints.astype("u2"),
            "i8be": ints.astype("i8"),
            "f4": ints.astype("f4"),
            "f8": np.where(null, np.nan, ints),
            "b": ints % 2 == 0,
            "text": pd.Series(holes(words[ints % 50]), dtype="str"),
            "text2": pd.Series(holes(words[ints % 50]), dtype="string[pyarrow]"),
            "obj": pd.Series(holes(words[ints % 50]), dtype="object"),
            "bytes": pd.Series(holes([w.encode() for w in words[ints % 50]]), dtype="object"),
            "I8": pd.Series(holes(ints, pd.NA), dtype="Int64"),
            "F8": pd.Series(holes(ints / 2, pd.NA), dtype="Float64"),
            "B": pd.Series(holes(ints % 2 == 0, pd.NA), dtype="boolean"),
            "cat": pd.Series(holes(words[ints % 3]), dtype=pd.CategoricalDtype(["w0", "w1", "w2"])),
            "ocat": pd.Series(holes(words[ints % 3]), dtype=pd.CategoricalDtype(["w0", "w1", "w2"], ordered=True)),
            "icat": pd.Series(ints % 5, dtype=pd.CategoricalDtype(range(5))),
            "ns": pd.Series(holes([stamp + pd.Timedelta(int(j), "h") for j in ints], pd.NaT), dtype="M8[ns]"),
            "us": pd.Series([stamp + pd.Timedelta(int(j), "h") for j in ints], dtype="M8[us]"),
            "tz": pd.Series([stamp + pd.Timedelta(int(j), "h") for j in ints]).dt.tz_localize("Europe/Paris"),
            "td": pd.Series(pd.to_timedelta(ints, unit="min")),
            "date": pd.Series(holes([day + datetime.timedelta(int(j)) for j in ints]), dtype="object"),
            "dec": pd.Series(holes([decimal.Decimal(int(j)) / 4 for j in ints]), dtype="object"),
            "list": pd.Series(holes([[int(j), 1] for j in ints]), dtype="object"),
            "arrow": pd.Series(holes(ints), dtype="int64[pyarrow]"),
            "period": pd.Series(pd.period_range("2020-01", periods=n, freq="M")),
            "interval": pd.Series(pd.arrays.IntervalArray.from_breaks(np.arange(n + 1.0))),
        }
    )


def source(make: Any, n: int = 6) -> dd.DataFrame:
    return dd.from_map(make, list(range(n)), meta=make(0).iloc[:0])


def same(a, b) -> None:
    (pd.testing.assert_frame_equal if isinstance(a, pd.DataFrame) else pd.testing.assert_series_equal)(a, b)
    assert a.attrs == b.attrs


def left(i: int) -> pd.DataFrame:
    r = np.random.default_rng(i)
    return pd.DataFrame(
        {"k": r.integers(0, 60, 80), "a": r.random(80), "s": pd.Series(r.integers(0, 9, 80)).astype("str")}
    )


def right(i: int) -> pd.DataFrame:
    r = np.random.default_rng(100 + i)
    return pd.DataFrame({"k": r.integers(30, 90, 50), "b": r.integers(0, 9, 50), "s": "right"})


def whole(make, n) -> pd.DataFrame:
    return pd.concat([make(i) for i in range(n)])


def ordered(df):
    return df.sort_values(list(df.columns), ignore_index=True)
