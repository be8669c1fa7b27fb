"""The files of the disk tier: direct I/O, layout, segments, compression."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

from dask_gpurt.errors import ConfigError, CorruptData, TierFull
from dask_gpurt.model import compression
from dask_gpurt.tiers.engine import io_threads
from dask_gpurt.tiers.engine.entry import Account
from dask_gpurt.tiers.storage.codec import PickleCodec
from dask_gpurt.tiers.storage.disk import segments
from dask_gpurt.tiers.storage.disk.direct_io import BLOCK, CHUNK, BufferPool, aligned_buffer
from dask_gpurt.tiers.storage.disk.frames import LARGE
from dask_gpurt.tiers.storage.disk.quota import FolderClosed, FolderDescriptor
from dask_gpurt.tiers.storage.disk.segments import Record
from dask_gpurt.tiers.storage.disk.tier import DiskTier
from tests.tiers.conftest import FaultyOs, enospc

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dask_gpurt.tiers.storage.disk.handle import DiskHandle

CODEC = PickleCodec()


def need(*codecs: str) -> None:
    for name in codecs:
        if name != "none":
            pytest.importorskip({"lz4": "lz4.block", "zstd": "zstandard"}[name])


def noise(n: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 255, n, dtype="u1")


def frames_of(disk: DiskTier, sizes: list[int], part: int = 0) -> tuple[DiskHandle, list[bytes]]:
    data = [noise(n, i).tobytes() for i, n in enumerate(sizes)]
    return disk.write([(part, data)]), data


def test_a_tier_that_is_closed_touches_no_folder_of_others(tmp_path: Path) -> None:
    """Its descriptor was closed while values were still to be freed; the next folder that was opened got the number."""
    old = DiskTier(str(tmp_path / "old"))
    large, small = old.write([(0, [noise(1 << 20)])]), old.write([(0, [b"x"])])
    old.close()
    new = DiskTier(str(tmp_path / "new"))
    handle = new.write([(0, [noise(1 << 20)])])
    assert new._dir_fd == old._dir_fd  # the case that this is about
    for late in (large, small):
        late.free()
        with pytest.raises(OSError):
            old.read(late)
    with pytest.raises(OSError, match="closed"):
        old.write([(0, [noise(1 << 20, 2)])])
    assert len(new.files()) == 1
    new.read(handle)
    old.close()
    new.close()


def test_a_descriptor_is_closed_by_the_last_who_uses_it(tmp_path: Path) -> None:
    folder = FolderDescriptor(str(tmp_path))
    with folder as fd:
        with folder:
            folder.close()
        os.stat(".", dir_fd=fd)  # still ours
        with pytest.raises(FolderClosed), folder:
            pass
    with pytest.raises(OSError):
        os.stat(".", dir_fd=fd)
    folder.close()


SIZES = [
    [0],
    [1],
    [BLOCK],
    [LARGE - 1, LARGE, LARGE + 1],
    [10, LARGE, 10, LARGE, 10],
    [0, LARGE, 0, 0, 7],
    [CHUNK],
    [CHUNK - 1, 5],
    [CHUNK + 1],
    [100, 2 * CHUNK + 12345, 3, CHUNK, LARGE + 1],
    [7] * 3000,
    [LARGE // 2] * 200,
]


@pytest.mark.parametrize("sizes", SIZES, ids=[str(i) for i in range(len(SIZES))])
@pytest.mark.parametrize("direct_io", ["auto", "off"])
@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_frames_come_back(tmp_path: Path, sizes: list[int], direct_io: str, codec: str) -> None:
    need(codec)
    disk = DiskTier(str(tmp_path / "t"), direct_io=direct_io, codec=codec, small_bytes=0)
    handle, data = frames_of(disk, sizes)
    (name,) = disk.files()
    assert os.path.getsize(tmp_path / "t" / name) == handle.nbytes == disk.used_bytes
    got, _ = handle.load_part(0)
    assert [bytes(g) for g in got] == data
    assert not any(g.readonly for g in got)
    handle.free()
    assert disk.used_bytes == 0
    disk.close()
    disk.close()


def test_written_past_the_cache_and_read_through_it_and_back(tmp_path: Path) -> None:
    disk = DiskTier(str(tmp_path / "t"))
    if not disk.direct:
        pytest.skip("this file system has no O_DIRECT")
    sizes = [5, LARGE + 3, CHUNK + 9]
    for written, read in ((True, False), (False, True)):
        disk.direct = written
        handle, data = frames_of(disk, sizes)
        disk.direct = read
        assert [bytes(b) for b in disk.read(handle)[1]] == data
        handle.free()
    disk.close()


def test_every_byte_of_a_file_is_checked(tmp_path: Path) -> None:
    """The zeros between frames too."""
    disk = DiskTier(str(tmp_path / "t"), small_bytes=0)
    handle, data = frames_of(disk, [100, LARGE + 1, 30, LARGE, 1])
    path = tmp_path / "t" / disk.files()[0]
    rng = random.Random(0)
    size = path.stat().st_size
    places = [0, 99, 100, BLOCK - 1, BLOCK, size - 1, size - BLOCK, *(rng.randrange(size) for _ in range(60))]
    with open(path, "r+b") as f:
        for at in places:
            f.seek(at)
            (byte,) = f.read(1)
            f.seek(at)
            f.write(bytes([byte ^ 1 << rng.randrange(8)]))
            f.flush()
            with pytest.raises(CorruptData):
                disk.read(handle)
            f.seek(at)
            f.write(bytes([byte]))
            f.flush()
    assert [bytes(b) for b in disk.read(handle)[1]] == data
    for length in (size - 1, size - BLOCK, BLOCK, 1, 0):
        os.truncate(path, length)
        with pytest.raises(CorruptData, match="ends before"):
            disk.read(handle)
    disk.close()


def test_a_file_system_that_refuses_direct_io(tmp_path: Path) -> None:
    """Late: the flag is taken, the transfer is not. And early: the probe fails."""
    system = FaultyOs()
    disk = DiskTier(str(tmp_path / "t"), small_bytes=0, os_layer=system)
    if not disk.direct:
        pytest.skip("this file system has no O_DIRECT")
    for call in ("pwritev", "preadv"):
        system.plan[call, system.calls.get(call, 0)] = OSError(errno.EINVAL, "no")
    handle, data = frames_of(disk, [LARGE, CHUNK + 5])
    assert [bytes(b) for b in disk.read(handle)[1]] == data
    disk.close()
    system.always["pwritev"] = OSError(errno.EINVAL, "no")
    assert not DiskTier(str(tmp_path / "t"), os_layer=system).direct
    with pytest.raises(OSError, match=r"O_DIRECT.*gpurt\.tiers\.direct-io"):
        DiskTier(str(tmp_path / "u"), direct_io="on", os_layer=system)
    assert not (tmp_path / "u").exists()


def test_pooled_chunks_are_aligned_and_used_again() -> None:
    pool = BufferPool(keep=1)
    a, b = pool.take(), pool.take()
    assert np.frombuffer(a, "u1").ctypes.data % BLOCK == 0
    pool.give(a)
    pool.give(b)
    assert pool.take() is a
    assert pool.take() is not b
    assert aligned_buffer(10).nbytes == 10


def test_pooled_chunks_go_when_memory_is_short() -> None:
    pool = BufferPool()
    waits, used = pool.take(), pool.take()
    pool.give(waits)
    pool.give_back()
    pool.give(used)
    assert pool.take() is used
    assert pool.take() is not waits


def test_parts_are_read_alone(tmp_path: Path) -> None:
    system = FaultyOs()
    disk = DiskTier(str(tmp_path / "t"), small_bytes=0, direct_io="off", os_layer=system)
    parts = {0: [noise(100), noise(LARGE)], 3: [noise(7, 1)], 9: [b"", noise(CHUNK + 1, 2)]}
    handle = disk.write(list(parts.items()))
    got: list[int] = []
    system.always["preadv"] = lambda real, *a: got.append(n := real(*a)) or n
    frames, _ = handle.load_part(3)
    assert [bytes(f) for f in frames] == [noise(7, 1).tobytes()]
    assert sum(got) <= BLOCK
    for part, data in parts.items():
        assert [bytes(f) for f in handle.load_part(part)[0]] == [bytes(d) for d in data]
    disk.close()


# ---------------------------------------------------------------------------------------------- segments


@pytest.fixture
def small(tmp_path: Path) -> Iterator[DiskTier]:
    disk = DiskTier(str(tmp_path / "t"), segment_bytes=10_000)
    yield disk
    disk.close()


def on_disk(disk: DiskTier) -> int:
    return sum(os.path.getsize(os.path.join(disk.directory, n)) for n in disk.files())


def record(handle: DiskHandle) -> Record:
    assert isinstance(handle.place, Record)
    return handle.place


def test_many_values_in_few_files(small: DiskTier) -> None:
    handles = [small.write([(0, [noise(100, i)])]) for i in range(1000)]
    assert len(small.files()) == 10
    assert small.used_bytes == on_disk(small) == 100_000
    for i, handle in enumerate(handles):
        assert bytes(handle.load_part(0)[0][0]) == noise(100, i).tobytes()
    for handle in handles:
        handle.free()
    assert small.files() == []
    assert small.used_bytes == 0


def test_dead_records_are_reclaimed_and_live_ones_move(small: DiskTier) -> None:
    handles = {i: small.write([(0, [noise(100, i)]), (5, [b"", noise(7, i)])]) for i in range(1000)}
    names = {i: h.name for i, h in handles.items()}
    rng = random.Random(0)
    order = list(handles)
    rng.shuffle(order)
    for n, i in enumerate(order[:970]):
        handles.pop(i).free()
        if n % 100 == 0:
            assert small.used_bytes == on_disk(small)
    live = sum(h.nbytes for h in handles.values())
    assert small.used_bytes == on_disk(small) <= live / segments.LIVE_SHARE + 2 * 10_000
    assert small.compactions > 3
    assert any(h.name != names[i] for i, h in handles.items())
    for i, handle in handles.items():
        assert bytes(handle.load_part(0)[0][0]) == noise(100, i).tobytes()
        assert bytes(handle.load_part(5)[0][1]) == noise(7, i).tobytes()
        handle.free()
        with pytest.raises(FileNotFoundError):
            handle.load_part(0)
    assert small.files() == []
    assert small.used_bytes == 0


def test_a_damaged_record_stops_compaction_only(small: DiskTier) -> None:
    handles = [small.write([(0, [noise(1000, i)])]) for i in range(10)]
    (name,) = small.files()
    bad = record(handles[9]).frames[0].offset
    with open(os.path.join(small.directory, name), "r+b") as f:
        f.seek(bad)
        f.write(bytes([noise(1000, 9)[0] ^ 1]))
    for handle in handles[:8]:
        handle.free()
    assert bytes(handles[8].load_part(0)[0][0]) == noise(1000, 8).tobytes()
    with pytest.raises(CorruptData):
        handles[9].load_part(0)
    for handle in handles[8:]:
        handle.free()
    assert small.files() == []
    assert small.used_bytes == 0


def test_a_record_on_its_way_into_a_segment_that_is_compacted(small: DiskTier) -> None:
    """By another thread. Its place there was moved on, though nothing pointed to it: a segment that never went."""
    old = [small.write([(0, [noise(3000)])]) for _ in range(4)]  # fills a segment
    new = [small.write([(0, [noise(3000)])]) for _ in range(3)]
    write, calls = small._segments.write, iter(("first", "second"))
    second_moves, first_ended = threading.Event(), threading.Event()
    second = threading.Thread(target=new[2].free)

    def waits(parts: Any) -> Record:
        record = write(parts)
        if next(calls) == "first":
            second.start()
            second_moves.wait(1)  # it does not, as long as the first one is at it
        else:
            second_moves.set()
            first_ended.wait(30)
        return record

    small._segments.write = waits  # type: ignore[method-assign]
    for handle in (*old[:2], *new[:2], old[2]):
        handle.free()
    first_ended.set()
    second.join()
    assert small.compactions == 2
    assert bytes(old[3].load_part(0)[0][0]) == noise(3000).tobytes()
    assert small.used_bytes == on_disk(small) == 3000
    old[3].free()
    assert small.files() == []
    assert small.used_bytes == 0


def test_a_record_that_is_freed_while_its_segment_is_compacted(small: DiskTier, monkeypatch: Any) -> None:
    """Another thread frees at the same time. The segment was then never compacted, whatever lived on in it."""
    handles = [small.write([(0, [noise(1000, i)])]) for i in range(10)]
    freed: list[DiskHandle] = []
    read = small._segments.read

    def frees_one_more(place: Record, part: int | None) -> Any:
        if not freed:
            freed.append(next(h for h in handles[7:] if h.place is place))
            freed[0].free()
        return read(place, part)

    monkeypatch.setattr(small._segments, "read", frees_one_more)
    for handle in handles[:7]:
        handle.free()
    assert len(freed) == small.compactions == 1
    assert small.used_bytes == on_disk(small) == 2000
    for i, handle in enumerate(handles[7:], 7):
        if handle not in freed:
            assert bytes(handle.load_part(0)[0][0]) == noise(1000, i).tobytes()
            handle.free()
    assert small.files() == []


def test_a_failed_append_leaves_no_trace(tmp_path: Path) -> None:
    system = FaultyOs()
    disk = DiskTier(str(tmp_path / "t"), os_layer=system)

    def half_then_full(real: Any, fd: int, buffers: list[memoryview], at: int) -> int:
        real(fd, [buffers[0][:50]], at)
        raise enospc()

    kept = disk.write([(0, [noise(100)])])
    for cut_off in (True, False):
        system.plan["pwritev", system.calls["pwritev"]] = half_then_full
        if not cut_off:
            system.plan["ftruncate", system.calls["ftruncate"]] = OSError(errno.EIO, "no")
        with pytest.raises(TierFull, match="stays in memory"):
            disk.write([(0, [noise(100, 1)])])
        assert disk.used_bytes == on_disk(disk) == (100 if cut_off else 150)
        assert bytes(kept.load_part(0)[0][0]) == noise(100).tobytes()
    second = disk.write([(0, [noise(100, 2)])])
    assert len(disk.files()) == 2, "the torn one takes no more"
    kept.free()
    second.free()
    assert disk.files() == []
    assert disk.used_bytes == 0
    disk.close()


@pytest.mark.parametrize("folder", [True, False])
def test_nothing_is_written_to_an_open_segment_that_was_deleted(tmp_path: Path, folder: bool) -> None:
    """By a cleaner of temporary files, say. What is written there could not be read back."""
    disk = DiskTier(str(tmp_path / "t"))
    frames_of(disk, [100])
    if folder:
        shutil.rmtree(disk.directory)
    else:
        os.remove(tmp_path / "t" / disk.files()[0])
    used = disk.used_bytes
    if not folder:
        with pytest.raises(FileNotFoundError):
            frames_of(disk, [100])
        assert disk.used_bytes == used
    handle, data = frames_of(disk, [100])
    assert [bytes(b) for b in disk.read(handle)[1]] == data
    disk.close()


def test_compaction_under_a_full_disk(tmp_path: Path) -> None:
    system = FaultyOs()
    disk = DiskTier(str(tmp_path / "t"), os_layer=system, segment_bytes=10_000)
    handles = [disk.write([(0, [noise(1000, i)])]) for i in range(10)]
    system.always["pwritev"] = enospc()
    for handle in handles[:9]:
        handle.free()
    system.always.clear()
    assert bytes(handles[9].load_part(0)[0][0]) == noise(1000, 9).tobytes()
    handles[9].free()
    assert disk.files() == []
    assert disk.used_bytes == 0
    disk.close()


def test_segments_from_many_threads(small: DiskTier) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        mine: dict[int, DiskHandle] = {}
        try:
            for i in range(400):
                mine[i] = small.write([(0, [noise(200, seed * 1000 + i)])])
                if rng.random() < 0.7:
                    mine.pop(rng.choice(list(mine))).free()
                j = rng.choice(list(mine)) if mine else None
                if j is not None:
                    assert bytes(mine[j].load_part(0)[0][0]) == noise(200, seed * 1000 + j).tobytes()
            for handle in mine.values():
                handle.free()
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    assert small.files() == []
    assert small.used_bytes == 0


# ---------------------------------------------------------------------------------------------- codecs


def test_missing_package_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compression, "_codecs", {})
    monkeypatch.setitem(__import__("sys").modules, "lz4.block", None)
    with pytest.raises(ConfigError, match=r"'lz4'.*install lz4.*auto or none"):
        DiskTier(str(tmp_path / "t"), codec="lz4")
    assert "lz4" not in compression.installed()
    assert compression.Chooser("auto").choose(noise(1 << 20).data, 1e6, 1e6).codec == ""


def test_compressing_is_no_time_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted as that in a write, and not in a read."""
    need("lz4")
    now, compress, system = [0.0], compression.compress, FaultyOs()

    def compresses(name: str, frame: memoryview) -> Iterator[memoryview]:
        for piece in compress(name, frame):
            now[0] += 1.0
            yield piece

    def writes(real: Any, *args: Any) -> Any:
        now[0] += 100.0
        return real(*args)

    for module in (compression, io_threads):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(compression, "compress", compresses)
    disk = DiskTier(str(tmp_path / "t"), codec="lz4", small_bytes=0, os_layer=system)
    before = system.calls.get("pwritev", 0)
    system.always["pwritev"] = writes
    _, cost = io_threads._write(disk, Account("a", CODEC), noise(1 << 20), None)
    assert cost.io_seconds == 100.0 * (system.calls["pwritev"] - before) > 0
    assert cost.codec_seconds == 2.0
    disk.close()


# ---------------------------------------------------------------------------------------------- objects


def test_objects_keep_their_types(tmp_path: Path) -> None:
    need("zstd")
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"s": [f"abc{i}" for i in range(9000)], "n": range(9000)})
    frame = table.to_pandas()
    frame["object"] = pd.Series([(i,) for i in range(9000)], dtype=object)
    frame["category"] = frame["s"].astype("category")
    frame["arrow"] = pd.Series(frame["n"], dtype="int64[pyarrow]")
    for codec in ("none", "zstd"):
        disk = DiskTier(str(tmp_path / codec), codec=codec)
        for value in (frame, frame.iloc[7:20], frame["s"], frame["arrow"]):
            handle = disk.write(CODEC.encode(value))
            got, _ = handle.load(CODEC)
            test = pd.testing.assert_frame_equal if value.ndim == 2 else pd.testing.assert_series_equal
            test(got, value)
        for value in (table, table.slice(100, 50), table.to_batches()[0].slice(3, 9)):
            handle = disk.write(CODEC.encode(value))
            assert handle.nbytes < 2 * value.nbytes + 9000, "a slice is stored, not what it was cut from"
            assert handle.load(CODEC)[0].equals(value)
        disk.close()
