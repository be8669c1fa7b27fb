"""Work on several times the memory: stock Dask against dask-gpurt, as installed, paired.

Real worker processes under a memory limit and under a nanny, which ends and restarts one that passes it. Per run: wall
time; bytes written and read (as each side counts them; stock's do not include what its p2p shuffle writes); peak
resident set, sampled by a thread of the worker; restarts, counted by the scheduler; gaps of the worker's event loop
beyond 20 ms; and for dask-gpurt the longest time that its own code held the loop, and the share of reading that was
hidden behind compute. The device's own bandwidth is measured beside it, with direct I/O.

One call runs a subset and adds to the file, so that long series can be taken in pieces:

    python -m benchmarks.spill --workloads persist_and_sum sort --times 3 --runs 1 --out spill.json --add
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import mmap
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from dask.utils import parse_bytes
from distributed import Client, LocalCluster, Scheduler, SchedulerPlugin, Worker

import dask_gpurt
from benchmarks import compare, data, watchdog
from benchmarks.spill_workloads import WORKLOADS, same
from dask_gpurt.extension import on_worker

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = ("stock", "gpurt")
#: chunks that fit in the memory limit of one worker
CHUNKS = 25
#: array work that is bound by arithmetic (`tensordot`) says little here
DEFAULT = ("persist_and_sum", "dot_product", "sort", "join_chain", "groupby_chain")


class Restarts(SchedulerPlugin):
    """Counts workers that went away."""

    name = "spill-restarts"

    def __init__(self) -> None:
        self.removed = 0

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        self.removed += 1


def _removed(dask_scheduler: Scheduler) -> int:
    plugin = dask_scheduler.plugins["spill-restarts"]
    assert isinstance(plugin, Restarts)
    return plugin.removed


def _compute_seconds(dask_scheduler: Scheduler) -> float:
    """That tasks ran for, of all workers, summed."""
    return float(sum(p.all_durations["compute"] for p in dask_scheduler.task_prefixes.values()))


def _collect(dask_worker: Worker) -> dict[str, Any]:
    out = watchdog.collect(dask_worker)
    parts = on_worker(dask_worker)
    if parts is not None and parts.runtime is not None:
        stats = parts.runtime.statistics()
        for disk in stats["disks"]:
            del disk["directory"]  # a path of the machine it ran on is no result
        out |= {
            "written_bytes": stats["written"]["bytes"],
            "read_bytes": stats["read"]["bytes"],
            "own_loop_seconds": stats["loop_blocked_seconds"],
            "statistics": stats,
        }
    else:
        metrics = dask_worker.data.cumulative_metrics
        out |= {
            "written_bytes": int(metrics.get(("disk-write", "bytes"), 0)),
            "read_bytes": int(metrics.get(("disk-read", "bytes"), 0)),
        }
    return out


@contextlib.contextmanager
def _cluster(kind: str, args: argparse.Namespace) -> Iterator[Client]:
    with tempfile.TemporaryDirectory() as folder:
        make = LocalCluster if kind == "stock" else dask_gpurt.local_cluster
        with (
            make(
                n_workers=args.workers,
                threads_per_worker=args.threads,
                processes=True,
                memory_limit=parse_bytes(args.memory_limit),
                dashboard_address=":0",
                local_directory=folder,
                silence_logs=logging.CRITICAL,
            ) as cluster,
            Client(cluster) as client,
        ):
            yield client


def one_run(kind: str, workload: str, times: float, args: argparse.Namespace) -> dict[str, Any]:
    """One workload on a fresh cluster."""
    limit = parse_bytes(args.memory_limit)
    result: dict[str, Any] = {"kind": kind, "workload": workload, "times": times}
    result["setup"] = {k: getattr(args, k) for k in ("workers", "threads", "memory_limit", "give_up")}
    with _cluster(kind, args) as client:
        client.register_plugin(Restarts())
        client.register_plugin(watchdog.Watchdog())
        start = time.perf_counter()
        pool = ThreadPoolExecutor(1)  # not waited for: what hangs ends with its client
        future = pool.submit(WORKLOADS[workload], int(times * limit * args.workers), limit // CHUNKS)
        try:
            result["answer"] = future.result(args.give_up)
        except TimeoutError:
            result["failed"] = f"not done after {args.give_up:g} s"
        except Exception as e:  # what stock does when its worker was killed too often
            result["failed"] = f"{type(e).__name__}: {str(e)[:200]}"
        result["wall_seconds"] = time.perf_counter() - start
        pool.shutdown(wait=False, cancel_futures=True)
        result["restarts"] = client.run_on_scheduler(_removed)
        result["compute_seconds"] = client.run_on_scheduler(_compute_seconds)
        per_worker = list(client.run(_collect, on_error="ignore").values())
    for name in ("written_bytes", "read_bytes", "loop_gaps_seconds", "long_gaps", "paused_seconds"):
        result[name] = sum(w[name] for w in per_worker)
    for name in ("peak_rss_bytes", "longest_loop_gap_seconds"):
        result[name] = max((w[name] for w in per_worker), default=0.0)  # none: it is being restarted
    if kind == "gpurt":
        result["own_loop_max_seconds"] = max((w["own_loop_seconds"]["max"] for w in per_worker), default=0.0)
        result["own_loop_sum_seconds"] = sum(w["own_loop_seconds"]["sum"] for w in per_worker)
        stats = [w["statistics"] for w in per_worker]
        reading = sum(s["read"]["io_seconds"] + s["read"]["codec_seconds"] for s in stats)
        waiting = sum(s["input_wait_seconds"] for s in stats)
        result["reading_seconds"], result["input_wait_seconds"] = reading, waiting
        # Waiting at the gate and for an I/O thread is in it, so this is what reading ahead achieves at least.
        result["hidden_seconds_share"] = max(0.0, 1 - waiting / reading) if reading else None
        # No more can be hidden than there is computing to hide it behind.
        result["hideable_seconds_share"] = min(1.0, result["compute_seconds"] / reading) if reading else None
        in_time = sum(s["prefetch"]["bytes"]["in_time"] for s in stats)
        result["read_in_time_share"] = in_time / result["read_bytes"] if result["read_bytes"] else None
        result["prefetch"] = {k: sum(s["prefetch"][k] for s in stats) for k in ("in_time", "late", "early", "wasted")}
    result["peak_rss_share"] = result["peak_rss_bytes"] / limit
    result["per_worker"] = per_worker
    return result


def device_bandwidth(folder: str, nbytes: int = 1 << 28) -> dict[str, float]:
    """Bytes per second of sequential direct writing and reading, 8 MiB at a time."""
    block = mmap.mmap(-1, 8 << 20)
    block.write(os.urandom(1 << 20) * 8)
    path = os.path.join(folder, "bandwidth")
    out = {}
    try:
        for name, flags in (("write", os.O_WRONLY | os.O_CREAT), ("read", os.O_RDONLY)):
            fd = os.open(path, flags | os.O_DIRECT, 0o600)
            try:
                start = time.perf_counter()
                for _ in range(nbytes // len(block)):
                    if name == "write":
                        os.write(fd, block)
                    else:
                        os.readv(fd, [block])
                out[f"direct_{name}_bytes_per_second"] = nbytes / (time.perf_counter() - start)
            finally:
                os.close(fd)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return out


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per workload and size: medians of both kinds, and of the ratios within rounds."""
    out = []
    for workload, times in dict.fromkeys((r["workload"], r["times"]) for r in runs):
        by_kind = {
            k: [r for r in runs if (r["workload"], r["times"], r["kind"]) == (workload, times, k)] for k in KINDS
        }
        row: dict[str, Any] = {"workload": workload, "times": times}
        for kind, mine in by_kind.items():
            if mine:
                row[kind] = {
                    f: statistics.median(r[f] for r in mine)
                    for f in ("wall_seconds", "written_bytes", "read_bytes", "loop_gaps_seconds", "paused_seconds")
                    if f in mine[0]
                }
                row[kind] |= {
                    f"max_{f}": max(r[f] for r in mine)
                    for f in ("peak_rss_share", "longest_loop_gap_seconds", "restarts")
                }
                row[kind] |= {"runs": len(mine), "failed": sum("failed" in r for r in mine)}
        ours = by_kind["gpurt"]
        if ours:
            row["gpurt"]["max_own_loop_max_seconds"] = max(r["own_loop_max_seconds"] for r in ours)
            for f in ("hidden_seconds_share", "hideable_seconds_share", "read_in_time_share"):
                shares = [r[f] for r in ours if r.get(f) is not None]  # earlier runs have not all of them
                row["gpurt"][f] = statistics.median(shares) if shares else None
        gave_up = [
            (s, g)
            for s, g in zip(by_kind["stock"], ours, strict=False)
            if str(s.get("failed", "")).startswith("not done") and "failed" not in g
        ]
        if gave_up:
            row["speedup_at_least"] = statistics.median(s["wall_seconds"] / g["wall_seconds"] for s, g in gave_up)
        pairs = [
            (s, g) for s, g in zip(by_kind["stock"], ours, strict=False) if "failed" not in s and "failed" not in g
        ]
        if pairs:
            row["speedup"] = statistics.median(s["wall_seconds"] / g["wall_seconds"] for s, g in pairs)
            row["bytes_ratio"] = statistics.median(
                (g["written_bytes"] + g["read_bytes"]) / max(1, s["written_bytes"] + s["read_bytes"]) for s, g in pairs
            )
            row["same_answers"] = all(same(s["answer"], g["answer"]) for s, g in pairs)
        out.append(row)
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=1, help="rounds")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="of each worker")
    parser.add_argument("--memory-limit", default="1GB", help="of each worker")
    parser.add_argument("--times", type=float, default=3, help="the data is so many times the memory of all workers")
    parser.add_argument("--workloads", nargs="+", default=list(DEFAULT), choices=list(WORKLOADS))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--give-up", type=float, default=120, help="seconds after which a run is ended as failed")
    parser.add_argument("--add", action="store_true", help="keep the runs that are in --out already")
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args(argv)
    before = data.earlier(args.out) if args.add else {}
    runs: list[dict[str, Any]] = before.get("runs", [])
    devices: list[dict[str, float]] = before.get("device", [])
    with tempfile.TemporaryDirectory() as folder:
        devices.append(device_bandwidth(folder))
    exercised = f"{data.cores()} CPU cores, worker processes under nannies, local disk, loopback, no GPU"
    report = {**data.facts(exercised), "benchmark": "spill", "arguments": vars(args), "device": devices}
    rows = []
    for workload in args.workloads:
        for _, kind in compare.turns(args.kinds, args.runs):
            runs.append(one_run(kind, workload, args.times, args))
            print(json.dumps({k: v for k, v in runs[-1].items() if k != "per_worker"}), file=sys.stderr, flush=True)
            rows = summary(runs)
            if args.out:  # after each run: a long series may be cut short
                data.write_json(args.out, {**report, "summary": rows, "runs": runs})
    print(json.dumps(rows, indent=1))
    return 0 if all(r.get("same_answers", True) for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
