"""What can go wrong with a disk, at every call: no key is lost that can be had, no wrong value, no stray file."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import random
import resource
import shutil
import stat
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from distributed.core import error_message
from distributed.protocol.pickle import loads
from distributed.utils import DequeHandler

from dask_gpurt.config import Settings
from dask_gpurt.errors import LostData, TierFull
from dask_gpurt.model import compression
from dask_gpurt.tiers.engine.rests import FULL_SECONDS
from dask_gpurt.tiers.storage.codec import PickleCodec
from dask_gpurt.tiers.storage.disk.quota import filesystem_of
from dask_gpurt.tiers.storage.disk.tier import DiskTier
from tests.tiers.conftest import FaultyOs, Rig, enospc

if TYPE_CHECKING:
    from dask_gpurt.tiers.storage.disk.handle import DiskHandle

RunRig = Callable[..., None]

#: a file per value, through the page cache or past it; or segments. What is not named is as by default.
LAYOUTS: dict[str, dict[str, Any]] = {
    "direct": {"small_bytes": 0},
    "cached": {"small_bytes": 0, "direct_io": "off"},
    "segments": {},
    "lz4": {"small_bytes": 0, "codec": "lz4"},
}
if "lz4" not in compression.installed():
    del LAYOUTS["lz4"]
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def value(i: int, n: int = 20_000) -> np.ndarray[Any, Any]:
    return np.random.default_rng(i).integers(0, 255, n, dtype="u1")


async def all_right(rig: Rig, n: int) -> None:
    rig.engine.shrink(0)
    for i in range(n):
        rig.store.release(await asyncio.wait_for(rig.store.ensure([i]), 30))
        np.testing.assert_array_equal(rig.store[i], value(i))
    await rig.settle()
    rig.validate()


@pytest.mark.parametrize(
    ("layout", "call"),
    [("direct", call) for call in ("open", "pwritev", "close", "rename", "statvfs")]
    + [("cached", call) for call in ("open", "pwritev", "fdatasync", "close", "rename")]
    + [("segments", call) for call in ("open", "pwritev", "statvfs")],
)
@pytest.mark.parametrize("nth", [0, 1, 3])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.EDQUOT])
def test_any_call_of_a_write_fails_once(
    run_rig: RunRig, monkeypatch: pytest.MonkeyPatch, layout: str, call: str, nth: int, code: int
) -> None:
    monkeypatch.setattr("dask_gpurt.tiers.storage.disk.tier._SYNCED", 1)
    if (layout, call) == ("segments", "open") and nth:
        nth = 0  # few are opened
    system = FaultyOs()

    async def test(rig: Rig) -> None:
        system.calls.clear()  # making the folder used some
        system.plan[call, nth] = OSError(code, os.strerror(code))
        for i in range(6):
            rig.store[i] = value(i)
        rig.spill_all()
        await rig.settle()
        assert sum(rig.engine.counters.write_errors.values()) == 1
        assert len(rig.store.slow) == 5, "the other keys went"
        await all_right(rig, 6)

    run_rig(test, os_layer=system, reserve_bytes=1, **LAYOUTS[layout])


@every_layout
def test_short_and_interrupted_writes_and_reads(run_rig: RunRig, layout: str) -> None:
    system = FaultyOs()
    rng = random.Random(0)

    def short(real: Any, fd: int, buffers: list[memoryview], *args: Any) -> int:
        first = buffers[0]
        return int(real(fd, [first[: rng.randint(1, max(1, len(first)))]], *args))

    system.always["pwritev"] = system.always["preadv"] = short

    async def test(rig: Rig) -> None:
        for i in range(4):
            rig.store[i] = value(i)
        rig.spill_all()
        await rig.settle()
        assert len(rig.store.slow) == 4
        await all_right(rig, 4)
        assert system.calls["pwritev"] > 12

    run_rig(test, os_layer=system, **LAYOUTS[layout])


@every_layout
def test_more_buffers_than_one_call_takes(run_rig: RunRig, layout: str) -> None:
    async def test(rig: Rig) -> None:
        rig.store["many"] = [np.full(3, i) for i in range(5000)]
        rig.spill_all()
        await rig.settle()
        assert list(rig.store.slow) == ["many"]
        rig.engine.shrink(0)
        got = rig.store["many"]
        assert all((a == i).all() and len(a) == 3 for i, a in enumerate(got))

    run_rig(test, **LAYOUTS[layout])


@every_layout
def test_disk_that_stays_full_is_left_in_peace(run_rig: RunRig, layout: str) -> None:
    """Stock tries again every 100 ms and leaves a partial file each time."""
    system = FaultyOs()
    system.always["pwritev"] = lambda *a: (_ for _ in ()).throw(enospc())

    async def test(rig: Rig) -> None:
        for i in range(50):
            rig.store[i] = value(i)
            with await asyncio.wait_for(rig.engine.admit(0), 30):
                pass
        for _ in range(20):
            rig.spill_all()
            await rig.settle()
        assert system.calls["pwritev"] <= 5
        assert rig.engine.eviction.timer is not None
        assert len(rig.store.slow) == 0
        assert rig.disk.files() == []
        assert rig.disk.used_bytes == 0
        rig.validate()
        # Space is free again.
        system.always.clear()
        rig.now += 1000
        rig.engine.eviction.on_timer()
        for _ in range(10):
            await rig.settle()
        assert len(rig.store.slow) >= 40
        await all_right(rig, 50)

    run_rig(test, budget=60_000, os_layer=system, **LAYOUTS[layout])


def test_file_size_limit_of_the_system(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        rig.store[0] = value(0, 300_000)
        rig.store[1] = value(1)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            rig.spill_all()
            await rig.settle()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert list(rig.store.slow) == [1]
        assert rig.engine.counters.write_errors == {"EFBIG": 1}
        assert len(rig.disk.files()) == 1
        rig.validate()
        np.testing.assert_array_equal(rig.store[0], value(0, 300_000))

    run_rig(test)


def test_quota(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        assert rig.disk.limit_bytes == 50_000
        for i in range(10):
            rig.store[i] = value(i)
            rig.spill_all()
            await rig.settle()
        assert rig.disk.used_bytes <= 50_000
        assert len(rig.store.slow) == 2
        assert rig.engine.counters.write_errors["EDQUOT"] >= 1
        await all_right(rig, 10)

    run_rig(test, limit_bytes=50_000)


def test_quota_counts_what_is_deleted(tmp_path: Any) -> None:
    disk = DiskTier(str(tmp_path / "t"), limit_bytes=30_000)
    for _ in range(5):
        handle = disk.write([(0, [value(1)])])
        with pytest.raises(TierFull, match=r"30000.*gpurt\.tiers\.disk-limit"):
            disk.write([(0, [value(1)])])
        disk.free(handle)
    assert disk.used_bytes == 0
    disk.probe()
    disk.close()


async def fill(rig: Rig, n: int) -> None:
    """Values of 20 kB, until a disk that takes two of them is full and rests for as long as it ever does."""
    for i in range(n):
        rig.store[i] = value(i)
    for _ in range(20):
        rig.spill_all()
        await rig.settle()
        rig.now = max(rig.now, rig.engine.eviction.rests.tier_until)
    rig.spill_all()
    await rig.settle()
    assert len(set(rig.store.slow) - {"tiny"}) == 2
    assert rig.engine.eviction.rests.tier_until > rig.now


def test_a_full_disk_rests_until_a_copy_is_deleted(run_rig: RunRig) -> None:
    """It was left alone for up to a minute, while all that asked for room was let in."""

    async def test(rig: Rig) -> None:
        await fill(rig, 10)
        gone = list(rig.store.slow)
        for i in gone:
            del rig.store[i]
        await rig.settle()
        assert len(rig.store.slow) == 2
        assert not set(gone) & set(rig.store.slow)
        await all_right(rig, 0)

    run_rig(test, limit_bytes=50_000)


def test_a_disk_that_is_full_again_rests_again(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        rig.store["tiny"] = bytes(1000)
        rig.spill_all()
        await rig.settle()
        await fill(rig, 11)
        errors = rig.engine.counters.write_errors["EDQUOT"]
        del rig.store["tiny"]
        for _ in range(20):
            rig.spill_all()
            await rig.settle()
        assert 1 <= rig.engine.counters.write_errors["EDQUOT"] - errors <= 3

    run_rig(test, limit_bytes=50_000, small_bytes=10_000)


def test_a_full_disk_that_others_have_emptied_is_found_soon(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        await fill(rig, 10)
        assert rig.engine.counters.write_errors["EDQUOT"] > 10
        rig.disk.quota.limit_bytes = None
        rig.now += FULL_SECONDS
        rig.engine.eviction.on_timer()
        await rig.settle()
        assert len(rig.store.slow) == 10

    run_rig(test, limit_bytes=50_000)


def half_noise(megabytes: int) -> np.ndarray[Any, Any]:
    """Half of it shrinks to nothing."""
    noise = value(7, megabytes << 20).reshape(-1, 1 << 19)
    noise[::2] = 0
    return noise.ravel()


def read_back(handle: DiskHandle) -> bytes:
    return bytes(handle.load_part(0)[0][0])


needs_lz4 = pytest.mark.skipif("lz4" not in compression.installed(), reason="needs lz4")


@needs_lz4
@pytest.mark.parametrize("codec", ["auto", "lz4"])
@pytest.mark.parametrize("small_bytes", [0, 8 << 20], ids=["file", "segment"])
def test_what_fits_when_compressed_is_taken(tmp_path: Any, codec: str, small_bytes: int) -> None:
    """Room was asked for as many bytes as it has in memory, so ``max-spill`` was full where Dask's is not."""
    disk = DiskTier(str(tmp_path / "t"), limit_bytes=5 << 19, codec=codec, small_bytes=small_bytes)
    data = half_noise(4)
    handle = disk.write([(0, [data])])
    assert read_back(handle) == data.tobytes()
    assert handle.nbytes == disk.used_bytes == disk.quota.used_bytes < 5 << 19
    files = disk.files()
    with pytest.raises(TierFull, match="would pass the limit"):
        disk.write([(0, [data])])
    assert disk.files() == files
    assert disk.quota.used_bytes == handle.nbytes
    disk.free(handle)
    assert disk.quota.used_bytes == disk.used_bytes == disk._in_flight.nbytes == 0
    disk.close()


