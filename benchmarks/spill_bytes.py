"""How many bytes does spilling move? Stock Dask, the tiers with what a worker knows by itself, and with hints.

Graphs whose data is about three times the workers' memory run on a real cluster of processes. Counted on the workers:
bytes written to and read from disk; measured: wall time. Cases take turns, a figure is the median of its runs, and the
results of all cases are compared. One cluster per run, so nobody inherits a warm store.

    python benchmarks/spill_bytes.py --runs 3 --memory 200MB --workers 1 2 --out spill_bytes.json
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import dask
from dask.utils import parse_bytes
from distributed import Client, LocalCluster, Scheduler, Worker

from benchmarks import compare, data
from benchmarks.spill_workloads import WORKLOADS, same
from dask_gpurt.config import Settings
from dask_gpurt.extension import GpurtScheduler, on_worker

if TYPE_CHECKING:
    from collections.abc import Callable

#: the first is what the others are compared with
CASES = ("stock", "local", "hints")
#: the working set is so many times the workers' memory
TIMES = 3
#: chunks that fit in the memory of one worker
CHUNKS = 20


GRAPHS: dict[str, Callable[[int, int], float]] = {
    name: WORKLOADS[name] for name in ("persist_and_sum", "transpose", "tensordot", "join_chain")
}


async def _attach(dask_scheduler: Scheduler, settings: Settings, next_use: bool) -> None:
    plugin = GpurtScheduler(settings, next_use=next_use)
    await plugin.start(dask_scheduler)
    dask_scheduler.add_plugin(plugin, name=plugin.name)


async def _heartbeat(dask_worker: Worker) -> None:
    """So that the scheduler knows now, not in a second, that hints are understood."""
    await dask_worker.heartbeat()


def _moved(dask_worker: Worker) -> dict[str, Any]:
    parts = on_worker(dask_worker)
    if parts is not None and parts.runtime is not None:
        stats = parts.runtime.statistics()
        return {
            "written_bytes": stats["written"]["bytes"],
            "read_bytes": stats["read"]["bytes"],
            "sync_reads": stats["sync_reads"],
            "evictions": stats["evictions"],
            "hints": {k: stats["hints"][k] for k in ("received", "advanced", "guessed", "expired", "exceptions")},
        }
    metrics = dask_worker.data.cumulative_metrics
    return {
        "written_bytes": int(metrics.get(("disk-write", "bytes"), 0)),
        "read_bytes": int(metrics.get(("disk-read", "bytes"), 0)),
    }


def _cost(dask_scheduler: Scheduler) -> dict[str, Any]:
    plugin = dask_scheduler.plugins.get("gpurt")
    return plugin.statistics().get("next_use", {}) if isinstance(plugin, GpurtScheduler) else {}


def one_run(case: str, graph: str, workers: int, memory: int) -> dict[str, Any]:
    """A fresh cluster; each worker keeps at most `memory` bytes of data."""
    # Dask's target is a share of the limit (0.6), and so is our budget: the same bytes for all cases.
    limit = int(memory / 0.6)
    with (
        # The process itself may be larger than such a limit: only data is to decide, in all cases.
        dask.config.set({f"distributed.worker.memory.{k}": False for k in ("spill", "pause", "terminate")}),
        # Stock compresses when lz4 is installed, and then counts compressed bytes.
        dask.config.set({"distributed.worker.memory.spill-compression": False, "dataframe.shuffle.method": "tasks"}),
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(
            n_workers=workers,
            threads_per_worker=2,
            processes=True,
            memory_limit=limit,
            dashboard_address=None,
            local_directory=folder,
            silence_logs=logging.ERROR,
        ) as cluster,
        Client(cluster) as client,
    ):
        if case != "stock":
            settings = Settings.load({"placement.enabled": False, "shuffle.enabled": False, "tiers.disk-reserve": 0})
            client.run_on_scheduler(_attach, settings=settings, next_use=case == "hints")
        client.run(_heartbeat)
        start = time.perf_counter()
        answer = GRAPHS[graph](TIMES * memory * workers, memory // CHUNKS)
        seconds = time.perf_counter() - start
        moved = list(client.run(_moved).values())
        return {
            "case": case,
            "graph": graph,
            "workers": workers,
            "answer": answer,
            "wall_seconds": seconds,
            "written_bytes": sum(w["written_bytes"] for w in moved),
            "read_bytes": sum(w["read_bytes"] for w in moved),
            "bytes": sum(w["written_bytes"] + w["read_bytes"] for w in moved),
            "per_worker": moved,
            "next_use": client.run_on_scheduler(_cost),
        }


def summary(runs: list[dict[str, Any]], cases: list[str]) -> list[dict[str, Any]]:
    """Per graph and number of workers: medians, and ratios to the first case (median over rounds)."""
    out = []
    for graph, workers in dict.fromkeys((r["graph"], r["workers"]) for r in runs):
        row: dict[str, Any] = {"graph": graph, "workers": workers}
        by_case = {c: [r for r in runs if (r["graph"], r["workers"], r["case"]) == (graph, workers, c)] for c in cases}
        for case, mine in by_case.items():
            row[case] = {
                f"median_{f}": statistics.median(r[f] for r in mine)
                for f in ("bytes", "written_bytes", "read_bytes", "wall_seconds")
            }
            base = by_case[cases[0]]
            row[case]["bytes_ratio"] = statistics.median(
                a["bytes"] / b["bytes"] if b["bytes"] else float("nan") for a, b in zip(mine, base, strict=True)
            )
            row[case]["wall_ratio"] = statistics.median(
                a["wall_seconds"] / b["wall_seconds"] for a, b in zip(mine, base, strict=True)
            )
        row["same_answers"] = all(
            same(r["answer"], by_case[cases[0]][0]["answer"]) for mine in by_case.values() for r in mine
        )
        out.append(row)
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="rounds")
    parser.add_argument("--memory", default="200MB", help="bytes of data that a worker keeps in memory")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of workers")
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS), choices=list(GRAPHS))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, help="the first is the baseline")
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args(argv)
    runs = []
    for workers in args.workers:
        for graph in args.graphs:
            for _, case in compare.turns(args.cases, args.runs):
                runs.append(one_run(case, graph, workers, parse_bytes(args.memory)))
                shown = {k: v for k, v in runs[-1].items() if k not in ("per_worker", "next_use")}
                print(json.dumps(shown), file=sys.stderr)
    rows = summary(runs, args.cases)
    means = {
        case: compare.geometric_mean(r[case]["bytes_ratio"] for r in rows if r[case]["bytes_ratio"] > 0)
        for case in args.cases
    }
    result = {
        **data.facts(f"{data.cores()} CPU cores, no GPU, loopback, local disk"),
        "benchmark": "spill_bytes",
        "arguments": vars(args),
        "summary": rows,
        "bytes_ratio_geometric_mean": means,
        "runs": runs,
    }
    if args.out:
        data.write_json(args.out, result)
    print(json.dumps({"summary": rows, "bytes_ratio_geometric_mean": means}, indent=1))
    return 0 if all(r["same_answers"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
