"""Is a worker's event loop free while it spills? Stock Dask and the tiers, alternating.

One worker makes arrays of several times its memory, then reads each again. Measured on its event loop: the gaps
between wake-ups of a task that sleeps 2 ms (gaps beyond 20 ms count as blocked), wall time of both phases, and the peak
resident set. The results are checked. Prints, and with ``--out`` writes, JSON with every run.

    python -m benchmarks.spill_loop --runs 5 --size 2GB --out spill_loop.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np
from dask.utils import parse_bytes
from distributed import Client, LocalCluster, Worker, WorkerPlugin, wait

from benchmarks import data
from dask_gpurt.config import Settings, TierSettings

PERIOD_SECONDS = 0.002
ALLOWED_SECONDS = 0.020


class Watchdog(WorkerPlugin):
    """Measures gaps on the loop and the resident set."""

    name = "loop-watchdog"

    async def setup(self, worker: Worker) -> None:
        self.worker = worker
        self.gaps: list[float] = []
        self.peak = 0
        self.task = asyncio.create_task(self.watch())

    async def watch(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            now = time.perf_counter()
            gap, last = now - last - PERIOD_SECONDS, now
            if gap > ALLOWED_SECONDS:
                self.gaps.append(gap)
            self.peak = max(self.peak, self.worker.monitor.proc.memory_info().rss)

    async def teardown(self, worker: Worker) -> None:
        self.task.cancel()


class Tiers(WorkerPlugin):
    """Installs what is measured."""

    name = "tiers"

    def __init__(self, settings: TierSettings) -> None:
        self.settings = settings

    async def setup(self, worker: Worker) -> None:
        from dask_gpurt.tiers import TierRuntime

        self.runtime = await TierRuntime.install(worker, self.settings)


def make(i: int, n: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(i).integers(0, 255, n, dtype="u1")


def digest(array: np.ndarray[Any, Any]) -> int:
    return int(array[::997].sum(dtype="i8"))


def collect(dask_worker: Worker) -> dict[str, Any]:
    dog = dask_worker.plugins["loop-watchdog"]
    gaps, dog.gaps = dog.gaps, []
    out = {"blocked_seconds": sum(gaps), "longest_gap_seconds": max(gaps, default=0.0), "peak_rss_bytes": dog.peak}
    tiers = dask_worker.plugins.get("tiers")
    if tiers is not None:
        stats = tiers.runtime.statistics()
        out["tiers"] = {k: stats[k] for k in ("written", "read", "sync_reads", "admission_wait_seconds", "fallbacks")}
    else:
        metrics = dask_worker.data.cumulative_metrics
        out["stock"] = {f"{label} {unit}": value for (label, unit), value in metrics.items()}
    return out


def one_run(kind: str, total_bytes: int, chunk_bytes: int, memory_limit: str) -> dict[str, Any]:
    n = total_bytes // chunk_bytes
    result: dict[str, Any] = {"kind": kind}
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(
            n_workers=1,
            threads_per_worker=1,
            processes=True,
            memory_limit=memory_limit,
            dashboard_address=None,
            local_directory=folder,
            silence_logs=logging.ERROR,
        ) as cluster,
        Client(cluster) as client,
    ):
        if kind == "tiers":
            client.register_plugin(Tiers(Settings.load().tiers))
        client.register_plugin(Watchdog())
        start = time.perf_counter()
        arrays = client.map(make, range(n), n=chunk_bytes, pure=False)
        wait(arrays)
        result["produce"] = {"wall_seconds": time.perf_counter() - start, **_only(client.run(collect))}
        start = time.perf_counter()
        digests = client.gather(client.map(digest, arrays))
        result["consume"] = {"wall_seconds": time.perf_counter() - start, **_only(client.run(collect))}
        result["correct"] = digests == [digest(make(i, chunk_bytes)) for i in range(n)]
    return result


def _only(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (result,) = results.values()
    return result


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for kind in ("stock", "tiers"):
        mine = [r for r in runs if r["kind"] == kind]
        out[kind] = {
            f"{phase} {figure}": {
                "median": statistics.median(r[phase][figure] for r in mine),
                "min": min(r[phase][figure] for r in mine),
                "max": max(r[phase][figure] for r in mine),
            }
            for phase in ("produce", "consume")
            for figure in ("wall_seconds", "blocked_seconds", "longest_gap_seconds", "peak_rss_bytes")
        }
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="of each kind")
    parser.add_argument("--size", default="2GB", help="bytes that the worker makes")
    parser.add_argument("--chunk", default="50MB", help="bytes of one array")
    parser.add_argument("--memory-limit", default="1GiB", help="of the worker")
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args(argv)
    runs = []
    for i in range(args.runs):
        # Alternating, and each first in turn: the machine's state is the same for both.
        for kind in ("stock", "tiers") if i % 2 == 0 else ("tiers", "stock"):
            runs.append(one_run(kind, parse_bytes(args.size), parse_bytes(args.chunk), args.memory_limit))
            print(json.dumps(runs[-1]), file=sys.stderr)
    report = {
        **data.facts(f"{data.cores()} CPU cores, one worker with one thread in this process, local disk, no GPU"),
        "benchmark": "spill_loop",
        "arguments": vars(args),
        "correct": all(r["correct"] for r in runs),
        "summary": summary(runs),
        "runs": runs,
    }
    print(json.dumps(report["summary"], indent=1))
    if args.out:
        print(data.write_json(args.out, report))
    return 0 if report["correct"] else 1


if __name__ == "__main__":
    sys.exit(main())
