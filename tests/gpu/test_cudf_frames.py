"""`CudfFrames`: what it keeps of cuDF's columns. Without a GPU on host memory (`on_host`), where no kernel is needed.

The tests marked ``gpu`` are the rest of the way, with every dtype: order, packs, host, and back. Skipped where cuDF
cannot be imported.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("cudf", reason="cuDF is not installed")

import cudf
import pylibcudf as plc

from dask_gpurt.backends import cudf_frames
from dask_gpurt.backends import frames as device_frames
from dask_gpurt.backends.cudf_frames import CudfFrames
from dask_gpurt.backends.frames import refused
from tests.gpu.on_host import HostSpan, content, lists, plain, text, typed

N = 100
TEXT = pd.StringDtype(na_value=np.nan)
WORDS = [f"row {i}" for i in range(N)]


def struct() -> Any:
    return plc.Column(
        plc.DataType(plc.TypeId.STRUCT), N, None, None, 0, 0, [plain(np.arange(N)), text(WORDS)], validate=False
    )


def decimal(kind: str, bits: str, scale: int) -> Any:
    data = HostSpan(np.arange(N).astype(bits) if bits != "i16" else np.zeros(2 * N, "i8"))
    return plc.Column(plc.DataType(getattr(plc.TypeId, kind), -scale), N, data, None, 0, 0, [], validate=False)


def nullable(data: Any) -> Any:
    return plain(data, valid=[i % 3 > 0 for i in range(N)])


#: name -> (column, dtype): all that is kept
KINDS: dict[str, tuple[Any, Any]] = {
    "int64": (plain(np.arange(N)), np.dtype("i8")),
    "int32": (plain(np.arange(N).astype("i4")), np.dtype("i4")),
    "float": (plain(np.arange(N) * 0.5), np.dtype("f8")),
    "null": (nullable(np.arange(N) * 0.5), np.dtype("f8")),
    "bool": (plain(np.arange(N) % 2 == 0), np.dtype("?")),
    "time": (plain(np.arange(N).astype("M8[ns]")), np.dtype("M8[ns]")),
    "span": (plain(np.arange(N).astype("m8[ns]")), np.dtype("m8[ns]")),
    "text": (text(WORDS), TEXT),
    "text-as-object": (text(WORDS), np.dtype("O")),
    "zone": (plain(np.arange(N).astype("M8[ns]")), pd.DatetimeTZDtype("ns", "Europe/Warsaw")),
    "nullable": (nullable(np.arange(N)), pd.Int64Dtype()),
    "nullable-bool": (nullable(np.arange(N) % 2 == 0), pd.BooleanDtype()),
    "list": (lists([i % 4 for i in range(N)]), cudf.ListDtype("int64")),
    "struct": (struct(), cudf.StructDtype({"first": "int64", "second": TEXT})),
    "decimal32": (decimal("DECIMAL32", "i4", 2), cudf.Decimal32Dtype(7, 2)),
    "decimal64": (decimal("DECIMAL64", "i8", 3), cudf.Decimal64Dtype(10, 3)),
    "decimal128": (decimal("DECIMAL128", "i16", 4), cudf.Decimal128Dtype(30, 4)),
}
#: dtypes that are left to stock
LEFT = {
    "categories": (
        plain((np.arange(N) % 3).astype("u1")),
        cudf.CategoricalDtype(cudf.Index._from_column(typed(text(["x", "y", "z"]), TEXT))),
    ),
}


def frame(kinds: dict[str, tuple[Any, Any]]) -> Any:
    """Such columns, and the ids of outputs."""
    columns = {name: typed(column, dtype) for name, (column, dtype) in kinds.items()}
    columns["_partitions"] = typed(plain(np.arange(N) % 4), np.dtype("i8"))
    index = cudf.Index._from_column(typed(plain(np.arange(N)[::-1].copy()), np.dtype("i8")), name="idx")
    return cudf.DataFrame._from_data(columns, index=index)


class Meta:
    """As much of an empty frame as is looked at: labels, dtypes, index."""

    __module__ = "cudf.core.dataframe"

    def __init__(self, value: Any, index: Any = None) -> None:
        self.columns, self.dtypes, self.index = value.columns, value.dtypes, value.index if index is None else index


@pytest.mark.parametrize("name", KINDS)
def test_a_dtype_comes_back_as_it_was(name: str) -> None:
    value = frame({name: KINDS[name]})
    assert refused(Meta(value), "_partitions") == ""
    meta = Meta(value)
    table, ids = CudfFrames().apart(value, "_partitions", meta)
    assert table.num_rows() == N
    assert ids.type().id() == plc.TypeId.INT64
    got = CudfFrames().frame(table, meta)
    assert content(got) == content(value)
    assert got.columns.equals(value.columns)
    for mine, theirs in zip(got.dtypes, value.dtypes, strict=True):
        assert type(mine) is type(theirs)
        assert mine == theirs
    assert got.index.name == "idx"
    assert got.index.dtype == value.index.dtype


def test_wider_numbers_than_the_metas_stay() -> None:
    meta = Meta(frame({"a": KINDS["int32"]}))
    for name in ("int64", "float"):
        table, _ = CudfFrames().apart(frame({"a": KINDS[name]}), "_partitions", meta)
        got = CudfFrames().frame(CudfFrames().concat([table]), meta)
        assert content(got) == content(frame({"a": KINDS[name]}))
        assert got.dtypes["a"] == KINDS[name][1]


def test_tables_of_one_type_are_joined_as_they_are() -> None:
    value = frame({name: KINDS[name] for name in KINDS if not name.startswith("nullable")})
    table, _ = CudfFrames().apart(value, "_partitions", Meta(value))
    for got in cudf_frames._alike([table, table]):
        assert [c.type() for c in got.columns()] == [c.type() for c in table.columns()]
        assert content(CudfFrames().frame(got, Meta(value))) == content(value)
    kinds = [KINDS["int32"][0].type(), KINDS["int64"][0].type(), KINDS["float"][0].type()]
    assert cudf_frames._common(kinds[:2]).id() == plc.TypeId.INT64
    assert cudf_frames._common(kinds).id() == plc.TypeId.FLOAT64


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_stock_is_named(name: str) -> None:
    value = frame(LEFT)
    assert refused(Meta(value), "_partitions").startswith(f"{name} is ")


def test_every_dtype_of_cudf_is_kept_or_left() -> None:
    """A dtype that a new version of cuDF brings is refused until it stands in a table here."""
    given = {type(dtype).__name__ for _, dtype in KINDS.values() if not isinstance(dtype, np.dtype)}
    nullable = {f"{kind}{bits}Dtype" for kind in ("Int", "UInt") for bits in (8, 16, 32, 64)}
    assert device_frames._KEPT["cudf"] == (given - {"StringDtype"}) | nullable | {"Float32Dtype", "Float64Dtype"}
    of_cudf = {name for name in dir(cudf) if name.endswith("Dtype")}
    assert of_cudf - device_frames._KEPT["cudf"] == {"CategoricalDtype", "IntervalDtype"}


def test_the_column_of_ids_may_be_one_of_the_metas() -> None:
    value = frame({"int64": KINDS["int64"]})
    table, _ = CudfFrames().apart(value, "_partitions", Meta(value))
    assert len(table.columns()) == 3  # both, and the index


def test_a_decimal_of_less_precision_goes_into_the_metas() -> None:
    small, large = cudf.Decimal64Dtype(5, 2), cudf.Decimal64Dtype(10, 2)
    assert device_frames._goes_into(small, large)
    assert not device_frames._goes_into(large, small)
    assert not device_frames._goes_into(cudf.Decimal64Dtype(5, 1), large)
    assert not device_frames._goes_into(cudf.Decimal32Dtype(5, 2), large)


def test_indexes_of_time_and_text_are_kept() -> None:
    for name in ("time", "text", "zone"):
        column, dtype = KINDS[name]
        value = frame({"int64": KINDS["int64"]})
        value.index = cudf.Index._from_column(typed(column, dtype), name=("a", 1))
        meta = Meta(value)
        table, _ = CudfFrames().apart(value, "_partitions", meta)
        got = CudfFrames().frame(table, meta)
        assert type(got.index) is type(value.index)
        assert got.index.dtype == dtype
        assert got.index.name == ("a", 1)
        assert content(got.index) == content(value.index)


# ---------------------------------------------------------------------------------------------- on a GPU


def made(n: int) -> Any:
    """Every kind again, by cuDF itself."""
    import decimal as decimals

    import pyarrow as pa

    rng = np.random.default_rng(n)
    numbers = rng.integers(0, 1000, n)
    of_arrow = {
        "list": pa.array([[int(k), None] if k % 3 else [] for k in numbers], pa.list_(pa.int64())),
        "struct": pa.array(
            [{"first": int(k), "second": f"w{k}"} for k in numbers],
            pa.struct({"first": pa.int64(), "second": pa.string()}),
        ),
        "decimal64": pa.array([decimals.Decimal(int(k)) / 100 for k in numbers], pa.decimal64(10, 2)),
        "decimal128": pa.array([decimals.Decimal(int(k)) / 100 for k in numbers], pa.decimal128(30, 2)),
        "text": pa.array([None if k % 5 == 0 else f"żółć {k}" for k in numbers], pa.string()),
    }
    out = cudf.DataFrame.from_arrow(pa.table(of_arrow))
    for kind in ("i1", "u2", "i4", "i8", "f4", "f8", "M8[ns]", "M8[us]", "m8[ns]"):
        out[kind] = cudf.Series(numbers % 100).astype(kind)
    out["null"] = cudf.Series(pd.array([None if k % 7 == 0 else int(k) for k in numbers], dtype="Int64"))
    out["zone"] = cudf.Series(pd.to_datetime(numbers).tz_localize("UTC"))
    out["_partitions"] = cudf.Series(numbers % 4)
    return out.set_index(cudf.Index(rng.integers(0, 9, n), name="idx"))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [0, 1, 1000])
def test_the_whole_way(n: int) -> None:
    """apart, order, pack, host, device, concat, frame: rows of each output as cuDF's own filter finds them."""
    import pyarrow as pa

    value = made(max(n, 1)).iloc[:n]
    meta = made(3).iloc[:0].drop(columns="_partitions")
    frames = CudfFrames()
    assert refused(value, "_partitions") == ""
    table, ids = frames.apart(value, "_partitions", meta)
    rows, offsets = frames.order(table, ids, np.arange(4, dtype=np.uint8), 4)
    for output in range(4):
        first, last = int(offsets[output]), int(offsets[output + 1])
        middle = (first + last) // 2
        packs = frames.pack(rows, [(first, middle), (middle, last)])
        room = memoryview(bytearray(sum(p.nbytes for p in packs)))
        frames.to_host(packs, room)
        frames.ready()
        again, at = [], 0
        for p in packs:
            again.append(frames.from_host(p.head, room[at : at + p.nbytes]))
            at += p.nbytes
        joined = frames.concat([frames.unpack(p) for p in again])
        frames.ready()
        got = frames.frame(joined, meta)
        want = value[value["_partitions"] == output].drop(columns="_partitions")
        assert list(got.dtypes) == list(meta.dtypes)
        assert got.to_arrow().equals(want.to_arrow()), f"output {output}"
        assert isinstance(got.to_arrow(), pa.Table)


