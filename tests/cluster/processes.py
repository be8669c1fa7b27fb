"""Real `dask scheduler` and `dask worker` processes for tests, as a user starts them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

T = TypeVar("T")

#: what an extended scheduler installs with the usual settings
SCHEDULER_PARTS = ("ledger", "next-use", "placement", "preflight", "quarantine", "shuffle", "workers")


class Processes:
    """Starts `dask` commands with their output in files; `close` ends them all."""

    def __init__(self, directory: Path, env: dict[str, str] | None = None) -> None:
        self.directory = directory
        self.env = {
            **os.environ,
            # A late timer of an earlier loss closes a nanny that is restarting: not what is tested.
            "DASK_DISTRIBUTED__DEPLOY__LOST_WORKER_TIMEOUT": "1 hour",
            **(env or {}),
        }
        self.running: list[tuple[subprocess.Popen[bytes], Path]] = []

    def start(
        self, *arguments: str, prefix: Sequence[str] = (), env: dict[str, str] | None = None
    ) -> tuple[subprocess.Popen[bytes], Path]:
        """``PREFIX dask ARGUMENTS``; returns the process and the file with what it prints."""
        log = self.directory / f"{len(self.running)}-{arguments[0]}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "dask", *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**self.env, **(env or {})},
                cwd=self.directory,
                start_new_session=True,
            )
        self.running.append((process, log))
        return process, log

    def scheduler(self, *arguments: str) -> str:
        """Start a scheduler; returns its address once it listens."""
        file = self.directory / "scheduler.json"
        process, log = self.start(
            *("scheduler", "--host", "127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0"),
            *("--scheduler-file", str(file), *arguments),
        )
        while not (file.exists() and file.stat().st_size):
            assert process.poll() is None, f"the scheduler ended with {process.returncode}:\n{log.read_text()}"
            time.sleep(0.05)
        import json

        return str(json.loads(file.read_text())["address"])

    def worker(
        self, address: str, *arguments: str, prefix: Sequence[str] = (), env: dict[str, str] | None = None
    ) -> tuple[subprocess.Popen[bytes], Path]:
        """Start one worker with a nanny."""
        return self.start(
            *("worker", address, "--host", "127.0.0.1", "--nthreads", "1", "--no-dashboard"),
            *("--local-directory", str(self.directory / "scratch"), *arguments),
            prefix=prefix,
            env=env,
        )

    def close(self) -> None:
        # A worker without a nanny whose scheduler ends before it does not end at SIGTERM.
        everything = [process for process, _ in self.running]
        first = [process for process in everything if "--no-nanny" in process.args]  # type: ignore[operator]
        for some in (first, [process for process in everything if process not in first]):
            for process in some:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
            for process in some:
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                # A nanny killed early can leave its worker, which is in the same session.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def processes(directory: Path, env: dict[str, str] | None = None) -> Iterator[Processes]:
    p = Processes(directory, env)
    try:
        yield p
    finally:
        p.close()


def together(*calls: Callable[[], T]) -> list[T]:
    """What the calls return, in their order. Each waits for something, so they do it side by side, some at a time."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def wait_text(log: Path, text: str, seconds: float = 30) -> str:
    """Wait until a log file has a text; returns the whole."""
    deadline = time.monotonic() + seconds
    while True:
        got = log.read_text()
        if text in got:
            return got
        assert time.monotonic() < deadline, f"{text!r} did not appear in:\n{got}"
        time.sleep(0.05)


def arguments(**settings: Sequence[str] | str) -> list[str]:
    """``policy="stock"`` -> ``["--gpurt-policy", "stock"]``"""
    return [p for key, value in settings.items() for p in ("--gpurt-" + key.replace("_", "-"), str(value))]
