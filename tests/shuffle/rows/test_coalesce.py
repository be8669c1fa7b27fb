"""Merged shards against the same shards one by one: same frames, in memory and through a tier."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from dask_gpurt.errors import CorruptData
from dask_gpurt.shuffle.rows import coalesce
from dask_gpurt.shuffle.rows.assemble import Assembler
from dask_gpurt.shuffle.rows.partition import OutputLayout, Shard, split
from dask_gpurt.shuffle.rows.received_chunk import ReceivedChunk
from tests.shuffle.helpers import mixed, same

SIMPLE = ["k", "i8", "u2", "f4", "b", "text", "text2", "ns", "td"]
HARD = ["f8", "obj", "bytes", "I8", "F8", "B", "ns", "us", "tz", "date", "dec", "list", "arrow", "period", "interval"]
LAYOUT = OutputLayout(dict.fromkeys(range(50), "a"))


def frame(i: int, columns: list[str] = SIMPLE, n: int = 60) -> pd.DataFrame:
    df = mixed(i, n)[columns].copy()
    if columns is SIMPLE:
        df["ns"] = df["ns"].fillna(pd.Timestamp("2021-01-01"))
    return df.assign(p=np.random.default_rng(i).integers(0, 50, n))


def shard(df: pd.DataFrame, i: int) -> Shard:
    ((_, out),) = split(df, "p", True, i, LAYOUT)
    return out


def outputs(chunks: list[ReceivedChunk], meta: pd.DataFrame, spilled: bool) -> dict[int, pd.DataFrame]:
    assembler = Assembler(meta)
    return {
        part: assembler(
            [
                piece
                for c in chunks
                if part in c.parts
                for piece in (c.shell().decode([bytes(f) for f in c.encode(part)]) if spilled else c.get(part))
            ]
        )
        for part in range(50)
    }


@pytest.mark.parametrize("spilled", [False, True])
@pytest.mark.parametrize("columns", [SIMPLE, ["k"], ["k", "text"], HARD, *([name] for name in HARD)])
def test_same_rows_in_the_same_order(columns, spilled):
    frames = [frame(i, columns) for i in range(12)]
    shards = [shard(df, i) for i, df in enumerate(frames)]
    meta = frames[0].iloc[:0].drop(columns="p")
    want = outputs([ReceivedChunk([s]) for s in shards], meta, False)
    # Inputs of the two merged ones interleave, two come as they are, as from senders with larger partitions.
    merged = [coalesce.merged(shards[i:10:2]) for i in (0, 1)]
    assert [len(m) for m in merged] == [1, 1]
    assert [m[0].input_id for m in merged] == [0, 1]
    chunks = [ReceivedChunk(m) for m in [*merged, shards[10:]]]
    got = outputs(chunks, meta, spilled)
    assert sum(map(len, got.values())) == 720
    for part in want:
        same(got[part], want[part])
        assert type(got[part].index) is type(want[part].index)


def test_merged_shards_hold():
    ((m),) = coalesce.merged([shard(frame(i), i) for i in (5, 3)])
    m.table.validate(full=True)
    assert m.inputs is not None
    assert int(m.lengths.sum()) == m.table.num_rows == len(m.inputs) == 120
    assert (np.diff(m.parts.astype(int)) > 0).all()
    for low, high in np.lib.stride_tricks.sliding_window_view([0, *np.cumsum(m.lengths.astype(int))], 2):
        assert (np.diff(m.inputs[low:high]) >= 0).all()
    assert not coalesce.worth(m)


def test_nulls_in_some_inputs_only():
    """Those without are merged apart from those with; outputs do not tell."""
    frames = [frame(i, ["k", "f8"]) for i in range(8)]
    for df in frames[::2]:
        df["f8"] = df["f8"].astype("Float64")
    for df in frames[:4:2]:
        df["f8"] = df["f8"].fillna(1.0)
    shards = [shard(df, i) for i, df in enumerate(frames)]
    meta = frames[0].iloc[:0].drop(columns="p")
    merged = coalesce.merged(shards)
    assert [s.input_id for s in merged] == [0, 1, 4]
    want = outputs([ReceivedChunk([s]) for s in shards], meta, False)
    got = outputs([ReceivedChunk(merged)], meta, False)
    for part in want:
        same(got[part], want[part])


def test_other_schemas_and_dictionaries_stay_apart():
    plain, other = [shard(frame(i), i) for i in (0, 1)], [shard(frame(i, ["k", "f4"]), i) for i in (2, 3)]
    hard = [shard(frame(i, ["k", "cat", "dec"]), i) for i in (4, 5)]
    out = coalesce.merged([*hard, *plain, *other])
    assert sorted((s.input_id, s.inputs is not None) for s in out) == [(0, True), (2, True), (4, False), (5, False)]
    alone = coalesce.merged(plain[:1])
    assert alone[0] is plain[0]


def test_worth_it_when_outputs_have_few_rows():
    assert coalesce.worth(shard(frame(0), 0))
    assert not coalesce.worth(shard(frame(0, ["k"], 50 * coalesce.FEW_ROWS), 0))


def test_decode_refuses_other_input_ids():
    c = ReceivedChunk(coalesce.merged([shard(frame(i), i) for i in (0, 1)]))
    frames = [bytes(f) for f in c.encode(c.parts[0])]
    for damaged in (frames[:-1], [*frames[:-1], frames[-1] + bytes(8)], [*frames[:-1], frames[-1][:-1]]):
        with pytest.raises(CorruptData):
            c.shell().decode(damaged)
