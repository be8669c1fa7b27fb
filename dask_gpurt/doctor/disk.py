"""T11: the folders that values are spilled to: what they are on, how much is free, and how fast they are.

64 MiB go through `DiskTier`, as spilled values do, and 64 blocks of 4 KiB are synced one by one. What other processes
do to the disk is looked at before.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from typing import TYPE_CHECKING

import numpy as np

from dask_gpurt.doctor.check import Check
from dask_gpurt.doctor.finding import fail, ok, warn
from dask_gpurt.errors import StoreError
from dask_gpurt.tiers.storage.disk.quota import ODD_FILESYSTEMS, filesystem_of, reserve_of
from dask_gpurt.tiers.storage.disk.tier import DiskTier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dask_gpurt.backends.system import System
    from dask_gpurt.doctor.check import Node
    from dask_gpurt.doctor.finding import Verdict

_FIRST, _BYTES = 1 << 20, 64 << 20
_SYNCS = 64
_RATE = 100e6
_SYNC_SECONDS = 0.05
_BUSY, _AWAIT_SECONDS = 0.9, 0.02
#: that the measurements may take, of all folders
_PATIENCE_SECONDS = 2.0
_IN_MEMORY = ("tmpfs", "ramfs")
_SETTING = "set gpurt.tiers.directory to a folder on a local disk, or start workers with --local-directory there"


def _look(node: Node) -> Iterator[Verdict]:
    for folder in node.folders:
        yield from _folder(folder, node, _PATIENCE_SECONDS / len(node.folders))


def _folder(folder: str, node: Node, seconds: float) -> Iterator[Verdict]:
    lost = "Values that do not fit into memory cannot be spilled: workers pause, and are ended at their limit"
    kind = filesystem_of(folder)
    if kind in _IN_MEMORY:
        yield fail(
            f"{folder} is on {kind}, which {ODD_FILESYSTEMS[kind]}",
            expected="a disk",
            meaning="A worker that spills needs as much memory as before",
            remedy=_SETTING,
        )
        return
    try:
        place = _place(folder)
        space = os.statvfs(place)
        if space.f_flag & os.ST_RDONLY:
            raise PermissionError(30, os.strerror(30), folder)
        free = space.f_bavail * space.f_frsize
        reserve = reserve_of(node.reserve_bytes, free)
        if free < reserve + _BYTES:
            yield fail(
                f"{folder} has {free / 1e9:.2f} GB free",
                expected=f"more than gpurt.tiers.disk-reserve, {reserve / 1e9:.2f} GB",
                meaning=lost,
                remedy="free space, lower gpurt.tiers.disk-reserve, or " + _SETTING,
            )
            return
        yield from _busy(place, node.system, 0.15 * seconds)
        yield from _measure(place, kind, free, 0.4 * seconds)
    except (OSError, StoreError) as e:
        yield fail(
            f"{folder} cannot be written: {e}", expected="a folder that can be written", meaning=lost, remedy=_SETTING
        )


def _place(folder: str) -> str:
    """The folder, or the one that it would be made in: made here it would stay, and belong to the user who asked."""
    place = os.path.abspath(folder)
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    return place


def _busy(folder: str, system: System, window: float) -> Iterator[Verdict]:
    """What others do to the disk."""
    device = os.stat(folder).st_dev
    before = _requests(system, device)
    seconds = system.wait(window)
    after = _requests(system, device)
    if before is None or after is None:
        return
    done, waited, busy = (b - a for a, b in zip(before, after, strict=True))
    share, each = busy / 1e3 / seconds, waited / 1e3 / max(1, done)
    if share > _BUSY and each > _AWAIT_SECONDS:
        yield warn(
            f"the disk of {folder} is busy for {share:.0%} of the time, {each * 1e3:.0f} ms a request",
            expected=f"at most {_BUSY:.0%}, or {_AWAIT_SECONDS * 1e3:.0f} ms",
            meaning="Spilled values wait behind the requests of other processes",
            remedy=f"find them (iotop), or {_SETTING}",
        )


def _requests(system: System, device: int) -> tuple[int, int, int] | None:
    """Requests done, milliseconds that they took together, and milliseconds with any under way."""
    for line in (system.text("proc/diskstats") or "").splitlines():
        words = line.split()
        if words[:2] == [str(os.major(device)), str(os.minor(device))]:
            reads, read_ms, writes, write_ms, busy_ms = (int(words[i]) for i in (3, 6, 7, 10, 12))
            return reads + writes, read_ms + write_ms, busy_ms
    return None


def _measure(folder: str, kind: str, free: int, seconds: float) -> Iterator[Verdict]:
    rate, worst = _rate(folder, seconds), _worst_sync(folder, seconds)
    text = (
        f"{folder} ({kind or 'unknown'}): {rate / 1e6:.0f} MB/s, a sync {worst * 1e3:.1f} ms, {free / 1e9:.0f} GB free"
    )
    if kind in ODD_FILESYSTEMS:
        yield warn(
            f"{folder} is on {kind}, which {ODD_FILESYSTEMS[kind]}",
            expected="a local disk",
            meaning="Spilling waits for the network",
            remedy=_SETTING,
        )
    if rate < _RATE or worst > _SYNC_SECONDS:
        yield warn(
            text,
            expected=f"at least {_RATE / 1e6:.0f} MB/s, and 99 of 100 syncs within {_SYNC_SECONDS * 1e3:.0f} ms",
            meaning="Tasks wait for values that are spilled and read again",
            remedy=f"more memory per worker, or {_SETTING}",
        )
    yield ok(text)


def _rate(folder: str, seconds: float) -> float:
    """Bytes per second of spilled values. A slow disk has written a small one when the time is over."""
    own = os.path.join(folder, f"gpurt-doctor-{os.getpid()}-{secrets.token_hex(4)}")
    disk = DiskTier(own)
    try:
        value = memoryview(np.random.default_rng(0).bytes(_BYTES))
        written, size, started = 0, _FIRST, time.perf_counter()
        while written < _BYTES and time.perf_counter() - started < seconds:
            disk.write([(0, [value[written : written + size]])])
            written, size = written + size, 7 * _FIRST
        return written / (time.perf_counter() - started)
    finally:
        disk.close()
        shutil.rmtree(own, ignore_errors=True)


def _worst_sync(folder: str, seconds: float) -> float:
    """Seconds: the 99th percentile of syncs of a block each."""
    taken: list[float] = []
    block = bytes(4096)
    with tempfile.TemporaryFile(dir=folder) as f:
        for _ in range(_SYNCS):
            started = time.perf_counter()
            os.write(f.fileno(), block)
            os.fsync(f.fileno())
            taken.append(time.perf_counter() - started)
            if sum(taken) > seconds:
                break
    return sorted(taken)[min(len(taken) - 1, int(0.99 * len(taken)))]


CHECK = Check(
    id="T11",
    name="Disk",
    looks_at="64 MiB written as spilled values are, 64 syncs of 4 KiB, file system, free space, /proc/diskstats",
    fails_when="fail: tmpfs, read-only, cannot be written, less free than the reserve; warn: below 100 MB/s, a sync "
    "above 50 ms (99 of 100), a network mount, busy above 90 % with 20 ms a request",
    remedy="another folder (gpurt.tiers.directory, --local-directory), or free space",
    look=_look,
    alone=True,
    once_per_host=True,
)
