"""Work on more than the device holds: the device tier, dask-cuda's DeviceHostFile, cuDF's own spilling.

One worker on one GPU whose allocator is limited (``--limit``), data of 2 and 4 times that. Workloads: CuPy arrays that
are persisted, then summed twice; cuDF frames, persisted, then a groupby and a join on them. Answers are checked. What
a system cannot complete is a result ("failed", with the error), not left out. Systems take turns within a round.

Every run is a process of its own, with its cluster: what one sets up (cuDF's spilling, RMM's resource) is set up in the
client, too, and would stay there for the next. It has ``--run-seconds``. No run begins that would likely pass
``--minutes``; the report says how many of how many ran. CuPy allocates through RMM in every system, within the limit.

Needs a GPU, dask-cuda, CuPy and cuDF; exits with 3 and the reason where one is missing.

    python -m benchmarks.gpu_spill --limit 4GiB --minutes 9 --out benchmarks/results/gpu_spill.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes, parse_bytes
from distributed import Client

from benchmarks import data
from dask_gpurt.backends import cuda
from dask_gpurt.backends.ucx_device import has_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: workload -> what can do it: cuDF spills its own frames only
SYSTEMS = {"cupy": ("gpurt", "device-host-file"), "cudf": ("gpurt", "device-host-file", "cudf-spill")}
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


def apart(command: Sequence[str], system: str, seconds: float) -> dict[str, Any]:
    """Run a command in a process of its own; what its last line says as JSON, or "failed" and why."""
    spill = "on" if system == "cudf-spill" else "off"
    environment = {**os.environ, "CUDF_SPILL": spill, "PYTHONFAULTHANDLER": "1"}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # its workers, too, end with it
    ) as process:
        try:
            out, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return {"failed": f"not done within {seconds:g} s"}
    lines = out.splitlines()
    if process.returncode or not lines:
        last = (errors.strip().splitlines() or ["nothing was said"])[-1]
        return {"failed": f"exit {process.returncode}: {last[:300]}"}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


Cell = tuple[str, str, int]


def plan(sizes: Sequence[int], runs: int) -> list[Cell]:
    """(system, workload, times) in the order of the runs: a round of everything before the next."""
    out: list[Cell] = []
    for r in range(runs):
        for times in sizes:
            for workload, systems in SYSTEMS.items():
                out += [(system, workload, times) for system in (systems if r % 2 == 0 else systems[::-1])]
    return out


def carry_out(
    cells: Sequence[Cell],
    run: Callable[[Cell], dict[str, Any]],
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[dict[str, Any]]:
    """Run what fits into `seconds`: none begins that would pass them, had it to take as long as the longest so far."""
    start, longest = clock(), 0.0
    out: list[dict[str, Any]] = []
    for cell in cells:
        began = clock()
        if began - start + longest > seconds:
            break
        system, workload, times = cell
        out.append({"system": system, "workload": workload, "times": times, **run(cell)})
        longest = max(longest, clock() - began)
        print(json.dumps({k: v for k, v in out[-1].items() if k != "device"}), file=sys.stderr)
    return out


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
    missing = [name for name in ("rmm", "cupy", "cudf", "dask_cuda") if importlib.util.find_spec(name) is None]
    if missing or not has_device():
        reason = "not installed: " + ", ".join(missing) if missing else "there is none"
        print(f"gpu_spill needs a GPU: {reason}", file=sys.stderr)
        return 3

    def run(cell: Cell) -> dict[str, Any]:
        this = [sys.executable, "-m", "benchmarks.gpu_spill", "--limit", args.limit, "--one", ":".join(map(str, cell))]
        return apart(this, cell[0], args.run_seconds)

    cells = plan([int(t) for t in args.times.split(",")], args.runs)
    runs = carry_out(cells, run, 60 * args.minutes)
    gpus = {r["gpu"] for r in runs if "gpu" in r} or {"a GPU on which no run was done"}
    report = {
        **data.facts(f"one {', '.join(gpus)}, allocator limited to {args.limit}"),
        "gpu_versions": data.versions(("rmm-cu13", "rmm-cu12", "cudf-cu13", "cudf-cu12", "dask-cuda", "cupy-cuda13x")),
        "benchmark": "gpu_spill",
        "arguments": vars(args),
        "planned_runs": len(cells),
        "correct": bool(runs) and all(r["correct"] for r in runs if "failed" not in r),
        "summary": summary(runs),
        "runs": runs,
    }
    print(json.dumps(report["summary"], indent=1))
    print(f"{len(runs)} of {len(cells)} runs were done")
    if args.out:
        print(data.write_json(args.out, report))
    return 0 if report["correct"] and not any("failed" in r for r in runs if r["system"] == "gpurt") else 1


if __name__ == "__main__":
    sys.exit(main())
