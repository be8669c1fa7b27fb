"""Several folders: the load is spread, one that fails is set aside, quota and reserve hold across them."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import subprocess
import sys
import tempfile
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from distributed import wait
from distributed.utils_test import gen_cluster

from dask_gpurt.config import Settings
from dask_gpurt.errors import CorruptData, InstallError, TierFull
from dask_gpurt.tiers.runtime import TierRuntime
from dask_gpurt.tiers.storage.disk.quota import InFlight, Quota
from dask_gpurt.tiers.storage.disk.striped import AMPLE_BYTES, Directories, open_directories
from dask_gpurt.tiers.storage.disk.tier import DiskTier
from tests.memory_watch import NO_WATCH
from tests.tiers.conftest import FaultyOs, enospc

if TYPE_CHECKING:
    from pathlib import Path

    from distributed import Client, Scheduler, Worker

    from dask_gpurt.model.events import Event
    from dask_gpurt.tiers.limits import Limits

SIZE = 300_000


def noise(seed: int, n: int = SIZE) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 255, n, dtype="u1")


class Rig:
    def __init__(self, tmp_path: Path, n: int, limit_bytes: int | None = None, reserve_bytes: int = 0) -> None:
        self.now = 0.0
        self.events: list[Event] = []
        self.systems = [FaultyOs() for _ in range(n)]
        quota, flight = Quota(limit_bytes), InFlight()
        self.tier = Directories(
            [
                DiskTier(
                    str(tmp_path / str(i)), os_layer=system, quota=quota, in_flight=flight, reserve_bytes=reserve_bytes
                )
                for i, system in enumerate(self.systems)
            ],
            quota,
            sink=self.events.append,
            clock=lambda: self.now,
        )

    def write(self, seed: int) -> Any:
        return self.tier.write([(0, [noise(seed)])])

    def check(self, handles: dict[int, Any]) -> None:
        for seed, handle in handles.items():
            assert bytes(handle.load_part(0)[0][0]) == noise(seed).tobytes()
        assert self.tier.used_bytes == sum(h.nbytes for h in handles.values())

    def places(self, handles: dict[int, Any]) -> list[int]:
        return [self.tier.disks.index(h.disk) for h in handles.values()]

    def end(self, handles: dict[int, Any]) -> None:
        self.check(handles)
        for handle in handles.values():
            handle.free()
        assert self.tier.used_bytes == 0
        assert all(d.files() == [] for d in self.tier.disks)
        self.tier.close()
        assert not any(os.path.exists(d.directory) for d in self.tier.disks)


def test_all_folders_are_used(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 3)
    handles = {i: rig.write(i) for i in range(12)}
    places = rig.places(handles)
    assert sorted(set(places)) == [0, 1, 2]
    assert max(places.count(i) for i in range(3)) == 4
    rig.end(handles)


def test_the_faster_gets_more(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 2)
    rig.tier.disks[0].write_rate.add(100_000_000, 1.0)
    rig.tier.disks[1].write_rate.add(100_000_000, 0.1)
    handles = {i: rig.write(i) for i in range(22)}
    assert rig.places(handles).count(0) == 2, "one in eleven"
    rig.end(handles)


def test_one_that_compresses_gets_more(tmp_path: Path) -> None:
    """Its rate is of bytes as they lie there, and was taken for one of bytes in memory."""
    pytest.importorskip("lz4.block")
    quota = Quota()
    disks = [DiskTier(str(tmp_path / codec), codec=codec, quota=quota) for codec in ("lz4", "none")]
    tier = Directories(disks, quota)
    for _ in range(20):
        tier.write([(0, [bytes(SIZE)])])
    assert [len(d.files()) for d in disks] == [19, 1]
    tier.close()


def test_less_room_gets_less_and_no_room_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path, 2)
    room = [AMPLE_BYTES // 4, 10 * AMPLE_BYTES]
    for disk, nbytes in zip(rig.tier.disks, room, strict=True):
        monkeypatch.setattr(disk, "free_bytes", lambda nbytes=nbytes: nbytes)
    handles = {i: rig.write(i) for i in range(10)}
    assert rig.places(handles).count(0) == 2
    monkeypatch.setattr(rig.tier.disks[0], "free_bytes", lambda: SIZE - 1)
    handles |= {i: rig.write(i) for i in range(10, 20)}
    assert rig.places(handles)[10:].count(0) == 0
    rig.end(handles)


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_one_that_fails_is_set_aside_and_comes_back(tmp_path: Path, code: int) -> None:
    rig = Rig(tmp_path, 2)
    calls = rig.systems[0].always
    calls["open"] = OSError(code, os.strerror(code))
    handles = {i: rig.write(i) for i in range(6)}
    assert rig.places(handles) == [1] * 6, "no value is refused"
    assert [e.name for e in rig.events] == ["tiers.directory"], "said once"
    opened = rig.systems[0].calls["open"]
    assert rig.tier.statistics()[0]["set_aside"]
    assert rig.tier.statistics()[0]["errors"] == {errno.errorcode[code]: 1}
    rig.now = 1.5
    handles[6] = rig.write(6)  # its rest is over: tried once more, fails, rests for longer
    rig.now = 3.0
    handles[7] = rig.write(7)
    assert rig.systems[0].calls["open"] == opened + 1
    calls.clear()
    rig.now = 4.0
    handles |= {i: rig.write(i) for i in range(8, 20)}
    assert rig.places(handles)[8:].count(0) >= 6
    assert not rig.tier.statistics()[0]["set_aside"]
    rig.end(handles)


def test_when_all_fail_the_caller_hears_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 2)
    for system in rig.systems:
        system.always["pwritev"] = enospc()
    with pytest.raises(TierFull, match="stays in memory"):
        rig.write(0)
    with pytest.raises(TierFull):
        rig.write(0)  # all rest: the one whose time ends first is tried all the same
    assert rig.tier.used_bytes == 0
    for system in rig.systems:
        system.always.clear()
    rig.end({0: rig.write(0)})


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failure_keeps_no_value(tmp_path: Path, failing: int) -> None:
    """The error, its traceback and the frame with the value were a circle: it stayed until a garbage collection."""
    rig = Rig(tmp_path, 2)

    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EIO, "no")  # a new one: one that is raised again keeps its tracebacks

    for system in rig.systems[:failing]:
        system.always["open"] = fails
    value = noise(0)
    alive = weakref.ref(value)
    gc.disable()
    try:
        with contextlib.suppress(OSError):
            rig.tier.write([(0, [value])])
        del value
        assert alive() is None
    finally:
        gc.enable()
    rig.tier.close()


def flips_a_bit(real: Any, fd: int, buffers: list[memoryview], at: int) -> int:
    n = int(real(fd, buffers, at))
    buffers[0][0] ^= 1
    return n


def test_one_that_gives_back_other_bytes_is_set_aside(tmp_path: Path) -> None:
    """The test at the start ended with an error, and the worker had no tiers although another folder was well."""
    rig = Rig(tmp_path, 2)
    rig.systems[0].always["preadv"] = flips_a_bit
    rig.tier.probe()
    assert [f["set_aside"] for f in rig.tier.statistics()] == [True, False]
    assert rig.tier.statistics()[0]["errors"] == {"CorruptData": 1}
    rig.systems[0].always.clear()
    rig.end({i: rig.write(i) for i in range(4)})


def test_a_disk_that_gives_back_other_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(disk: DiskTier) -> None:
        raise CorruptData("other bytes")

    monkeypatch.setattr(DiskTier, "probe", wrong)
    with pytest.raises(InstallError, match="comes back wrong"):
        open_directories(str(tmp_path / "local"), settings(str(tmp_path / "disk")), LIMITS)
    assert [n for _, names, _ in os.walk(tmp_path) for n in names if n.startswith(("worker-", "gpurt-"))] == []


def test_a_read_that_fails_sets_aside_for_writes(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 2)
    handles = {i: rig.write(i) for i in range(4)}
    bad = rig.places(handles)[0]
    rig.systems[bad].plan["preadv", rig.systems[bad].calls.get("preadv", 0)] = OSError(errno.EIO, "bad sector")
    with pytest.raises(OSError, match="bad sector"):
        handles[0].load_part(0)
    handles |= {i: rig.write(i) for i in range(4, 8)}
    assert bad not in rig.places(handles)[4:]
    rig.end(handles)


def test_quota_is_one_for_all(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 2, limit_bytes=4 * SIZE)
    handles = {i: rig.write(i) for i in range(3)}
    with pytest.raises(TierFull, match=r"gpurt\.tiers\.disk-limit"):
        rig.write(3)
    assert not any(s["set_aside"] for s in rig.tier.statistics()), "that says nothing about a folder"
    handles.pop(0).free()
    handles[3] = rig.write(3)
    rig.tier.limit_bytes = None
    handles[4] = rig.write(4)
    handles[5] = rig.write(5)
    rig.end(handles)


def test_reserve_counts_what_is_on_its_way_through_any(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 2, reserve_bytes=1)
    room = min(d.free_bytes() for d in rig.tier.disks)
    flight = rig.tier.disks[0]._in_flight
    flight.add(room)
    with pytest.raises(TierFull, match=r"of which 1 stay free.*gpurt\.tiers\.directory"):
        rig.write(0)
    flight.add(-room)
    rig.now = 100.0
    rig.end({0: rig.write(0)})


def settings(*folders: str, **more: Any) -> Any:
    return Settings.load({"tiers.directory": list(folders), **more}).tiers


LIMITS = cast("Limits", SimpleNamespace(disk_limit_bytes=None, disk_reserve_bytes=0))


def test_opened_from_settings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    good, bad = str(tmp_path / "good"), str(tmp_path / "file")
    with caplog.at_level(logging.WARNING, "distributed.worker.gpurt"):
        tier, work_dirs = open_directories(str(tmp_path / "local"), settings(bad, good), LIMITS)
    assert "Not spilling to" in caplog.text
    assert len(tier.disks) == len(work_dirs) == 1
    assert tier.used_bytes == 0
    assert tier.disks[0].write_rate.bytes_per_second, "measured at the start"
    assert tier.directory.startswith(good)
    tier.close()
    for work_dir in work_dirs:
        work_dir.release()
    assert [n for _, _, files in os.walk(good) for n in files if not n.endswith("lock")] == []
    with pytest.raises(InstallError, match=r"gpurt\.tiers\.directory"):
        open_directories(str(tmp_path / "local"), settings(bad), LIMITS)


def test_leftovers_of_the_dead_are_purged(tmp_path: Path) -> None:
    folder = str(tmp_path / "disk")
    program = """
