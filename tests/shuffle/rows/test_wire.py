"""Messages: what goes in comes out, and nothing that was changed on the way is accepted."""

from __future__ import annotations

import random
import struct
import tracemalloc

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import xxhash
from distributed.protocol import dumps, loads
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.errors import WireError
from dask_gpurt.shuffle.rows import wire
from dask_gpurt.shuffle.rows.partition import OutputLayout, Shard, split
from dask_gpurt.shuffle.worker.message import Message, as_is
from tests.shuffle.helpers import mixed

TAG = wire.run_tag("abc")


def shards(inputs=(0,), n=200, columns=None) -> list[Shard]:
    out = []
    for i in inputs:
        df = mixed(i, n)
        df = df if columns is None else df[columns]
        out += [
            s for _, s in split(df.assign(p=np.arange(n) % 5), "p", True, i, OutputLayout(dict.fromkeys(range(5), "a")))
        ]
    return out


def message(items, known=()) -> list[bytes]:
    return [bytes(f) for f in wire.pack(TAG, 7, 1, [wire.encode(s) for s in items], set(known))]


def same(a: Shard, b: Shard) -> None:
    assert a.input_id == b.input_id
    assert a.parts.tolist() == b.parts.tolist()
    assert a.lengths.tolist() == b.lengths.tolist()
    assert a.table.schema.equals(b.table.schema, check_metadata=True)
    assert a.table.equals(b.table)
    b.table.validate(full=True)


RAW = ["k", "i8", "f8", "b", "text", "text2", "bytes", "I8", "B", "ns", "tz", "date", "dec"]


@pytest.mark.parametrize("columns", [None, RAW])
@pytest.mark.parametrize("n", [1, 7, 200, 20000])
def test_round_trip(columns, n):
    items = shards((4, 2), n, columns)
    got = wire.unpack(message(items), TAG, 7, {})
    assert list(dict.fromkeys(s.input_id for s in got)) == [4, 2]
    for a, b in zip(items, got, strict=True):
        same(a, b)
    kinds = {wire.encode(s).kind for s in items}
    assert kinds == ({0} if columns else {1})


def test_round_trip_through_the_comm_without_compression_or_pickle():
    items = shards((1, 2), 20000, RAW)
    sent = Message(wire.pack(TAG, 7, 1, [wire.encode(s) for s in items]))
    frames = dumps({"data": as_is(sent)}, context={"compression": "lz4"}, frame_split_size=1000)
    assert len(frames) == len(sent.frames) + 2

    # Out of band: the very bytes, neither copied nor compressed.
    def address(frame):
        return np.frombuffer(frame, "u1").__array_interface__["data"][0]

    assert [address(f) for f in frames[2:]] == [address(f) for f in sent.frames]
    got = loads([bytes(f) for f in frames])["data"]
    for a, b in zip(items, wire.unpack(got.frames, TAG, 7, {}), strict=True):
        same(a, b)


def test_schema_travels_once():
    (a,), (b,) = shards((1,), 50, RAW), shards((2,), 50, RAW)
    first = message([a])
    known = wire.schema_bytes(a.table.schema)[0]
    second = message([b], {known})
    assert len(second[0]) < len(first[0]) - 1000
    schemas = {}
    wire.unpack(first, TAG, 7, schemas)
    same(b, wire.unpack(second, TAG, 7, schemas)[0])
    with pytest.raises(WireError, match="not known"):
        wire.unpack(second, TAG, 7, {})


def test_small_shards_share_one_frame_and_large_neighbours_share_another():
    assert len(message(shards(range(50), 20, RAW))) == 2
    assert len(message(shards((1,), 20000, ["k", "f8"]))) == 2 + 1  # neighbours in memory


def test_payload_is_not_copied_after_the_gather():
    (shard,) = shards((1,), 20000, ["f8"])
    address = shard.table.column("__index_level_0__").chunk(0).buffers()[1].address
    frames = wire.pack(TAG, 7, 1, [wire.encode(shard)])
    starts = {np.frombuffer(f, "u1").__array_interface__["data"][0]: len(f) for f in frames[2:]}
    assert any(start <= address < start + nbytes for start, nbytes in starts.items())