@needs_lz4
def test_values_are_made_small_once_half_of_the_room_is_used(tmp_path: Any) -> None:
    """Ten of these fit into Dask's ``max-spill``. A fast disk got five of them as they are, and took no more."""
    disk = DiskTier(str(tmp_path / "t"), limit_bytes=2_400_000, codec="auto")
    disk.ways.past.write.add(1 << 40, 1.0)
    values = [np.random.default_rng(i).integers(0, 1000, 50_000, "i8") for i in range(10)]
    handles = [disk.write([(0, [v])]) for v in values]
    assert disk.compressed_frames["none"] == 2
    for handle, data in zip(handles, values, strict=True):
        assert read_back(handle) == data.tobytes()
    disk.close()


@needs_lz4
def test_frames_that_are_not_worth_a_look_are_made_small_where_room_is_short(tmp_path: Any) -> None:
    disk = DiskTier(str(tmp_path / "t"), limit_bytes=40_000, codec="auto")
    handles = [disk.write([(0, [np.full(20_000, i, "u1")])]) for i in range(20)]
    assert [h.nbytes for h in handles[:1]] == [20_000]
    assert disk.used_bytes < 40_000
    assert read_back(handles[-1]) == b"\x13" * 20_000
    disk.close()


@needs_lz4
def test_what_is_far_from_fitting_is_not_begun(tmp_path: Any) -> None:
    system = FaultyOs()
    disk = DiskTier(str(tmp_path / "t"), limit_bytes=500_000, codec="auto", os_layer=system)
    system.always["open"] = OSError(errno.EIO, "it was begun")
    with pytest.raises(TierFull, match="would pass the limit of 500000"):
        disk.write([(0, [half_noise(4)])])
    assert disk.quota.used_bytes == 0
    disk.close()