import os, sys
from distributed.diskutils import WorkSpace
from dask_gpurt.tiers.storage.disk.tier import DiskTier
work_dir = WorkSpace(os.path.join(sys.argv[1], "dask-gpurt-space")).new_work_dir(prefix="worker-")
disk = DiskTier(os.path.join(work_dir.dir_path, "gpurt-tiers"))
disk.write([(0, [b"small"])])
disk.write([(0, [bytes(1_000_000)])])
print(disk.directory, flush=True)
os._exit(1)
"""
    done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, check=False)
    left = done.stdout.strip()
    assert left, done.stderr
    assert len(os.listdir(left)) == 2
    tier, work_dirs = open_directories(str(tmp_path), settings(folder), LIMITS)
    assert not os.path.exists(left)
    tier.close()
    for work_dir in work_dirs:
        work_dir.release()


def test_a_home_is_that_of_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings come from the scheduler, which may run as another user."""
    monkeypatch.setenv("HOME", str(tmp_path / "scheduler"))
    sent = settings("~/spill")
    monkeypatch.setenv("HOME", str(tmp_path / "worker"))
    tier, work_dirs = open_directories(str(tmp_path), sent, LIMITS)
    assert tier.directory.startswith(str(tmp_path / "worker" / "spill"))
    tier.close()
    for work_dir in work_dirs:
        work_dir.release()


