"""Packs: cut, sent, divided, stored, spilled and assembled, by one worker's parts and without a cluster."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("rmm")

from dask_gpurt.errors import CorruptData, WireError
from dask_gpurt.model import Chunk
from dask_gpurt.shuffle.protocol.recovery import shard_id
from dask_gpurt.shuffle.rows import packed, wire
from dask_gpurt.shuffle.rows.device_rows import LOCAL_CUTS, DeviceRows
from dask_gpurt.shuffle.rows.packed import PackedChunk, PackedRows, stage
from dask_gpurt.shuffle.rows.partition import OutputLayout, Shard, by_owner, separate
from tests.backends.host_frames import HostFrame, HostFrames
from tests.backends.lazy_memory import LazyMemory, NotReady

OUTPUTS = 6
LAYOUT = OutputLayout({part: "ab"[part % 2] for part in range(OUTPUTS)})


def rows(n: int = 400, seed: int = 0) -> HostFrame:
    rng = np.random.default_rng(seed)
    out = pd.DataFrame(
        {
            "v": np.arange(n) + 1000 * seed,
            "t": pd.Series([None if i % 7 == 0 else "x" * (i % 50) for i in range(n)], dtype="str"),
            "_partitions": rng.integers(0, OUTPUTS, n),
        }
    )
    return HostFrame(out.set_index(pd.Index(rng.integers(0, 9, n), name="i")))


def kind(memory: LazyMemory, cut_bytes: int = 1 << 20) -> DeviceRows:
    return DeviceRows(
        HostFrames(memory),
        meta=rows().iloc[:0],
        column="_partitions",
        drop_column=True,
        cut_bytes=cut_bytes,
        local_address="a",
    )


def numbered(shards: Any) -> list[Shard]:
    """As a splitter gives them ids."""
    return [kind(LazyMemory()).copied(shard, shard.input_id + i) for i, (_, shard) in enumerate(shards)]


def of(data: pd.DataFrame, part: int) -> pd.DataFrame:
    return pd.DataFrame(data[data._partitions == part].drop(columns="_partitions"))


def pieces(shards: list[Shard], part: int) -> list[Any]:
    chunks = [PackedChunk([shard]) for shard in shards if part in shard.parts]
    return [piece for chunk in chunks for piece in chunk.get(part)]


@pytest.mark.parametrize("cut_bytes", [1 << 20, 4000, 1])
def test_every_output_is_its_rows_in_their_order(cut_bytes: int) -> None:
    memory = LazyMemory()
    one = kind(memory, cut_bytes)
    data = [rows(seed=i) for i in range(3)]
    split = [list(one.split(d, shard_id(i, 0, 0), LAYOUT)) for i, d in enumerate(data)]
    for address, shard in itertools.chain(*split):
        cut = cut_bytes * (LOCAL_CUTS if address == "a" else 1)  # what stays here is no message
        assert shard.nbytes <= cut or shard.table.num_rows == 1
    shards = [s for some in split for s in numbered(some)]
    assert all(len(set(shard.parts.tolist())) == len(shard.parts) for shard in shards)
    for part in range(OUTPUTS):
        some = pieces(shards, part)
        np.random.default_rng(0).shuffle(some)
        got = one.assemble(some)
        assert type(got) is HostFrame
        assert not some
        pd.testing.assert_frame_equal(pd.DataFrame(got), pd.concat([of(d, part) for d in data]))
    assert not memory.faults


def test_an_output_without_rows_is_the_meta() -> None:
    one = kind(LazyMemory())
    got = one.assemble([])
    assert type(got) is HostFrame
    pd.testing.assert_frame_equal(pd.DataFrame(got), of(rows(), 0).iloc[:0])
    assert not list(one.split(rows(0), 0, LAYOUT))


def test_what_others_get_has_left_the_device_and_what_stays_has_not() -> None:
    memory = LazyMemory()
    shards = list(kind(memory).split(rows(), 0, LAYOUT))
    assert {address for address, _ in shards} == {"a", "b"}
    for address, shard in shards:
        assert all(pack.on_device is (address == "a") for pack in shard.table.packs)
    memory.drain()
    # RMM rounds each up.
    own = sum(shard.nbytes for address, shard in shards if address == "a")
    n = sum(len(shard.table.packs) for address, shard in shards if address == "a")
    assert own <= memory.allocated_bytes() <= own + 256 * n
    del shards, shard
    memory.drain()
    assert memory.allocated_bytes() == 0


def test_a_split_is_ready_when_it_is_handed_over() -> None:
    """Without its last wait a split is found out."""
    memory = LazyMemory()

    class Hasty(HostFrames):
        def ready(self) -> None:
            if self.memory.allocations < 3 + OUTPUTS:  # the table, its ids, rows in order, a pack for each output
                super().ready()

    one = kind(memory)
    one._frames = Hasty(memory)
    ((_, shard),) = one.split(rows(), 0, OutputLayout(dict.fromkeys(range(OUTPUTS), "a")))
    with pytest.raises(NotReady):
        memory.bytes_of(shard.table.packs[-1]._device.data)


def test_no_pack_leaves_before_it_is_ready() -> None:
    """Device memory is made free in other threads, too, such as that of a task whose allocation fails."""
    memory = LazyMemory()
    me, left = threading.get_ident(), []

    def meanwhile() -> None:
        if threading.get_ident() == me:
            other = threading.Thread(target=lambda: left.append(packed.shelf.leave(1 << 62)))
            other.start()
            other.join()

    packed.shelf.leave(1 << 62)  # of other tests
    memory.meanwhile = meanwhile
    shards = [shard for address, shard in kind(memory).split(rows(), 0, LAYOUT) if address == "a"]
    assert not any(left)
    assert not memory.faults
    memory.meanwhile = lambda: None
    nbytes = sum(shard.nbytes for shard in shards)
    assert packed.shelf.nbytes == nbytes
    assert packed.shelf.leave(1) == shards[-1].table.packs[-1].nbytes  # the newest
    assert packed.shelf.leave(1 << 62) + shards[-1].table.packs[-1].nbytes == nbytes
    assert (packed.shelf.nbytes, packed.shelf.leave(1)) == (0, 0)
    assert not any(pack.on_device for shard in shards for pack in shard.table.packs)
    memory.drain()
    assert memory.allocated_bytes() == 0


def test_the_shelf_keeps_no_pack() -> None:
    packed.shelf.leave(1 << 62)
    memory = LazyMemory()
    shards = list(kind(memory).split(rows(), 0, LAYOUT))
    assert packed.shelf.nbytes > 0
    del shards
    assert packed.shelf.nbytes == 0
    assert not packed.shelf.held()


@pytest.mark.parametrize("flip", [None, 0, 60, -1, -1000])
def test_through_a_message(flip: int | None) -> None:
    one = kind(LazyMemory(), 3000)
    data = rows()
    shards = numbered(one.split(data, shard_id(3, 0, 0), OutputLayout(dict.fromkeys(range(OUTPUTS), "b"))))
    parcels = [parcel for shard in shards for parcel in one.encoder()(shard)]
    frames = [bytearray(frame) for frame in wire.pack(7, 1, 1, parcels)]
    if flip is not None:
        frames[0 if flip >= 0 else 1][flip] ^= 4
        with pytest.raises(WireError):
            wire.unpack(frames, 7, 1, {})
        return
    got = wire.unpack(frames, 7, 1, {})
    assert [s.input_id for s in got] == [s.input_id for s in shards]
    assert [s.parts.tolist() for s in got] == [s.parts.tolist() for s in shards]
    for part in range(OUTPUTS):
        pd.testing.assert_frame_equal(pd.DataFrame(one.assemble(pieces(got, part))), of(data, part))


def large(seed: int = 0) -> HostFrame:
    return rows(60_000, seed)


def to_b(one: DeviceRows, direct: str = "b") -> list[Shard]:
    return numbered(
        one.split(large(), shard_id(3, 0, 0), OutputLayout(dict.fromkeys(range(OUTPUTS), "b")), direct=direct)
    )


@pytest.mark.parametrize("left", ["nothing", "one pack", "all"])
def test_through_a_message_from_device_to_device(left: str) -> None:
    """What memory was short for has left the device by then, and goes by the host."""
    here, there = LazyMemory(), LazyMemory()
    one, other = kind(here), kind(there)
    shards = to_b(one)
    assert all(pack.on_device for shard in shards for pack in shard.table.packs)
    parcels = [parcel for shard in shards for parcel in one.encoder()(shard)]
    stage(
        {"nothing": [], "one pack": shards[0].table.packs[:1], "all": [p for s in shards for p in s.table.packs]}[left]
    )
    frames = wire.pack(7, 1, 1, parcels)
    sent = [hasattr(frame, "__cuda_array_interface__") for frame in frames]
    assert not any(sent[:2])
    assert sum(sent) == {"nothing": OUTPUTS, "one pack": OUTPUTS - len(shards[0].parts), "all": 0}[left]
    came = []
    for frame, on_device in zip(frames, sent, strict=True):
        came.append(there.allocate(frame.nbytes) if on_device else frame)
        if on_device:
            there.write(came[-1], here.bytes_of(frame))
    there.ready()
    got = wire.unpack(came, 7, 1, {}, other.adopt)
    del frames, parcels, shards
    for part in range(OUTPUTS):
        pd.testing.assert_frame_equal(pd.DataFrame(other.assemble(pieces(got, part))), of(large(), part))
    assert not here.faults
    assert not there.faults


def test_what_comes_on_a_device_where_it_must_not_is_refused() -> None:
    memory = LazyMemory()
    one = kind(memory)
    frames = wire.pack(7, 1, 1, [parcel for shard in to_b(one) for parcel in one.encoder()(shard)])
    with pytest.raises(WireError, match="must be in host memory came on a device"):
        wire.unpack(frames, 7, 1, {})
    with pytest.raises(WireError, match="must be in host memory"):
        wire.unpack([frames[0], memory.allocate(frames[1].nbytes), *frames[2:]], 7, 1, {}, one.adopt)
    with pytest.raises(WireError, match="must be all of it"):
        wire.unpack([*frames[:2], memory.allocate(frames[2].nbytes * 2), *frames[3:]], 7, 1, {}, one.adopt)


def test_only_large_packs_for_workers_that_take_them_stay_on_the_device() -> None:
    one = kind(LazyMemory())
    assert not any(pack.on_device for shard in to_b(one, "x") for pack in shard.table.packs)
    small = one.split(rows(), 0, OutputLayout(dict.fromkeys(range(OUTPUTS), "b")), direct="b")
    assert not any(pack.on_device for _, shard in small for pack in shard.table.packs)


def test_heads_that_do_not_fit_are_refused() -> None:
    import pyarrow as pa

    (_, shard), *_ = kind(LazyMemory()).split(rows(), 0, LAYOUT)
    heads, *bodies = packed.to_buffers(shard.table)
    lengths = shard.lengths
    assert packed.from_buffers(lengths, [heads, *bodies]).num_rows == shard.table.num_rows
    for bad in ([heads], [None, *bodies], [heads.slice(0, 2), *bodies], [heads.slice(0, heads.size - 1), *bodies]):
        with pytest.raises(ValueError):
            packed.from_buffers(lengths, bad)
    with pytest.raises(ValueError, match="3 bytes too many"):
        packed.from_buffers(lengths, [pa.py_buffer(heads.to_pybytes() + b"abc"), *bodies])


def test_divided_by_outputs_without_the_device() -> None:
    memory = LazyMemory()
    one = kind(memory)
    data = rows()
    shards = numbered(one.split(data, 0, OutputLayout(dict.fromkeys(range(OUTPUTS), "b"))))
    memory.drain()
    before = memory.allocations
    (shard,) = shards
    mine, rest = separate(shard, {1, 4})
    assert [s.parts.tolist() for s in mine] == [[1], [4]]
    assert sum(s.table.num_rows for s in [*mine, *rest]) == len(data)
    owners = list(by_owner(shard, lambda part: part // 3))
    assert [(owner, s.parts.tolist()) for owner, s in owners] == [(0, [0, 1, 2]), (1, [3, 4, 5])]
    assert all(s.nbytes == sum(p.nbytes for p in s.table.packs) for _, s in owners)
    assert memory.allocations == before
    for part in (1, 4):
        pd.testing.assert_frame_equal(pd.DataFrame(one.assemble(pieces(mine, part))), of(data, part))
    with pytest.raises(ValueError):
        shard.table.slice(1, 2)


def test_a_chunk_is_written_and_read_by_output() -> None:
    memory = LazyMemory()
    one = kind(memory, 3000)
    data = rows()
    shards = numbered(one.split(data, shard_id(2, 0, 0), LAYOUT))
    chunk = one.chunk(shards, None)
    assert isinstance(chunk, Chunk)
    assert chunk.chunk_id == (shard_id(2, 0, 0), int(shards[0].parts[0]))
    assert chunk.nbytes == sum(shard.nbytes for shard in shards)
    assert sorted(chunk.parts) == list(range(OUTPUTS))
    with pytest.raises(KeyError):
        chunk.get(99)
    frames = {part: [bytes(frame) for frame in chunk.encode(part)] for part in chunk.parts}
    memory.drain()
    assert memory.allocated_bytes() == 0  # written rows leave the device, though the chunk lives on
    for part, some in frames.items():
        shell = chunk.shell()
        assert not shell.nbytes
        got = shell.decode(some)
        assert [i for i, _ in got] == [i for i, _ in chunk.get(part)]
        pd.testing.assert_frame_equal(pd.DataFrame(one.assemble(got)), of(data, part))
        for bad in ([], some[:-1], [some[0][:-1], *some[1:]], [*some[:-1], some[-1][:-1]]):
            with pytest.raises(CorruptData):
                chunk.shell().decode(bad)


def test_short_of_device_memory_packs_are_staged_and_the_step_is_tried_again() -> None:
    memory = LazyMemory()
    one = kind(memory)
    first = list(one.split(rows(seed=1), 0, LAYOUT))
    own = [shard for address, shard in first if address == "a"]
    failed = memory.allocations + 3
    memory.fail = lambda number: number == failed
    second = list(one.split(rows(seed=2), 1 << 32, LAYOUT))
    assert not any(pack.on_device for shard in own for pack in shard.table.packs)
    assert any(pack.on_device for _, shard in second for pack in shard.table.packs)
    failed = memory.allocations + 2
    shards = [shard for _, shard in (*first, *second)]
    got = one.assemble(pieces(shards, 0))
    pd.testing.assert_frame_equal(pd.DataFrame(got), pd.concat([of(rows(seed=i), 0) for i in (1, 2)]))
    assert not memory.faults


def test_without_packs_to_stage_a_task_gets_its_error() -> None:
    memory = LazyMemory()
    one = kind(memory)
    for pack in packed.shelf.held():  # of other tests
        stage([pack])
    memory.fail = lambda number: True
    with pytest.raises(MemoryError):
        one.split(rows(), 0, LAYOUT)
    memory.fail = lambda number: False
    assert one.split(rows(), 0, LAYOUT)


def test_rows_have_of_a_table_what_is_used() -> None:
    table = PackedRows(())
    assert (table.num_rows, table.nbytes, table.inputs) == (0, 0, None)
    assert table.table() is table


def test_a_row_is_copied_no_more_often_than_it_has_to_be() -> None:
    """To the device, in order, into its pack, to the host, back, and into its output."""
    memory = LazyMemory()
    one = kind(memory)
    data = rows(20_000)
    table, ids = HostFrames(memory).apart(data, "_partitions", data.drop(columns="_partitions").iloc[:0])
    memory.ready()
    nbytes = table.block.nbytes
    before = memory.copied_bytes
    shards = list(one.split(data, 0, OutputLayout(dict.fromkeys(range(OUTPUTS), "b"))))
    for part in range(OUTPUTS):
        one.assemble(pieces([shard for _, shard in shards], part))
    copied = memory.copied_bytes - before - ids.block.nbytes
    assert 5.5 * nbytes < copied < 6.2 * nbytes


def test_a_partition_of_another_library_is_refused() -> None:
    from dask_gpurt.shuffle.counters import ShuffleCounters
    from dask_gpurt.shuffle.worker.join_filter import JoinRows
    from dask_gpurt.shuffle.worker.owners import Owners
    from dask_gpurt.shuffle.worker.splitter import Splitter
    from tests.shuffle.worker.test_parts import Host, log

    splitter = Splitter(
        Host(),
        owners=Owners("a", {0: "a"}, None),
        log=log(),
        column="_partitions",
        rows=kind(LazyMemory()),
        join=JoinRows(None, None, ShuffleCounters()),
        direct=lambda addresses: (),
        counters=ShuffleCounters(),
    )
    assert len(splitter.split(rows(), 0).own) == 1
    wanted = r"is a pandas\..*DataFrame, its meta is a tests\.backends\.host_frames\.HostFrame\. Remedy"
    with pytest.raises(TypeError, match=wanted):
        splitter.split(pd.DataFrame(rows()), 0)
