"""Work on more than the device holds: the device tier, dask-cuda's DeviceHostFile, cuDF's own spilling.

A case is SYSTEM-WORKLOAD-TIMES: one worker with two threads on one GPU whose allocator gives `LIMIT`, and data of that
many times the limit. Workloads: *cupy*, arrays that are persisted, then summed twice; *cudf*, frames, persisted, then a
group-by and a join. Answers are checked. CuPy allocates through RMM in every system, within the limit. Each case is a
process: what a system sets up in the client, too (cuDF's spilling, RMM's resource), must not stay for the next.
"""

from __future__ import annotations

import importlib
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.target import get, missing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distributed import Client

    from benchmarks.gpu.target import Target

LIMIT, CHUNK = 4 << 30, 128 << 20


@contextmanager
def cluster(system: str, limit: int) -> Iterator[Client]:
    """One worker, whose allocator gives `limit` bytes at the most."""
    from distributed import Client

    if system == "gpurt":
        import dask_gpurt
        from dask_gpurt.backends import cuda

        share = limit / cuda.probe().total_bytes
        made: Any = dask_gpurt.local_cluster(
            settings={"tiers.device": "on", "tiers.device-limit": share},
            n_workers=1,
            threads_per_worker=2,
            processes=True,
            dashboard_address=None,
        )
    else:
        missing("dask_cuda")
        from dask_cuda import LocalCUDACluster

        os.environ["CUDF_SPILL"] = "on" if system == "cudf-spill" else "off"
        made = LocalCUDACluster(
            CUDA_VISIBLE_DEVICES="0",
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
        client.wait_for_workers(1, timeout=60)
        yield client


def block(arrays: str, block_info: Any = None) -> Any:
    """A block of its own number."""
    module: Any = importlib.import_module(arrays)
    return module.full(block_info[None]["chunk-shape"], block_info[None]["chunk-location"][0], "f8")


def arrays_work(target: Target, nbytes: int, chunk: int) -> bool:
    """Persist, then two passes; is the answer right?"""
    import dask.array as da
    import numpy as np

    rows = chunk // 8
    n = max(2, nbytes // chunk)
    x = da.map_blocks(block, target.arrays, chunks=((rows,) * n,), dtype="f8", meta=np.empty(0)).persist()
    want = sum(range(n)) * rows
    return float(x.sum().compute()) == want and float((x + 1).sum().compute()) == want + rows * n


def part(i: int, rows: int, on: str) -> Any:
    """Partition `i`: keys that follow on those of the one before."""
    import numpy as np
    import pandas as pd

    keys = np.arange(i * rows, (i + 1) * rows)
    made = pd.DataFrame({"k": keys % 1000, "v": np.ones(rows)})
    return get(on).frame(made) if on == "gpu" else made


def frames_work(target: Target, nbytes: int, chunk: int) -> bool:
    """Persist, then a group-by and a join; are the answers right?"""
    import dask
    import dask.dataframe as dd
    import pandas as pd

    rows = chunk // 16
    n = max(2, nbytes // chunk)
    meta = part(0, 1, target.name).iloc[:0]
    right = pd.DataFrame({"k": range(1000), "w": [2.0] * 1000})
    with dask.config.set({"dataframe.backend": target.frames}):
        frame = dd.from_map(part, range(n), rows=rows, on=target.name, meta=meta).persist()
        sums = frame.groupby("k").v.sum().compute()
        small = dd.from_pandas(target.frame(right) if target.name == "gpu" else right, npartitions=1)
        joined = frame.merge(small, on="k")
        total = float((joined.v * joined.w).sum().compute())
    return float(sums.sum()) == rows * n and total == 2.0 * rows * n


def run(what: str, target: Target) -> dict[str, Any]:
    """`what`: SYSTEM-WORKLOAD-TIMES. Wall time of the work itself, without the start of the cluster."""
    system, workload, times = what.rsplit("-", 2)
    missing("rmm", target.arrays, *([target.frames] if workload == "cudf" else []))
    limit, chunk = int(LIMIT * target.scale), int(CHUNK * target.scale)
    work = arrays_work if workload == "cupy" else frames_work
    out: dict[str, Any] = {"limit_bytes": limit, "data_bytes": int(times) * limit}
    with cluster(system, limit) as client:
        start = time.perf_counter()
        out["correct"] = work(target, int(times) * limit, chunk)
        out["seconds"] = round(time.perf_counter() - start, 3)
        if system == "gpurt":
            (out["device"],) = client.run(_device_statistics).values()
    if not out["correct"]:
        out["problem"] = "the answer is wrong"
    return out


def _device_statistics(dask_worker: Any) -> Any:
    from dask_gpurt.extension import on_worker

    parts = on_worker(dask_worker)
    assert parts is not None
    assert parts.runtime is not None
    return parts.runtime.statistics()["device"]
