"""How much is held at most."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import dask.dataframe as dd
import pandas as pd
import pytest

from dask_gpurt.planning import held
from tests.planning.test_held import plans

if TYPE_CHECKING:
    from pathlib import Path


def test_expressions(kept: held.HeldExpressions, files: Path) -> None:
    kept.limit = 20
    kept.install()
    theirs = plans(files)
    assert kept.figures()["held"] == 20
    assert plans(files) == theirs
    with pytest.raises(ValueError, match="must be 1 or more"):
        held.HeldExpressions(0)


@pytest.mark.parametrize("filesystem", ["fsspec", "arrow"])
def test_files_of_a_growing_folder(
    kept: held.HeldExpressions, files: Path, monkeypatch: pytest.MonkeyPatch, filesystem: str
) -> None:
    monkeypatch.setattr(held, "MOST_FILES", 30)
    kept.install()
    known = []
    for i in range(12):
        pd.DataFrame({"key": [i], "value": [1], "text": ["a"]}).to_parquet(files / f"part.{i + 3}.parquet")
        t = dd.read_parquet(str(files), filesystem=filesystem)
        assert t[t.key > 0].key.sum().compute() == 18 + i * (i + 1) // 2
        del t
        gc.collect()
        known.append(kept._files)
    assert known[0] == 4
    assert max(known) <= 30
    assert kept.failed is None
    kept.clear()
    assert kept._files == 0
    assert not kept._data_sets