@needs_lz4
def test_bytes_that_were_written_do_not_count_twice(tmp_path: Any) -> None:
    """The system counts them, and they were counted as on their way until the file was complete."""
    total = 3 << 20

    def space(real: Any, fd: int) -> SimpleNamespace:
        used = sum(os.stat(name, dir_fd=fd).st_size for name in os.listdir(fd))
        return SimpleNamespace(f_frsize=4096, f_bavail=(total - used) // 4096)

    system = FaultyOs()
    system.always["statvfs"] = space
    disk = DiskTier(str(tmp_path / "t"), reserve_bytes=1, codec="auto", os_layer=system)
    free: list[int] = []
    system.always["rename"] = lambda real, *a, **k: free.append(disk.free_bytes()) or real(*a, **k)
    data = half_noise(4)
    handle = disk.write([(0, [data])])
    assert read_back(handle) == data.tobytes()
    assert free[0] >= total - handle.nbytes - 3 * 4096
    disk.close()


@needs_lz4
def test_a_disk_that_turns_out_full_gets_what_fits_when_compressed(tmp_path: Any) -> None:
    """As by a quota of its user's, which nothing tells before. What a named codec made is not written twice."""

    def full(real: Any, fd: int, buffers: list[memoryview], at: int) -> int:
        if at + sum(b.nbytes for b in buffers) > 3 << 20:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return int(real(fd, buffers, at))

    system = FaultyOs()
    for codec in ("auto", "lz4"):
        system.always.clear()
        disk = DiskTier(str(tmp_path / "t"), codec=codec, os_layer=system)
        system.always["pwritev"] = full
        data = half_noise(4)
        handle = disk.write([(0, [data])])
        assert read_back(handle) == data.tobytes()
        opened = system.calls["open"]
        with pytest.raises(TierFull, match="Disk quota exceeded"):
            disk.write([(0, [half_noise(8)])])
        assert system.calls["open"] - opened == (2 if codec == "auto" else 1)
        assert disk.files() == [handle.name]
        assert disk.used_bytes == handle.nbytes
        disk.close()


def test_reserve(tmp_path: Any) -> None:
    disk = DiskTier(str(tmp_path / "t"), reserve_bytes=1 << 60)
    with pytest.raises(TierFull, match=r"gpurt\.tiers\.directory"):
        disk.write([(0, [b"x"])])
    assert disk.files() == []
    disk.close()


@pytest.mark.parametrize("size", [1 << 30, 1 << 40], ids=["a small disk", "one that is nearly full"])
def test_the_usual_reserve_leaves_room(tmp_path: Any, size: int) -> None:
    """Where less than 1 GiB was free nothing was written, and a worker that had filled its memory paused for good."""
    free = 700 << 20
    space = SimpleNamespace(f_frsize=4096, f_blocks=size // 4096, f_bavail=free // 4096)
    small = FaultyOs()
    small.always["statvfs"] = lambda real, fd: space
    usual = DiskTier(str(tmp_path / "usual"), reserve_bytes=Settings.load({}).tiers.disk_reserve, os_layer=small)
    assert usual.free_bytes() == free - free // 10
    usual.write([(0, [value(1, 20 << 20)])])
    space.f_bavail = (2 << 20) // 4096
    with pytest.raises(TierFull, match=r"of which 23\d{5} stay free.*gpurt\.tiers\.disk-reserve"):
        usual.write([(0, [value(1)])])
    space.f_bavail = (20 << 30) // 4096
    assert usual.free_bytes() == (20 << 30) - (1 << 30)
    space.f_bavail = free // 4096
    chosen = DiskTier(str(tmp_path / "chosen"), reserve_bytes=1 << 30, os_layer=small)
    with pytest.raises(TierFull, match="do not fit into"):
        chosen.write([(0, [value(1)])])
    usual.close()
    chosen.close()


@every_layout
def test_folder_removed_under_us(run_rig: RunRig, layout: str) -> None:
    """By a cleaner of temporary files, say. It is made again: else nothing could leave memory any more."""

    async def test(rig: Rig) -> None:
        rig.store[0] = value(0)
        shutil.rmtree(os.path.dirname(rig.disk.directory))  # with the worker's own folder
        rig.spill_all()
        await rig.settle()
        assert len(rig.store.slow) == 1
        assert stat.S_IMODE(os.stat(rig.disk.directory).st_mode) == 0o700
        assert len(rig.disk.files()) == 1
        np.testing.assert_array_equal(rig.store[0], value(0))

    run_rig(test, **LAYOUTS[layout])


@every_layout
def test_two_writers_find_the_folder_removed(tmp_path: Any, layout: str) -> None:
    """The second found the folder that the first had made, and took it for somebody else's."""
    system = FaultyOs()
    disk = DiskTier(str(tmp_path / "t"), os_layer=system, **LAYOUTS[layout])
    shutil.rmtree(disk.directory)
    other: list[DiskHandle] = []

    def first(real: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return real(*args, **kwargs)
        except FileNotFoundError:
            if not other:
                other.append(disk.write([(0, [value(1)])]))
            raise

    system.plan["open", system.calls.get("open", 0)] = first
    handle = disk.write([(0, [value(0)])])
    assert other
    for i, written in enumerate([handle, *other]):
        np.testing.assert_array_equal(np.frombuffer(written.load_part(0)[0][0], "u1"), value(i))
    disk.close()


@every_layout
def test_too_few_descriptors_to_make_the_folder_again(
    tmp_path: Any, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was made, could not be opened, and was then in its own way: no value could leave memory any more."""
    disk = DiskTier(str(tmp_path / "t"), **LAYOUTS[layout])
    shutil.rmtree(disk.directory)
    real = os.open

    def refuses(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if path == disk.directory:
            raise OSError(errno.EMFILE, "x")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuses)
    with pytest.raises(OSError, match="x"):
        disk.write([(0, [value(0)])])
    monkeypatch.undo()
    handle = disk.write([(0, [value(0)])])
    assert disk.files() == [handle.name]
    disk.close()


def test_what_stands_in_place_of_the_folder_is_left_alone(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        rig.store[0] = value(0)
        os.rename(rig.disk.directory, rig.disk.directory + ".old")
        os.mkdir(rig.disk.directory)
        os.rmdir(rig.disk.directory + ".old")
        rig.spill_all()
        await rig.settle()
        assert len(rig.store.slow) == 0
        assert rig.disk.files() == []
        np.testing.assert_array_equal(rig.store[0], value(0))

    run_rig(test)


def test_leftovers_are_purged(tmp_path: Any) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "0").write_text("of a dead process")
    disk = DiskTier(str(tmp_path / "t"))
    assert disk.files() == []
    disk.close()


class Unpicklable:
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("nope")

    def __sizeof__(self) -> int:
        return 100_000


def test_unpicklable_value_stays_and_blocks_nobody(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        bad = Unpicklable()
        rig.store["bad"] = bad
        for i in range(5):
            rig.store[i] = value(i)
        for _ in range(5):
            rig.spill_all()
            await rig.settle()
        assert sorted(rig.store.slow) == [0, 1, 2, 3, 4]
        assert rig.store["bad"] is bad
        assert rig.engine.counters.write_errors == {"unpicklable": 1}, "tried once, not for ever"
        rig.validate()

    run_rig(test)


class _Full:
    """Cannot be pickled for want of memory until it is fed; by what is given, as the memory error is or hidden."""

    fed = True

    def __init__(self, how: str) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        if _Full.fed:
            return _Full, (self.how,)
        try:
            raise MemoryError("hungry")
        except MemoryError as e:
            if self.how == "itself":
                raise
            raise TypeError("cannot be pickled") from (e if self.how == "as the cause" else None)

    def __sizeof__(self) -> int:
        return 100_000


@pytest.mark.parametrize("how", ["itself", "as the cause", "as the context"])
def test_a_value_that_finds_no_memory_to_be_pickled_is_tried_again(
    run_rig: RunRig, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as one that cannot be pickled, and stayed in memory for good."""

    async def test(rig: Rig) -> None:
        rig.store["k"] = _Full(how)
        rig.spill_all()
        await rig.settle()
        assert len(rig.store.slow) == 0
        assert rig.engine.counters.write_errors == {"MemoryError": 1}
        monkeypatch.setattr(_Full, "fed", True)
        rig.now += 2
        rig.spill_all()
        await rig.settle()
        assert list(rig.store.slow) == ["k"]
        rig.validate()

    monkeypatch.setattr(_Full, "fed", False)
    run_rig(test)


@pytest.mark.parametrize("nested", [False, True], ids=["as it is", "in a list"])
def test_too_little_memory_to_pickle_is_said(monkeypatch: pytest.MonkeyPatch, nested: bool) -> None:
    """Dask's families were asked then, which raise something else."""
    monkeypatch.setattr(_Full, "fed", False)
    with pytest.raises(MemoryError, match="hungry"):
        PickleCodec().encode([_Full("itself")] if nested else _Full("itself"))


def test_the_log_does_not_keep_what_cannot_be_written(run_rig: RunRig, monkeypatch: Any) -> None:
    """A worker keeps its last 10,000 records. An exception in one of them has the value in its traceback."""
    log = DequeHandler()

    async def test(rig: Rig) -> None:
        rig.store["bad"] = bad = Unpicklable()
        alive = weakref.ref(bad)
        del bad
        rig.spill_all()
        await rig.settle()
        assert ["cannot be written" in r.getMessage() for r in log.deque] == [True]
        del rig.store["bad"]
        gc.collect()
        assert alive() is None

    monkeypatch.setattr(logging.getLogger("distributed.worker"), "handlers", [log])  # as a worker does
    # pytest keeps records too. No worker keeps those of this logger, which have the value in them.
    monkeypatch.setattr(logging.getLogger("distributed.protocol.pickle"), "disabled", True)
    run_rig(test)


def extent(handle: DiskHandle) -> tuple[int, int]:
    """Bytes of its file that are a value's: from, to."""
    frames = handle.frames
    return frames[0].offset, frames[-1].offset + frames[-1].extent_bytes


def spoil(path: str, how: str, rng: random.Random, start: int, end: int) -> None:
    if how == "gone":
        os.unlink(path)
        return
    if how == "truncated":
        os.truncate(path, rng.randrange(start, end))
        return
    with open(path, "r+b") as f:
        if how == "swapped":
            f.seek(start)
            f.write(b"\1" * (end - start))
            return
        at = rng.randrange(start, end)
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ (1 << rng.randrange(8))]))


@pytest.mark.parametrize("how", ["flipped", "truncated", "gone", "swapped"])
@pytest.mark.parametrize("sync", [False, True])
@every_layout
def test_a_spoilt_file_is_never_a_value(run_rig: RunRig, how: str, sync: bool, layout: str) -> None:
    rng = random.Random(1)

    async def test(rig: Rig) -> None:
        for round_ in range(40 if how in ("flipped", "truncated") else 2):
            rig.lost.clear()
            rig.store["k"] = value(round_, 3000)
            rig.store["other"] = value(-1 if round_ < 0 else 1000 + round_, 3000)
            rig.spill_all()
            await rig.settle()
            handle = rig.store.entry("k").handle
            spoil(os.path.join(rig.disk.directory, handle.name), how, rng, *extent(handle))
            # In the same segment: what is behind a cut is gone with it.
            both = how in ("gone", "truncated") and handle.name == rig.store.entry("other").handle.name
            if sync:
                with pytest.raises(LostData, match="could not be read"):
                    rig.store["k"]
            else:
                rig.store.release(await asyncio.wait_for(rig.store.ensure(["k", "other"]), 30))
            assert rig.store.is_lost("k")
            with pytest.raises(KeyError, match="k"):
                rig.store["k"]
            await asyncio.sleep(0)
            if not both:
                assert rig.lost == ["k"], "its owner is told, once"
                np.testing.assert_array_equal(rig.store["other"], value(1000 + round_, 3000))
            assert "k" in rig.store, "until the owner gives it up"
            rig.store.clear()
            await rig.settle()
            rig.engine.validate()
            assert rig.disk.files() == []
            assert rig.disk.used_bytes == 0
        assert rig.engine.counters.lost >= round_ + 1

    run_rig(test, **LAYOUTS[layout])


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.ENOMEM])
@every_layout
def test_a_read_that_fails_once_is_tried_again(run_rig: RunRig, code: int, layout: str) -> None:
    system = FaultyOs()

    async def test(rig: Rig) -> None:
        rig.store[0] = value(0)
        rig.spill_all()
        await rig.settle()
        system.plan["preadv", system.calls.get("preadv", 0)] = OSError(code, "x")
        await all_right(rig, 1)
        assert rig.engine.counters.lost == 0
        assert rig.engine.counters.sync_reads == 0

    run_rig(test, os_layer=system, **LAYOUTS[layout])