def test_other_run_is_refused():
    frames = message(shards())
    for tag, run in ((TAG, 8), (TAG + 1, 7)):
        with pytest.raises(WireError, match="is of run"):
            wire.unpack(frames, tag, run, {})


def test_no_memory_is_not_taken_for_damage(monkeypatch):
    """Arrow's error of that kind is a `MemoryError` and an `ArrowException`."""

    def full(*args: object) -> None:
        raise pa.ArrowMemoryError("malloc of size 64 failed")

    frames = message(shards((1,), 20000, ["f8"]))
    monkeypatch.setattr(wire, "arrays_of", full)
    with pytest.raises(MemoryError, match="64"):
        wire.unpack(frames, TAG, 7, {})


def mutate(frames: list[bytes], rng: random.Random) -> list[bytes]:
    """One accident: a flipped bit, lost or added bytes, a lost, doubled or swapped frame."""
    frames = [bytearray(f) for f in frames]
    at = rng.randrange(len(frames))
    kind = rng.randrange(6)
    if kind in (0, 1, 2) and frames[at]:
        i = rng.randrange(len(frames[at]))
        if kind == 0:
            frames[at][i] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del frames[at][i:]
        else:
            frames[at][i:i] = bytes(rng.randrange(1, 9))
    elif kind == 3:
        del frames[at]
    elif kind == 4:
        frames.append(frames[at])
    else:
        j = rng.randrange(len(frames))
        frames[at], frames[j] = frames[j], frames[at]
    return [bytes(f) for f in frames]


@pytest.mark.parametrize("columns", [None, RAW])
def test_fuzz_nothing_changed_is_accepted(columns):
    rng = random.Random(5)
    for n in (30, 12000):
        frames = message(shards((1, 2, 3), n, columns))
        tried = 0
        for _ in range(600):
            bad = mutate(frames, rng)
            if bad == frames:
                continue
            tried += 1
            schemas: dict = {}
            with pytest.raises(WireError):
                wire.unpack(bad, TAG, 7, schemas)
            assert schemas == {}
        assert tried > 400


@given(st.lists(st.binary(max_size=300), max_size=4))
@settings(deadline=None)
def test_fuzz_garbage(frames):
    with pytest.raises(WireError):
        wire.unpack(frames, TAG, 7, {})


def test_fuzz_heads_with_a_right_checksum_do_not_allocate_by_their_numbers():
    """Numbers in a head that checks out but lies: refused by comparison with the bytes there, before allocation."""
    rng = random.Random(6)
    frames = message(shards((1,), 50, RAW))
    tracemalloc.start()
    accepted = 0
    for _ in range(3000):
        rest = bytearray(frames[0][wire._PREFIX.size :])
        at = rng.randrange(len(rest) - 8)
        struct.pack_into("<Q", rest, at, rng.choice([2**64 - 1, 2**63, 2**40, 2**32, 0]))
        head = wire._PREFIX.pack(wire.MAGIC, wire.VERSION, 0, len(rest), xxhash.xxh3_64_intdigest(rest)) + rest
        try:
            wire.unpack([head, *frames[1:]], TAG, 7, {})
            accepted += 1  # a number that nothing else depends on: sequence, an input id, an output id
        except WireError:
            pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20
    assert accepted < 1500


def test_version_is_named():
    frames = message(shards())
    frames[0] = frames[0][:4] + struct.pack("<H", 9) + frames[0][6:]
    with pytest.raises(WireError, match=r"version 9.*must be.*version 3"):
        wire.unpack(frames, TAG, 7, {})


def test_charged_by_its_bytes():
    from distributed.sizeof import sizeof

    (shard,) = shards((1,), 20000, ["f8"])
    assert sizeof(wire.encode(shard)) == pytest.approx(2 * 8 * 20000, rel=0.05)


def test_empty_text_columns_travel():
    df = pd.DataFrame({"p": [0, 0], "s": pd.Series([None, None], dtype="str"), "t": ["", ""]})
    ((_, shard),) = split(df, "p", True, 0, OutputLayout({0: "a"}))
    same(shard, wire.unpack(message([shard]), TAG, 7, {})[0])
