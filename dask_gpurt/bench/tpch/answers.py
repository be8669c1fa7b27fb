"""Is this the answer? An exact comparison, row by row, that knows what ORDER BY and LIMIT leave open.

- Integers, strings, dates and decimals must be equal; a decimal must arrive as a decimal. Floats (averages and ratios,
  which DuckDB computes as doubles too) may differ by `RELATIVE`: another order of summation, nothing else.
- Rows that tie on all ORDER BY columns may come in any order. At a LIMIT, any choice among the rows that tie there is
  right, so the reference carries the rows behind the cut.
- A query without ORDER BY answers a set; here they are all single rows.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pandas as pd

from dask_gpurt.bench.tpch.reference import LIMITS, ORDER

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

#: relative tolerance, for floats only
RELATIVE = 1e-9

Row = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Difference:
    """One place where an answer is wrong."""

    query: int
    #: row of the answer, from 0; None if it is not about a row
    row: int | None
    column: str
    expected: Any
    got: Any

    def __str__(self) -> str:
        where = "" if self.row is None else f", row {self.row}"
        return f"query {self.query}{where}, column {self.column}: expected {self.expected!r}, got {self.got!r}"


def compare(query: int, expected: pa.Table, got: Any, *, most: int = 20) -> list[Difference]:
    """Differences between an answer and the reference, `most` at most; empty if the answer is right.

    Parameters
    ----------
    query
        1 to 22; tells ORDER BY and LIMIT.
    expected
        From `Reference.answer`: ordered, without LIMIT.
    got
        What the query computed: a pandas DataFrame.
    """
    if not isinstance(got, pd.DataFrame):
        return [Difference(query, None, "(the whole)", "a DataFrame", type(got).__name__)]
    names = list(expected.column_names)
    if list(got.columns) != names:
        return [Difference(query, None, "(names)", names, list(got.columns))]
    limit = LIMITS.get(query)
    theirs = _rows_of_table(expected)
    ours = _rows_of_frame(got)
    count = len(theirs) if limit is None else min(limit, len(theirs))
    out = []
    if len(ours) != count:
        out.append(Difference(query, None, "(number of rows)", count, len(ours)))
    for difference in _differences(query, names, theirs, ours[:count]):
        out.append(difference)
        if len(out) >= most:
            break
    return out


def _differences(query: int, names: list[str], theirs: list[Row], ours: list[Row]) -> Iterator[Difference]:
    order = [names.index(c.removeprefix("-")) for c in ORDER[query]]
    start = 0
    for group in _ties(theirs, order):
        chunk = ours[start : start + len(group)]
        if not chunk:
            return
        if len(chunk) < len(group):
            # The cut goes through these ties: any of them will do, but each only once.
            group = _nearest(chunk, group)
        else:
            group = sorted(group, key=_sort_key)
        # Which of the tied rows stands where is open, so both sides are put in one order; `place` remembers the row.
        placed = sorted(enumerate(chunk), key=lambda item: _sort_key(item[1]))
        for wanted, (place, row) in zip(group, placed, strict=True):
            for name, a, b in zip(names, wanted, row, strict=True):
                if not _same(a, b):
                    yield Difference(query, start + place, name, a, b)
        start += len(chunk)


def _ties(rows: list[Row], order: Sequence[int]) -> Iterator[list[Row]]:
    """Consecutive rows that are equal in the ORDER BY columns; everything at once without ORDER BY."""
    group: list[Row] = []
    for row in rows:
        if group and [row[i] for i in order] != [group[0][i] for i in order]:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _nearest(chunk: list[Row], group: list[Row]) -> list[Row]:
    """For each row of `chunk` (in the order of `_sort_key`) the row of `group` that it is, or else one that is left."""
    left = sorted(group, key=_sort_key)
    out: list[Row | None] = []
    ordered = sorted(chunk, key=_sort_key)
    for row in ordered:
        found = next((i for i, g in enumerate(left) if all(map(_same, g, row))), None)
        out.append(None if found is None else left.pop(found))
    return [row if row is not None else left.pop(0) for row in out]


def _sort_key(row: Row) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Exact columns first: floats that differ in the last digit must not change which rows are laid side by side."""
    exact = tuple(_text(v) for v in row if not isinstance(v, float))
    return exact, tuple(v for v in row if isinstance(v, float))


def _text(value: Any) -> str:
    if isinstance(value, Decimal):
        return f"{value.normalize():f}"
    return repr(value)


def _same(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    if isinstance(a, float):
        # DuckDB's double against a decimal would hide a query that forgot its division; floats only.
        return isinstance(b, float) and (math.isclose(a, b, rel_tol=RELATIVE, abs_tol=0.0) or a == b)
    if isinstance(a, (Decimal, int)) and not isinstance(a, bool):
        # DuckDB sums integers to HUGEINT, which arrives as a decimal of scale 0.
        return isinstance(b, (Decimal, int)) and not isinstance(b, bool) and a == b
    return type(a) is type(b) and bool(a == b)


def _rows_of_table(table: pa.Table) -> list[Row]:
    columns = [[_plain(v) for v in column.to_pylist()] for column in table.columns]
    return list(zip(*columns, strict=True)) if columns else []


def _rows_of_frame(frame: pd.DataFrame) -> list[Row]:
    columns = [[_plain(v) for v in frame.iloc[:, i].tolist()] for i in range(frame.shape[1])]
    return list(zip(*columns, strict=True)) if columns else []


def _plain(value: Any) -> Any:
    """One Python type per kind of value; every way of saying "missing" is None."""
    if value is None or value is pd.NA or value is pd.NaT or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, datetime.datetime) and value.time() == datetime.time():
        return value.date()
    return value
