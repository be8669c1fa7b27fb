"""Trees of files that stand for /sys and /proc, and what else several tests of checks need."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from dask_gpurt.backends.nvml import Snapshot
from dask_gpurt.doctor.check import Check, Node
from dask_gpurt.doctor.system import System

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from dask_gpurt.doctor.finding import State, Verdict


class Tree(System):
    """Files below a folder; `later` are written when a check lets time pass."""

    def __init__(self, root: Path, files: Mapping[str, str], later: Mapping[str, str] | None = None) -> None:
        super().__init__(str(root))
        self._folder = root
        self._later = later or {}
        self.waited = 0.0
        self._write(files)

    def _write(self, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def wait(self, seconds: float) -> None:
        self.waited += seconds
        self._write(self._later)


class Gpus:
    """A snapshot that was made by hand."""

    prefix = "recorded: "

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def look(self) -> Snapshot:
        return self._snapshot


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
    import os

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
