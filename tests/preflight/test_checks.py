"""Each check finds what it is for."""

from __future__ import annotations

import asyncio
import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dask_gpurt.backends.system import System
from dask_gpurt.preflight import checks, known_answer, worker
from dask_gpurt.preflight.checks import Finding, Plan, State
from dask_gpurt.preflight.worker import Preflight

if TYPE_CHECKING:
    from pathlib import Path


def plan(tmp_path: Path, **changes: Any) -> Plan:
    return Plan(
        **{"imports": ("numpy",), "load": True, "folders": (str(tmp_path),), "memory_limit_bytes": 0, **changes}
    )


def found(tmp_path: Path, check: str, **changes: Any) -> Finding:
    findings, _ = checks.run(plan(tmp_path, **changes))
    return next(f for f in findings if f.check == check)


def test_a_sound_worker(tmp_path: Path) -> None:
    findings, measured = checks.run(plan(tmp_path))
    assert {f.check: f.state.value for f in findings} == {
        "imports": "ok",
        "memory": "ok",
        "disk": "ok",
        "device": "n/a",
        "partition": "ok",
    }
    assert measured is not None
    assert all(f.seconds >= 0 for f in findings)
    assert os.listdir(tmp_path) == [], "nothing is left behind"


@pytest.mark.parametrize("load", [False, True])
def test_a_module_that_is_missing(load: bool, tmp_path: Path) -> None:
    finding = found(tmp_path, "imports", imports=("numpy", "no_such_module.part"), load=load, compute=False)
    assert finding.state is State.FAIL
    assert "no_such_module.part (ModuleNotFoundError: No module named 'no_such_module')" in finding.found
    assert "numpy" not in finding.found
    assert "no_such_module.part" in finding.remedy


def test_a_module_that_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpurt_breaks.py").write_text("raise SystemExit('no driver')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert found(tmp_path, "imports", imports=("gpurt_breaks",), compute=False).found == (
        "gpurt_breaks (SystemExit: no driver)"
    )
    assert found(tmp_path, "imports", imports=("gpurt_breaks",), load=False, compute=False).state is State.OK
    assert "gpurt_breaks" not in sys.modules


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    bad = str(tmp_path / "bad")
    finding = found(tmp_path, "disk", folders=(str(tmp_path), bad), compute=False)
    assert finding.state is State.FAIL
    assert bad in finding.found
    assert f"{tmp_path} (" not in finding.found
    assert "gpurt.tiers.directory" in finding.remedy


def test_a_disk_that_stores_other_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(fd: int) -> None:
        os.pwrite(fd, b"?", 4711)

    monkeypatch.setattr(os, "fsync", fsync)
    finding = found(tmp_path, "disk", compute=False)
    assert finding.state is State.FAIL
    assert "other bytes" in finding.found


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(fd: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    assert "No space left" in found(tmp_path, "disk", compute=False).found


def test_memory_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "HOST_BYTES", 10**15)
    assert found(tmp_path, "memory", folders=(), compute=False).state is State.FAIL


def test_a_device(tmp_path: Path) -> None:
    def lost(data: bytes) -> bytes:
        raise RuntimeError("CUDA error 999")

    assert found(tmp_path, "device", device=lambda data: data, compute=False).state is State.OK
    assert "CUDA error 999" in found(tmp_path, "device", device=lost, compute=False).found
    wrong = found(tmp_path, "device", device=lambda data: data[:-1] + b"!", compute=False)
    assert wrong.state is State.FAIL


def test_a_core_that_miscounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    stock = np.sort

    def sort(values: Any, kind: str) -> Any:
        out = stock(values, kind=kind)
        out[12345] ^= np.uint64(1 << 7)  # one bit of one row
        return out

    monkeypatch.setattr(np, "sort", sort)
    findings, measured = checks.run(plan(tmp_path))
    finding = next(f for f in findings if f.check == "partition")
    assert measured is None
    assert finding.state is State.FAIL
    assert finding.expected == known_answer.ANSWER
    assert finding.found != f"answer {known_answer.ANSWER}"


def test_no_answer_is_computed_where_there_is_no_room_or_no_time(tmp_path: Path) -> None:
    small = found(tmp_path, "partition", memory_limit_bytes=100_000_000)
    assert small.state is State.NONE
    assert "100,000,000 bytes" in small.found
    assert found(tmp_path, "partition", compute=False).state is State.NONE


def test_a_computation_that_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compute() -> str:
        raise ValueError("broken numpy")

    monkeypatch.setattr(known_answer, "compute", compute)
    assert "broken numpy" in found(tmp_path, "partition").found


def test_a_finding_travels() -> None:
    finding = Finding("disk", State.FAIL, "x", "y", "z", 0.5)
    assert Finding.from_dict(finding.to_dict()) == finding
    assert finding.said() == "disk: x, expected y. Remedy: z"
    with pytest.raises(ValueError, match="soso"):
        Finding.from_dict({"check": "x", "state": "soso"})


def test_the_file_system_is_that_behind_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "proc" / "self" / "mounts"
    mounts.parent.mkdir(parents=True)
    real = tmp_path / "disk"
    real.mkdir()
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\n/dev/sdb {real} xfs rw 0 0\n")
    (tmp_path / "scratch").symlink_to(real)
    monkeypatch.setattr(worker, "System", lambda: System(tmp_path))
    fake: Any = SimpleNamespace(local_directory="/unused")
    assert Preflight(fake, [str(tmp_path / "scratch")])._node_class().filesystem == "xfs"


@pytest.mark.parametrize(("silent", "tells"), [(0, 1), (2, 3), (99, 5)])
def test_the_class_is_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: int, tells: int) -> None:
    """A scheduler that takes in a large graph does not answer for a while."""
    told: list[dict[str, Any]] = []

    async def answer(worker: str, node: dict[str, Any]) -> dict[str, Any]:
        told.append(node)
        if len(told) <= silent:
            raise TimeoutError
        return {}

    monkeypatch.setattr(worker, "AGAIN_SECONDS", (0.0,) * 4)
    fake: Any = SimpleNamespace(scheduler=SimpleNamespace(gpurt_preflight=answer), contact_address="tcp://a:1")
    asyncio.run(Preflight(fake, [str(tmp_path)])._prove())
    assert len(told) == tells
    assert all(node["key"] == told[0]["key"] for node in told)
