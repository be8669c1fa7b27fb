"""Files stay in the page cache while memory is idle, and only then."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dask_gpurt.tiers.storage.codec import PickleCodec
from dask_gpurt.tiers.storage.disk.idle_memory import IdleMemory, Memory, memories
from dask_gpurt.tiers.storage.disk.io_mode import Ways
from dask_gpurt.tiers.storage.disk.tier import DiskTier

if TYPE_CHECKING:
    from pathlib import Path

GB = 10**9
KIB = 1024


def machine(root: Path, *, total: int, available: int, dirty: int = 0, writeback: int = 0, cgroup: str = "") -> str:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: {total // KIB} kB\nMemFree: 1 kB\nMemAvailable: {available // KIB} kB\nHugePages_Total: 0\n"
        f"Dirty: {dirty // KIB} kB\nWriteback: {writeback // KIB} kB\n"
    )
    (root / "proc/self/cgroup").write_text(cgroup)
    return str(root)


def group(folder: Path, limit: object, used: int, stat: dict[str, int], *, v1: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(f"{limit}\n")
    (folder / ("memory.usage_in_bytes" if v1 else "memory.current")).write_text(f"{used}\n")
    (folder / "memory.stat").write_text("".join(f"{k} {v}\n" for k, v in stat.items()))


def test_machine_without_cgroups(tmp_path: Path) -> None:
    root = machine(tmp_path, total=64 * KIB**3, available=32 * KIB**3, dirty=KIB**3, writeback=KIB**3)
    assert memories(root) == [Memory(64 * KIB**3, 30 * KIB**3, 2 * KIB**3)]


def test_cgroups_v2_up_to_the_root(tmp_path: Path) -> None:
    root = machine(tmp_path, total=64 * KIB**3, available=32 * KIB**3, cgroup="0::/pod/worker\n")
    top = tmp_path / "sys/fs/cgroup"
    stat = {"inactive_file": 300, "file_dirty": 20, "file_writeback": 30, "anon": 1}
    group(top / "pod/worker", "max", 5, stat)
    group(top / "pod", 10_000, 4_000, stat)
    group(top, 10**18, 5, stat)  # more than there is: no limit
    assert memories(root)[1:] == [Memory(10_000, 10_000 - 4_000 + 300 - 50, 50)]


def test_cgroup_v1_of_a_container(tmp_path: Path) -> None:
    lines = "12:cpu,cpuacct:/docker/abc\n9:memory:/docker/abc\n0::/\n"
    root = machine(tmp_path, total=64 * KIB**3, available=32 * KIB**3, cgroup=lines)
    # In the container only its own group is mounted, at the top.
    stat = {"total_inactive_file": 500, "total_dirty": 7, "total_writeback": 3}
    group(tmp_path / "sys/fs/cgroup/memory", 20_000, 8_000, stat, v1=True)
    assert memories(root)[1:] == [Memory(20_000, 20_000 - 8_000 + 500 - 10, 10)]


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert memories(str(tmp_path)) == []
    assert not IdleMemory(list).ample(1)


@pytest.mark.parametrize(
    ("seen", "ample"),
    [
        ([Memory(30 * GB, 12 * GB, 0)], True),
        ([Memory(30 * GB, 10 * GB, 0)], False),  # not a third is left after it
        ([Memory(30 * GB, 12 * GB, 2 * GB)], False),  # the kernel is behind with writing
        ([Memory(30 * GB, 29 * GB, 0), Memory(4 * GB, 1 * GB, 0)], False),  # a small container on a large machine
        ([Memory(30 * GB, 29 * GB, 0), Memory(8 * GB, 7 * GB, 0)], True),
    ],
)
def test_ample(seen: list[Memory], ample: bool) -> None:
    assert IdleMemory(lambda: seen).ample(GB // 10) is ample


def test_looks_again_after_a_while() -> None:
    now, looks = [0.0], [0]

    def look() -> list[Memory]:
        looks[0] += 1
        return [Memory(10, 10 // looks[0], 0)]

    idle = IdleMemory(look, clock=lambda: now[0])
    assert idle.ample(0)
    assert idle.ample(0)
    assert looks == [1]
    for _ in range(4):
        now[0] += 1
        idle.ample(0)
    assert not idle.ample(0)


def test_a_file_is_left_in_the_cache_and_read_from_it(tmp_path: Path) -> None:
    opened: list[int] = []

    class Os:
        def __getattr__(self, name: str) -> object:
            return getattr(os, name)

        def open(self, path: str, flags: int, *args: int, **kwargs: int) -> int:
            opened.append(flags)
            return os.open(path, flags, *args, **kwargs)

    seen = [Memory(GB, GB, 0)]
    idle = IdleMemory(lambda: seen, clock=iter(range(10**6)).__next__)
    disk = DiskTier(str(tmp_path / "t"), idle_memory=idle, os_layer=Os())
    codec = PickleCodec()
    value = np.arange(1_000_000)
    direct = os.O_DIRECT if disk.direct else 0

    opened.clear()
    cached = disk.write(codec.encode(value))
    assert cached.cached
    assert disk.cached_bytes == disk.used_bytes == cached.nbytes
    seen[0] = Memory(GB, GB // 10, 0)
    past = disk.write(codec.encode(value + 1))
    assert not past.cached
    assert disk.cached_bytes == cached.nbytes
    assert [flags & direct for flags in opened] == [0, direct]

    opened.clear()
    assert np.array_equal(cached.load(codec)[0], value)  # memory is short by now, but its pages may still be there
    assert np.array_equal(past.load(codec)[0], value + 1)
    assert [flags & direct for flags in opened] == [0, direct]
    cached.free()
    past.free()
    assert disk.cached_bytes == disk.used_bytes == 0
    assert disk.files() == []
    disk.close()


def test_a_large_value_in_several_pieces_through_the_cache(tmp_path: Path) -> None:
    disk = DiskTier(str(tmp_path / "t"), idle_memory=IdleMemory(lambda: [Memory(GB * 10, GB * 10, 0)]))
    codec = PickleCodec()
    value = np.random.default_rng(0).integers(0, 255, (33 << 20) + 17, "u1")
    handle = disk.write(codec.encode((value, value[:1000].tolist())))
    got, small = handle.load(codec)[0]
    assert np.array_equal(got, value)
    assert small == value[:1000].tolist()
    with open(tmp_path / "t" / handle.name, "r+b") as f:
        f.seek(20 << 20)
        byte = f.read(1)[0]
        f.seek(20 << 20)
        f.write(bytes([byte ^ 1]))
    with pytest.raises(Exception, match="checksum"):
        handle.load(codec)
    disk.close()


def test_the_page_cache_is_used_where_it_is_faster() -> None:
    def decisions(n: int, *, reads: float = 1, direct: bool = True, **rates: tuple[float, float]) -> list[bool]:
        ways = Ways(IdleMemory(lambda: [Memory(GB * 10, GB * 10, 0)]))
        for name, (write, read) in rates.items():
            cached = name == "through"
            ways.wrote(100 << 20, (100 << 20) / write, cached=cached)
            ways.read(int(reads * (100 << 20)), reads * (100 << 20) / read, cached=cached)
        return [ways.cached(4096, direct=direct) for _ in range(n)]

    fast, slow = (3e9, 3e9), (3e8, 3e8)
    assert decisions(1, past=fast) == [True]  # never tried
    assert decisions(1, through=fast) == [False]
    assert sum(decisions(3200, past=(1e9, 1e9), through=(1e8, 1e9))) <= 4  # much dearer: hardly ever tried again
    assert 50 < sum(decisions(3200, past=(1e9, 1e9), through=(0.9e9, 1.1e9))) < 150
    assert sum(decisions(3200, past=slow, through=fast)) > 3150
    assert all(decisions(100, past=fast, through=slow, direct=False))
    # Dear to write and cheap to read: it depends on how often a value is read.
    assert sum(decisions(100, reads=0.5, past=(1e9, 1e9), through=(3e8, 1e10))) < 10
    assert sum(decisions(100, reads=4, past=(1e9, 1e9), through=(3e8, 1e10))) > 90
    short = Ways(IdleMemory(lambda: [Memory(GB * 10, GB, 0)]))
    assert not any(short.cached(4096, direct=False) for _ in range(100))


def test_the_probe_measures_both_ways(tmp_path: Path) -> None:
    disk = DiskTier(str(tmp_path / "t"), idle_memory=IdleMemory(lambda: [Memory(GB * 10, GB * 10, 0)]))
    disk.probe()
    rates = [rate for way in (disk.ways.past, disk.ways.through) for rate in (way.write, way.read)]
    assert all(r.bytes_per_second for r in rates)
    assert disk.cached_bytes == disk.used_bytes == 0
    disk.close()
