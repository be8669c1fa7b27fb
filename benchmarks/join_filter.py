"""Joins with run-time filters on and off, in turns, where a share of the larger side's rows has a partner.

    python -m benchmarks.join_filter --selectivity 0.01 0.3 1.0 --runs 3
    python -m benchmarks.join_filter --selectivity 1.0 --runs 7 --fanout 1     # a side of as many rows as the other

Two clusters of two workers with one thread, the whole extension on both; they differ in ``gpurt.shuffle.join-filter``.
Inputs are persisted before the clock starts, the first run of each is left out. The results must have the same rows.
Besides seconds, which need a quiet machine: the CPU seconds of both workers in a join, and those of the filter's code.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import psutil
from distributed import wait

import dask_gpurt
from benchmarks import compare, data
from benchmarks.shuffle import prepare
from benchmarks.shuffle_meters import two_workers
from dask_gpurt.shuffle.counters import worker_statistics

if TYPE_CHECKING:
    from distributed import Client

VARIANTS = ("off", "auto")
COUNTS = ("bytes_sent", "bytes_self", "join_rows_in", "join_rows_dropped", "join_seconds")


def large(i: int, n: int, keys: int, text: bool) -> pd.DataFrame:
    """An input of the larger side: keys below `keys`, three numbers, a text."""
    r = np.random.default_rng([i, 1])
    columns: dict[str, Any] = {"k": named(r.integers(0, keys, n), text)} | {name: r.random(n) for name in "abc"}
    words = np.char.add("name-", r.integers(0, 1_000_000, n).astype("U7"))
    return pd.DataFrame(columns | {"s": pd.Series(words, dtype="string[pyarrow]")})


def small(i: int, n: int, parts: int, text: bool) -> pd.DataFrame:
    """An input of the smaller side: every key of 0 to parts * n once."""
    return pd.DataFrame({"k2": named(np.arange(n) * parts + i, text), "w": np.arange(n) + 0.5})


def named(keys: Any, text: bool) -> Any:
    """Keys as they are, or as text."""
    return pd.Series(np.char.add("Customer#", keys.astype("U9")), dtype="string[pyarrow]") if text else keys


def cluster_for(variant: str) -> contextlib.AbstractContextManager[Client]:
    """Two workers of one thread."""
    os.environ["DASK_GPURT__SHUFFLE__JOIN_FILTER"] = variant
    dask.config.refresh()
    return two_workers(dask_gpurt.local_cluster)


def counted(client: Client) -> dict[str, float]:
    """Figures of both workers."""
    each = client.run(lambda dask_worker: (worker_statistics(dask_worker), os.getpid()))
    counts = {name: sum(one[name] for one, _ in each.values()) for name in COUNTS}
    return counts | {"cpu_seconds": sum(sum(psutil.Process(pid).cpu_times()[:2]) for _, pid in each.values())}


def one(client: Client, inputs: tuple[Any, Any]) -> tuple[float, dict[str, float], tuple[int, float]]:
    """Seconds, what was counted meanwhile, and what tells the result from others."""
    before = counted(client)
    with client.as_current(), dask.config.set({"dataframe.shuffle.method": "p2p"}):
        start = time.perf_counter()
        out = inputs[0].merge(inputs[1], left_on="k", right_on="k2", broadcast=False).persist()
        wait(out)
        seconds = time.perf_counter() - start
        rows, total = dask.compute(out.a.size, out.w.sum())
    after = counted(client)
    del out
    time.sleep(0.5)
    return seconds, {name: after[name] - before[name] for name in after}, (int(rows), round(float(total), 1))


def sweep(clients: dict[str, Client], selectivity: float, args: argparse.Namespace) -> dict[str, Any]:
    """Both variants in turns."""
    n, keys = args.rows // args.partitions, args.rows // args.fanout
    parts = max(2, args.partitions // 4)
    few = max(1, int(keys * selectivity) // parts)
    inputs = {}
    for variant, client in clients.items():
        with client.as_current():
            metas = large(0, 2, 9, args.text).iloc[:0], small(0, 2, 1, args.text).iloc[:0]
            inputs[variant] = (
                dd.from_map(large, range(args.partitions), n=n, keys=keys, text=args.text, meta=metas[0]).persist(),
                dd.from_map(small, range(parts), n=few, parts=parts, text=args.text, meta=metas[1]).persist(),
            )
            wait(inputs[variant])
    runs: dict[str, list[float]] = {variant: [] for variant in clients}
    cpu: dict[str, list[float]] = {variant: [] for variant in clients}
    counts: dict[str, dict[str, float]] = {}
    results = set()
    for round_, variant in compare.turns(list(clients), args.runs + 1):
        seconds, counts[variant], result = one(clients[variant], inputs[variant])
        results.add(result)
        if round_:
            runs[variant].append(seconds)
            cpu[variant].append(counts[variant]["cpu_seconds"])
        print(f"{selectivity} {variant} {seconds:.2f} s {result}", flush=True)
    if len(results) > 1:
        raise SystemExit(f"selectivity {selectivity}: results differ: {results}")
    median = {variant: statistics.median(seconds) for variant, seconds in runs.items()}
    median_cpu = {variant: statistics.median(seconds) for variant, seconds in cpu.items()}
    return {
        "seconds": runs,
        "median": median,
        "auto_over_off": median["auto"] / median["off"],
        "cpu_seconds": cpu,
        "cpu_auto_over_off": median_cpu["auto"] / median_cpu["off"],
        "filter_share_of_cpu": counts["auto"]["join_seconds"] / median_cpu["auto"],
        "counts": counts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--selectivity", type=float, nargs="+", default=[0.01, 0.1, 0.3, 0.6, 1.0])
    parser.add_argument("--partitions", type=int, default=24)
    parser.add_argument("--rows", type=int, default=4_000_000, help="of the larger side")
    parser.add_argument("--fanout", type=int, default=10, help="rows of the larger side per key")
    parser.add_argument("--runs", type=int, default=5, help="after the first")
    parser.add_argument("--text", action="store_true", help="join on text, not on integers")
    parser.add_argument("--out", default=os.path.join(data.OUT, "join_filter.json"))
    args = parser.parse_args()
    prepare()
    report: dict[str, Any] = data.facts(
        f"{data.cores()} CPU cores, 2 worker processes with one thread, loopback, no GPU"
    ) | {"rows": args.rows, "partitions": args.partitions, "fanout": args.fanout, "text": args.text}
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        clients = {variant: stack.enter_context(cluster_for(variant)) for variant in VARIANTS}
        for selectivity in args.selectivity:
            results[str(selectivity)] = sweep(clients, selectivity, args)
            shown = {k: v for k, v in results[str(selectivity)].items() if k not in ("seconds", "cpu_seconds")}
            print(selectivity, shown, flush=True)
            data.write_json(args.out, report | {"results": results})


if __name__ == "__main__":
    main()
