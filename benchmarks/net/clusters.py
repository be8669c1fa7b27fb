"""Clusters on the nodes of `racks`, and a process on node 0 that measures them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from benchmarks import data

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks.net.racks import Racks


@dataclasses.dataclass(frozen=True)
class Kind:
    """One cluster."""

    #: of its scheduler, on node 0
    port: int
    #: with the extension
    gpurt: bool
    #: more of the environment of its processes
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Lab:
    """Processes on the nodes of racks.

    Parameters
    ----------
    folder
        For logs and scratch.
    env
        The environment of all processes.
    """

    def __init__(self, racks: Racks, folder: str, env: Mapping[str, str]) -> None:
        self.racks = racks
        self.folder = folder
        path = os.pathsep.join(filter(None, [data.ROOT, os.environ.get("PYTHONPATH")]))
        own = {"OMP_NUM_THREADS": "1", "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "20s", "PYTHONPATH": path}
        self.env = {**os.environ, **own, **env}

    @contextlib.contextmanager
    def clusters(self, kinds: Mapping[str, Kind], nodes: Sequence[int], memory_limit: str) -> Iterator[None]:
        """Clusters with a worker of one thread on each of the nodes; their processes end with the block."""
        started: list[subprocess.Popen[bytes]] = []

        def start(node: int, log: str, env: Mapping[str, str], *command: str) -> None:
            with open(os.path.join(self.folder, log), "wb") as f:
                argv = [*self.racks.command(node), sys.executable, "-m", *command]
                started.append(subprocess.Popen(argv, stdout=f, stderr=f, env={**self.env, **env}, cwd=self.folder))

        host = self.racks.address(0)
        try:
            for name, kind in kinds.items():
                preload = ["--preload", "dask_gpurt.preload"] if kind.gpurt else []
                # fmt: off
                start(0, f"{name}-s", kind.env, "distributed.cli.dask_scheduler", "--host", host,
                      "--port", str(kind.port), "--no-dashboard", *preload)
                for i in nodes:
                    start(i, f"{name}-{i}", kind.env, "distributed.cli.dask_worker", f"tcp://{host}:{kind.port}",
                          "--host", self.racks.address(i), "--name", f"n{i}", "--nthreads", "1",
                          "--memory-limit", memory_limit, "--no-nanny", "--no-dashboard",
                          "--local-directory", os.path.join(self.folder, f"{name}{i}"))
                # fmt: on
            yield
        finally:
            for p in started:
                p.send_signal(signal.SIGTERM)
            for p in started:
                try:
                    p.wait(5)
                except subprocess.TimeoutExpired:
                    p.kill()
                    p.wait()

    def inside(self, module: str, *arguments: str) -> dict[str, Any]:
        """What a module says in its last line, as JSON, when it runs on node 0.

        It gets ``--inside``, the address of that node, and ``--switch``, the namespace whose bytes to count.

        Raises
        ------
        SystemExit
            It failed; the logs of the clusters are printed before.
        """
        command = [*self.racks.command(0), sys.executable, "-m", module, "--inside", self.racks.address(0)]
        command += ["--switch", f"{self.racks.prefix}a", *arguments]
        done = subprocess.run(command, env=self.env, cwd=data.ROOT, stdout=subprocess.PIPE, check=False)
        if done.returncode:
            for log in sorted(os.listdir(self.folder)):
                path = os.path.join(self.folder, log)
                if os.path.isfile(path):
                    with open(path) as f:
                        print(f"--- {log}\n{f.read()[-2000:]}", file=sys.stderr)
            raise SystemExit("the measuring process failed; the logs are above")
        out: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return out
