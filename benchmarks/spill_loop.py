"""Is a worker's event loop free while it spills? Stock Dask and the tiers, alternating.

One worker makes arrays of several times its memory, then reads each again. Measured on its event loop (`watchdog`): the
gaps between wake-ups of a task that sleeps 2 ms, and what was at work in the long ones; beside them the longest time
that code of the tiers held the loop, as they count it themselves; wall time of both phases; the peak resident set. The
results are checked. Prints, and with ``--out`` writes, JSON with every run.

    python -m benchmarks.spill_loop --runs 5 --size 10GB --out spill_loop.json --add
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from dask.utils import parse_bytes
from distributed import Client, LocalCluster, Worker, WorkerPlugin, wait

from benchmarks import compare, data, watchdog
from dask_gpurt.config import Settings, TierSettings

FIGURES = (
    "wall_seconds",
    "loop_gaps_seconds",
    "longest_loop_gap_seconds",
    "long_gaps",
    "own_loop_max_seconds",
    "own_loop_sum_seconds",
    "peak_rss_bytes",
)


class Tiers(WorkerPlugin):
    """Installs what is measured."""

    name = "tiers"

    def __init__(self, settings: TierSettings) -> None:
        self.settings = settings

    async def setup(self, worker: Worker) -> None:
        from dask_gpurt.tiers.runtime import TierRuntime

        self.runtime = await TierRuntime.install(worker, self.settings)


def make(i: int, n: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(i).integers(0, 255, n, dtype="u1")


def digest(array: np.ndarray[Any, Any]) -> int:
    return int(array[::997].sum(dtype="i8"))


def collect(dask_worker: Worker) -> dict[str, Any]:
    out = watchdog.collect(dask_worker)
    tiers = dask_worker.plugins.get("tiers")
    if tiers is not None:
        stats = tiers.runtime.statistics()
        out["own_loop_max_seconds"] = stats["loop_blocked_seconds"]["max"]
        out["own_loop_sum_seconds"] = stats["loop_blocked_seconds"]["sum"]
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
        client.register_plugin(watchdog.Watchdog())
        start = time.perf_counter()
        arrays = client.map(make, range(n), n=chunk_bytes, pure=False)
        wait(arrays)
        result["produce"] = {"wall_seconds": time.perf_counter() - start, **_only(client.run(collect))}
        start = time.perf_counter()
        digests = client.gather(client.map(digest, arrays))
        result["consume"] = {"wall_seconds": time.perf_counter() - start, **_only(client.run(collect))}
    with ThreadPoolExecutor() as threads:
        result["correct"] = digests == list(threads.map(lambda i: digest(make(i, chunk_bytes)), range(n)))
    return result


def _only(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (result,) = results.values()
    return result


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for kind in dict.fromkeys(r["kind"] for r in runs):
        mine = [r for r in runs if r["kind"] == kind]
        figures = [f for f in FIGURES if f in mine[0]["produce"]]
        out[kind] = {
            f"{phase} {figure}": {
                "median": statistics.median(r[phase][figure] for r in mine),
                "min": min(r[phase][figure] for r in mine),
                "max": max(r[phase][figure] for r in mine),
            }
            for phase in ("produce", "consume")
            for figure in figures
        }
        kept = Counter[str]()
        for run in mine:
            for phase in ("produce", "consume"):
                kept.update(run[phase]["long_gaps_kept_by"])
        out[kind]["runs"] = len(mine)
        out[kind]["gaps over 50 ms, by what kept the loop"] = dict(kept)
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="of each kind")
    parser.add_argument("--size", default="2GB", help="bytes that the worker makes")
    parser.add_argument("--chunk", default="50MB", help="bytes of one array")
    parser.add_argument("--memory-limit", default="1GiB", help="of the worker")
    parser.add_argument("--kinds", nargs="+", default=["stock", "tiers"], choices=["stock", "tiers"])
    parser.add_argument("--add", action="store_true", help="keep the runs that are in --out already")
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args(argv)
    runs: list[dict[str, Any]] = data.earlier(args.out).get("runs", []) if args.add else []
    for _, kind in compare.turns(args.kinds, args.runs):
        runs.append(one_run(kind, parse_bytes(args.size), parse_bytes(args.chunk), args.memory_limit))
        runs[-1]["setup"] = {k: getattr(args, k) for k in ("size", "chunk", "memory_limit")}
        print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
        report = {
            **data.facts(f"{data.cores()} CPU cores, one worker process with one thread, local disk, no GPU"),
            "benchmark": "spill_loop",
            "arguments": vars(args),
            "correct": all(r["correct"] for r in runs),
            "summary": summary(runs),
            "runs": runs,
        }
        if args.out:  # after each run: a long series may be cut short
            data.write_json(args.out, report)
    print(json.dumps(report["summary"], indent=1))
    return 0 if report["correct"] else 1


if __name__ == "__main__":
    sys.exit(main())
