"""T11, on real file systems: tmpfs, read-only, full, limited; and a disk that is slow or busy."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from dask_gpurt.doctor import disk
from dask_gpurt.doctor.disk import CHECK
from dask_gpurt.doctor.finding import State
from dask_gpurt.tiers.storage.disk.quota import filesystem_of

from .trees import Tree, alone, needs_namespaces, node

if TYPE_CHECKING:
    from pathlib import Path

_CODE = """
import sys
from dask_gpurt.doctor.disk import CHECK
from tests.doctor.trees import node
for v in CHECK.look(node(folders=("{folder}",), reserve_bytes={reserve})):
    print(v.state, v.found, "|", v.remedy)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if filesystem_of(str(tmp_path)) in ("tmpfs", "ramfs"):
        pytest.skip("temporary files are kept in memory here")
    return tmp_path


def look(folder: Path, before: str, unshare: str = "-Urm", reserve: int = 0) -> str:
    return alone(_CODE.format(folder=folder, reserve=reserve), before=before, unshare=unshare)


@needs_namespaces("-Urm")
def test_a_real_tmpfs_and_a_real_read_only_mount(folder: Path) -> None:
    got = look(folder, f"mount -t tmpfs none {folder}")
    assert got.startswith(f"fail {folder} is on tmpfs, which keeps its files in memory")
    assert "gpurt.tiers.directory" in got
    got = look(folder, f"mount --bind {folder} {folder}; mount -o remount,bind,ro {folder}")
    assert got.startswith(f"fail {folder} cannot be written: [Errno 30] Read-only file system")


def test_a_real_limit_of_file_sizes(folder: Path) -> None:
    got = look(folder, "ulimit -f 1024", unshare="")
    assert got.startswith(f"fail {folder} cannot be written: [Errno 27] File too large")
    assert os.listdir(folder) == []


def test_less_free_than_the_reserve(folder: Path) -> None:
    got = look(folder, "", unshare="", reserve=10**18)
    assert got.startswith(f"fail {folder} has ")
    assert "lower gpurt.tiers.disk-reserve" in got


def test_a_folder_that_cannot_be_made(folder: Path) -> None:
    (folder / "file").write_text("")
    (found,) = CHECK.look(node(folders=(str(folder / "file" / "x"),)))
    assert found.state is State.FAIL
    assert "Not a directory" in found.found


def test_a_disk_here_and_nothing_is_left_behind(folder: Path) -> None:
    found = list(CHECK.look(node(folders=(str(folder), str(folder / "new" / "er")))))
    assert {v.state for v in found} <= {State.OK, State.WARN}
    assert sum("MB/s" in v.found for v in found) >= 2
    assert os.listdir(folder) == []


def test_a_link_to_nowhere(folder: Path) -> None:
    (folder / "link").symlink_to(folder / "nothing")
    (found,) = CHECK.look(node(folders=(str(folder / "link"),)))
    assert (found.state, found.found) == (
        State.FAIL,
        f"{folder}/link cannot be written: [Errno 2] No such file or directory: '{folder}/link'",
    )


def test_a_slow_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync
    monkeypatch.setattr(disk, "_RATE", 1e15)
    monkeypatch.setattr(os, "fsync", lambda fd: (time.sleep(0.06), real(fd)))
    (found,) = [v for v in CHECK.look(node(folders=(str(folder),))) if v.state is State.WARN]
    assert "MB/s, a sync " in found.found
    assert "99 of 100 syncs within 50 ms" in found.expected


def test_a_disk_that_hardly_moves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told as slow: a check that hangs would say less."""
    real, written = disk.DiskTier.write, []

    def write(tier: disk.DiskTier, groups: list[tuple[int, list[memoryview]]]) -> object:
        written.append(groups[0][1][0].nbytes)
        time.sleep(1.0)  # what 1 MB/s takes for the first
        return real(tier, groups)

    monkeypatch.setattr(disk.DiskTier, "write", write)
    (found,) = [v for v in CHECK.look(node(folders=(str(folder),))) if v.state is State.WARN]
    assert written == [1 << 20]
    assert found.found.startswith(f"{folder} (")
    assert os.listdir(folder) == []


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.sshfs"])
def test_a_network_mount(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(disk, "filesystem_of", lambda path: kind)
    monkeypatch.setattr(disk, "_rate", lambda *_: 1e9)
    monkeypatch.setattr(disk, "_worst_sync", lambda *_: 0.001)
    found = [v.found for v in CHECK.look(node(folders=(str(folder),))) if v.state is State.WARN]
    assert f"{folder} is on {kind}, which is a network mount: spilling is slow and competes with transfers" in found


def test_a_disk_that_others_keep_busy(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    device = os.stat(folder).st_dev

    def stats(done: int, waited: int, busy: int) -> dict[str, str]:
        line = f"{os.major(device)} {os.minor(device)} x {done} 0 0 {waited} 0 0 0 0 0 {busy} 0\n"
        return {"proc/diskstats": "7 9 other 1 0 0 1 0 0 0 0 0 1 0\n" + line}

    root = tmp_path_factory.mktemp("root")
    found = list(disk._busy(str(folder), Tree(root, stats(100, 500, 1000), stats(110, 1000, 1300)), 0.3))
    assert [v.found for v in found] == [f"the disk of {folder} is busy for 100% of the time, 50 ms a request"]
    assert not list(disk._busy(str(folder), Tree(root, stats(100, 500, 1000), stats(110, 600, 1300)), 0.3))
    assert not list(disk._busy(str(folder), Tree(root, {"proc/diskstats": ""}), 0.3))
    late = Tree(root, stats(100, 500, 1000), stats(110, 1000, 1300))
    late.late = 2.0  # of a machine that has no processor left: busy for half of the time
    assert not list(disk._busy(str(folder), late, 0.3))