@every_layout
def test_too_few_descriptors_to_read_are_not_a_loss(run_rig: RunRig, layout: str) -> None:
    """Scattered data cannot be computed again. Stock's reader gets the error, and the next one the value."""
    system = FaultyOs()

    async def test(rig: Rig) -> None:
        rig.store[0] = value(0)
        rig.spill_all()
        await rig.settle()
        for i in range(20):
            system.plan["preadv", system.calls.get("preadv", 0) + i] = OSError(errno.EMFILE, "x")
        for _ in range(2):
            entries = await asyncio.wait_for(rig.store.ensure([0]), 30)
            with pytest.raises(OSError, match="x"):
                rig.store[0]
            rig.store.release(entries)
            assert not rig.store.is_lost(0)
        system.plan.clear()
        await all_right(rig, 1)
        assert rig.engine.counters.lost == 0

    run_rig(test, os_layer=system, **LAYOUTS[layout])


@every_layout
def test_a_bit_that_flips_on_the_bus_once_heals(run_rig: RunRig, layout: str) -> None:
    system = FaultyOs()

    def flip(real: Any, fd: int, buffers: list[memoryview], offset: int) -> int:
        n = int(real(fd, buffers, offset))
        buffers[-1][7] ^= 4
        return n

    async def test(rig: Rig) -> None:
        rig.store[0] = value(0)
        rig.spill_all()
        await rig.settle()
        system.plan["preadv", system.calls.get("preadv", 0)] = flip
        await all_right(rig, 1)
        assert rig.engine.counters.lost == 0

    run_rig(test, os_layer=system, **LAYOUTS[layout])


