"""A shuffle of frames in device memory: ours, Dask's P2P and its tasks; the partitions are compared.

Integer and text keys, one worker process and then two on the same GPU, every worker with RMM's asynchronous allocator.
Every run is a process of its own with a limit of time, and no run begins that would likely pass ``--minutes``. Of each
partition a digest is kept (rows, keys, sums of two columns, wrapping at 2^64): systems agree when all are equal.

    python -m benchmarks.gpu_shuffle --gigabytes 8 --minutes 5 --out benchmarks/results/gpu_shuffle.json
    python -m benchmarks.gpu_shuffle --frames pandas --gigabytes 0.05 --runs 1

``--frames pandas`` shuffles frames in host memory: a rehearsal of this script on a machine without a GPU, and no figure
of one. ``--frames cudf`` (default) exits with 3 where there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pandas as pd
from distributed import Client, LocalCluster, wait

import dask_gpurt
from benchmarks import gpu_runs
from benchmarks.shuffle_meters import give_back
from dask_gpurt.backends.ucx_device import has_device

if TYPE_CHECKING:
    from collections.abc import Sequence

SYSTEMS = ("gpurt", "p2p", "tasks")
#: workload -> the systems that can do it
WORKLOADS = {"integers": SYSTEMS, "text": SYSTEMS}
#: a key, an identity and six values of eight bytes; text keys have about twelve
ROW_BYTES = 64


def part(i: int, rows: int, workload: str, frames: str) -> Any:
    """Partition `i` of the input: `rows` rows whose keys repeat across partitions."""
    rng = np.random.default_rng(i)
    keys = rng.integers(0, 100_000, rows)
    out = pd.DataFrame({"k": keys, "id": np.arange(i * rows, (i + 1) * rows)})
    if workload == "text":
        out["k"] = ("key-" + pd.Series(keys).astype("str")).astype("str")
    for j in range(6):
        out[f"v{j}"] = rng.integers(0, 1 << 40, rows)
    if frames == "pandas":
        return out
    import cudf

    return cudf.DataFrame.from_pandas(out)


def digest(frame: Any) -> pd.DataFrame:
    """One row that tells a partition from others, whatever the order of its rows."""
    row = [len(frame), int(frame["k"].nunique()), int(frame["id"].sum()), int(frame["v0"].sum())]
    return pd.DataFrame([row], columns=["rows", "keys", "ids", "values"]).astype("i8")


def use_async_allocator() -> None:
    """Of a worker: RMM's asynchronous allocator, the same for all systems."""
    import rmm

    rmm.mr.set_current_device_resource(rmm.mr.CudaAsyncMemoryResource())


def cluster(system: str, workers: int) -> LocalCluster:
    """`workers` processes with one thread each; ours with device frames taken."""
    where: dict[str, Any] = {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": None}
    if system == "gpurt":
        return dask_gpurt.local_cluster(settings={"shuffle.device-frames": True}, **where)
    return LocalCluster(**where)


def one_run(system: str, workload: str, workers: int, nbytes: int, frames: str) -> dict[str, Any]:
    """Wall time of the shuffle itself: its input lies in the workers, and its outputs stay there."""
    import dask.dataframe as dd

    parts = 8 * workers
    rows = max(1, nbytes // parts // ROW_BYTES)
    with cluster(system, workers) as made, Client(made) as client:
        client.wait_for_workers(workers)
        if frames == "cudf":
            client.run(use_async_allocator)
        meta = part(0, 3, workload, frames).iloc[:0]
        source = dd.from_map(part, range(parts), rows=rows, workload=workload, frames=frames, meta=meta).persist()
        wait(source)
        start = time.perf_counter()
        out = source.shuffle("k", npartitions=parts, shuffle_method="tasks" if system == "tasks" else "p2p").persist()
        wait(out)
        seconds = time.perf_counter() - start
        empty = digest(pd.DataFrame({"k": [], "id": [], "v0": []})).iloc[:0]
        (digests,) = dask.compute(out.map_partitions(digest, meta=empty))
        result: dict[str, Any] = {"seconds": seconds, "digests": digests.to_numpy().tolist()}
        result["rows"] = int(digests["rows"].sum())
        result["correct"] = result["rows"] == parts * rows
        if system == "gpurt":
            stats = client.run_on_scheduler(give_back)
            result["taken"] = stats["runs"] == 1 and not stats["fallbacks"]
    return result


def agree(runs: Sequence[dict[str, Any]]) -> bool:
    """Whether all runs of the same input made the same partitions."""
    seen: dict[tuple[str, int], Any] = {}
    done = [r for r in runs if "digests" in r]
    return all(seen.setdefault((r["workload"], r["size"]), r["digests"]) == r["digests"] for r in done)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--frames", choices=("cudf", "pandas"), default="cudf")
    parser.add_argument("--gigabytes", type=float, default=8.0, help="of the input, about")
    parser.add_argument("--workers", default="1,2", help="worker processes, on one GPU")
    parser.add_argument("--runs", type=int, default=3, help="of each, at most")
    parser.add_argument("--minutes", type=float, default=5.0, help="for all of it")
    parser.add_argument("--run-seconds", type=float, default=60.0, help="for one run, its cluster's start included")
    parser.add_argument("--one", help="only this run, here: SYSTEM:WORKLOAD:WORKERS")
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args(argv)
    if args.runs < 1:
        parser.error(f"--runs is {args.runs}, must be at least 1")
    if not args.gigabytes > 0:
        parser.error(f"--gigabytes is {args.gigabytes}, must be more than 0")
    if args.one:
        system, workload, workers = args.one.split(":")
        print(json.dumps(one_run(system, workload, int(workers), int(args.gigabytes * 1e9), args.frames)))
        return 0
    if args.frames == "cudf":
        absent = [name for name in ("rmm", "cudf", "dask_cudf") if importlib.util.find_spec(name) is None]
        if absent or not has_device():
            print(f"gpu_shuffle needs a GPU: {'not installed: ' + ', '.join(absent) if absent else 'there is none'}")
            return 3

    def run(cell: gpu_runs.Cell) -> dict[str, Any]:
        this = [sys.executable, "-m", "benchmarks.gpu_shuffle", "--frames", args.frames]
        this += ["--gigabytes", str(args.gigabytes), "--one", ":".join(map(str, cell))]
        return gpu_runs.apart(this, args.run_seconds)

    cells = gpu_runs.plan(WORKLOADS, [int(w) for w in args.workers.split(",")], args.runs)
    runs = gpu_runs.carry_out(cells, run, 60 * args.minutes)
    report = {
        "benchmark": "gpu_shuffle",
        "arguments": vars(args),
        "planned_runs": len(cells),
        "correct": any("digests" in r for r in runs) and agree(runs) and all(r.get("correct", True) for r in runs),
        "taken": all(r["taken"] for r in runs if "taken" in r),
        "summary": gpu_runs.summary(runs),
        "runs": [{k: v for k, v in r.items() if k != "digests"} for r in runs],
    }
    gpu_runs.publish(
        report, "one GPU" if args.frames == "cudf" else "CPU, frames in host memory: no figure of a GPU", args.out
    )
    ours = [r for r in runs if r["system"] == "gpurt"]
    return 0 if report["correct"] and report["taken"] and not any("failed" in r for r in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
