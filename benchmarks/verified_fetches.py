"""What checksums of fetches cost: one worker fetches partitions from another, with and without them.

    python -m benchmarks.verified_fetches --runs 7 --out results.json

Two worker processes with one thread each, no memory limit, loopback, stock Dask but for `extension.fetches`. In turns:

- `stock`: no checksums. `verified`: as with ``gpurt.transfers.verify: true``.

For each size, partitions (pandas frames of floats and integers) are made on one worker, `--total` MB. A task for
each, on the other worker, needs it. Counted are the seconds until all tasks are done (`wall`), those of the fetches as
Dask's own log of transfers has them (`fetch`), CPU seconds of both workers (`cpu`), all per MB, in microseconds.
`hash_us_per_mb` is the checksum alone, of data that lies in memory, in one thread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pandas as pd
import xxhash
from distributed import wait

from benchmarks import compare, data
from benchmarks.shuffle_meters import UNMANAGED, two_workers

if TYPE_CHECKING:
    from distributed import Client

VARIANTS = ("stock", "verified")
#: MB of a partition
SIZES = (1, 10, 100)
_COLUMNS = 8


def make(i: int, mb: int) -> pd.DataFrame:
    """A partition of so many MB."""
    rng = np.random.default_rng(i)
    rows = mb * 1_000_000 // (8 * _COLUMNS)
    floats = {f"f{j}": rng.random(rows) for j in range(_COLUMNS // 2)}
    return pd.DataFrame(floats | {f"i{j}": rng.integers(0, 1 << 40, rows) for j in range(_COLUMNS // 2)})


def _switch(dask_worker: Any, variant: str) -> None:
    """On a worker: with or without checksums from now on."""
    from dask_gpurt.extension.fetches import Fetches

    found = getattr(dask_worker, "_gpurt_fetches", None)
    if found is not None:
        found.uninstall()
        dask_worker._gpurt_fetches = None
    if variant == "verified":
        dask_worker._gpurt_fetches = Fetches(dask_worker, verify=True)
        dask_worker._gpurt_fetches.install()


def _cpu() -> float:
    return time.process_time()


def _seen(dask_worker: Any) -> tuple[int, float, int]:
    """On a worker: bytes fetched so far, seconds that took, and fetches verified."""
    log = dask_worker.transfer_incoming_log
    fetches = getattr(dask_worker, "_gpurt_fetches", None)
    verified = 0 if fetches is None else fetches.counts["verified"]
    return sum(t["total"] for t in log), sum(t["stop"] - t["start"] for t in log), verified


def _once(client: Client, variant: str, mb: int, count: int) -> dict[str, float]:
    sender, receiver = sorted(client.scheduler_info()["workers"])
    client.run(_switch, variant=variant)
    made = client.map(make, range(count), mb=mb, workers=[sender], pure=False)
    wait(made)
    (bytes_before, seconds_before, _), cpu = client.run(_seen, workers=[receiver])[receiver], client.run(_cpu)
    start = time.perf_counter()
    lengths = client.map(len, made, workers=[receiver], pure=False)
    wait(lengths)
    wall = time.perf_counter() - start
    after = client.run(_cpu)
    moved, seconds, verified = client.run(_seen, workers=[receiver])[receiver]
    assert verified == (count if variant == "verified" else 0), (variant, verified)
    assert moved - bytes_before >= mb * count * 1_000_000 * 0.99
    total = (moved - bytes_before) / 1e6
    return {
        "wall": wall / total * 1e6,
        "fetch": (seconds - seconds_before) / total * 1e6,
        "cpu": sum(after[w] - cpu[w] for w in after) / total * 1e6,
    }


def _hash_us_per_mb(mb: int) -> float:
    block = memoryview(np.random.default_rng(0).bytes(mb * 1_000_000))
    times = []
    for _ in range(7):
        start = time.perf_counter()
        xxhash.xxh3_64_intdigest(block)
        times.append(time.perf_counter() - start)
    return statistics.median(times) / mb * 1e6


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """By size: medians and runs of each variant, and the ratios of runs in one round."""
    out: dict[str, Any] = {}
    with dask.config.set(UNMANAGED), two_workers() as client:
        for mb in args.sizes:
            count = max(1, args.total // mb)
            runs: dict[str, list[dict[str, float]]] = {v: [] for v in VARIANTS}
            for i, variant in compare.turns(list(VARIANTS), args.runs + 1):
                figures = _once(client, variant, mb, count)
                if i:
                    runs[variant].append(figures)
            pairs = list(zip(runs["verified"], runs["stock"], strict=True))
            out[f"{mb}MB"] = {
                "partitions": count,
                "median_us_per_mb": {
                    v: {k: statistics.median(r[k] for r in rs) for k in rs[0]} for v, rs in runs.items()
                },
                "verified / stock": {k: statistics.median(v[k] / s[k] for v, s in pairs) for k in pairs[0][0]},
                "verified - stock, us per MB": {
                    k: statistics.median(v[k] - s[k] for v, s in pairs) for k in pairs[0][0]
                },
                "hash_us_per_mb": _hash_us_per_mb(mb),
                "runs": runs,
            }
            print(mb, {k: v for k, v in out[f"{mb}MB"].items() if k != "runs"}, flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--total", type=int, default=400, help="MB fetched per run")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="MB of a partition")
    parser.add_argument("--out", default="-", help="JSON file; - for standard output")
    args = parser.parse_args()
    report = {
        **data.facts(f"{data.cores()} CPU cores, two worker processes, loopback"),
        "load_before": os.getloadavg()[0],
        "arguments": vars(args),
        "results": measure(args),
    }
    data.put(args.out, report)


if __name__ == "__main__":
    main()
