"""Large shards in pieces: the same rows in the same order, each piece small, nothing encoded that was not before."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from dask_gpurt.shuffle.rows import wire
from dask_gpurt.shuffle.rows.message_cut import ID_STEP, cut
from dask_gpurt.shuffle.rows.partition import OutputLayout, Shard, split
from dask_gpurt.shuffle.rows.received_chunk import ReceivedChunk
from tests.shuffle.helpers import mixed


def shard_of(df: pd.DataFrame, parts: int = 7) -> Shard:
    data = df.assign(_partitions=np.random.default_rng(1).integers(0, parts, len(df)))
    ((_, shard),) = split(data, "_partitions", True, 5 * ID_STEP, OutputLayout(dict.fromkeys(range(parts), "w")))
    return shard


def plain(n: int) -> pd.DataFrame:
    r = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "i": r.integers(0, 9, n),
            "f": np.where(r.random(n) < 0.1, np.nan, r.random(n)),
            "b": r.random(n) < 0.5,
            "s": pd.Series(r.integers(0, 10**6, n).astype("U7"), dtype="str").where(r.random(n) > 0.1),
            "I": pd.Series(r.integers(0, 9, n), dtype="Int64").mask(r.random(n) < 0.1),
        }
    )


@pytest.mark.parametrize("make", [plain, lambda n: mixed(0, n)])
@pytest.mark.parametrize("limit", [1, 5000, 40_000])
def test_the_rows_and_their_outputs_stay(make, limit):
    shard = shard_of(make(3000))
    pieces = cut(shard, limit)
    assert len(pieces) > 1
    assert [p.input_id for p in pieces] == list(range(5 * ID_STEP, 5 * ID_STEP + len(pieces)))
    assert pa.concat_tables([p.table for p in pieces]).equals(shard.table)
    rows = np.concatenate([np.repeat(p.parts, p.lengths.astype(int)) for p in pieces])
    assert rows.tolist() == np.repeat(shard.parts, shard.lengths.astype(int)).tolist()
    for p in pieces:
        assert p.lengths.sum() == p.table.num_rows
        assert (p.lengths > 0).all()
        assert p.table.nbytes <= limit or p.table.num_rows <= 64
        assert p.table.num_rows % 64 == 0 or p is pieces[-1]


def test_pieces_travel_raw_and_come_out_the_same():
    shard = shard_of(plain(3000))
    pieces = cut(shard, 9000)
    parcels = [wire.encode(p) for p in pieces]
    assert {p.kind for p in parcels} == {wire.encode(shard).kind} == {0}
    got = wire.unpack([bytes(f) for f in wire.pack(1, 1, 1, parcels)], 1, 1, {})
    assert pa.concat_tables([s.table for s in got]).equals(shard.table)
    for part in shard.parts.tolist():
        want = ReceivedChunk([shard]).get(part)[0][1].table()
        have = sorted(ReceivedChunk(got).get(part), key=lambda piece: piece[0])
        assert pa.concat_tables([rows.table() for _, rows in have]).combine_chunks().equals(want.combine_chunks())


def test_rows_of_very_different_sizes():
    texts = ["x" * 10] * 1000 + ["y" * 100_000] * 3 + ["z"] * 1000
    pieces = cut(shard_of(pd.DataFrame({"s": pd.Series(texts, dtype="str")}), 1), 20_000)
    assert [t for p in pieces for t in p.table.column(0).to_pylist()] == texts
    assert sum(p.table.nbytes > 20_000 for p in pieces) <= 2


def test_a_column_of_nothing_but_nulls_is_cut():
    shard = shard_of(plain(1000).assign(o=pd.Series([None] * 1000, dtype="object")))
    assert pa.types.is_null(shard.table.schema.field("o").type)
    pieces = cut(shard, 5000)
    assert len(pieces) > 1
    assert pa.concat_tables([p.table for p in pieces]).equals(shard.table)


@pytest.mark.parametrize("words", [100, 1000, 30_000])
def test_dictionaries_travel_once_for_as_many_bytes_of_rows(words):
    """Each cut has them whole, so cuts of a few rows would be many times the shard."""
    codes = np.random.default_rng(0).integers(0, words, 30_000)
    text = pd.Categorical.from_codes(codes, [f"a category of some length {i}" for i in range(words)])
    shard = shard_of(pd.DataFrame({"c": text, "x": np.arange(30_000) * 1.5}), 1)
    pieces = cut(shard, 60_000)
    assert sum(p.nbytes for p in pieces) <= 2.5 * shard.nbytes
    whole = shard.table.slice(0, 0).nbytes
    assert all(p.nbytes <= max(60_000, 2 * whole) for p in pieces)
    assert pa.concat_tables([p.table for p in pieces]).equals(shard.table)


def test_what_fits_is_left_alone():
    shard = shard_of(plain(100))
    assert cut(shard, 1 << 20) == [shard]
    empty = Shard(0, shard.table.slice(0, 0), shard.parts[:0], shard.lengths[:0])
    assert cut(empty, 0) == [empty]
