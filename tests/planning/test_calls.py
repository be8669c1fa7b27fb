"""Functions of users that change what they are given."""

from __future__ import annotations

import functools
import gc
from typing import TYPE_CHECKING, Any

import dask.dataframe as dd
import pandas as pd
import pytest
from dask.dataframe.dask_expr._accessor import FunctionMap
from dask.dataframe.dask_expr._collection import new_collection

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dask_gpurt.planning import held


def take(frame: pd.DataFrame, rules: dict[str, int]) -> pd.DataFrame:
    return frame.assign(value=rules.pop("value"))


@pytest.mark.parametrize("how", ["argument", "keyword", "partial"])
def test_an_argument_that_a_function_changes_in_place(kept: held.HeldExpressions, files: Path, how: str) -> None:
    """In threads of this process a function gets the object that the expression has."""
    kept.install()
    for _ in range(2):
        t = dd.read_parquet(str(files / "part.0.parquet"))
        function = functools.partial(take, rules={"value": 5}) if how == "partial" else take
        args = ({"value": 5},) if how == "argument" else ()
        kwargs = {"rules": {"value": 5}} if how == "keyword" else {}
        query = t.map_partitions(function, *args, meta=t._meta.assign(value=1), **kwargs)
        assert query.compute().value.tolist() == [5, 5, 5]
        del t, function, args, kwargs, query
        gc.collect()


#: read by the functions below while a query is planned
NAMES: dict[str, str] = {}


def named(column: str) -> str:
    return NAMES.get(column, column)


def renamed(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[["value"]].rename(columns=NAMES).sum().to_frame().T


def total(frame: pd.DataFrame) -> pd.Series:
    return frame.sum()


def side(label: int) -> int | str:
    return str(label % 2) if NAMES else label % 2


#: what Dask asks a user's function for
ASKED: dict[str, Callable[[Any], Any]] = {
    "names": lambda t: t.rename(columns=named),
    "a reduction": lambda t: t.reduction(renamed, aggregate=total),
    "groups": lambda t: t.groupby(side).agg({"value": "sum"}),
}


@pytest.mark.parametrize("case", ASKED)
def test_a_function_that_reads_what_has_changed(kept: held.HeldExpressions, files: Path, case: str) -> None:
    def answer() -> tuple[Any, Any]:
        asked = ASKED[case](dd.read_parquet(str(files)))
        return asked._meta, asked.compute()

    try:
        NAMES["value"] = "price"
        expected = answer()
        kept.install()
        NAMES.clear()
        answer()
        gc.collect()
        NAMES["value"] = "price"
        for got, want in zip(answer(), expected, strict=True):
            equal = pd.testing.assert_frame_equal if isinstance(want, pd.DataFrame) else pd.testing.assert_series_equal
            equal(got, want)
    finally:
        NAMES.clear()
    assert kept.failed is None


def seen_rows(frame: pd.DataFrame, seen: list[int]) -> pd.Series:
    seen.append(len(frame))
    return pd.Series([sum(seen)])


@pytest.mark.parametrize("step", ["chunk", "aggregate"])
def test_a_list_that_a_reduction_changes_in_place(kept: held.HeldExpressions, files: Path, step: str) -> None:
    kept.install()
    for _ in range(2):
        t = dd.read_parquet(str(files / "part.0.parquet"))
        functions = {"chunk": total, "aggregate": total, step: seen_rows}
        answer = t[["value"]].reduction(**functions, meta=pd.Series([0]), **{f"{step}_kwargs": {"seen": []}}).compute()
        assert answer.tolist() == [{"chunk": 3, "aggregate": 1}[step]]
        del t, answer
        gc.collect()


def test_an_accessor_that_is_registered_again(
    kept: held.HeldExpressions, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a cell of a notebook that runs a second time does."""

    class Units:
        def __init__(self, values: pd.Series, as_type: str) -> None:
            self.values, self.as_type = values, as_type

        def convert(self) -> pd.Series:
            return self.values.astype(self.as_type)

    kept.install()
    for dtype in ("int32", "float32"):
        monkeypatch.setattr(pd.Series, "units", property(lambda v, dtype=dtype: Units(v, dtype)), raising=False)
        column = dd.read_parquet(str(files)).value
        converted = new_collection(FunctionMap(column.expr, "units", "convert", (), {}))
        assert converted.dtype == converted.compute().dtype == dtype
        del column, converted
        gc.collect()