def test_an_object_whose_own_code_raises_is_not_lost(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        rig.store["k"] = _Grumpy()
        rig.spill_all()
        await rig.settle()
        rig.store.release(await asyncio.wait_for(rig.store.ensure(["k"]), 30))
        assert not rig.store.is_lost("k")
        assert rig.engine.counters.decode_errors == 1
        with pytest.raises(ZeroDivisionError, match="grumpy"):
            rig.store["k"]
        rig.validate()

    run_rig(test)


@pytest.mark.parametrize("thread", [False, True], ids=["on the loop", "in a task's thread"])
def test_what_an_objects_own_code_raises_can_be_sent(run_rig: RunRig, thread: bool) -> None:
    """It referred to an error of ours, and that to it: the client got an `Exception` of its text instead."""

    async def test(rig: Rig) -> None:
        rig.store["k"] = _Grumpy()
        rig.spill_all()
        await rig.settle()
        with pytest.raises(ZeroDivisionError, match="grumpy") as raised:
            await asyncio.to_thread(rig.store.__getitem__, "k") if thread else rig.store["k"]
        sent = error_message(raised.value)["exception"].data
        assert isinstance(loads(sent), ZeroDivisionError)

    run_rig(test)


class _Panic(BaseException):
    """As what an extension in Rust raises when it panics."""


class _Panics:
    def __init__(self, *, writing: bool) -> None:
        self.writing = writing

    def __getstate__(self) -> dict[str, Any]:
        if self.writing:
            raise _Panic("in Rust")
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise _Panic("in Rust")


def test_an_object_that_panics_when_it_is_read_is_not_lost(run_rig: RunRig) -> None:
    """Its reader gets an `Exception`: distributed's worker handles no other, and the task would never end."""

    async def test(rig: Rig) -> None:
        rig.store["k"] = _Panics(writing=False)
        rig.spill_all()
        await rig.settle()
        rig.store.release(await asyncio.wait_for(rig.store.ensure(["k"]), 30))
        assert not rig.store.is_lost("k")
        assert rig.engine.counters.decode_errors == 1
        with pytest.raises(RuntimeError, match="cannot be unpickled: _Panic: in Rust"):
            rig.store["k"]
        rig.validate()

    run_rig(test)


def test_an_object_that_panics_when_it_is_written_is_tried_once(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        rig.store["k"] = bad = _Panics(writing=True)
        for _ in range(3):
            rig.spill_all()
            await rig.settle()
        assert rig.store["k"] is bad
        assert rig.engine.counters.write_errors == {"unpicklable": 1}
        rig.validate()

    run_rig(test)


def test_an_object_whose_own_code_raises_keeps_nothing_in_memory(run_rig: RunRig) -> None:
    """Neither its bytes, nor what the tasks that tried to read it had."""

    async def test(rig: Rig) -> None:
        rig.store["k"] = _GrumpyArray()
        rig.spill_all()
        await rig.settle()
        rig.store.release(await asyncio.wait_for(rig.store.ensure(["k"]), 30))
        await rig.settle()
        gc.collect()
        assert _GrumpyArray.seen() is None
        assert _GrumpyArray.read() is None

        class Input:
            pass

        def task(data: Input) -> None:
            with pytest.raises(ZeroDivisionError, match="grumpy"):
                rig.store["k"]

        data = Input()
        task(data)
        alive = weakref.ref(data)
        del data
        gc.collect()
        assert alive() is None

    run_rig(test, small_bytes=0)


@pytest.mark.parametrize("thread", [False, True], ids=["on the loop", "in a task's thread"])
def test_what_an_objects_own_code_raises_does_not_keep_the_bytes(run_rig: RunRig, thread: bool) -> None:
    """Dask keeps the error of a task, and so all frames in its traceback, and those that called them."""

    async def test(rig: Rig) -> None:
        rig.store["k"] = _GrumpyArray()
        rig.spill_all()
        await rig.settle()
        with pytest.raises(ZeroDivisionError, match="grumpy") as raised:
            await asyncio.to_thread(rig.store.__getitem__, "k") if thread else rig.store["k"]
        gc.collect()
        assert _GrumpyArray.seen() is None
        assert _GrumpyArray.read() is None
        assert raised.value.__traceback__ is not None

    run_rig(test, small_bytes=0)


class _GrumpyArray:
    """An array that is complete when it raises."""

    seen: Any = None
    #: the memory that its bytes were read into
    read: Any = None

    def __init__(self) -> None:
        self.array = np.zeros(10_000)

    def __setstate__(self, state: dict[str, Any]) -> None:
        _GrumpyArray.seen = weakref.ref(state["array"])
        read = state["array"]
        while not isinstance(read, memoryview):
            read = read.base
        _GrumpyArray.read = weakref.ref(read.obj)
        raise ZeroDivisionError("grumpy")


@every_layout
def test_too_little_memory_to_read_is_not_a_loss(run_rig: RunRig, layout: str) -> None:
    """Neither for good: the copy is read as soon as there is memory."""
    system = FaultyOs()

    async def test(rig: Rig) -> None:
        rig.store[0] = value(0)
        rig.spill_all()
        await rig.settle()
        for _ in range(2):
            first = system.calls.get("preadv", 0)
            for i in range(4):  # the first try and all that come after a pause
                system.plan["preadv", first + i] = MemoryError("x")
            rig.store.release(await asyncio.wait_for(rig.store.ensure([0]), 30))
            with pytest.raises(MemoryError):
                rig.store[0]
        assert rig.engine.counters.lost == 0
        await all_right(rig, 1)
        rig.validate()

    run_rig(test, os_layer=system, **LAYOUTS[layout])


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_task_does_not_get_the_error_of_a_read_ahead_of_it(run_rig: RunRig, tasks: int) -> None:
    """It waited for that read, and failed for what had been short when it began."""
    system = FaultyOs()

    async def test(rig: Rig) -> None:
        rig.store[0] = value(0)
        rig.spill_all()
        await rig.settle()
        rig.engine.shrink(0)
        first = system.calls.get("preadv", 0)
        for i in range(4):  # the first try and all that come after a pause
            system.plan["preadv", first + i] = MemoryError("x")
        entry = rig.store.entry(0)
        assert rig.engine.loading.prefetch(entry)
        got = await asyncio.wait_for(asyncio.gather(*(rig.store.ensure([0]) for _ in range(tasks))), 30)
        np.testing.assert_array_equal(rig.store[0], value(0))
        assert entry.load_error is None
        assert rig.engine.counters.cumulative["disk-read", "count"] == 1, "one for all"
        for pinned in got:
            rig.store.release(pinned)
        rig.validate()

    run_rig(test, os_layer=system, small_bytes=0)


def test_an_object_that_finds_no_memory_is_tried_again(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        rig.store["k"] = _Hungry()
        rig.spill_all()
        await rig.settle()
        _Hungry.fed = False
        rig.store.release(await asyncio.wait_for(rig.store.ensure(["k"]), 30))
        with pytest.raises(MemoryError, match="hungry"):
            rig.store["k"]
        _Hungry.fed = True
        release = await asyncio.wait_for(rig.store.ensure(["k"]), 30)
        assert isinstance(rig.store["k"], _Hungry)
        rig.store.release(release)
        rig.validate()

    run_rig(test)


class _Hungry:
    """Cannot be rebuilt for want of memory until it is fed."""

    fed = True

    def __reduce__(self) -> Any:
        return _fed, ()

    def __sizeof__(self) -> int:
        return 10_000


def _fed() -> _Hungry:
    if not _Hungry.fed:
        raise MemoryError("hungry")
    return _Hungry()


def _grump() -> Any:
    raise ZeroDivisionError("grumpy")


class _Grumpy:
    def __reduce__(self) -> Any:
        return _grump, ()

    def __sizeof__(self) -> int:
        return 10_000


def test_filesystem_of(tmp_path: Any) -> None:
    assert filesystem_of(str(tmp_path)) not in ("", "proc")
    assert filesystem_of("/proc/self") == "proc"
