"""A shuffle of 8 GB of frames in device memory: ours, Dask's P2P, its tasks over tcp and over UCX; rows compared.

A case is SYSTEM-KEYS-WORKERS: integer or text keys, one worker process or two on the same GPU, every worker with RMM's
asynchronous allocator. Of each partition a digest is kept: its rows, the number of its keys, and sums over its rows of
each value times the row's identity, wrapping at 2^64. So systems that mixed up values, rows or partitions differ.
`agree` compares the digests of cases; each case by itself compares the sums of all rows with those of its input.
"""

from __future__ import annotations

import importlib
import statistics
import time
from typing import TYPE_CHECKING, Any

import pandas as pd

from benchmarks.gpu.target import get, missing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distributed import LocalCluster

    from benchmarks.gpu.target import Target

BYTES = 2_000_000_000
#: runs of a shuffle on one cluster, and the seconds after which no other is begun
RUNS, SECONDS = 6, 20.0
#: for one of them
PATIENCE_SECONDS = 40.0
VALUES, KEYS = 6, 100_000
#: a key, an identity and six values of eight bytes; text keys have about twelve
ROW_BYTES = 8 * (2 + VALUES)


def part(i: int, rows: int, keys: str, on: str) -> Any:
    """Partition `i` of the input: `rows` rows whose keys repeat across partitions."""
    target = get(on)
    arrays: Any = importlib.import_module(target.arrays)
    rng = arrays.random.default_rng(i)
    columns = {"k": rng.integers(0, KEYS, rows), "id": arrays.arange(i * rows, (i + 1) * rows)}
    columns |= {f"v{j}": rng.integers(0, 1 << 40, rows) for j in range(VALUES)}
    return target.table(columns, [f"key-{k}" for k in range(KEYS)] if keys == "text" else [])


def digest(frame: Any) -> pd.DataFrame:
    """One row that tells a partition from others, whatever the order of its rows."""
    row = [len(frame), int(frame["k"].nunique()), int(frame["id"].sum())]
    row += [int((frame[f"v{j}"] * (frame["id"] + 1)).sum()) for j in range(VALUES)]
    return pd.DataFrame([row], columns=_COLUMNS).astype("i8")


_COLUMNS = ["rows", "keys", "ids", *(f"v{j}" for j in range(VALUES))]


def use_async_allocator() -> None:
    """Of a worker: RMM's asynchronous allocator, the same for all systems."""
    import rmm

    rmm.mr.set_current_device_resource(rmm.mr.CudaAsyncMemoryResource())


def cluster(system: str, workers: int) -> LocalCluster:
    """`workers` processes with one thread each; ours with device frames taken."""
    import dask_gpurt

    where: dict[str, Any] = {
        "n_workers": workers,
        "threads_per_worker": 1,
        "dashboard_address": None,
        "processes": True,
    }
    if system.startswith("gpurt"):
        ways = {"shuffle.device-frames": True, "shuffle.transport": "ucx" if system == "gpurt-ucx" else "auto"}
        return dask_gpurt.local_cluster(settings=ways, **where)
    from distributed import LocalCluster

    if system == "tasks-ucx":
        missing("distributed_ucxx")
        where |= {"protocol": "ucxx"}
    return LocalCluster(**where)


def run(what: str, target: Target) -> dict[str, Any]:
    """`what`: SYSTEM-KEYS-WORKERS. Wall time of a shuffle: its input lies in the workers, its outputs stay there.

    The first has kernels loaded and memory mapped; "seconds" is the median of those after it, as far as there are some.
    """
    import dask
    import dask.dataframe as dd
    from distributed import Client, wait

    from benchmarks.shuffle_meters import give_back

    system, keys, count = what.rsplit("-", 2)
    workers = int(count)
    missing("rmm", target.frames)
    parts = 8 * workers
    rows = max(1, int(BYTES * target.scale / 4 if target.name != "gpu" else BYTES) // parts // ROW_BYTES)
    with cluster(system, workers) as made, Client(made) as client:
        client.wait_for_workers(workers, timeout=60)
        if target.name == "gpu":
            client.run(use_async_allocator)
        meta = part(0, 3, keys, target.name).iloc[:0]
        source = dd.from_map(part, range(parts), rows=rows, keys=keys, on=target.name, meta=meta).persist()
        wait(source)
        method = "tasks" if system.startswith("tasks") else "p2p"
        all_seconds: list[float] = []
        out: Any = None
        while len(all_seconds) < RUNS and sum(all_seconds) < SECONDS:
            del out
            client.run(_idle)  # what the run before left has been given back
            start = time.perf_counter()
            out = source.shuffle("k", npartitions=parts, shuffle_method=method).persist()
            try:
                wait(out, timeout=PATIENCE_SECONDS)
            except TimeoutError:
                found = {"problem": f"a shuffle did not end in {PATIENCE_SECONDS:g} s", "all_seconds": all_seconds}
                if system.startswith("gpurt"):
                    found["on_workers"] = client.run(_counters)
                return {**found, "stacks": client.call_stack()}
            all_seconds.append(time.perf_counter() - start)
        seconds = statistics.median(all_seconds[1:] or all_seconds)
        empty = pd.DataFrame({name: pd.Series([], dtype="i8") for name in _COLUMNS})
        before, after = dask.compute(source.map_partitions(digest, meta=empty), out.map_partitions(digest, meta=empty))
        same = bool((before.drop(columns="keys").sum() == after.drop(columns="keys").sum()).all())
        result: dict[str, Any] = {
            "seconds": round(seconds, 3),
            "all_seconds": [round(s, 3) for s in all_seconds],
            "rows": int(after["rows"].sum()),
            "gigabytes_per_second": round(parts * rows * ROW_BYTES / seconds / 1e9, 2),
            "digests": after.to_numpy().tolist(),
        }
        if not same or result["rows"] != parts * rows:
            result["problem"] = "the rows are not those of the input"
        if system.startswith("gpurt"):
            result["on_workers"] = client.run(_counters)
            ours = client.run_on_scheduler(give_back)
            if ours["runs"] != len(all_seconds) or ours["fallbacks"]:
                result["problem"] = f"it was not ours: {ours['runs']} runs, {ours['fallbacks']}"
    return result


def _idle() -> None:
    import gc

    gc.collect()


def _counters(dask_worker: Any) -> dict[str, Any]:
    """Where its time went, and by which ways."""
    from dask_gpurt.shuffle.counters import worker_statistics

    found = worker_statistics(dask_worker)
    transport = found.pop("transport") or {}
    return {**{k: v for k, v in found.items() if v}, "transport": {k: v for k, v in transport.items() if v}}


def agree(cases: Sequence[dict[str, Any]]) -> list[str]:
    """Cases of the same input whose partitions are not those of the first of them."""
    seen: dict[str, Any] = {}
    out = []
    for case in cases:
        if "digests" in case:
            system, keys, workers = case["case"].partition(":")[2].rsplit("-", 2)
            del system
            if seen.setdefault(f"{keys}-{workers}", case["digests"]) != case["digests"]:
                out.append(case["case"])
    return out
