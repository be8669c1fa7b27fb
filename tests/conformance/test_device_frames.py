"""Every `DeviceFrames` keeps the same contract, on a GPU or on the host."""

from __future__ import annotations

import importlib.util
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("rmm")

from dask_gpurt.backends.frames import load, provider_of, reason_for_stock, refused, to_cast
from tests.backends.host_frames import HostFrame, HostFrames
from tests.backends.lazy_memory import LazyMemory
from tests.versions import needs_pandas_3

if TYPE_CHECKING:
    from collections.abc import Callable

    from dask_gpurt.backends.frames import DeviceFrames


def on_host() -> tuple[DeviceFrames, Callable[[pd.DataFrame], Any], Callable[[Any], pd.DataFrame]]:
    return HostFrames(LazyMemory()), HostFrame, pd.DataFrame


def on_gpu() -> tuple[DeviceFrames, Callable[[pd.DataFrame], Any], Callable[[Any], pd.DataFrame]]:
    import cudf

    return load("dask_gpurt.backends.cudf_frames:CudfFrames"), cudf.DataFrame, lambda frame: frame.to_pandas()


#: (frames, pandas -> a frame of theirs, the reverse)
IMPLEMENTATIONS = [
    pytest.param(on_host, id="host"),
    pytest.param(
        on_gpu,
        id="cudf",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(importlib.util.find_spec("cudf") is None, reason="cuDF is not installed"),
        ],
    ),
]
each = pytest.mark.parametrize("make", IMPLEMENTATIONS)
OUTPUTS = 5


def rows(n: int = 300, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    words = np.array([None, "", "a", "żółć", "longer text " * 5], dtype=object)
    out = pd.DataFrame(
        {
            "i8": rng.integers(-100, 100, n).astype("i1"),
            "u4": rng.integers(0, 1 << 32, n).astype("u4"),
            "i8b": rng.integers(-(1 << 62), 1 << 62, n),
            "f4": rng.random(n).astype("f4"),
            "f8": np.where(rng.random(n) < 0.1, np.nan, rng.random(n)),
            "b": rng.random(n) < 0.5,
            "text": pd.Series(words[rng.integers(0, 5, n)], dtype="str"),
            "ns": pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 1 << 40, n), unit="ns"),
            "us": pd.Series(pd.to_datetime(rng.integers(0, 1 << 40, n), unit="us")).astype("M8[us]"),
            "td": pd.to_timedelta(rng.integers(0, 1 << 40, n), unit="ns"),
            "_partitions": rng.integers(0, OUTPUTS, n),
        }
    )
    return out.set_index(pd.Index(rng.integers(0, 9, n), name="idx"))


def code_of(*order: int) -> np.ndarray[Any, Any]:
    """Codes of outputs 0 to `OUTPUTS`, those that are named; the others are not asked for."""
    out = np.full(OUTPUTS, len(order), dtype=np.uint8)
    out[list(order)] = np.arange(len(order), dtype=np.uint8)
    return out


def check(got: Any, want: pd.DataFrame, there: Any, back: Any) -> None:
    """Rows, order, dtypes, names and index are those of the frame that the library itself makes of `want`."""
    pd.testing.assert_frame_equal(back(got), back(there(want)))


@each
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (3, 0, 4), ()])
def test_rows_in_the_order_of_their_outputs(make: Any, order: tuple[int, ...]) -> None:
    frames, there, back = make()
    data = rows()
    meta = data.drop(columns="_partitions").iloc[:0]
    table, ids = frames.apart(there(data), "_partitions", there(meta))
    ordered, offsets = frames.order(table, ids, code_of(*order), len(order))
    assert offsets.dtype == np.int64
    assert offsets.tolist() == np.cumsum([0, *((data._partitions == part).sum() for part in order)]).tolist()
    for at, part in enumerate(order):
        (pack,) = frames.pack(ordered, [(int(offsets[at]), int(offsets[at + 1]))])
        frames.ready()
        want = data[data._partitions == part].drop(columns="_partitions")
        check(frames.frame(frames.unpack(pack), there(meta)), want, there, back)


