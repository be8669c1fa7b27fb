"""The partitioner against pandas: every row goes to its id, in the order it had."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.shuffle.rows.partition import (
    SHARD_BYTES,
    SHARDS,
    OutputLayout,
    Shard,
    _cuts,
    by_owner,
    copied,
    locate,
    separate,
    split,
)
from tests.shuffle.helpers import mixed


def parts_of(shard: Shard) -> dict[int, pd.DataFrame]:
    """Output id to its rows, from a shard's order and lengths."""
    at, out = 0, {}
    for part, length in zip(shard.parts.tolist(), shard.lengths.tolist(), strict=True):
        out[part] = shard.table.slice(at, length).to_pandas()
        at += length
    assert at == shard.table.num_rows
    return out


@st.composite
def cases(draw):
    n_out = draw(st.integers(1, 300))
    n_workers = draw(st.integers(1, 5))
    wanted = draw(st.sets(st.integers(0, n_out - 1), min_size=1))
    seed = draw(st.integers(0, 2**32 - 1))
    workers = np.random.default_rng(seed).integers(0, n_workers, n_out)
    rows = draw(st.integers(0, 200))
    dtype = draw(st.sampled_from(["i8", "u8", "i4", "u2", "u1", "f8", "Int64", "int64[pyarrow]"]))
    ids = np.random.default_rng(seed + 1).integers(0, min(n_out, 255) if dtype == "u1" else n_out, rows)
    return {p: f"w{workers[p]}" for p in sorted(wanted)}, pd.Series(ids).astype(dtype)


@given(cases())
@settings(max_examples=150, deadline=None)
def test_equals_groupby_in_order(case):
    worker_for, ids = case
    df = pd.DataFrame({"p": ids, "v": np.arange(len(ids))}, index=pd.Index(np.arange(len(ids)) * 2, name="idx"))
    got = {}
    for address, shard in split(df, "p", True, 3, OutputLayout(worker_for)):
        assert shard.input_id == 3
        for part, rows in parts_of(shard).items():
            assert worker_for[part] == address
            got[part] = rows
    want = {int(part): rows.drop(columns="p") for part, rows in df.groupby("p") if int(part) in worker_for}
    assert got.keys() == want.keys()
    for part, rows in want.items():
        pd.testing.assert_frame_equal(got[part], rows)


