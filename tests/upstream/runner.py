"""Runs one upstream test file (or one test of it) in one mode, in a process of its own.

The process gets: its own network namespace and rights (`isolate`), its own home, temporary and working folder
(removed afterwards), an environment without any Dask setting but the extension's, a fixed hash seed (ids of tests
come from sets in places), a per-test and a per-file time limit. Everything it left running is killed with its
session.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .compare import Result, crashed, read_junit

if TYPE_CHECKING:
    from .suites import Suite

#: Import name of this folder in the processes that run tests; no other installed package has it.
SUPPORT = "gpurt_upstream"
#: One test may take so long, seconds. pytest-timeout raises in the test (signal), the file goes on.
TEST_LIMIT_SECONDS = 120
_DROPPED = ("DASK_", "PYTEST_", "UPSTREAM_")
#: The extension's own settings pass, so that its options can be tried: stock has no use for them.
_KEPT = "DASK_GPURT__"


@dataclass(frozen=True)
class Mode:
    """Stock, or with an extension."""

    #: Folder name of the results: ``stock`` or ``extension``.
    name: str
    #: Preload module; None for stock.
    extension: str | None
    #: Roles that load it, such as ``scheduler,worker``.
    roles: str = "scheduler,worker"


@dataclass(frozen=True)
class Place:
    """Where a run takes place."""

    out: Path
    #: Root of this checkout, from which the extension is imported.
    root: Path
    own_network: bool
    runslow: bool
    #: Time limit of one file, seconds.
    limit_seconds: float

    def overlay(self, package: str) -> Path:
        """Folder that holds the package with its tests."""
        return self.out / "overlay" / package

    def junit(self, mode: Mode, suite: Suite) -> Path:
        """Results of one file."""
        return self.out / mode.name / f"{suite.slug}.xml"

    def log(self, mode: Mode, suite: Suite) -> Path:
        """Activity log of one file."""
        return self.out / mode.name / f"{suite.slug}.jsonl"


def kept_settings() -> list[str]:
    """Names of the environment's Dask settings that the tests get to see."""
    return sorted(k for k in os.environ if k.startswith(_KEPT))


def make_support(place: Place) -> None:
    """Makes this folder importable as `SUPPORT` without the rest of ``tests``."""
    link = place.out / "support" / SUPPORT
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(Path(__file__).resolve().parent)


def _command(place: Place, mode: Mode, suite: Suite, target: str, junit: Path) -> list[str]:
    overlay = place.overlay(suite.package)
    ini = "pytest.ini" if suite.package == "dask" else "pyproject.toml"
    plugins = [f"{SUPPORT}.ext_everywhere"] if mode.extension else []  # first, see there
    if suite.package == "dask":
        plugins.append(f"{SUPPORT}.suite_options")
    if suite.on_cluster:
        plugins.append(f"{SUPPORT}.on_cluster")
    isolate = [sys.executable, str(Path(__file__).with_name("isolate.py"))]
    if not place.own_network:
        isolate.append("--shared-network")
    return [
        *isolate,
        *(sys.executable, "-m", "pytest", "-c", str(overlay / ini), f"--rootdir={overlay}", f"--confcutdir={overlay}"),
        *(x for p in plugins for x in ("-p", p)),
        # Python's own tracebacks: pytest's parse the sources, in which Python 3.11 may fail, and that ends the process.
        *("--override-ini=addopts=", "-q", "-rfE", "--tb=native", f"--junitxml={junit}"),
        *("-p", "no:asyncio", "-p", "no:cacheprovider"),
        *(["-p", "no:legacypath"] if suite.package == "distributed" else []),  # dask's use the fixture tmpdir
        *(f"--timeout={TEST_LIMIT_SECONDS}", "--timeout-method=signal"),
        *(["--runslow"] if place.runslow else []),
        *(["-k", suite.keyword] if suite.keyword else []),
        target,
    ]


def _environment(place: Place, mode: Mode, suite: Suite, home: Path, log: Path) -> dict[str, str]:
    kept = kept_settings()
    env = {k: v for k, v in os.environ.items() if not k.startswith(_DROPPED) or k in kept}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    path = [place.overlay(suite.package), place.out / "support", place.root]
    env |= {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "PYTHONHASHSEED": "0",
        # Compiled files, as an installed package has them: else each worker that starts compiles the extension.
        "PYTHONPYCACHEPREFIX": str(place.out / "pycache"),
        "HOME": str(home),
        "TMPDIR": str(home),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)]),
        "UPSTREAM_ACTIVE_LOG": str(log),
    }
    if mode.extension:
        env |= {"UPSTREAM_EXTENSION": mode.extension, "UPSTREAM_ROLES": mode.roles}
    return env


#: Processes of this run that have not been reaped: to be ended when the run is interrupted.
_live: set[subprocess.Popen[bytes]] = set()


def end_all() -> None:
    """Ends every file that is running, when the run itself is interrupted: they are in sessions of their own."""
    for process in list(_live):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of the process's group; it leads the group, so the id stays taken until it is reaped."""
    with contextlib.suppress(ProcessLookupError):  # all ended by themselves
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_file(
    place: Place, mode: Mode, suite: Suite, test: str | None = None, folder: Path | None = None
) -> tuple[dict[str, Result], float]:
    """Runs a file, or only ``test`` of it (its junit id), and returns the results and the wall seconds.

    A process that left no junit file gives the single result ``crashed``. Results go to ``folder``, default that of
    the mode.
    """
    folder = folder or place.out / mode.name
    folder.mkdir(parents=True, exist_ok=True)
    junit, log, text = (folder / f"{suite.slug}{end}" for end in (".xml", ".jsonl", ".log"))
    for old in (junit, log):
        old.unlink(missing_ok=True)
    overlay = place.overlay(suite.package)
    target = str(overlay / suite.path) + ("" if test is None else _below_file(suite, test))
    home = Path(tempfile.mkdtemp(prefix="up-"))  # short: it is part of the names of Unix sockets
    start = time.monotonic()
    with open(text, "wb") as output:
        process = subprocess.Popen(
            _command(place, mode, suite, target, junit),
            cwd=home,
            env=_environment(place, mode, suite, home, log),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _live.add(process)
        try:
            limit = place.limit_seconds if test is None else 2 * TEST_LIMIT_SECONDS
            # waitid leaves the process a zombie, so that its group id cannot be given to someone else before the kill
            why = _wait(process, limit)
        finally:
            _live.discard(process)
            _end_session(process)
    seconds = time.monotonic() - start
    shutil.rmtree(home, ignore_errors=True)
    if junit.exists():
        return read_junit(junit), seconds
    return crashed(suite.module, f"{why}, no results; see {text.name}"), seconds


def _wait(process: subprocess.Popen[bytes], limit_seconds: float) -> str:
    """Waits for the end or the limit without reaping; says which."""
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            return f"ended with {ended.si_status}"
        time.sleep(0.1)
    return f"killed after {limit_seconds:.0f} s"


def _below_file(suite: Suite, test: str) -> str:
    """The part of pytest's node id after the file, for a junit id."""
    head, bracket, params = test.partition("[")
    classname, _, name = head.rpartition("::")
    classes = classname.removeprefix(suite.module).strip(".")
    return "::" + "::".join([*(classes.split(".") if classes else []), name]) + bracket + params
