"""The short way for plain columns against the general one: same schema, same frames, also when inputs mix both."""

from __future__ import annotations

import dataclasses
import weakref

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.rows import arrow_buffers, gather, wire
from dask_gpurt.shuffle.rows import assemble as assembling
from dask_gpurt.shuffle.rows.assemble import Assembler
from dask_gpurt.shuffle.rows.partition import OutputLayout, split
from dask_gpurt.shuffle.rows.received_chunk import ReceivedChunk
from dask_gpurt.shuffle.rows.schema import known_schema
from tests.shuffle.helpers import mixed
from tests.versions import needs_pandas_3

STAMP = ["M8[s]", "M8[ms]", "M8[us]", "M8[ns]", "m8[s]", "m8[ns]"]
KINDS = [
    "i1",
    "i2",
    "i4",
    "i8",
    "u1",
    "u2",
    "u4",
    "u8",
    "f4",
    "f8",
    "bool",
    *STAMP,
    "str",
    "string[pyarrow]",
    "pieces",
    "full",
]
INDEXES = ["range", "step", "i8", "i4", "f8", "M8[ns]", "m8[us]", "named"]


def values(rng, kind: str, n: int):
    ints = rng.integers(0, 100, n)
    holes = rng.random(n) < 0.2
    if kind in ("f4", "f8"):
        return np.where(holes, np.nan, ints / 3).astype(kind)
    if kind[0] in "Mm":
        out = ints.astype(kind)
        out[holes] = "NaT"
        return out
    if kind == "full":  # text without nulls
        return pd.array(["" if i < 10 else f"wört{i}" for i in ints], dtype="str")
    if kind in ("str", "string[pyarrow]", "pieces"):
        words = [None if hole else "" if i < 10 else f"wört{i}" for i, hole in zip(ints, holes, strict=True)]
        if kind != "pieces":
            # A slice of a longer array: its offset is not 0.
            return pd.array(["before", None, *words, "after"], dtype=kind)[2:-1]
        chunks = pa.chunked_array(
            [pa.array(words[: n // 2], pa.large_string()), pa.array(words[n // 2 :], pa.large_string())]
        )
        return pd.arrays.ArrowStringArray(chunks, dtype=pd.StringDtype("pyarrow", na_value=np.nan))
    return (ints % 2 == 0) if kind == "bool" else ints.astype(kind)


def frame(seed: int, n: int, kinds: list[str], index: str, how: str) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    extra = 4 if how != "plain" else 0
    size = n * 2 + extra if how == "steps" else n + extra
    df = pd.DataFrame({f"c{i}": values(rng, kind, size) for i, kind in enumerate(kinds)}, index=range(size))
    df["p"] = rng.integers(0, 12, size)
    if index == "step":
        df.index = pd.RangeIndex(5, 5 - 3 * size, -3)
    elif index == "named":
        df.index = pd.Index(rng.integers(0, 9, size), name="idx")
    elif index != "range":
        df.index = pd.Index(values(rng, index, size))
    if how == "rows":
        df = df.iloc[2 : n + 2]
    elif how == "steps":  # columns that are not contiguous
        df = df.iloc[: 2 * n : 2]
    elif how == "two-dimensional" and len(set(kinds)) == 1 and kinds[0] in ("i8", "f8"):
        block = df[[f"c{i}" for i in range(len(kinds))]].to_numpy().copy(order="C")
        df = (
            pd.DataFrame(block, columns=[f"c{i}" for i in range(len(kinds))], index=df.index).assign(p=df["p"]).iloc[:n]
        )
    return df.iloc[:n]


class Large:
    """Within, every output counts as a large one: it is built piece by piece."""

    def __enter__(self) -> None:
        self.before = assembling.LARGE_BYTES, assembling.GIVE_BACK_BYTES
        assembling.LARGE_BYTES = assembling.GIVE_BACK_BYTES = 0

    def __exit__(self, *_: object) -> None:
        assembling.LARGE_BYTES, assembling.GIVE_BACK_BYTES = self.before


cases = st.tuples(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 60), min_size=1, max_size=4),
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
    st.sampled_from(INDEXES),
    st.sampled_from(["plain", "rows", "steps", "two-dimensional"]),
    st.booleans(),
)


class General:
    """Within, frames take the general way: those whose turn it is when splitting, and all when assembling."""

    def __init__(self, turns=None) -> None:
        self.turns = turns

    def __enter__(self) -> None:
        self.before = gather.plan, assembling.template
        plan, calls = gather.plan, iter(self.turns or ())
        gather.plan = lambda *a: plan(*a) if self.turns and next(calls) else None
        if self.turns is None:
            assembling.template = lambda *_: None

    def __exit__(self, *_: object) -> None:
        gather.plan, assembling.template = self.before


def shuffled(frames, drop: bool, travel: str) -> dict[int, pd.DataFrame]:
    layout = OutputLayout({part: "a" if part % 2 else "b" for part in range(11)})
    shards = [s for i, df in enumerate(frames) for _, s in split(df, "p", drop, i, layout)]
    if not shards:
        return {}
    if travel == "wire":
        parcels = [wire.encode(s) for s in shards]
        sent = [bytearray(f) for f in wire.pack(1, 1, 1, parcels)]
        chunks = [ReceivedChunk(wire.unpack(sent, 1, 1, {}))]
    else:
        chunks = [ReceivedChunk([s]) for s in shards]
    meta = frames[0].iloc[:0].drop(columns="p" if drop else [])
    assembler = Assembler(meta)
    out = {}
    for part in sorted({p for c in chunks for p in c.parts}):
        pieces = []
        for chunk in chunks:
            if part in chunk.parts:
                frames_ = [bytes(f) for f in chunk.encode(part)]
                pieces += chunk.shell().decode(frames_) if travel == "spill" else chunk.get(part)
        out[part] = assembler(pieces)
    return out


def equal(got, want) -> None:
    assert got.keys() == want.keys()
    for part in want:
        pd.testing.assert_frame_equal(got[part], want[part], check_index_type="exact")
        for name in want[part]:
            assert got[part][name].dtype == want[part][name].dtype
        assert type(got[part].index) is type(want[part].index)


@needs_pandas_3
@given(cases)
@settings(max_examples=30, deadline=None)
def test_same_as_general(case):
    seed, lengths, kinds, index, how, drop = case
    frames = [frame(seed + i, n, kinds, index, how) for i, n in enumerate(lengths)]
    with General():
        want = shuffled(frames, drop, "memory")
    for travel in ("memory", "wire", "spill"):
        equal(shuffled(frames, drop, travel), want)
        with Large():
            equal(shuffled(frames, drop, travel), want)
    with General([i % 2 for i in range(len(frames))]):
        equal(shuffled(frames, drop, "wire"), want)


@needs_pandas_3
@given(cases)
@settings(max_examples=30, deadline=None)
def test_same_schema_as_arrow_makes(case):
    seed, _, kinds, index, how, drop = case
    df = frame(seed, 30, kinds, index, how)
    layout = OutputLayout(dict.fromkeys(range(12), "a"))
    ((_, got),) = split(df, "p", drop, 0, layout)
    assert layout.schemas, "the short way was not taken"
    with General():
        ((_, want),) = split(df, "p", drop, 0, layout)
    assert got.table.schema.equals(want.table.schema, check_metadata=True)
    got.table.validate(full=True)


@needs_pandas_3
def test_a_large_output_gives_its_pieces_back_as_it_is_built():
    frames = [frame(i, 40, ["i8", "f8", "full", "bool"], "range", "plain").assign(p=0) for i in range(6)]
    chunks = [
        ReceivedChunk([s]) for i, df in enumerate(frames) for _, s in split(df, "p", True, i, OutputLayout({0: "a"}))
    ]
    pieces = [piece for chunk in chunks for piece in chunk.get(0)]
    alive = [weakref.ref(chunk) for chunk in chunks]
    tables = [weakref.ref(rows.rows.views[0]) for _, rows in pieces]
    chunks.clear()
    left = []
    trim = assembling.pages.trim
    assembling.pages.trim = lambda: left.append(sum(ref() is not None for ref in tables)) or trim()  # type: ignore[method-assign]
    try:
        with Large():
            got = Assembler(frames[0].iloc[:0].drop(columns="p"))(pieces)
    finally:
        del assembling.pages.trim
    assert left == [5, 4, 3, 2, 1, 0]
    assert not any(ref() for ref in alive)
    pd.testing.assert_frame_equal(got, pd.concat(frames).drop(columns="p"), check_index_type=False)


@needs_pandas_3
def test_what_is_not_plain_takes_the_general_way():
    df = mixed(0)
    plain = [name for name in df if gather.plan(df[[name]], None, {}) is not None]
    assert plain == ["k", "i8", "u2", "i8be", "f4", "f8", "b", "text", "text2", "ns", "us", "td"]
    for other in (
        df[["k"]].set_index(df["text"]),
        df[["k"]].set_index([df["f4"], df["f8"]]),
        df[["k"]].set_index(df["cat"]),
        df[["k"]].set_axis([1], axis=1),
        df[["k"]].astype("complex128"),
        df[["k"]].astype("f2"),
        df[["k"]].astype(">i8"),
        pd.concat([df["k"], df["k"]], axis=1),
    ):
        assert gather.plan(other, None, {}) is None


def test_frames_can_be_written_to_and_are_consolidated():
    frames = [frame(i, 40, ["i8", "f8", "i8", "str", "f8"], "i8", "plain") for i in range(3)]
    for df in shuffled(frames, True, "wire").values():
        assert len(df._mgr.blocks) == 3
        df.iloc[0, 0] = -1
        df["c1"] *= 2
        assert df.iloc[0, 0] == -1
        for name in ("c0", "c2", "c4"):
            assert df[name].to_numpy(copy=True).flags.writeable


@pytest.mark.parametrize("changed", ["f8", "str"])
def test_pieces_of_other_types_are_settled_as_before(changed):
    frames = [frame(0, 40, ["i8"], "i8", "plain"), frame(1, 40, [changed], "i8", "plain")]

    def outcome():
        try:
            return shuffled(frames, True, "memory")
        except pa.ArrowException as e:
            return str(e)

    got = outcome()
    with General():
        want = outcome()
    if isinstance(want, str):
        assert got == want
    else:
        equal(got, want)


def test_meta_of_another_dtype_is_settled_as_before():
    frames = [frame(i, 40, ["i4", "str"], "i8", "plain") for i in range(2)]
    layout = OutputLayout(dict.fromkeys(range(12), "a"))
    chunk = ReceivedChunk([s for i, df in enumerate(frames) for _, s in split(df, "p", True, i, layout)])
    meta = frames[0].iloc[:0].drop(columns="p").astype({"c0": "f8", "c1": "string[pyarrow]"})
    got = Assembler(meta)(chunk.get(3))
    with General():
        want = Assembler(meta)(chunk.get(3))
    pd.testing.assert_frame_equal(got, want)
    assert got["c0"].dtype == "f8"


@pytest.mark.parametrize("units", [("us", "ns"), ("ns", "s"), ("s", "us")])
@pytest.mark.parametrize("kind", ["M8", "m8"])
def test_what_is_missing_among_dates_of_two_units_stays_missing(kind, units):
    frames = [frame(i, 40, [f"{kind}[{unit}]"], "range", "plain") for i, unit in enumerate(units)]
    assert all(df["c0"].isna().any() for df in frames)
    with General():
        want = shuffled(frames, True, "memory")
    equal(shuffled(frames, True, "memory"), want)


@pytest.mark.parametrize(
    ("plain", "other"), [("f8", pa.float64()), ("f4", pa.float64()), ("M8[us]", pa.timestamp("us"))]
)
def test_what_is_missing_is_a_null_to_arrow_dtypes(plain, other):
    """Whether the meta has such a dtype, or another input."""
    frames = [frame(i, 40, [plain], "range", "plain") for i in range(2)]
    arrow = pd.ArrowDtype(other)
    chunk = ReceivedChunk(
        [
            s
            for i, df in enumerate(frames)
            for _, s in split(df, "p", True, i, OutputLayout(dict.fromkeys(range(12), "a")))
        ]
    )
    got = Assembler(frames[0].iloc[:0].drop(columns="p").astype({"c0": arrow}))(chunk.get(3))
    rows = pd.concat(frames)
    assert got["c0"].dtype == arrow
    assert got["c0"].isna().tolist() == rows["c0"][rows["p"] == 3].isna().tolist()
    mixed_frames = [frames[0].astype({"c0": arrow}), frames[1]]
    with General():
        want = shuffled(mixed_frames, True, "memory")
    equal(shuffled(mixed_frames, True, "memory"), want)


@needs_pandas_3
def test_plain_frames_are_made_without_arrow():
    """Doubles above all: to numpy, None equals their dtype."""

    def refuse(*_):
        raise AssertionError("the general way was taken")

    frames = [frame(i, 40, ["i8", "f8", "bool", "f4", "M8[us]", "full", "str"], "range", "plain") for i in range(3)]
    want = shuffled(frames, True, "memory")
    before, assembling.general = assembling.general, refuse
    try:
        for travel in ("memory", "wire"):
            equal(shuffled(frames, True, travel), want)
    finally:
        assembling.general = before


@needs_pandas_3
def test_columns_apart_are_those_of_the_table_or_not_used():
    df = frame(0, 40, ["i8", "full"], "range", "plain").assign(p=0)
    ((_, shard),) = split(df, "p", True, 0, OutputLayout({0: "a"}))
    assert shard.apart is not None
    assert shard.arrays is shard.apart[1]
    other = dataclasses.replace(shard, table=shard.table.slice(0, 5))
    assert [len(array) for array in other.arrays] == [5] * 3
    assert [len(values) for values in ReceivedChunk([other])._rows[0].views[:1]] == [5]
    assert ReceivedChunk([shard])._rows[0].views[0].tolist() == df["c0"].tolist()
    pieces = pa.concat_tables([shard.table, shard.table])
    assert dataclasses.replace(shard, table=pieces).arrays is None


@needs_pandas_3
@pytest.mark.parametrize("public", [False, True])
def test_columns_of_a_frame(monkeypatch, public):
    df = mixed(0).assign(extra=1.5)
    if public:  # should pandas drop the quick way
        monkeypatch.delattr(pd.DataFrame, "_get_column_array")
    found = list(seam.columns_of(df))
    assert len(found) == df.shape[1]
    for values, name in zip(found, df, strict=True):
        want = df[name]
        pd.testing.assert_series_equal(pd.Series(values, want.index, want.dtype, name), want)
    assert gather.plan(df[["k", "f8", "ns", "td", "text"]], None, {}) is not None


@needs_pandas_3
def test_views_of_text_are_let_go():
    df = frame(0, 40, ["full", "full"], "range", "plain")
    plan = gather.plan(df, "p", {})
    assert plan is not None
    gather.gather(plan, np.arange(10))
    assert [column._parts for column in plan.columns if isinstance(column, gather.Text)] == [None, None]


def test_what_is_remembered_of_many_schemas_is_right():
    schemas = [pa.schema([(f"c{i}", pa.int64() if i % 2 else pa.large_string())]) for i in range(600)]
    for i, schema in enumerate(schemas):
        assert known_schema(schema).schema == schema
        assert known_schema(schema) is known_schema(schema)
        assert arrow_buffers.layouts_of(schema) == ((schema.field(0).type, (64, 0) if i % 2 else (0, 8)),)