@pytest.mark.parametrize("n", [1, 254, 255, 256, 65535, 65536, 70000])
def test_code_width_never_wraps(n):
    layout = OutputLayout({p: f"w{p % 3}" for p in range(n)})
    ids = np.array([0, n - 1, n // 2, n, n + 5, -1])
    codes = layout.codes(ids)
    assert layout.part_of[codes[:3]].tolist() == [0, n - 1, n // 2]
    assert (codes[3:] == layout.unwanted).all()


@pytest.mark.filterwarnings("ignore:You are merging on int and float")
def test_ids_out_of_range_and_missing_are_dropped_as_by_a_merge():
    df = pd.DataFrame({"p": [1.0, np.nan, 2.5, 0.0, 7.0, -1.0, 1.0], "v": range(7)})
    rows = locate(df, "p", OutputLayout({0: "a", 1: "b"}))
    assert df["v"].to_numpy()[rows.order].tolist() == [3, 0, 6]
    assert rows.offsets.tolist() == [0, 1, 3]


def test_ids_that_do_not_merge_are_refused_as_by_stock():
    with pytest.raises(ValueError, match="merge"):
        locate(pd.DataFrame({"p": ["a", "b"]}), "p", OutputLayout({0: "a"}))


def test_frames_without_wanted_rows_give_nothing():
    df = pd.DataFrame({"p": [5, 5], "v": [1, 2]})
    assert list(split(df, "p", True, 0, OutputLayout({0: "a"}))) == []
    assert list(split(df.iloc[:0], "p", True, 0, OutputLayout({0: "a"}))) == []


@pytest.mark.parametrize("drop", [True, False])
def test_drop_column(drop):
    ((_, shard),) = split(pd.DataFrame({"p": [0, 0], "v": [1, 2]}), "p", drop, 0, OutputLayout({0: "a"}))
    assert ("p" in shard.table.column_names) is not drop


def test_what_stays_does_not_hold_what_goes():
    df = mixed(0, 5000).assign(p=np.arange(5000) % 100)
    shards = dict(split(df, "p", True, 0, OutputLayout({p: "one" if p == 0 else "rest" for p in range(100)})))
    assert shards["one"].table.get_total_buffer_size() * 20 < shards["rest"].table.get_total_buffer_size()


def test_categorical_indices_are_32_bits_and_values_stay():
    df = pd.DataFrame({"p": [0] * 4, "c": pd.Categorical(["a", None, "b", "a"], categories=["b", "a"], ordered=True)})
    ((_, shard),) = split(df, "p", True, 0, OutputLayout({0: "a"}))
    assert shard.table.schema.field("c").type.index_type == pa.int32()
    pd.testing.assert_frame_equal(shard.table.to_pandas(), df[["c"]])


def test_text_in_pieces_is_gathered_whole():
    text = pa.chunked_array([["a", "b"], ["c"], ["d", None]], type=pa.string())
    df = pd.DataFrame({"p": [1, 0, 1, 0, 1], "s": pd.Series(pd.array(text, dtype=pd.ArrowDtype(pa.string())))})
    got = {
        p: r["s"].tolist()
        for _, s in split(df, "p", True, 0, OutputLayout({0: "a", 1: "b"}))
        for p, r in parts_of(s).items()
    }
    assert got[0] == ["b", "d"]
    assert got[1][:2] == ["a", "c"]
    assert pd.isna(got[1][2])


def test_large_shards_are_cut_by_outputs_and_hold_memory_of_their_own():
    n = 200_000
    df = pd.DataFrame({"p": np.arange(n) % 20, "a": np.arange(n), "b": np.arange(n) / 2})
    layout = OutputLayout({p: "one" if p < 10 else "two" for p in range(20)})
    shards = list(split(df, "p", True, 3, layout))
    assert [address for address, _ in shards] == ["one"] * 4 + ["two"] * 4
    assert np.concatenate([s.parts for _, s in shards]).tolist() == list(range(20))
    for _, s in shards:
        assert s.input_id == 3
        assert SHARD_BYTES // 2 < s.table.get_total_buffer_size() < 2 * SHARD_BYTES
        for part, rows in parts_of(s).items():
            pd.testing.assert_frame_equal(rows, df[df["p"] == part][["a", "b"]])


@pytest.mark.parametrize("counts", [[0, 0, 5], [1000, 0, 0], [0, 1000, 1], [1] * 50, [1, 10**6, 1]])
def test_cuts_cover_all_codes_once(counts):
    offsets = np.concatenate([[7], 7 + np.cumsum(counts)])
    for row_bytes in (0.0, 100.0, 1e6):
        cuts = _cuts(offsets, 4, row_bytes, SHARD_BYTES)
        assert cuts[0] == 4
        assert cuts[-1] == 4 + len(counts)
        assert cuts == sorted(set(cuts))
        assert len(cuts) - 1 <= SHARDS


def test_a_wide_frame_is_cut_to_several_shards():
    """Else all of it stays until the last output is made."""
    r = np.random.default_rng(0)
    df = pd.DataFrame({f"c{i}": r.random(5600) for i in range(200)}).assign(p=np.arange(5600) % 8)
    shards = [shard for _, shard in split(df, "p", True, 0, OutputLayout(dict.fromkeys(range(8), "a")))]
    assert len(shards) >= 3
    assert max(shard.nbytes for shard in shards) <= 0.4 * sum(shard.nbytes for shard in shards)


def test_shards_with_a_large_dictionary_are_few():
    """Each of them travels with all of it."""
    n, words = 200_000, [f"a category of some length {i}" for i in range(40_000)]
    codes = np.random.default_rng(0).integers(0, len(words), n)
    df = pd.DataFrame({"p": codes % 16, "c": pd.Categorical.from_codes(codes, words), "x": np.arange(n) * 1.5})
    shards = [shard for _, shard in split(df, "p", True, 0, OutputLayout({p: f"w{p % 2}" for p in range(16)}))]
    (whole,) = (shard for _, shard in split(df.assign(p=0), "p", True, 0, OutputLayout({0: "w"})))
    assert sum(shard.table.num_rows for shard in shards) == n
    assert sum(shard.nbytes for shard in shards) < 2.5 * whole.nbytes


def test_a_shard_whose_outputs_have_one_owner_is_not_divided():
    layout = OutputLayout(dict.fromkeys(range(4), "a"))
    data = pd.DataFrame({"v": range(40), "_partitions": [i % 4 for i in range(40)]})
    ((_, shard),) = split(data, "_partitions", True, 7, layout)
    ((owner, one),) = by_owner(shard, lambda part: "a")
    assert owner == "a"
    assert one is shard
    assert separate(shard, {0, 1, 2, 3}) == ([shard], [])
    assert separate(shard, {9}) == ([], [shard])
    mine, rest = separate(shard, {1, 2})
    assert [one.parts.tolist() for one in mine] == [[1, 2]]
    assert [one.parts.tolist() for one in rest] == [[0], [3]]
    assert mine[0].table.column("v").to_pylist() == [*range(1, 40, 4), *range(2, 40, 4)]


def test_a_copy_of_a_shard_does_not_hold_its_rows():
    """It may stay for as long as its output waits, when what it was made of is retained no more."""
    data = pd.DataFrame({"v": range(40), "_partitions": [i % 4 for i in range(40)]})
    ((_, shard),) = split(data, "_partitions", True, 7, OutputLayout(dict.fromkeys(range(4), "a")))
    ((_, one),) = by_owner(shard, lambda part: "a")
    assert one.apart is not None
    again = copied(one, 9)
    assert again.apart is None
    assert again.table.equals(shard.table)
    assert again.input_id == 9
