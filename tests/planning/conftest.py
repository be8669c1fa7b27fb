"""What this process holds, and files to plan queries of."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import dask.config
import pandas as pd
import pytest

from dask_gpurt import planning
from dask_gpurt.planning import held, seam
from tests.versions import PANDAS_3

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[held.HeldExpressions]:
    """What this process holds; nothing before and after."""
    if not PANDAS_3:
        pytest.skip("planning is Dask's with pandas below 3")
    planning.forget()  # an earlier test may have had a client
    one = held.HeldExpressions()
    monkeypatch.setattr(held, "HELD", one)
    monkeypatch.setattr(seam, "_kept", weakref.WeakKeyDictionary())
    with dask.config.set({"scheduler": "sync", "dataframe.shuffle.method": "tasks"}):
        yield one
    planning.forget()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    write(tmp_path, 1)
    return tmp_path


def write(folder: Path, factor: int) -> None:
    for i in range(3):
        frame = pd.DataFrame({"key": [1, 2, 3], "value": [factor * i, factor, 1], "text": ["a", "b", "c"]})
        frame.to_parquet(folder / f"part.{i}.parquet")
