"""What the gate keeps from sick workers, and what it costs those that are sound.

    python -m benchmarks.preflight --part sick --out results.json     # 3 minutes; root, for the limits
    python -m benchmarks.preflight --part start --runs 5 --out ...    # 3 minutes
    python -m benchmarks.preflight --part event --out ...             # 20 seconds

- `sick`: one scheduler, three sound workers and four sick ones, with ``gpurt.preflight`` `hold` and `off`. The sick
  ones lack a module (`lacks`), have another version of this package (`version`), cannot write where values are
  spilled to (`read-only`, in a mount namespace), or have 20 % of a core (`slow`, in a control group; where none can
  be made, they are stopped for 80 % of each 0.1 s). Tasks are submitted all the time. The tasks
  that each worker ran, and what `status` says of it.
- `start`: a `LocalCluster` of two processes, in turns: seconds until it is there, until the first result, and until all
  workers run.
- `event`: microseconds on the scheduler of a change of status with and without the gate, of a worker that tells its
  class, and of a report, with 100 and 1000 workers known.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import Client, get_worker

import dask_gpurt
from benchmarks import compare, data

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULE = "only_sound_workers_have_it"
SICK = ("lacks", "version", "read-only", "slow")
MODES = ("off", "warn", "hold")
#: of one core, of the slow worker
SHARE = 0.2


# ------------------------------------------------------------------ sick workers


@contextlib.contextmanager
def control_group() -> Iterator[Path | None]:
    """A control group with a limit of `SHARE` of one core; None where none can be made."""
    for base, files in (
        ("/sys/fs/cgroup/cpu", {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": str(int(SHARE * 1e5))}),
        ("/sys/fs/cgroup", {"cpu.max": f"{int(SHARE * 1e5)} 100000"}),
    ):
        group = Path(base) / f"gpurt-benchmark-{os.getpid()}"
        try:
            group.mkdir()
            for name, text in files.items():
                (group / name).write_text(text)
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        try:
            yield group
        finally:
            for _ in range(50):
                with contextlib.suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.1)
        return
    yield None


class StopAndGo(threading.Thread):
    """Stops the processes of a session for most of the time, until it is ended."""

    def __init__(self, session: int) -> None:
        super().__init__(daemon=True)
        self.session = session
        self.ended = threading.Event()

    def run(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            while not self.ended.wait(SHARE * 0.1):
                os.killpg(self.session, signal.SIGSTOP)
                time.sleep((1 - SHARE) * 0.1)
                os.killpg(self.session, signal.SIGCONT)


class Sick:
    """One cluster of sound and sick workers."""

    def __init__(self, folder: Path, mode: str, group: Path | None) -> None:
        self.folder, self.group = folder, group
        self.processes: list[subprocess.Popen[bytes]] = []
        self.stopper: StopAndGo | None = None
        here = str(Path(dask_gpurt.__file__).parents[1])
        modules = folder / "modules"
        modules.mkdir()
        (modules / f"{MODULE}.py").write_text("")
        other = folder / "other"
        shutil.copytree(Path(here) / "dask_gpurt", other / "dask_gpurt", ignore=shutil.ignore_patterns("__pycache__"))
        (other / "dask_gpurt" / "_version.py").write_text('__version__ = "0.0.1"\n')
        self.spill = folder / "spill"
        self.spill.mkdir()
        self.path = {"sound": f"{modules}:{here}", "lacks": here, "version": f"{other}:{modules}"}
        file = folder / "scheduler.json"
        settings = ["preflight", mode, "preflight-imports", f"['{MODULE}']", "tiers-directory", str(self.spill)]
        flags = [f"--gpurt-{x}" if i % 2 == 0 else x for i, x in enumerate(settings)]
        self._start(
            "sound", "scheduler", "--host", "127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0",
            "--scheduler-file", str(file), "--preload", "dask_gpurt.preload", *flags,
        )  # fmt: skip
        while not (file.exists() and file.stat().st_size):
            time.sleep(0.05)
        self.address = json.loads(file.read_text())["address"]

    def _start(self, kind: str, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        env = {**os.environ, "PYTHONPATH": self.path.get(kind, self.path["sound"])}
        log = (self.folder / f"{len(self.processes)}.log").open("wb")
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "dask", *arguments],
            stdout=log, stderr=subprocess.STDOUT, env=env, cwd=self.folder, start_new_session=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def worker(self, name: str, kind: str) -> None:
        """Start one worker."""
        prefix: tuple[str, ...] = ()
        if kind == "read-only":
            script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
            prefix = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, str(self.spill))
        elif kind == "slow" and self.group is not None:
            prefix = ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(self.group))
        process = self._start(
            kind, "worker", self.address, "--host", "127.0.0.1", "--nthreads", "1", "--no-dashboard", "--name", name,
            "--local-directory", str(self.folder / "scratch"), "--memory-limit", "1 GiB", prefix=prefix,
        )  # fmt: skip
        if kind == "slow" and self.group is None:
            self.stopper = StopAndGo(process.pid)
            self.stopper.start()

    def close(self) -> None:
        """End all processes."""
        if self.stopper is not None:
            self.stopper.ended.set()
            self.stopper.join()
        for process in reversed(self.processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _where(x: int) -> str:
    time.sleep(0.01)
    return str(get_worker().name)


def _states(dask_scheduler: Any) -> dict[str, str]:
    return {str(ws.name): ws.status.name for ws in dask_scheduler.workers.values()}


def sick(args: argparse.Namespace) -> dict[str, Any]:
    """For each mode: tasks that each worker ran, and what was found of it."""
    out: dict[str, Any] = {}
    with control_group() as group:
        out["slow by"] = "a limit of a control group" if group is not None else "SIGSTOP"
        for mode in ("hold", "off"):
            with tempfile.TemporaryDirectory() as folder:
                cluster = Sick(Path(folder), mode, group)
                try:
                    out[mode] = _sick(cluster, args.seconds)
                finally:
                    cluster.close()
            print(mode, json.dumps(out[mode], indent=1), flush=True)
    return out


def _sick(cluster: Sick, seconds: float) -> dict[str, Any]:
    with Client(cluster.address) as client:
        for i in range(3):
            cluster.worker(f"sound-{i}", "sound")
        client.wait_for_workers(3, timeout=120)
        for kind in SICK:
            cluster.worker(kind, kind)
        ran: collections.Counter[str] = collections.Counter()
        deadline = time.monotonic() + 120
        end = None
        while end is None or time.monotonic() < end:
            ran.update(client.gather(client.map(_where, range(50), pure=False)))
            if end is None and (len(client.run_on_scheduler(_states)) == 3 + len(SICK) or time.monotonic() > deadline):
                end = time.monotonic() + seconds
        status = dask_gpurt.status(client)
        preflight = status.scheduler["preflight"]
        found = {
            member.name: {
                "status": client.run_on_scheduler(_states).get(member.name),
                "tasks": ran[member.name],
                "findings": [
                    f"{f['check']}: {f['state']}: {f['found']}"
                    for f in preflight["workers"].get(address, {}).get("findings", [])
                ],
            }
            for address, member in status.members.items()
        }
        return {"workers": dict(sorted(found.items())), "counts": preflight["counts"], "summary": str(status)}


# ------------------------------------------------------------------ what it costs


def _started(mode: str) -> dict[str, float]:
    start = time.perf_counter()
    with (
        dask_gpurt.local_cluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0", settings={"preflight": mode}
        ) as cluster,
        Client(cluster) as client,
    ):
        up = time.perf_counter()
        client.submit(int, 1).result()
        first = time.perf_counter()
        client.wait_for_workers(2)
        return {"up": up - start, "first_result": first - start, "all_running": time.perf_counter() - start}


def start(args: argparse.Namespace) -> dict[str, Any]:
    """Medians of seconds by mode, and over those of `off` in the same round."""
    runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for i, mode in compare.turns(list(MODES), args.runs + 1):
        figures = _started(mode)
        print(i, mode, {k: round(v, 3) for k, v in figures.items()}, flush=True)
        if i:
            runs[mode].append(figures)
    return {
        "median": {m: {k: statistics.median(r[k] for r in rs) for k in rs[0]} for m, rs in runs.items()},
        "more_seconds_than_off": {
            m: {k: statistics.median(r[k] - o[k] for r, o in zip(rs, runs["off"], strict=True)) for k in rs[0]}
            for m, rs in runs.items()
            if m != "off"
        },
        "runs": runs,
    }


async def _event(n: int, known: int, repeats: int) -> dict[str, float]:
    """Microseconds of each event, with so many workers known."""
    from distributed import Scheduler
    from distributed.core import Status

    from dask_gpurt.model.node_class import NodeClass
    from dask_gpurt.preflight.gate import Gate
    from dask_gpurt.preflight.members import Mode

    class Worker:
        """As much of a worker's state as a change of status that changes nothing looks at."""

        def __init__(self, address: str) -> None:
            self.address, self.status, self.extra = address, Status.init, dict[str, Any]()

    async with Scheduler(dashboard_address=":0", port=0) as scheduler:
        addresses = [f"tcp://10.0.{i // 250}.{i % 250}:1" for i in range(known)]
        handlers = scheduler.stream_handlers

        def change(status: str) -> float:
            handler, address = handlers["worker-status-change"], addresses[0]
            begin = time.perf_counter()
            for _ in range(n):
                handler(status=status, worker=address, stimulus_id="s")
            return (time.perf_counter() - begin) / n * 1e6

        node = NodeClass(cpu="x", cores=8, stack=(("dask", "1"),)).to_dict()
        report = {"findings": [], "own_seconds": 0.1, "peers": {}}
        out: collections.defaultdict[str, list[float]] = collections.defaultdict(list)
        for _ in range(repeats):
            scheduler.workers.update({a: Worker(a) for a in addresses})
            out["status, stock"].append(change("init"))
            gate = Gate(Mode.HOLD)
            await gate.start(scheduler)
            for address in addresses:
                gate.add_worker(scheduler, address)
            out["status, kept back"].append(change("running"))
            begin = time.perf_counter()
            for address in addresses:
                await gate.answer(address, node=node)
            middle = time.perf_counter()
            for member in gate.members.values():
                member.running = None  # the scheduler's own work is not what is measured
            turn = time.perf_counter()
            for address in addresses:
                await gate.answer(address, report=report)
            end = time.perf_counter()
            out["class told"].append((middle - begin) / known * 1e6)
            out["report"].append((end - turn) / known * 1e6)
            out["status, passed"].append(change("init"))
            gate.stop()
            scheduler.workers.clear()
    return {what: statistics.median(values) for what, values in out.items()}


def event(args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds, medians of the runs."""
    import asyncio

    return {str(known): asyncio.run(_event(20_000, known, args.runs)) for known in (100, 1000)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("sick", "start", "event"), required=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0, help="of work after all workers have come, with `sick`")
    parser.add_argument("--out", default="-", help="JSON file; - for standard output")
    args = parser.parse_args()
    report = {
        **data.facts(f"{data.cores()} CPU cores, processes of this machine, no GPU"),
        "load_before": os.getloadavg()[0],
        "arguments": vars(args),
        "results": {"sick": sick, "start": start, "event": event}[args.part](args),
    }
    data.put(args.out, report)


if __name__ == "__main__":
    main()