@pytest.mark.gpu
def test_text_beyond_two_gibibytes() -> None:
    """64-bit offsets, or an error that says so; never other rows."""
    frames = CudfFrames()
    words = cudf.DataFrame({"text": cudf.Series(["x" * 1000]).repeat(1 << 20), "_partitions": 0}).reset_index(drop=True)
    meta = words.iloc[:0].drop(columns="_partitions")
    table, _ = frames.apart(words, "_partitions", meta)
    (pack,) = frames.pack(table, [(0, len(words))])
    try:
        joined = frames.concat([frames.unpack(pack)] * 3)
    except OverflowError as e:
        pytest.fail(f"cuDF joins no more than 2 GiB of text: {e}")
    frames.ready()
    got = frames.frame(joined, meta)
    assert len(got) == 3 << 20
    assert int(got["text"].str.len().sum()) == 3 * 1000 << 20
    assert set(got["text"].iloc[[0, 1 << 20, (3 << 20) - 1]].to_pandas()) == {"x" * 1000}


def test_ready_waits_for_both_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    from dask_gpurt.backends import cudf_frames

    waited = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.synchronize = lambda: waited.append(name)

    monkeypatch.setattr(cudf_frames, "DEFAULT_STREAM", Stream("RMM's"))
    monkeypatch.setattr(cudf_frames, "PER_THREAD_DEFAULT_STREAM", Stream("cuDF's"))
    CudfFrames().ready()
    assert waited == ["cuDF's", "RMM's"]


def test_more_rows_than_a_table_holds_is_an_error_with_a_remedy() -> None:
    class Long:
        def num_rows(self) -> int:
            return 2**30

    with pytest.raises(OverflowError, match="more partitions"):
        CudfFrames().concat([Long(), Long()])
