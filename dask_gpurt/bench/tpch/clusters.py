"""Clusters of real processes, started as a user starts them: one ``dask scheduler``, n ``dask worker``.

An engine is a way to start the scheduler, and nothing else differs:

=============  ===================================================================
stock          ``dask scheduler``
stock-inf      the same with ``worker-saturation: inf``: root tasks are not queued
gpurt          ``dask scheduler --preload dask_gpurt.preload``
gpurt-stock    the same with ``DASK_GPURT__POLICY=stock``: loaded, and told to do nothing
gpurt-verify   the same with ``DASK_GPURT__TRANSFERS__VERIFY=true``: fetches with checksums
gpurt-join     the same with ``DASK_GPURT__SHUFFLE__JOIN_FILTER=auto``: rows that cannot match are not sent
=============  ===================================================================

An engine may be named twice (``stock,stock``); the second is called ``stock#2``, and what differs between the two is
the noise of the machine.

Every process is the head of a group of its own, so that a nanny's worker goes with it, and every group is killed on
`close`, which the caller runs on all ways out. Workers end by themselves when the scheduler stays away for a minute.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import IO, TYPE_CHECKING, Any

from distributed import Client

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

#: engine -> (more arguments of the scheduler, more environment of all its processes)
ENGINES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "stock": ((), {}),
    "stock-inf": ((), {"DASK_DISTRIBUTED__SCHEDULER__WORKER_SATURATION": "inf"}),
    "gpurt": (("--preload", "dask_gpurt.preload"), {"DASK_GPURT__POLICY": "gpurt"}),
    "gpurt-stock": (("--preload", "dask_gpurt.preload"), {"DASK_GPURT__POLICY": "stock"}),
    "gpurt-verify": (
        ("--preload", "dask_gpurt.preload"),
        {"DASK_GPURT__POLICY": "gpurt", "DASK_GPURT__TRANSFERS__VERIFY": "true"},
    ),
    "gpurt-join": (
        ("--preload", "dask_gpurt.preload"),
        {"DASK_GPURT__POLICY": "gpurt", "DASK_GPURT__SHUFFLE__JOIN_FILTER": "auto"},
    ),
}

#: the folder that holds the package: the root of a checkout, or site-packages
_HOME = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))

#: in each directory of a cluster, which the next one may empty
_STAMP = "dask-gpurt-cluster"
#: seconds until all workers must have registered; a first import on a cold disk takes many of them
START_TIMEOUT_S = 120.0


def parse_engines(text: str) -> list[str]:
    """``"stock,gpurt"`` -> names, in order; repeats get ``#2``, ``#3``.

    Raises
    ------
    ValueError
        Unknown engine, or none.
    """
    out: list[str] = []
    for item in text.split(","):
        name = item.strip()
        if name not in ENGINES:
            raise ValueError(f"engines: {name!r} is unknown; there are {', '.join(ENGINES)}, separated by commas")
        count = sum(known.partition("#")[0] == name for known in out)
        out.append(f"{name}#{count + 1}" if count else name)
    return out


class ClusterError(RuntimeError):
    """A process did not start or ended early; the text has the end of its log."""


class ProcessCluster:
    """One engine's scheduler and workers on this machine, and a client.

    Parameters
    ----------
    engine
        A name from `parse_engines`.
    workers
        Number of worker processes, each with `threads` threads and `memory_limit_bytes`.
    directory
        For logs, scratch and spill files; emptied at start, if it is of an earlier run.
    """

    def __init__(self, engine: str, *, workers: int, threads: int, memory_limit_bytes: int, directory: str) -> None:
        self.engine = engine
        self.directory = self._first_directory = os.path.abspath(directory)
        #: times that `restart` started everything anew
        self.restarts = 0
        #: set while a query runs on it
        self.busy = threading.Event()
        self._workers = workers
        self._threads = threads
        self._memory_limit_bytes = memory_limit_bytes
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._client: Client | None = None

    @property
    def holds_plans(self) -> bool:
        """Whether a client of this engine has the extension's preload too."""
        return self.engine.partition("#")[0] in ("gpurt", "gpurt-verify", "gpurt-join")

    @property
    def client(self) -> Client:
        if self._client is None:
            raise RuntimeError(f"the {self.engine} cluster is not running; call start")
        return self._client

    @property
    def address(self) -> str:
        return str(self.client.scheduler_info()["address"])

    @property
    def dashboard(self) -> str:
        """Address of the dashboard, or "" if the scheduler has none (bokeh missing)."""
        port = self.client.scheduler_info()["services"].get("dashboard")
        return f"http://127.0.0.1:{port}/status" if port else ""

    @property
    def pids(self) -> list[int]:
        """Of the scheduler first, then of the nannies."""
        return [process.pid for _, process in self._processes]

    def start(self) -> ProcessCluster:
        """`launch` and `join`."""
        self.launch()
        return self.join()

    def launch(self) -> None:
        """Start all processes and return at once; several clusters come up faster together.

        Raises
        ------
        ClusterError
            The directory holds something else, or a cluster that runs; it is as it was.
        """
        if os.path.isdir(self.directory) and os.listdir(self.directory):
            # Whose it is, its name does not say, and nor do the logs in it: "stock" may be data of a user's.
            if not os.path.exists(os.path.join(self.directory, _STAMP)):
                raise ClusterError(
                    f"{self.directory} is not a directory of this benchmark (no {_STAMP}). Remedy: another --out, "
                    "or remove it"
                )
            with (
                contextlib.suppress(FileNotFoundError),
                open(os.path.join(self.directory, "scheduler.log"), "rb") as log,
            ):
                if not _lock(log):
                    raise ClusterError(
                        f"{self.directory} is in use by a cluster that runs (--keep-running, or another benchmark). "
                        "Remedy: another --out, or stop that cluster"
                    )
            shutil.rmtree(self.directory)
        os.makedirs(self.directory, exist_ok=True)
        with open(os.path.join(self.directory, _STAMP), "w"):
            pass
        arguments, _ = ENGINES[self.engine.partition("#")[0]]
        scheduler_file = os.path.join(self.directory, "scheduler.json")
        try:
            self._spawn(
                "scheduler",
                *("scheduler", "--host", "127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0"),
                *("--scheduler-file", scheduler_file, *arguments),
            )
            for i in range(self._workers):
                self._spawn(
                    f"worker-{i}",
                    *(
                        "worker",
                        "--scheduler-file",
                        scheduler_file,
                        "--host",
                        "127.0.0.1",
                        "--nthreads",
                        str(self._threads),
                    ),
                    *("--memory-limit", str(self._memory_limit_bytes), "--name", f"{self.engine}-{i}"),
                    *("--no-dashboard", "--death-timeout", "60"),
                    *("--local-directory", os.path.join(self.directory, "scratch", f"worker-{i}")),
                )
        except BaseException:
            self.close()
            raise

    def join(self) -> ProcessCluster:
        """Wait until all workers are there.

        Raises
        ------
        ClusterError
            Something ended early or took longer than `START_TIMEOUT_S`; everything was stopped again.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            address = self._address(os.path.join(self.directory, "scheduler.json"), deadline)
            self._client = Client(address, timeout=START_TIMEOUT_S, set_as_default=False)
            while len(self._client.scheduler_info(n_workers=-1)["workers"]) < self._workers:
                self._check(deadline)
                time.sleep(0.05)
        except BaseException:
            self.close()
            raise
        return self

    def restart(self) -> ProcessCluster:
        """`close` and `start`. The logs so far stay; the new ones are in ``<directory>-restart<n>``."""
        self.close()
        self.restarts += 1
        self.directory = f"{self._first_directory}-restart{self.restarts}"
        return self.start()

    def kill_worker(self) -> str:
        """SIGKILL the process of one worker, not its nanny, which starts another. Returns the address it had."""
        address, pid = next(iter(self.client.run(os.getpid).items()))
        os.kill(pid, signal.SIGKILL)
        return str(address)

    def close(self) -> None:
        """Kill every process of this cluster. Never raises for one that has gone; a second call does nothing."""
        client, self._client = self._client, None
        processes, self._processes = self._processes, []
        if not processes:
            return  # never started, or left to run: its workers need their scratch
        try:
            if client is not None:
                # First, or it would log that its scheduler is gone. A hung scheduler costs the timeout, no more.
                with contextlib.suppress(Exception):
                    client.close(timeout=2)
            _signal(processes, signal.SIGTERM)
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline and any(process.poll() is None for _, process in processes):
                time.sleep(0.02)
        finally:
            # A second Ctrl-C while we wait must not leave them behind.
            _signal(processes, signal.SIGKILL)
            for _, process in processes:
                process.wait()
            shutil.rmtree(os.path.join(self.directory, "scratch"), ignore_errors=True)

    def leave(self) -> None:
        """Let go of the processes: they go on without this one."""
        client, self._client = self._client, None
        self._processes = []
        if client is not None:
            client.close()

    def __enter__(self) -> ProcessCluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _spawn(self, name: str, *arguments: str) -> None:
        with open(os.path.join(self.directory, f"{name}.log"), "wb") as log:
            _lock(log)
            process = subprocess.Popen(
                [sys.executable, "-m", "dask", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self.directory,
                env=environment(self.engine),
                start_new_session=True,
            )
        self._processes.append((name, process))

    def _address(self, scheduler_file: str, deadline: float) -> str:
        while True:
            # The file exists before it is written; half of it is no JSON.
            with contextlib.suppress(OSError, ValueError), open(scheduler_file) as f:
                return str(json.load(f)["address"])
            self._check(deadline)
            time.sleep(0.05)

    def _check(self, deadline: float) -> None:
        for name, process in self._processes:
            if process.poll() is not None:
                raise ClusterError(
                    f"{self.engine}: the {name} ended with {process.returncode}. Its log ends:\n{self.log_end(name)}"
                )
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{self.engine}: {self._workers} workers were not there after {START_TIMEOUT_S:g} s. "
                f"Logs: {self.directory}. The scheduler's ends:\n{self.log_end('scheduler')}"
            )

    def log_end(self, name: str) -> str:
        """The last lines of a process's log."""
        try:
            with open(os.path.join(self.directory, f"{name}.log"), errors="replace") as f:
                return "".join(f.readlines()[-15:])
        except OSError as e:
            return f"(no log: {e})"