@each
def test_ids_outside_are_dropped(make: Any) -> None:
    frames, there, _ = make()
    data = pd.DataFrame({"v": np.arange(6), "p": [0, -1, 7, 1, 1 << 40, 0]})
    table, ids = frames.apart(there(data), "p", there(data[["v"]].iloc[:0]))
    _, offsets = frames.order(table, ids, np.array([0, 1], dtype=np.uint8), 2)
    assert offsets.tolist() == [0, 2, 3]


@each
def test_packs_go_to_the_host_and_back(make: Any) -> None:
    frames, there, back = make()
    data = rows()
    meta = there(data.iloc[:0])
    table, _ = frames.apart(there(data), "_partitions", meta)
    ranges = [(0, 1), (1, 200), (200, 300), (5, 7)]
    packs = frames.pack(table, ranges)
    target = memoryview(bytearray(sum(pack.nbytes for pack in packs)))
    frames.to_host(packs, target)
    frames.ready()
    heads = [(pack.head, pack.nbytes) for pack in packs]
    del packs, table
    again, at = [], 0
    for head, nbytes in heads:
        again.append(frames.from_host(head, target[at : at + nbytes].toreadonly()))
        at += nbytes
    joined = frames.concat([frames.unpack(pack) for pack in again])
    frames.ready()
    del again
    check(frames.frame(joined, meta), pd.concat([data.iloc[a:b] for a, b in ranges]), there, back)


@each
def test_one_table_is_joined_to_one_of_its_own(make: Any) -> None:
    """A pack may be retained: what becomes of an output must not change it."""
    frames, there, back = make()
    data = rows(20)
    meta = there(data.iloc[:0])
    table, _ = frames.apart(there(data), "_partitions", meta)
    (pack,) = frames.pack(table, [(0, 20)])
    joined = frames.concat([frames.unpack(pack)])
    frames.ready()
    out = frames.frame(joined, meta)
    out["i8"] = out["i8"] * 0
    check(frames.frame(frames.unpack(pack), meta), data, there, back)


@each
def test_what_another_thread_made_is_there_once_it_is_ready(make: Any) -> None:
    frames, there, back = make()
    data = rows()
    meta = there(data.iloc[:0])
    packs: list[Any] = []

    def thread() -> None:
        table, _ = frames.apart(there(data), "_partitions", meta)
        packs.extend(frames.pack(table, [(0, 100), (100, 300)]))
        frames.ready()

    one = threading.Thread(target=thread)
    one.start()
    one.join()
    joined = frames.concat([frames.unpack(pack) for pack in packs])
    frames.ready()
    check(frames.frame(joined, meta), data, there, back)


@each
@pytest.mark.parametrize("change", ["fewer columns", "another dtype"])
def test_a_partition_unlike_its_meta_is_refused(make: Any, change: str) -> None:
    frames, there, _ = make()
    data = rows(5)
    bad = data.drop(columns="f4") if change == "fewer columns" else data.astype({"i8": "str"})
    with pytest.raises(TypeError, match=r"Remedy"):
        frames.apart(there(bad), "_partitions", there(data.iloc[:0]))


@each
def test_wider_numbers_than_the_metas_stay(make: Any) -> None:
    """An output has the common type of its partitions, as with stock Dask."""
    frames, there, back = make()
    data = rows(20)
    meta = there(data.iloc[:0])
    wide = data.astype({"i8": "f8", "f4": "f8"})
    packs = []
    for part in (data, wide):
        table, _ = frames.apart(there(part), "_partitions", meta)
        packs += frames.pack(table, [(0, 20)])
        frames.ready()
    for which, want in (([0], data), ([1], wide), ([1, 0], pd.concat([wide, data])), ([0, 0], pd.concat([data, data]))):
        joined = frames.concat([frames.unpack(packs[i]) for i in which])
        frames.ready()
        check(frames.frame(joined, meta), want, there, back)


@each
def test_a_narrower_dtype_becomes_the_metas(make: Any) -> None:
    frames, there, back = make()
    data = rows(5)
    meta = there(data.astype({"i8": "i4"}).iloc[:0])
    table, _ = frames.apart(there(data), "_partitions", meta)
    frames.ready()
    check(frames.frame(table, meta), data.astype({"i8": "i4"}), there, back)


