"""Trees of files that stand for /sys and /proc, and what else several tests of checks need."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dask_gpurt.backends.nvml import Device, Load, Snapshot
from dask_gpurt.backends.system import System
from dask_gpurt.doctor.check import Check, Node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dask_gpurt.doctor.finding import State, Verdict


class Tree(System):
    """Files below a folder; `later` are written when a check lets time pass."""

    def __init__(self, root: Path, files: Mapping[str, str], later: Mapping[str, str] | None = None) -> None:
        super().__init__(str(root))
        self._folder = root
        self._later = later or {}
        self.waited = 0.0
        #: how many times longer a wait takes than it should
        self.late = 1.0
        self._write(files)

    def _write(self, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def wait(self, seconds: float) -> float:
        self.waited += seconds
        self._write(self._later)
        return seconds * self.late


class Gpus:
    """A snapshot that was made by hand."""

    prefix = "recorded: "

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def look(self) -> Snapshot:
        return self._snapshot

    def load(self, device: Device) -> Load:
        return device.load


NO_GPU = Gpus(Snapshot("no driver"))


def node(system: System | None = None, **fields: Any) -> Node:
    """A node about which little is known."""
    known: dict[str, Any] = {"gpu": NO_GPU, "environ": {}, "folders": (), "window_seconds": 0.01}
    return Node(system or System(), **{**known, **fields})


def told(check: Check, about: Node, state: State) -> list[Verdict]:
    """What a check says that is so good, or so bad."""
    return [v for v in check.look(about) if v.state is state]


def alone(code: str, *, before: str = "", unshare: str = "", **env: str) -> str:
    """What Python code prints in a process of its own, after shell commands, in namespaces of its own."""
    script = f'{before}\nexec {sys.executable} -c "$CODE"'
    command = [*(["unshare", unshare] if unshare else []), "sh", "-ec", script]
    done = subprocess.run(
        command,
        env={**os.environ, "CODE": textwrap.dedent(code), **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def needs_namespaces(flags: str) -> Callable[[Any], Any]:
    """Skip where this user may have no namespaces of its own."""
    try:
        possible = subprocess.run(["unshare", flags, "true"], capture_output=True, timeout=10).returncode == 0
    except OSError:
        possible = False
    return pytest.mark.skipif(not possible, reason=f"unshare {flags} is not permitted here")


@contextlib.contextmanager
def real_cgroup(controller: str, files: tuple[str, str], limit: str) -> Iterator[Path]:
    """A control group with a limit, in the file of version 1 or 2; the test is skipped where none can be made."""
    parent = Path("/sys/fs/cgroup", controller)
    first = parent.is_dir()
    group = (parent if first else parent.parent) / f"gpurt-doctor-{os.getpid()}"
    try:
        group.mkdir()
        (group / files[not first]).write_text(limit)
    except OSError as e:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no cgroup can be made here: {e}")
    try:
        yield group
    finally:
        group.rmdir()


def inside(group: Path, code: str) -> str:
    """What code prints in a process that is in a control group from before its first line."""
    code = 'print("ready", flush=True); input()\n' + code
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (group / "cgroup.procs").write_text(str(process.pid))
        out, _ = process.communicate("\n", timeout=60)
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 10
    while (group / "cgroup.procs").read_text().strip():
        assert time.monotonic() < deadline
    return out
