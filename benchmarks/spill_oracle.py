"""How far from the optimum is eviction? Traces of real runs, replayed through LRU and Belady at the same capacity.

Workloads whose data is several times the workers' memory run on a real cluster of processes, with a record of every
access on every worker (`benchmarks.eviction_record`). Each record is then replayed
(`benchmarks.eviction_replay`). Printed per workload, in bytes of values written and read, summed over the workers:

* ``moved``: what was really moved;
* ``policy``: our order of victims with ideal mechanics (nothing in flight), i.e. what it costs not to know the future;
* ``lru`` and ``belady``;

and beside it how much reading was hidden behind compute, and how the values that were read ahead ended.

    python -m benchmarks.spill_oracle --memory 100MB --workers 1 4 --out spill_oracle.json
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import tempfile
import time
from typing import Any

import dask
from dask.utils import parse_bytes
from distributed import Client, LocalCluster, Scheduler, Worker

from benchmarks import compare, data
from benchmarks.eviction_record import record
from benchmarks.eviction_replay import Belady, Lru, Ours, moved, replay
from benchmarks.spill_workloads import WORKLOADS
from dask_gpurt.config import Settings
from dask_gpurt.extension import GpurtScheduler, on_worker

#: events kept per worker
EVENTS = 500_000
#: chunks that fit in the memory of one worker
CHUNKS = 20


async def _attach(dask_scheduler: Scheduler, settings: Settings) -> None:
    plugin = GpurtScheduler(settings)
    await plugin.start(dask_scheduler)
    dask_scheduler.add_plugin(plugin, name=plugin.name)


async def _heartbeat(dask_worker: Worker) -> None:
    """So that the scheduler knows now, not in a second, that hints are understood."""
    await dask_worker.heartbeat()


def _record(dask_worker: Worker) -> None:
    parts = on_worker(dask_worker)
    assert parts is not None
    assert parts.runtime is not None
    dask_worker.trace_of_gpurt = record(parts.runtime.engine, EVENTS)


def _traces(dask_worker: Worker) -> dict[str, Any]:
    parts = on_worker(dask_worker)
    assert parts is not None
    assert parts.runtime is not None
    stats = parts.runtime.statistics()
    return {
        "trace": dask_worker.trace_of_gpurt.to_dict(),
        "evictions": stats["evictions"],
        "hints": stats["hints"],
        "admission_waits": stats["admission_waits"],
        "admission_forced": stats["admission_forced"],
        "sync_reads": stats["sync_reads"],
        "prefetch": stats["prefetch"],
        "reading_seconds": stats["read"]["io_seconds"] + stats["read"]["codec_seconds"],
        "input_wait_seconds": stats["input_wait_seconds"],
        "read_bytes": stats["read"]["bytes"],
    }


def one_run(
    workload: str, workers: int, memory: int, times: float, *, threads: int, keep: str | None
) -> dict[str, Any]:
    """One workload on a fresh cluster, and what its traces say."""
    with (
        dask.config.set({f"distributed.worker.memory.{k}": False for k in ("spill", "pause", "terminate")}),
        dask.config.set({"dataframe.shuffle.method": "tasks"}),
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(
            n_workers=workers,
            threads_per_worker=threads,
            processes=True,
            memory_limit=int(memory / 0.6),
            dashboard_address=":0",
            local_directory=folder,
            silence_logs=logging.ERROR,
        ) as cluster,
        Client(cluster) as client,
    ):
        settings = Settings.load({"placement.enabled": False, "shuffle.enabled": False, "tiers.disk-reserve": 0})
        client.run_on_scheduler(_attach, settings=settings)
        client.run(_heartbeat)
        client.run(_record)
        start = time.perf_counter()
        WORKLOADS[workload](int(times * memory * workers), memory // CHUNKS)
        seconds = time.perf_counter() - start
        per_worker = list(client.run(_traces).values())
    out: dict[str, Any] = {"workload": workload, "workers": workers, "wall_seconds": seconds}
    sums = dict.fromkeys(("moved", "policy", "lru", "belady"), 0)
    parts: dict[str, list[int]] = {name: [0, 0] for name in sums}
    for w in per_worker:
        events = w["trace"]["events"]
        for name, result in (
            ("moved", moved(events)),
            ("policy", replay(events, Ours())),
            ("lru", replay(events, Lru())),
            ("belady", replay(events, Belady(events))),
        ):
            sums[name] += result.total_bytes
            parts[name][0] += result.written_bytes
            parts[name][1] += result.read_bytes
    if keep is not None:
        os.makedirs(keep, exist_ok=True)
        with open(os.path.join(keep, f"{workload}-{workers}.json"), "w") as f:
            json.dump(per_worker, f)
    for w in per_worker:
        w["events"] = len(w["trace"]["events"])
        w["events_dropped"] = w.pop("trace")["dropped"]
    out |= {f"{name}_bytes": n for name, n in sums.items()}
    out |= {f"{name}_written_read": n for name, n in parts.items()}
    if sums["belady"]:
        out["moved_to_belady"] = sums["moved"] / sums["belady"]
        out["policy_to_belady"] = sums["policy"] / sums["belady"]
        out["lru_to_belady"] = sums["lru"] / sums["belady"]
    reading = sum(w["reading_seconds"] for w in per_worker)
    if reading:
        # Waiting at the gate and for an I/O thread is in it, so this is what reading ahead achieves at least.
        out["hidden_seconds_share"] = max(0.0, 1 - sum(w["input_wait_seconds"] for w in per_worker) / reading)
        in_time = sum(w["prefetch"]["bytes"]["in_time"] for w in per_worker)
        out["read_in_time_share"] = in_time / sum(w["read_bytes"] for w in per_worker)
    out["prefetch"] = {
        k: sum(w["prefetch"][k] for w in per_worker) for k in ("started", "in_time", "late", "early", "wasted", "rests")
    }
    out["per_worker"] = per_worker
    return out


def _write(args: argparse.Namespace, runs: list[dict[str, Any]]) -> dict[str, float]:
    known = [r for r in runs if r.get("moved_to_belady")]
    ratios = {
        f"{name}_to_belady": compare.geometric_mean(r[f"{name}_to_belady"] for r in known)
        for name in ("moved", "policy", "lru")
    }
    ratios["worst_moved_to_belady"] = max((r["moved_to_belady"] for r in known), default=math.nan)
    if args.out:
        data.write_json(
            args.out,
            {
                **data.facts(f"{data.cores()} CPU cores, no GPU, loopback, local disk"),
                "benchmark": "spill_oracle",
                "arguments": vars(args),
                "goal": "moved_to_belady at most 1.15",
                "geometric_means": ratios,
                "runs": runs,
            },
        )
    return ratios


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=1, help="of each workload")
    parser.add_argument("--memory", default="100MB", help="bytes of data that a worker keeps in memory")
    parser.add_argument("--times", type=float, default=3, help="the data is so many times the memory of all workers")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4], help="numbers of workers")
    parser.add_argument("--threads", type=int, default=2, help="of each worker")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--keep", help="folder for the traces")
    parser.add_argument("--add", action="store_true", help="keep the runs that are in --out already")
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args(argv)
    runs: list[dict[str, Any]] = data.earlier(args.out).get("runs", []) if args.add else []
    ratios: dict[str, float] = {}
    for workers in args.workers:
        for workload in args.workloads:
            for _ in range(args.runs):
                runs.append(
                    one_run(
                        workload, workers, parse_bytes(args.memory), args.times, threads=args.threads, keep=args.keep
                    )
                )
                print(json.dumps({k: v for k, v in runs[-1].items() if k != "per_worker"}), file=sys.stderr, flush=True)
                ratios = _write(args, runs)  # after each run: a long series may be cut short
    print(json.dumps(ratios, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
