"""What the spilling benchmarks run: array and dataframe work on data that does not fit in memory.

Each function takes the bytes of its working set (what it keeps in memory at a time, were there enough) and of one chunk
or partition, and returns a number that depends on all of the data, so that answers can be compared. Values are random:
stock Dask compresses what it spills when lz4 is installed, and then counts compressed bytes, which cannot be compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import wait

if TYPE_CHECKING:
    from collections.abc import Callable

#: of one row of `_frame`, its index not counted
ROW_BYTES = 32


def persist_and_sum(nbytes: int, chunk_bytes: int) -> float:
    """Make it, then read it twice: the data of a notebook."""
    n = nbytes // 8
    x = da.random.default_rng(0).random(n, chunks=chunk_bytes // 8).persist()
    wait(x)
    return float(x.sum().compute()) + float((x * x).sum().compute())


def dot_product(nbytes: int, chunk_bytes: int) -> float:
    """Two vectors, kept, and their products with each other."""
    n = nbytes // 16
    rng = da.random.default_rng(0)
    x, y = (rng.random(n, chunks=chunk_bytes // 8) for _ in "xy")
    x, y = x.persist(), y.persist()
    wait([x, y])
    return float(da.dot(x, y).compute()) + float(da.dot(x + 1, y).compute())


def transpose(nbytes: int, chunk_bytes: int) -> float:
    """``x + x.T``, kept: every block is read twice, at times far apart."""
    x = _square(nbytes // 2, chunk_bytes)
    y = (x + x.T).persist()
    wait(y)
    return float(y.sum().compute())


def tensordot(nbytes: int, chunk_bytes: int) -> float:
    """``x @ x.T``, kept: every block is read many times."""
    x = _square(nbytes // 2, chunk_bytes)
    y = da.tensordot(x, x.T, axes=1).persist()
    wait(y)
    return float(y.sum().compute())


def sort(nbytes: int, chunk_bytes: int) -> float:
    """A frame, kept; sorted by a random column; then a question about order and content.

    (None that depends on where partitions end: Dask seeds the sample that decides that by names, which differ by run.)
    """
    df = _table(nbytes // 2, chunk_bytes).persist()
    wait(df)
    ordered = df.sort_values("x").persist()
    wait(ordered)
    del df
    return float(ordered.map_partitions(_steps, meta=pd.Series(dtype="f8")).sum().compute())


def join_chain(nbytes: int, chunk_bytes: int) -> float:
    """Two joins in a row of tables that are kept, then two questions about the result."""
    big = _table(nbytes // 2, chunk_bytes).persist()
    small = [
        _table(nbytes // 16, chunk_bytes, seed=100_000 * i).drop(columns=["x", "y"]).rename(columns={"z": f"z{i}"})
        for i in (1, 2)
    ]
    small = [s.groupby("k").mean(split_out=4).reset_index().persist() for s in small]
    wait([big, *small])
    joined = big.merge(small[0], on="k", how="left").merge(small[1], on="k", how="left").persist()
    wait(joined)
    del big
    return float((joined.z1 + joined.z2).sum().compute()) + float((joined.x * joined.z1).sum().compute())


def groupby_chain(nbytes: int, chunk_bytes: int) -> float:
    """A frame, kept; three aggregations, each over all of it."""
    df = _table(nbytes, chunk_bytes).persist()
    wait(df)
    total = 0.0
    for column, how in (("x", "sum"), ("y", "mean"), ("z", "max")):
        total += float(getattr(df.groupby("k")[column], how)(split_out=2).sum().compute())
    return total


WORKLOADS: dict[str, Callable[[int, int], float]] = {
    f.__name__: f for f in (persist_and_sum, dot_product, transpose, tensordot, sort, join_chain, groupby_chain)
}


def same(a: float, b: float) -> bool:
    """Equal, but for the order of sums."""
    return abs(a - b) <= 1e-9 * max(abs(a), abs(b))


def _square(nbytes: int, chunk_bytes: int) -> da.Array:
    n = int((nbytes / 8) ** 0.5)
    return da.random.default_rng(0).random((n, n), chunks=(int((chunk_bytes / 8) ** 0.5),) * 2)


def _frame(i: int, rows: int) -> pd.DataFrame:
    rng = np.random.default_rng(i)
    return pd.DataFrame(
        {"k": rng.integers(0, 10_000, rows), "x": rng.random(rows), "y": rng.random(rows), "z": rng.random(rows)}
    )


def _table(nbytes: int, chunk_bytes: int, seed: int = 0) -> Any:
    partitions = max(2, round(nbytes / chunk_bytes))
    rows = nbytes // ROW_BYTES // partitions
    return dd.from_map(_frame, range(seed, seed + partitions), rows=rows, meta=_frame(0, 1))


def _steps(df: pd.DataFrame) -> pd.Series:
    ordered = df.x.is_monotonic_increasing
    return pd.Series([(df.x * df.z + df.k).sum() if ordered else float("nan")])