def _lock(log: IO[bytes]) -> bool:
    """Lock a log, which the process that writes it holds open and so keeps locked; False: another has locked it."""
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks does not tell
    return True


def _signal(processes: Sequence[tuple[str, subprocess.Popen[bytes]]], number: signal.Signals) -> None:
    # Workers first: with their scheduler gone they would only log about it.
    for _, process in reversed(processes):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def environment(engine: str) -> dict[str, str]:
    """The environment of an engine's processes: the caller's, minus what would make engines differ from their names."""
    _, more = ENGINES[engine.partition("#")[0]]
    # A user's own preloads, in the environment or by DASK_GPURT__*, would end up in the stock cluster too.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DASK_DISTRIBUTED__", "DASK_GPURT__POLICY"))}
    # The same for preloads in a YAML file: the environment wins over it, the command line over the environment.
    env.update({f"DASK_DISTRIBUTED__{role}__PRELOAD": "[]" for role in ("SCHEDULER", "WORKER", "NANNY")})
    # A checkout is not found without; site-packages is, and put first it would hide modules of the standard library.
    home = [] if os.path.basename(_HOME) in ("site-packages", "dist-packages") else [_HOME]
    # Absolute, as the processes run in another directory.
    path = [os.path.abspath(p) for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
    env["PYTHONPATH"] = os.pathsep.join([*home, *path])
    # Arrow's hash join warns once per process about buffers that came out of a message; it works all the same.
    env["ACERO_ALIGNMENT_HANDLING"] = "ignore"
    # More threads than cores inside one task help no engine and blur what is measured.
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("OPENBLAS_NUM_THREADS", "1")
    return {**env, **more}


def memory_limit_bytes(free_bytes: int, clusters: int, workers: int) -> int:
    """Per worker: its share of three quarters of what is free, all clusters being up at once; at most 8 GiB.

    Raises
    ------
    ValueError
        Less than 512 MiB would be left for each.
    """
    limit = min(8 * 2**30, int(free_bytes * 0.75) // max(1, clusters * workers))
    if limit < 512 * 2**20:
        raise ValueError(
            f"{free_bytes / 2**30:.1f} GiB of free memory leave {limit / 2**20:.0f} MiB for each of {workers} workers "
            f"in {clusters} clusters, which is too little. Remedy: fewer --engines or --workers, or set --memory-limit"
        )
    return limit


def describe(cluster: ProcessCluster) -> dict[str, Any]:
    """What was started, for a report."""
    info = cluster.client.scheduler_info(n_workers=-1)
    return {
        "engine": cluster.engine,
        "scheduler": cluster.address,
        "dashboard": cluster.dashboard,
        "workers": len(info["workers"]),
        "threads_each": sorted({w["nthreads"] for w in info["workers"].values()}),
        "memory_limit_bytes_each": sorted({w["memory_limit"] for w in info["workers"].values()}),
        "restarts": cluster.restarts,
    }


def close_all(clusters: Sequence[ProcessCluster]) -> None:
    """Close every one of them, even if one fails."""
    with contextlib.ExitStack() as stack:
        for cluster in clusters:
            stack.callback(cluster.close)