@pytest.mark.parametrize("kind", ["tmpfs", "nfs4"])
def test_odd_file_systems_are_named_once(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dask_gpurt.tiers.storage.disk.tier.filesystem_of", lambda directory: kind)
    rig = Rig(tmp_path, 2)
    ((message, found),) = rig.tier.warnings()
    assert found == kind
    assert "gpurt.tiers.directory" in message
    rig.end({})
    monkeypatch.setattr("dask_gpurt.tiers.storage.disk.tier.filesystem_of", lambda directory: "ext4")
    assert Rig(tmp_path, 2).tier.warnings() == []


@gen_cluster(
    client=True,
    nthreads=[("127.0.0.1", 2)],
    worker_kwargs={"memory_limit": "2 GiB"},
    config=NO_WATCH,
)
async def test_a_worker_spills_to_several(c: Client, s: Scheduler, a: Worker) -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        chosen = settings(one, two, **{"tiers.host-limit": 0.0001, "tiers.disk-reserve": 0})
        runtime = await TierRuntime.install(a, chosen)
        arrays = c.map(noise, range(20))
        await wait(arrays)
        await runtime.engine.idle()
        disks = runtime.statistics()["disks"]
        assert [d["directory"].startswith(f) for d, f in zip(disks, (one, two), strict=True)] == [True, True]
        assert all(d["used_bytes"] >= SIZE for d in disks)  # shares are by the speeds of the moment
        assert runtime.statistics()["disk_bytes"] == sum(d["used_bytes"] for d in disks)
        assert await c.gather(c.map(lambda x: int(x.sum()), arrays)) == [int(noise(i).sum()) for i in range(20)]
        await runtime.uninstall()
        assert not [n for f in (one, two) for _, _, names in os.walk(f) for n in names if not n.endswith("lock")]
