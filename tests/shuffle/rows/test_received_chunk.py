"""Chunks: views in memory, exact copies after encode and decode."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from dask_gpurt.errors import CorruptData
from dask_gpurt.model import Chunk
from dask_gpurt.shuffle.rows.assemble import Assembler
from dask_gpurt.shuffle.rows.partition import OutputLayout, split
from dask_gpurt.shuffle.rows.received_chunk import ReceivedChunk
from tests.shuffle.helpers import mixed
from tests.versions import needs_pandas_3


def chunk(inputs=(3, 1), n=100, columns=None) -> ReceivedChunk:
    shards = []
    for i in inputs:
        df = mixed(i, n) if columns is None else mixed(i, n)[columns]
        df = df.assign(p=np.arange(n) % 5 + i)
        shards += [s for _, s in split(df, "p", True, i, OutputLayout(dict.fromkeys(range(20), "a")))]
    return ReceivedChunk(shards)


def test_is_a_chunk_with_the_parts_of_all_its_inputs():
    c = chunk()
    assert isinstance(c, Chunk)
    assert sorted(c.parts) == [1, 2, 3, 4, 5, 6, 7]
    assert c.chunk_id == (1, 1)
    assert [i for i, _ in c.get(4)] == [3, 1]
    assert [i for i, _ in c.get(7)] == [3]
    with pytest.raises(KeyError):
        c.get(9)


def test_rows_may_lie_in_any_order_of_outputs():
    """As they do where the outputs are made in another order than that of their numbers."""
    order = [4, 0, 3, 1, 2]
    df = mixed(0, 100).assign(p=np.arange(100) % 5)
    ((_, shard),) = split(df, "p", True, 7, OutputLayout(dict.fromkeys(order, "a")))
    assert shard.parts.tolist() == order
    c = ReceivedChunk([shard])
    want = ReceivedChunk([s for _, s in split(df, "p", True, 7, OutputLayout(dict.fromkeys(range(5), "a")))])
    meta = df.drop(columns="p").iloc[:0]
    for part in order:
        pd.testing.assert_frame_equal(Assembler(meta)(c.get(part)), Assembler(meta)(want.get(part)))
    with pytest.raises(KeyError):
        c.get(5)


def test_get_is_a_view():
    c = chunk((3,), columns=["k", "f8"])
    (_, a), (_, b) = *c.get(3), *c.get(4)
    a, b = a.table(), b.table()
    assert a["k"].chunk(0).buffers()[1].address == b["k"].chunk(0).buffers()[1].address


@pytest.mark.parametrize("columns", [None, ["k", "f8", "text"]])
def test_encode_decode(columns):
    c = chunk(columns=columns)
    shell = c.shell()
    assert shell.nbytes == 0
    assert list(shell.parts) == []
    for part in c.parts:
        frames = [bytearray(f) for f in c.encode(part)]
        got = shell.decode(frames)
        assert [i for i, _ in got] == [i for i, _ in c.get(part)]
        for (_, a), (_, b) in zip(got, c.get(part), strict=True):
            pd.testing.assert_frame_equal(a.table().to_pandas(), b.table().to_pandas())
            assert a.table().schema.equals(b.table().schema, check_metadata=True)


def test_encode_writes_only_the_rows_of_its_part():
    c = chunk((3,), n=10000, columns=["k", "f8", "text"])
    assert sum(len(f) for f in c.encode(3)) < c.nbytes / 4


@pytest.mark.parametrize(
    "damage", [lambda f: f[:-1], lambda f: [f[0][:-1], *f[1:]], lambda f: [f[0], f[1][:-8], *f[2:]]]
)
def test_decode_refuses_other_frames(damage):
    c = chunk()
    frames = [bytes(f) for f in c.encode(4)]
    with pytest.raises(CorruptData):
        c.shell().decode(damage(frames))


def test_two_schemas_that_differ_in_pandas_notes_only_stay_apart():
    a = pd.DataFrame({"p": [0], "x": pd.Series([1], dtype="int64")})
    b = pd.DataFrame({"p": [0], "x": pd.Series([1], dtype="int64[pyarrow]")})
    shards = [s for i, df in enumerate((a, b)) for _, s in split(df, "p", True, i, OutputLayout({0: "w"}))]
    c = ReceivedChunk(shards)
    got = c.shell().decode([bytes(f) for f in c.encode(0)])
    assert [str(t.table().to_pandas()["x"].dtype) for _, t in got] == ["int64", "int64[pyarrow]"]


@needs_pandas_3
def test_assembled_frames_do_not_hold_received_memory():
    c = chunk((3, 1, 2), n=20000, columns=["k", "f8", "text", "text2", "arrow", "I8"])
    meta = mixed(0, 2)[["k", "f8", "text", "text2", "arrow", "I8"]].iloc[:0]
    frames = [Assembler(meta)(c.get(part)) for part in (3, 4)]
    nbytes = c.nbytes
    before = pa.total_allocated_bytes()
    del c
    # All of it went but the little the frames hold for themselves.
    assert before - pa.total_allocated_bytes() > 0.9 * nbytes
    assert all(len(f) for f in frames)
    assert frames[0]["text"].array._pa_array.num_chunks == 1


def test_assemble_orders_by_input_and_keeps_meta_for_nothing():
    c = chunk((3, 1), columns=["k"])
    meta = mixed(0, 2)[["k"]].iloc[:0]
    df = Assembler(meta)(c.get(4))
    want = pd.concat([mixed(1, 100)[["k"]].iloc[3::5], mixed(3, 100)[["k"]].iloc[1::5]])
    pd.testing.assert_frame_equal(df, want)
    pd.testing.assert_frame_equal(Assembler(meta)([]), meta)


def test_no_memory_is_not_taken_for_damage(monkeypatch):
    """Arrow's error of that kind is a `MemoryError` and an `ArrowException`."""

    def full(*args: object) -> None:
        raise pa.ArrowMemoryError("malloc of size 64 failed")

    c = chunk(columns=["f8"])
    frames = c.encode(4)
    monkeypatch.setattr(pa.ipc, "read_record_batch", full)
    with pytest.raises(MemoryError, match="64"):
        c.shell().decode(frames)
