"""Run all tests but the slow ones, in three parts side by side: `python ci/suite.py`, from the root of the checkout.

One pytest keeps a processor busy for half of its time, for the most part with processes that start, and waits in the
other half; so there are three for two processors. The parts take about as long. Each has a cache and a log of its own,
in `.pytest_cache/`. The output of the first part is printed while it runs, that of the others after it. The last lines
name each test that failed. Exit code: 0 if all parts passed, 1 if not, 128 + the signal if it was stopped.

No process stays behind. One whose parent ended becomes a child of this process (a "subreaper"), so that none is out of
reach, whichever session it is in. What is still there in the end is killed.

Rejected: pytest-xdist, which starts more processes than two cores carry, or splits files whose tests share a cluster.
Rejected: parts by the mark `cluster`. Those tests take three times as long as all others.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

if TYPE_CHECKING:
    from collections.abc import Sequence

CLUSTERS = ("cluster", "preflight", "quarantine", "tiers")
#: name -> arguments for pytest; each test belongs to exactly one
PARTS = {
    "shuffle": ("tests/shuffle",),
    "clusters": tuple(f"tests/{folder}" for folder in CLUSTERS),
    "others": tuple(f"--ignore=tests/{folder}" for folder in ("shuffle", *CLUSTERS)),
}
LOGS = Path(".pytest_cache")
#: seconds that a part gets to end its clusters after an interruption
GRACE_SECONDS = 20.0
_PR_SET_CHILD_SUBREAPER = 36
_SUMMARY = "short test summary info"


class Part:
    """One pytest with its log."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.log = LOGS / f"{name}.log"
        command = [sys.executable, "-m", "pytest", *arguments, "-m", "not slow", "-o", f"cache_dir={LOGS / name}"]
        # The summary is cut to 80 columns at lower verbosity; the rest is as without `-v`.
        command += ["-vv", "-o", "verbosity_test_cases=0", "-o", "verbosity_assertions=0"]
        self.log.write_text(f"== pytest {' '.join(arguments)}\n")
        with self.log.open("ab") as out:
            # A session of its own: an interruption from the keyboard comes through this process only, and once.
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        self._read = self.log.open("rb")

    def print_more(self) -> None:
        """What was written since the last call."""
        sys.stdout.buffer.write(self._read.read())
        sys.stdout.buffer.flush()

    def failures(self) -> list[str]:
        """The lines of pytest's summary that name a test, and one more if that does not explain the exit code."""
        text = self.log.read_text(errors="replace")
        lines = text.rpartition(_SUMMARY)[2].splitlines() if _SUMMARY in text else []
        found = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        code = self.process.returncode
        if code and not found:
            what = f"signal {-code}" if code < 0 else f"exit code {code}"
            found.append(f"ERROR {self.log} - pytest ended with {what}")
        return found


def reap(parts: list[Part]) -> None:
    """Take the exit codes of all that ended; orphans as well, or they would look alive to the test that ended them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        for part in parts:
            if part.process.pid == pid:
                part.process.returncode = os.waitstatus_to_exitcode(status)


def kill_all() -> None:
    """End all descendants. Again and again: one that dies hands its children to this process."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        reap([])
        time.sleep(0.01)


def wait(parts: list[Part], seconds: float = float("inf")) -> None:
    """Until all have ended, printing one after the other."""
    deadline = time.monotonic() + seconds
    for part in parts:
        while part.process.returncode is None and time.monotonic() < deadline:
            part.print_more()
            time.sleep(0.05)
            reap(parts)
        part.print_more()


def main() -> int:
    def on_signals(handler: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, handler)

    def stop(number: int, frame: object) -> NoReturn:
        on_signals(signal.SIG_IGN)  # a second one must not interrupt the cleaning
        raise KeyboardInterrupt(number)

    on_signals(stop)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    LOGS.mkdir(exist_ok=True)
    parts: list[Part] = []
    try:
        for name, arguments in PARTS.items():
            parts.append(Part(name, arguments))
        wait(parts)
    except KeyboardInterrupt as e:
        for part in parts:
            if part.process.returncode is None:
                os.kill(part.process.pid, signal.SIGINT)  # pytest ends its fixtures
        wait(parts, GRACE_SECONDS)
        return 128 + int(e.args[0])
    finally:
        on_signals(signal.SIG_IGN)
        kill_all()
    lines = [line for part in parts for line in part.failures()]
    print("", *lines, sep="\n", flush=True)
    return 1 if any(part.process.returncode for part in parts) else 0


if __name__ == "__main__":
    sys.exit(main())