@each
def test_it_knows_its_frames(make: Any) -> None:
    frames, there, _ = make()
    assert frames.owns(there(rows(2)))
    assert not frames.owns(rows(2))
    assert not frames.owns([])
    assert type(load(provider_of(type(there(rows(2)))))) is type(frames)


# ---- what is decided from a meta, on the scheduler


def column(name: str) -> Any:
    """A dtype of a library that cannot be imported here."""
    return type(name, (), {"__module__": "cudf.core.dtypes"})()


class Index:
    nlevels = 1

    def __init__(self, dtype: Any = None) -> None:
        self.dtype = dtype or np.dtype("i8")


class DataFrame:
    """A meta of cuDF's, as far as it is looked at."""

    __module__ = "cudf.core.dataframe"

    def __init__(self, dtypes: dict[str, Any], index: Any = None) -> None:
        self.dtypes = {**dtypes, "_partitions": np.dtype("i8")}
        self.columns = pd.Index(list(self.dtypes))
        self.index = index or Index()


@needs_pandas_3
def test_what_is_refused_is_known_from_the_meta() -> None:
    good = {"a": np.dtype("f4"), "b": np.dtype("M8[us]"), "c": np.dtype("O"), "d": np.dtype("?")}
    assert refused(DataFrame(good), "_partitions") == ""
    for name in ("StructDtype", "ListDtype", "Decimal64Dtype", "Int64Dtype", "DatetimeTZDtype"):
        assert refused(DataFrame({**good, "x": column(name)}), "_partitions") == ""
    for name in ("CategoricalDtype", "IntervalDtype", "PeriodDtype"):
        assert refused(DataFrame({**good, "x": column(name)}), "_partitions").startswith("x is ")
    assert refused(DataFrame({"x": np.dtype("c16")}), "_partitions") == "x is complex128"
    assert refused(DataFrame({}, Index(column("CategoricalDtype"))), "_partitions").startswith("the index is ")
    many = Index()
    many.nlevels = 2
    assert refused(DataFrame({}, many), "_partitions") == "its index is a MultiIndex"
    assert refused(DataFrame({"x": column("Int64Dtype")}), "x").endswith("must be of integers")  # it may have nulls
    assert refused(DataFrame({"a": np.dtype("f4")}), "a") == "column a is float32, must be of integers"
    assert refused(rows(1).assign(i8=pd.array([1], dtype="Int64")), "_partitions") == "i8 is Int64"
    pandas = rows(1).assign(o=pd.Series([[1]], dtype="object"))
    assert refused(pandas, "_partitions") == "o is object"  # which is anything, but for cuDF
    assert refused(rows(1).assign(i8=pd.Categorical(["x"])), "_partitions") == "i8 is category"
    two = rows(1)
    two.columns = ["x"] * (len(two.columns) - 1) + ["_partitions"]
    assert refused(two, "_partitions") == "its columns have several levels, or one name twice"


def test_why_stock_shuffles() -> None:
    meta = DataFrame({"a": np.dtype("f4")})
    assert reason_for_stock(meta, "_partitions", True) == ""
    off = "meta is cudf.core.dataframe.DataFrame, and gpurt.shuffle.device-frames is false"
    assert reason_for_stock(meta, "_partitions", False) == off
    bad = DataFrame({"x": column("CategoricalDtype")})
    assert reason_for_stock(bad, "_partitions", True).startswith("meta is cudf.core.dataframe.DataFrame, and x is ")
    assert reason_for_stock([], "_partitions", True) == "meta is builtins.list"
    assert provider_of(pd.DataFrame) == ""
    assert provider_of(DataFrame) == "dask_gpurt.backends.cudf_frames:CudfFrames"


@needs_pandas_3
def test_what_goes_into_a_dtype() -> None:
    meta = pd.DataFrame({"a": np.array([], "f8"), "s": pd.Series([], dtype="str"), "p": np.array([], "i8")})
    data = meta.astype({"a": "i4", "s": "string[pyarrow]", "p": "f8"})
    assert list(to_cast(data, meta, "p")) == ["a", "s"]
    assert to_cast(meta, meta.astype({"a": "i8"}), "p") == {}  # wider numbers stay
    with pytest.raises(TypeError, match=r"column a of a partition is float64, in its meta it is bool"):
        to_cast(meta, meta.astype({"a": "?"}), "p")
