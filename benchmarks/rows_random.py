"""Random frames through splitting, messages, spilling and assembly, without a cluster, against `pandas.concat`.

    python -m benchmarks.rows_random --frames 3000

Each case has inputs with one set of columns and one kind of index, with nulls in some inputs only, and the index may
have the name of a column. Every output must have the rows of the inputs in their order, with their dtypes and index.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import time
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from benchmarks.join_random import EXACT, column
from dask_gpurt.shuffle.rows import wire
from dask_gpurt.shuffle.rows.kinds import PandasRows
from dask_gpurt.shuffle.rows.partition import OutputLayout

WORKERS = ("a", "b")
DAY = datetime.date(2020, 1, 1)
MOMENTS = pd.DatetimeIndex(["2020-01-01", "2020-01-02"])
#: name -> value of a whole number, in a column of objects
OBJECTS: dict[str, Any] = {
    "text": "t{}".format,
    "bytes": lambda i: b"%d" % i,
    "decimals": lambda i: decimal.Decimal(i) / 8,
    "days": lambda i: DAY + datetime.timedelta(i),
    "numbers and text": lambda i: i if i % 2 else f"s{i}",
    "whole": lambda i: i,
    "large": lambda i: (1 << 60) + i,
}
#: categories that Arrow gives back as they were
CATEGORIES = (list("abc"), [1, 2, 3], [1.5, 2.5], MOMENTS, MOMENTS.tz_localize("UTC"), pd.interval_range(0, 4))
DTYPES: tuple[Any, ...] = (
    *EXACT,
    *("uint16", "uint32", "datetime64[s]", "datetime64[ms]", "timedelta64[s]", "Float32", "UInt64", "period[M]"),
    *(pd.StringDtype("python"), pd.StringDtype("python", na_value=np.nan), pd.ArrowDtype(pa.float64())),
    *(pd.ArrowDtype(pa.list_(pa.int64())), pd.ArrowDtype(pa.binary()), *OBJECTS, *map(pd.CategoricalDtype, CATEGORIES)),
)
INDEXES: dict[str, Any] = {
    "range": lambda at: pd.RangeIndex(len(at)),
    "numbers": pd.Index,
    "text": lambda at: pd.Index([f"i{i}" for i in at], dtype="str"),
    "moments": lambda at: pd.DatetimeIndex(at * 10**9).tz_localize("UTC").tz_convert("US/Pacific"),
    "nullable": lambda at: pd.Index(pd.array([pd.NA if i < 4 else i for i in at], dtype="Int64")),
    "levels": lambda at: pd.MultiIndex.from_arrays([at, pd.Index([f"k{i}" for i in at], dtype="str")]),
    "intervals": lambda at: pd.IntervalIndex.from_arrays(at, at + 2),
    "days": lambda at: pd.Index([DAY + datetime.timedelta(int(i)) for i in at], dtype=object),
}


def values(r: np.random.Generator, dtype: Any, n: int, nulls: float) -> Any:
    """A column of a dtype."""
    at, null = r.integers(0, 30, n), r.random(n) < nulls
    if isinstance(dtype, pd.CategoricalDtype):
        return pd.Categorical.from_codes(np.where(null, -1, at % len(dtype.categories)), dtype=dtype)
    if isinstance(dtype, str) and dtype in OBJECTS:
        # No nulls: Arrow gives back None or NaN for all of a column.
        return pd.Series([OBJECTS[dtype](i) for i in at.tolist()], dtype=object)
    if str(dtype) == "period[M]":
        return pd.PeriodIndex.from_ordinals(at, freq="M").array
    kind = getattr(dtype, "pyarrow_dtype", None)
    if kind == pa.binary():
        return pd.array([None if gone else b"%d" % i for i, gone in zip(at, null, strict=True)], dtype=dtype)
    if kind == pa.list_(pa.int64()):
        return pd.array([None if gone else [int(i)] * (i % 3) for i, gone in zip(at, null, strict=True)], dtype=dtype)
    return column(r, dtype, n, 0, 30, nulls).array


def inputs_of(r: np.random.Generator, outputs: int) -> list[pd.DataFrame]:
    """The inputs of a case."""
    dtypes = [DTYPES[int(r.integers(len(DTYPES)))] for _ in range(int(r.integers(1, 6)))]
    index, name = INDEXES[str(r.choice(list(INDEXES)))], [None, "c0", "i"][int(r.integers(3))]
    frames = []
    for _ in range(int(r.integers(1, 6))):
        n, nulls = int(r.choice([0, 1, 7, 40, 300])), float(r.choice([0, 0, 0.2]))
        frame = pd.DataFrame({f"c{i}": values(r, one, n, nulls) for i, one in enumerate(dtypes)})
        frame.index = index(r.integers(0, 50, n))
        frame.index.names = [name, *frame.index.names[1:]]
        frames.append(frame.assign(_partitions=r.integers(0, outputs, n)))
    return frames


def check(seed: int) -> None:
    """Shuffle the frames of a seed.

    Raises
    ------
    AssertionError
        An output is another one.
    """
    r = np.random.default_rng(seed)
    outputs = int(r.integers(1, 8))
    frames = inputs_of(r, outputs)
    meta = frames[0].iloc[:0]
    rows = PandasRows(meta, "_partitions", True, int(r.choice([1 << 10, 1 << 20])))
    layout = OutputLayout({int(part): WORKERS[int(r.integers(2))] for part in r.permutation(outputs)})
    shards: list[Any] = []
    schemas: dict[str, dict[int, pa.Schema]] = {address: {} for address in WORKERS}
    for i, frame in enumerate(frames):
        encode = rows.encoder()
        for address, shard in rows.split(frame, i << 16, layout):
            if r.random() < 0.3:  # its own
                shards.append(shard)
                continue
            message = wire.pack(1, 1, 0, encode(shard), frozenset(schemas[address]))
            shards += wire.unpack([bytes(memoryview(one)) for one in message], 1, 1, schemas[address])
    if r.random() < 0.5:
        few = [shard for shard in shards if rows.few(shard)]
        shards = [shard for shard in shards if not rows.few(shard)] + rows.merged(few)
    chunks = [rows.chunk([shard], None) for shard in shards]
    for part in range(outputs):
        pieces = []
        for chunk in (one for one in chunks if part in one.parts):
            spilled = r.random() < 0.3
            pieces += chunk.decode(list(map(bytes, chunk.encode(part)))) if spilled else chunk.get(part)
        got = rows.assemble([pieces[i] for i in r.permutation(len(pieces))])
        wanted = [some for one in frames if len(some := one[one["_partitions"] == part])]
        want = (pd.concat(wanted) if len(wanted) > 1 else wanted[0] if wanted else meta).drop(columns="_partitions")
        pd.testing.assert_frame_equal(got, want, check_index_type="equiv", check_freq=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=3000, help="cases")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    args = parser.parse_args()
    start = time.monotonic()
    failed = 0
    for seed in range(args.first, args.first + args.frames):
        try:
            check(seed)
        except Exception as e:
            failed += 1
            print(f"seed {seed}: {type(e).__name__}: {' '.join(str(e).split())[:300]}", flush=True)
    print(f"{args.frames} cases, {failed} failed, {time.monotonic() - start:.0f} s")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
