"""What the name of an expression does not tell: such an expression does not live on."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import dask
import dask.dataframe as dd

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from dask_gpurt.planning import held


def rows_with(frame: pd.DataFrame, values: Any) -> pd.DataFrame:
    return frame[frame.key.isin(list(values))]


def test_a_delayed_object_under_a_name_of_the_users(kept: held.HeldExpressions, files: Path) -> None:
    kept.install()
    t = dd.read_parquet(str(files))

    def keys(values: list[int]) -> list[int]:
        named = dask.delayed(values, name="values")
        found = t.map_partitions(rows_with, named, meta=t._meta).compute()
        return sorted(set(found.key))

    assert keys([1]) == [1]
    gc.collect()
    assert keys([2, 3]) == [2, 3]
