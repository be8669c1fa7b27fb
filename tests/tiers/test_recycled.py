"""Memory of values that went is used for those that come."""

from __future__ import annotations

import gc
import pickle
import threading
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from dask_gpurt.tiers.codec import PickleCodec
from dask_gpurt.tiers.direct import BLOCK
from dask_gpurt.tiers.disk import DiskTier
from dask_gpurt.tiers.recycled import IDLE_SECONDS, LEAST_BYTES, RECYCLED, Recycled

if TYPE_CHECKING:
    from pathlib import Path

MB = 1 << 20


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, "u1").ctypes.data)


def test_memory_comes_back_when_nobody_refers_to_it() -> None:
    pool = Recycled(10 * MB)
    view = pool.take(4 * MB)
    where = address(view)
    assert where % BLOCK == 0
    assert view.nbytes == 4 * MB
    array = np.frombuffer(view[100:200], "u1")
    del view
    gc.collect()
    assert pool.kept_bytes == 0
    tail = array[50:]  # a slice of a slice
    del array
    assert pool.kept_bytes == 0
    del tail
    assert pool.kept_bytes >= 4 * MB
    again = pool.take(4 * MB - 5)
    assert address(again) == where
    assert again.nbytes == 4 * MB - 5
    assert (pool.taken, pool.reused, pool.kept_bytes) == (2, 1, 0)


@pytest.mark.parametrize("nbytes", [3 * MB, 5 * MB])
def test_memory_that_does_not_fit_is_not_taken(nbytes: int) -> None:
    pool = Recycled(10 * MB)
    del_me = pool.take(4 * MB)
    del del_me
    assert pool.take(nbytes).nbytes == nbytes
    assert pool.reused == 0


def test_no_more_is_kept_than_allowed_and_not_for_long() -> None:
    now = [0.0]
    pool = Recycled(10 * MB, clock=lambda: now[0])
    views = [pool.take(4 * MB) for _ in range(4)]
    views.clear()
    assert pool.kept_bytes == pytest.approx(8 * MB, rel=0.01)
    now[0] += IDLE_SECONDS / 2
    pool.trim()
    assert pool.kept_bytes > 0
    now[0] += IDLE_SECONDS
    pool.trim()
    assert pool.kept_bytes == 0
    views = [pool.take(4 * MB)]
    views.clear()
    assert pool.kept_bytes > 0
    pool.trim(all_of_it=True)
    assert pool.kept_bytes == 0


def test_small_memory_is_malloc_s() -> None:
    pool = Recycled()
    view = pool.take(LEAST_BYTES - 1)
    del view
    assert (pool.taken, pool.kept_bytes) == (0, 0)


def test_no_two_threads_get_the_same_memory() -> None:
    pool = Recycled(64 * MB)
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(200):
            view = pool.take(MB)
            array = np.frombuffer(view, "u1")
            view[:] = bytes([i]) * MB
            if array.min() != i or array.max() != i:
                wrong.append(i)
            del view, array

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    assert pool.reused > 0


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
    RECYCLED.trim(all_of_it=True)
