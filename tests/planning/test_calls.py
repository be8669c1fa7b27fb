"""Functions of users that change what they are given."""

from __future__ import annotations

import functools
import gc
from typing import TYPE_CHECKING

import dask.dataframe as dd
import pytest

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

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
