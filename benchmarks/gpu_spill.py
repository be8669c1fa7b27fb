"""Work on more than the device holds: the device tier, dask-cuda's DeviceHostFile, cuDF's own spilling.

One worker on one GPU whose allocator is limited (``--limit``), data of 2 and 4 times that. Workloads: CuPy arrays that
are persisted, then summed twice; cuDF frames, persisted, then a groupby and a join on them. Answers are checked. What
a system cannot complete is a result ("failed", with the error), not left out. Systems take turns within a round.

Needs a GPU, dask-cuda, CuPy and cuDF; exits with 3 and the reason where one is missing.

    python -m benchmarks.gpu_spill --limit 4GiB --runs 5 --out benchmarks/results/gpu_spill.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes, parse_bytes
from distributed import Client

from benchmarks import data
from benchmarks.compare import turns
from dask_gpurt.backends import cuda

if TYPE_CHECKING:
    from collections.abc import Iterator

SYSTEMS = ("gpurt", "device-host-file", "cudf-spill")
WORKLOADS = ("cupy", "cudf")
CHUNK = 128 << 20


@contextmanager
def cluster(system: str, limit: int) -> Iterator[Client]:
    """One worker with two threads, whose allocator gives `limit` bytes at the most."""
    if system == "gpurt":
        import dask_gpurt

        share = limit / cuda.probe().total_bytes
        made: Any = dask_gpurt.local_cluster(
            settings={"tiers.device": "auto", "tiers.device-limit": share},
            n_workers=1,
            threads_per_worker=2,
            processes=True,
            dashboard_address=None,
        )
    else:
        from dask_cuda import LocalCUDACluster

        made = LocalCUDACluster(
            n_workers=1,
            threads_per_worker=2,
            rmm_async=True,
            rmm_pool_size=limit // 2,
            rmm_maximum_pool_size=limit,
            device_memory_limit=int(limit * 0.8) if system == "device-host-file" else limit,
            enable_cudf_spill=system == "cudf-spill",
            dashboard_address=None,
        )
    with made, Client(made) as client:
        client.wait_for_workers(1)
        yield client


def cupy_work(nbytes: int) -> bool:
    """Persist, then two passes; is the answer right?"""
    import dask.array as da
    import numpy as np

    rows = CHUNK // 8
    n = max(2, nbytes // CHUNK)

    def block(block_info: Any = None) -> Any:
        import cupy

        return cupy.full(block_info[None]["chunk-shape"], block_info[None]["chunk-location"][0], "f8")

    x = da.map_blocks(block, chunks=((rows,) * n,), dtype="f8", meta=np.empty(0)).persist()
    want = sum(range(n)) * rows
    return float(x.sum().compute()) == want and float((x + 1).sum().compute()) == want + rows * n


def cudf_work(nbytes: int) -> bool:
    """Persist, then a groupby and a join; are the answers right?"""
    import dask
    import dask.dataframe as dd

    rows = CHUNK // 16
    n = max(2, nbytes // CHUNK)

    def part(i: int) -> Any:
        import cudf
        import cupy

        keys = cupy.arange(i * rows, (i + 1) * rows, dtype="i8")
        return cudf.DataFrame({"k": keys % 1000, "v": cupy.ones(rows, "f8")})

    import cudf

    meta = cudf.DataFrame({"k": cudf.Series([], dtype="i8"), "v": cudf.Series([], dtype="f8")})
    with dask.config.set({"dataframe.backend": "cudf"}):
        frame = dd.from_map(part, range(n), meta=meta).persist()
        sums = frame.groupby("k").v.sum().compute()
        small = dd.from_pandas(cudf.DataFrame({"k": range(1000), "w": [2.0] * 1000}), npartitions=1)
        joined = frame.merge(small, on="k")
        total = float((joined.v * joined.w).sum().compute())
    return float(sums.sum()) == rows * n and total == 2.0 * rows * n


def one_run(system: str, workload: str, times: int, limit: int) -> dict[str, Any]:
    """Wall time of the work itself, without the start of the cluster."""
    work = cupy_work if workload == "cupy" else cudf_work
    out: dict[str, Any] = {"system": system, "workload": workload, "times": times}
    try:
        with cluster(system, limit) as client:
            start = time.perf_counter()
            out["correct"] = work(times * limit)
            out["seconds"] = time.perf_counter() - start
            if system == "gpurt":
                (out["device"],) = client.run(_device_statistics).values()
    except Exception as e:
        out["failed"] = f"{type(e).__name__}: {str(e)[:300]}"
    return out


def _device_statistics(dask_worker: Any) -> Any:
    from dask_gpurt.extension import on_worker

    parts = on_worker(dask_worker)
    assert parts is not None
    assert parts.runtime is not None
    return parts.runtime.statistics()["device"]


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Median seconds by workload, size and system, or why there are none."""
    out: dict[str, Any] = {}
    for run in runs:
        place = out.setdefault(f"{run['workload']} x{run['times']}", {}).setdefault(run["system"], [])
        place.append(run.get("seconds"))
    return {
        name: {
            system: statistics.median(s) if s and None not in s else f"failed {s.count(None)} of {len(s)}"
            for system, s in systems.items()
        }
        for name, systems in out.items()
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--limit", default="4GiB", help="of the worker's device allocator")
    parser.add_argument("--times", default="2,4", help="sizes of the data, as multiples of the limit")
    parser.add_argument("--runs", type=int, default=5, help="of each")
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args(argv)
    found = cuda.probe()
    missing = [name for name in ("cupy", "cudf", "dask_cuda") if importlib.util.find_spec(name) is None]
    if found.reason or missing:
        print(f"gpu_spill needs a GPU: {found.reason or 'not installed: ' + ', '.join(missing)}", file=sys.stderr)
        return 3
    limit = parse_bytes(args.limit)
    runs = []
    for times in map(int, args.times.split(",")):
        for workload in WORKLOADS:
            for _, system in turns(SYSTEMS, args.runs):
                runs.append(one_run(system, workload, times, limit))
                print(json.dumps({k: v for k, v in runs[-1].items() if k != "device"}), file=sys.stderr)
    report = {
        **data.facts(f"one {found.name} ({format_bytes(found.total_bytes)}), allocator limited to {args.limit}"),
        "gpu_versions": data.versions(("rmm-cu13", "rmm-cu12", "cudf-cu13", "cudf-cu12", "dask-cuda", "cupy-cuda13x")),
        "benchmark": "gpu_spill",
        "arguments": vars(args),
        "correct": all(r["correct"] for r in runs if "failed" not in r),
        "summary": summary(runs),
        "runs": runs,
    }
    print(json.dumps(report["summary"], indent=1))
    if args.out:
        print(data.write_json(args.out, report))
    return 0 if report["correct"] and not any("failed" in r for r in runs if r["system"] == "gpurt") else 1


if __name__ == "__main__":
    sys.exit(main())
