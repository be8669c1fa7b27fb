"""The eight tables as dask.dataframe collections, and the few idioms the queries share.

Types are Arrow's: ``int64[pyarrow]``, ``string[pyarrow]``, ``date32[day][pyarrow]`` and, for money and quantities,
``decimal128(15, 2)[pyarrow]``. Money arithmetic stays decimal from the file to the answer, so sums do not depend on the
order in which partitions arrive and can be compared with DuckDB digit by digit. Only averages and ratios are floats.

Two properties of Arrow decimals shape the queries:

- Precision grows with each operation and 38 digits is the end: ``price * (1 - discount) * (1 + tax)`` would need 61.
  `decimal` cuts an intermediate back to the digits it can hold (it raises if a value does not fit; it never rounds
  silently).
- ``mean`` of a decimal column keeps the column's scale, so it is cut to two digits. Averages are therefore a sum
  and a count, divided as floats at the end.

Groups that are joined afterwards are aggregated by a dict (``.agg({"x": "sum"})``) and renamed after ``reset_index``.
By name (``.agg(total=("x", "sum"))``) Dask 2026.8 cannot plan the join once the group-by has 16 input partitions
(docs/upstream.md, "A join after a named aggregation").
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import dask.dataframe as dd
import pandas as pd
import pyarrow as pa

from dask_gpurt.bench.seam import meta as meta_of
from dask_gpurt.bench.tpch.reference import TABLES

FLOAT = pd.ArrowDtype(pa.float64())


@dataclasses.dataclass(frozen=True)
class Tables:
    """The tables, lazily. Reading is part of each query, and Dask pushes the columns in use down into the reader."""

    region: Any
    nation: Any
    supplier: Any
    customer: Any
    part: Any
    partsupp: Any
    orders: Any
    lineitem: Any
    #: the scale factor; Q11's threshold depends on it
    scale: float


def open_tables(directory: str, scale: float) -> Tables:
    """The tables under `directory`, as `generate.ensure` writes them."""
    return Tables(
        **{t: dd.read_parquet(os.path.join(directory, t), dtype_backend="pyarrow") for t in TABLES},
        scale=scale,
    )


def decimal(series: Any, precision: int, scale: int) -> Any:
    """`series` as ``decimal128(precision, scale)``; ArrowInvalid at compute time if a value does not fit."""
    return series.astype(pd.ArrowDtype(pa.decimal128(precision, scale)))


def revenue(frame: Any) -> Any:
    """``l_extendedprice * (1 - l_discount)``, exact, four digits after the point."""
    return decimal(frame.l_extendedprice * (1 - frame.l_discount), 19, 4)


def mean(total: Any, count: Any) -> Any:
    """Average from an exact total and a count, as floats."""
    return total.astype(FLOAT) / count.astype(FLOAT)


def totals(frame: Any) -> Any:
    """The sum of each decimal column of `frame`: a frame of one row and one partition, still decimal.

    ``series.sum()`` on decimals is not an option: Dask plans with an ``object()`` in place of the scalar and cannot
    compute further with it.
    """
    return _one_row(frame, "sum")


def largest(frame: Any) -> Any:
    """The maximum of each decimal column of `frame`, in the form of `totals`."""
    return _one_row(frame, "max")


def _one_row(frame: Any, how: str) -> Any:
    dtypes = dict(meta_of(frame).dtypes)
    meta = _reduced(meta_of(frame), how, dtypes)
    partial = frame.map_partitions(_reduced, how, dtypes, meta=meta)
    return partial.repartition(npartitions=1).map_partitions(_reduced, how, dict(meta.dtypes), meta=meta)


def _reduced(frame: pd.DataFrame, how: str, dtypes: dict[str, Any]) -> pd.DataFrame:
    # Dask's peer-to-peer shuffle gives decimals back as Python objects, against its own plan.
    frame = frame.astype(dtypes)
    out = {}
    for name in frame.columns:
        kind = pd.ArrowDtype(pa.decimal128(38, _arrow_type(frame[name]).scale))
        # As in SQL, nothing has neither a sum nor a maximum (NA; skipped when partitions are put together).
        value = frame[name].sum(min_count=1) if how == "sum" else frame[name].max()
        out[name] = pd.Series([value], dtype=kind)
    return pd.DataFrame(out)


def _arrow_type(series: pd.Series) -> Any:
    dtype = series.dtype
    if not isinstance(dtype, pd.ArrowDtype):
        raise TypeError(f"column {series.name!r} is {dtype}, must be an Arrow decimal; see open_tables")
    return dtype.pyarrow_dtype


def keep(frame: Any, column: str, comparison: str, bound: Any, factor: Any = 1) -> Any:
    """The rows of `frame` whose `column` compares so with `factor` times the only value of `bound`, a one-row frame.

    `comparison` is a method of a pandas Series: ``gt``, ``eq``, ... Dask hands a frame of one partition to every task.
    """
    return frame.map_partitions(_keep, bound, column, comparison, factor, meta=meta_of(frame))


def _keep(frame: pd.DataFrame, bound: pd.DataFrame, column: str, comparison: str, factor: Any) -> pd.DataFrame:
    return frame[getattr(frame[column], comparison)(bound.iloc[0, 0] * factor)]


def order_by(frame: Any, columns: list[str], ascending: list[bool] | bool = True, limit: int | None = None) -> Any:
    """ORDER BY (and LIMIT) of an answer: the best `limit` of each partition, then of their union.

    dask.dataframe's ``nlargest`` takes numbers only and its ``sort_values`` divides by quantiles, which decimals have
    not; an answer fits in one partition anyway.
    """
    ordered = frame.map_partitions(_sorted, columns, ascending, limit, meta=meta_of(frame))
    # Also where `frame` says that it has one partition: a group-by on several keys may have more when the
    # query is optimized (at scale 5 two for q03 and q07, whose answers were then wrong with any engine).
    ordered = ordered.repartition(npartitions=1)
    return ordered.map_partitions(_sorted, columns, ascending, limit, meta=meta_of(frame))


def _sorted(frame: pd.DataFrame, columns: list[str], ascending: list[bool] | bool, limit: int | None) -> pd.DataFrame:
    out = frame.sort_values(columns, ascending=ascending)
    return out if limit is None else out.head(limit)
