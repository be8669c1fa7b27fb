"""Work on more than the device holds: the device tier, dask-cuda's DeviceHostFile, cuDF's own spilling.

One worker on one GPU whose allocator is limited (``--limit``), data of 2 and 4 times that. Workloads: CuPy arrays that
are persisted, then summed twice; cuDF frames, persisted, then a groupby and a join on them. Answers are checked. What
a system cannot complete is a result ("failed", with the error), not left out. Systems take turns within a round.

Every run is a process of its own, with its cluster: what one sets up (cuDF's spilling, RMM's resource) is set up in the
client, too, and would stay there for the next. It has ``--run-seconds``. No run begins that would likely pass
``--minutes``; the report says how many of how many ran. CuPy allocates through RMM in every system, within the limit.

Needs a GPU, and exits with 3 where there is none. A run for which CuPy, cuDF or dask-cuda is missing is said to have
failed; the others go on.

    python -m benchmarks.gpu_spill --limit 4GiB --minutes 9 --out benchmarks/results/gpu_spill.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes, parse_bytes
from distributed import Client

from benchmarks import gpu_runs
from dask_gpurt.backends import cuda
from dask_gpurt.backends.ucx_device import has_device

if TYPE_CHECKING:
    from collections.abc import Iterator

#: workload -> what can do it: cuDF spills its own frames only
SYSTEMS = {"cupy": ("gpurt", "device-host-file"), "cudf": ("gpurt", "device-host-file", "cudf-spill")}
CHUNK = 128 << 20


def lacking(system: str, workload: str) -> list[str]:
    """Packages that this run needs and that are not installed; the others can run without them."""
    needs = ["rmm", "cupy", *(["cudf"] if workload == "cudf" else []), *(["dask_cuda"] if system != "gpurt" else [])]
    return [name for name in needs if importlib.util.find_spec(name) is None]


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
            rmm_allocator_external_lib_list=["cupy"],
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
    """Wall time of the work itself, without the start of the cluster. For a process of its own."""
    work = cupy_work if workload == "cupy" else cudf_work
    found = cuda.probe()
    out: dict[str, Any] = {"gpu": f"{found.name} ({format_bytes(found.total_bytes)})"}
    with cluster(system, limit) as client:
        start = time.perf_counter()
        out["correct"] = work(times * limit)
        out["seconds"] = time.perf_counter() - start
        if system == "gpurt":
            (out["device"],) = client.run(_device_statistics).values()
    return out


def _device_statistics(dask_worker: Any) -> Any:
    from dask_gpurt.extension import on_worker

    parts = on_worker(dask_worker)
    assert parts is not None
    assert parts.runtime is not None
    return parts.runtime.statistics()["device"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--limit", default="4GiB", help="of the worker's device allocator")
    parser.add_argument("--times", default="2,4", help="sizes of the data, as multiples of the limit")
    parser.add_argument("--runs", type=int, default=3, help="of each, at most")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all of it")
    parser.add_argument(
        "--run-seconds", type=float, default=60.0, help="for one run, the start of its cluster included"
    )
    parser.add_argument("--one", help="only this run, here: SYSTEM:WORKLOAD:TIMES")
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args(argv)
    limit = parse_bytes(args.limit)
    if args.one:
        system, workload, times = args.one.split(":")
        print(json.dumps(one_run(system, workload, int(times), limit), default=str))
        return 0
    if args.runs < 1:
        parser.error(f"--runs is {args.runs}, must be at least 1")
    if not has_device():
        print("gpu_spill needs a GPU: there is none", file=sys.stderr)
        return 3

    def run(cell: gpu_runs.Cell) -> dict[str, Any]:
        absent = lacking(cell[0], cell[1])
        if absent:
            return {"failed": f"not installed: {', '.join(absent)}"}
        this = [sys.executable, "-m", "benchmarks.gpu_spill", "--limit", args.limit, "--one", ":".join(map(str, cell))]
        return gpu_runs.apart(this, args.run_seconds, {"CUDF_SPILL": "on" if cell[0] == "cudf-spill" else "off"})

    cells = gpu_runs.plan(SYSTEMS, [int(t) for t in args.times.split(",")], args.runs)
    runs = gpu_runs.carry_out(cells, run, 60 * args.minutes)
    gpus = {r["gpu"] for r in runs if "gpu" in r} or {"a GPU on which no run was done"}
    report = {
        "benchmark": "gpu_spill",
        "arguments": vars(args),
        "planned_runs": len(cells),
        "correct": any("failed" not in r for r in runs) and all(r["correct"] for r in runs if "failed" not in r),
        "summary": gpu_runs.summary(runs),
        "runs": runs,
    }
    gpu_runs.publish(report, f"one {', '.join(gpus)}, allocator limited to {args.limit}", args.out)
    return 0 if report["correct"] and not any("failed" in r for r in runs if r["system"] == "gpurt") else 1


if __name__ == "__main__":
    sys.exit(main())
