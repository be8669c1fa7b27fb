"""What is read from disk lies in memory that is used again, but not before its last user is gone."""

from __future__ import annotations

import gc
import pickle
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from dask_gpurt.memory.pages import pages
from dask_gpurt.tiers.storage.codec import PickleCodec
from dask_gpurt.tiers.storage.disk.tier import DiskTier

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("cached", [False, True])
def test_values_that_were_read_keep_their_memory(tmp_path: Path, cached: bool) -> None:
    """What is read later must not be written over what somebody still has, whatever it was made into."""
    disk = DiskTier(str(tmp_path / "t"), direct_io="off" if cached else "auto")
    codec = PickleCodec()
    rng = np.random.default_rng(0)
    values = {
        "array": rng.random(400_000),
        "matrix": rng.random((600, 600)).T,
        "frame": pd.DataFrame({"x": rng.random(300_000), "y": rng.integers(0, 9, 300_000)}),
        "strings": pd.Series([f"text {i}" for i in range(200_000)], dtype="string[pyarrow]"),
        "table": pa.table({"a": rng.random(300_000)}),
    }
    handles = {name: disk.write(codec.encode(value)) for name, value in values.items()}
    kept = {
        "array": handles["array"].load(codec)[0][7:],
        "matrix": handles["matrix"].load(codec)[0].T[3],
        "frame": handles["frame"].load(codec)[0]["x"].to_numpy()[5:],
        "strings": handles["strings"].load(codec)[0].iloc[9:],
        "table": handles["table"].load(codec)[0].column("a").chunk(0).slice(11),
    }
    gc.collect()
    for _ in range(5):
        for handle in handles.values():
            pickle.dumps(handle.load(codec)[0])  # read into whatever is thought to be free
    assert np.array_equal(kept["array"], values["array"][7:])
    assert np.array_equal(kept["matrix"], values["matrix"].T[3])
    assert np.array_equal(kept["frame"], values["frame"]["x"].to_numpy()[5:])
    assert kept["strings"].tolist() == values["strings"].iloc[9:].tolist()
    assert kept["table"].to_pylist() == values["table"].column("a").chunk(0).slice(11).to_pylist()
    disk.close()
    pages.trim()
