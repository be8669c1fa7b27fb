"""A shuffle of about 1 GB on two workers of one thread: stock P2P, stock tasks and ours, alternating in one run.

    python -m benchmarks.shuffle_small --runs 5 --size 1.0 --partitions 16 128 --out results.json

One cluster serves all variants; between runs the takeover is installed or uninstalled on its scheduler. The input (2
int64, 4 float64, one text column) is persisted before the clock starts; every result is checked by row count and sum.
Reported per variant and number of partitions: wall seconds, CPU seconds of both workers, peak RSS of the larger worker,
each run and the median; and the ratios of the medians, stock divided by ours (above 1: ours is better).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import statistics
import time
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client, LocalCluster, wait

from benchmarks import data

ROWS_PER_GB = 15_000_000
VARIANTS = ("p2p", "tasks", "gpurt")


def make(i: int, n: int) -> pd.DataFrame:
    """One input partition."""
    r = np.random.default_rng(i)
    columns: dict[str, Any] = {"k": r.integers(0, 10_000_000, n), "i": r.integers(0, 1 << 40, n)}
    for name in "abcd":
        columns[name] = r.random(n)
    columns["s"] = pd.Series(np.char.add("name-", r.integers(0, 1_000_000, n).astype("U7")), dtype="str")
    return pd.DataFrame(columns)


def _cpu_seconds() -> float:
    t = os.times()
    return t.user + t.system


def _status(field: str) -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field))


def begin() -> float:
    """On a worker: forget the peak of memory; CPU seconds so far."""
    gc.collect()
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    return _cpu_seconds()


def end() -> tuple[float, int]:
    """On a worker: CPU seconds so far, peak RSS in bytes since `begin`."""
    return _cpu_seconds(), _status("VmHWM")


async def take_over(dask_scheduler: Any) -> None:
    """On the scheduler."""
    from dask_gpurt.config import ShuffleSettings
    from dask_gpurt.shuffle import ShuffleTakeover

    await ShuffleTakeover.install(dask_scheduler, ShuffleSettings(enabled=True))


async def give_back(dask_scheduler: Any) -> dict[str, Any]:
    """On the scheduler."""
    takeover = dask_scheduler.plugins["shuffle"].takeover
    while dask_scheduler.plugins["shuffle"].active_shuffles:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    await takeover.uninstall()
    stats: dict[str, Any] = takeover.statistics()
    return stats


def one(client: Client, d: Any, variant: str, want: int) -> dict[str, float]:
    """Shuffle once."""
    if variant == "gpurt":
        client.run_on_scheduler(take_over)
    before = client.run(begin)
    start = time.perf_counter()
    out = d.shuffle("k", shuffle_method="tasks" if variant == "tasks" else "p2p").persist()
    wait(out)
    wall = time.perf_counter() - start
    after = client.run(end)
    got = int(out.k.sum().compute())
    if got != want:
        raise SystemExit(f"{variant}: sum of k is {got}, must be {want}")
    del out
    if variant == "gpurt":
        stats = client.run_on_scheduler(give_back)
        if stats["runs"] != 1 or stats["fallbacks"]:
            raise SystemExit(f"our shuffle was not what ran: {stats}")
    time.sleep(0.5)
    return {
        "wall_seconds": wall,
        "cpu_seconds": sum(after[w][0] - before[w] for w in after),
        "peak_rss_bytes": max(peak for _, peak in after.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="runs of every variant")
    parser.add_argument("--size", type=float, default=1.0, help="GB of input in memory")
    parser.add_argument("--partitions", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--out", default="-", help="JSON file; - for standard output")
    args = parser.parse_args()
    logging.getLogger("distributed.shuffle").setLevel(logging.ERROR)
    dask.config.set(
        {f"distributed.worker.memory.{name}": False for name in ("target", "spill", "pause", "terminate")}
        | {"logging.distributed": "error"}
    )
    report: dict[str, Any] = {
        **data.facts(f"{data.cores()} CPU cores, 2 worker processes with one thread, loopback, no GPU"),
        "load_before": os.getloadavg()[0],
        "arguments": vars(args),
        "results": {},
    }
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, memory_limit=0, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        for n in args.partitions:
            rows = int(ROWS_PER_GB * args.size) // n
            d = dd.from_map(make, list(range(n)), n=rows, meta=make(0, 3).iloc[:0]).persist()
            wait(d)
            want = int(d.k.sum().compute())
            nbytes = int(d.memory_usage(deep=True).sum().compute())
            runs: dict[str, list[dict[str, float]]] = {v: [] for v in args.variants}
            for i in range(args.runs + 1):
                for variant in args.variants:
                    measured = one(client, d, variant, want)
                    if i:  # the first round imports and warms up
                        runs[variant].append(measured)
            medians = {v: {k: statistics.median(r[k] for r in rs) for k in rs[0]} for v, rs in runs.items()}
            report["results"][str(n)] = {
                "input_bytes": nbytes,
                "rows": rows * n,
                "median": medians,
                "stock_over_gpurt": {
                    v: {k: m[k] / medians["gpurt"][k] for k in m}
                    for v, m in medians.items()
                    if v != "gpurt" and "gpurt" in medians
                },
                "runs": runs,
            }
            del d
    if args.out == "-":
        print(json.dumps(report, indent=1))
    else:
        print(data.write_json(args.out, report))


if __name__ == "__main__":
    main()
