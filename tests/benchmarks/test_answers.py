"""The comparison must find what is wrong and allow what SQL leaves open."""

from __future__ import annotations

import datetime
from decimal import Decimal

import pandas as pd
import pyarrow as pa
import pytest

from dask_gpurt.bench.tpch.answers import RELATIVE, compare

DAY = datetime.date(1995, 1, 1)


def frame(table: pa.Table) -> pd.DataFrame:
    return table.to_pandas(types_mapper=pd.ArrowDtype)


@pytest.fixture
def q03() -> pa.Table:
    """Q3: order by revenue desc, o_orderdate; limit 10. Rows 8 to 11 tie, so the limit cuts through them."""
    revenue = [Decimal(f"{100 - i}.0000") for i in range(8)] + [Decimal("50.0000")] * 4 + [Decimal("1.0000")]
    n = len(revenue)
    return pa.table(
        {
            "l_orderkey": pa.array(range(n), pa.int64()),
            "revenue": pa.array(revenue, pa.decimal128(38, 4)),
            "o_orderdate": pa.array([DAY] * n, pa.date32()),
            "o_shippriority": pa.array([0] * n, pa.int32()),
        }
    )


@pytest.fixture
def q01() -> pa.Table:
    """Q1: one exact sum, one average, ordered by two flags."""
    return pa.table(
        {
            "l_returnflag": ["A", "N", "N"],
            "l_linestatus": ["F", "F", "O"],
            "sum_qty": pa.array([Decimal("1.10"), Decimal("2.20"), Decimal("3.30")], pa.decimal128(38, 2)),
            "avg_qty": [1.0, 2.0, 3.0],
        }
    )


def test_equal_is_equal(q01: pa.Table, q03: pa.Table) -> None:
    assert compare(1, q01, frame(q01)) == []
    assert compare(3, q03, frame(q03).head(10)) == []


def test_wrong_decimal_is_found(q01: pa.Table) -> None:
    got = frame(q01)
    got["sum_qty"] = [Decimal("1.10"), Decimal("2.21"), Decimal("3.30")]
    (difference,) = compare(1, q01, got)
    assert (difference.query, difference.row, difference.column) == (1, 1, "sum_qty")
    assert (difference.expected, difference.got) == (Decimal("2.20"), Decimal("2.21"))
    assert "query 1, row 1, column sum_qty" in str(difference)


def test_float_for_a_decimal_is_found(q01: pa.Table) -> None:
    """2.2 and 2.20 print alike; a sum that went through floats is not exact all the same."""
    got = frame(q01).assign(sum_qty=[1.1, 2.2, 3.3])
    assert [d.column for d in compare(1, q01, got)] == ["sum_qty"] * 3


def test_decimal_for_a_float_is_found(q01: pa.Table) -> None:
    got = frame(q01).assign(avg_qty=[Decimal(1), Decimal(2), Decimal(3)])
    assert [d.column for d in compare(1, q01, got)] == ["avg_qty"] * 3


def test_float_tolerance(q01: pa.Table) -> None:
    near = frame(q01).assign(avg_qty=[1.0 * (1 + RELATIVE / 2), 2.0, 3.0])
    assert compare(1, q01, near) == []
    far = frame(q01).assign(avg_qty=[1.0 * (1 + RELATIVE * 3), 2.0, 3.0])
    assert [(d.row, d.column) for d in compare(1, q01, far)] == [(0, "avg_qty")]


def test_wrong_order_is_found(q01: pa.Table, q03: pa.Table) -> None:
    assert compare(1, q01, frame(q01).iloc[[0, 2, 1]])
    assert compare(3, q03, frame(q03).iloc[[1, 0, *range(2, 10)]])


def test_ties_may_come_in_any_order(q03: pa.Table) -> None:
    """Any two of the four rows that tie at the limit, in any order."""
    assert compare(3, q03, frame(q03).iloc[[*range(8), 11, 8]]) == []


def test_a_tied_row_counts_once(q03: pa.Table) -> None:
    (difference,) = compare(3, q03, frame(q03).iloc[[*range(8), 9, 9]])
    assert difference.column == "l_orderkey"


def test_a_row_from_behind_the_limit_is_found(q03: pa.Table) -> None:
    assert {d.column for d in compare(3, q03, frame(q03).iloc[[*range(9), 12]])} >= {"revenue"}


def test_wrong_value_inside_a_tie_is_found() -> None:
    """Q13 orders by all its columns but Q20 by names only: rows that tie there are compared whole."""
    expected = pa.table({"s_name": ["a", "a", "b"], "s_address": ["x", "y", "z"]})
    assert compare(20, expected, frame(expected).iloc[[1, 0, 2]]) == []
    wrong = pd.DataFrame({"s_name": ["a", "a", "b"], "s_address": ["y", "q", "z"]})
    assert {d.column for d in compare(20, expected, wrong)} == {"s_address"}


@pytest.mark.parametrize("rows", [9, 11])
def test_number_of_rows(q03: pa.Table, rows: int) -> None:
    assert any(d.column == "(number of rows)" for d in compare(3, q03, frame(q03).head(rows)))


def test_no_row_where_some_are_expected(q01: pa.Table) -> None:
    (difference,) = compare(1, q01, frame(q01).head(0))
    assert (difference.expected, difference.got) == (3, 0)


def test_names_and_their_order(q01: pa.Table) -> None:
    assert compare(1, q01, frame(q01).rename(columns={"sum_qty": "qty"}))[0].column == "(names)"
    assert compare(1, q01, frame(q01)[["l_linestatus", "l_returnflag", "sum_qty", "avg_qty"]])[0].column == "(names)"


def test_null_is_not_zero() -> None:
    expected = pa.table({"avg_yearly": pa.array([None], pa.float64())})
    assert compare(17, expected, pd.DataFrame({"avg_yearly": [float("nan")]})) == []
    assert compare(17, expected, pd.DataFrame({"avg_yearly": [0.0]}))


def test_a_timestamp_at_midnight_is_that_day_and_others_are_not(q03: pa.Table) -> None:
    got = frame(q03).head(10)
    midnight = got.assign(o_orderdate=pd.Timestamp("1995-01-01"))
    assert compare(3, q03, midnight) == []
    wrong = compare(3, q03, got.assign(o_orderdate=pd.Timestamp("1995-01-01 01:00")))
    assert {d.row for d in wrong if d.column == "o_orderdate"} == set(range(10))


def test_only_so_many_differences(q03: pa.Table) -> None:
    assert len(compare(3, q03, frame(q03).head(10).assign(o_shippriority=7), most=4)) == 4


def test_not_a_frame(q01: pa.Table) -> None:
    assert compare(1, q01, 3)[0].got == "int"
