"""Merge and set_index, which are shuffles with work around them, against stock's two, beside the plain shuffle.

    python -m benchmarks.shuffle_merge --partitions 16 128 --runs 5

Each variant has a cluster of its own, two workers with one thread; ours has the whole extension. They take turns, the
first run of each in fresh processes is left out. Inputs are persisted before the clock starts. Results are checked by
row count and sum. *Alone* is what the work around the shuffle takes by itself: the same merges of partitions that are
shuffled already, in one process, half of it, since two workers share it. Nobody can be faster than that.
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
from distributed import LocalCluster, wait

import dask_gpurt
from benchmarks import compare, data
from benchmarks.shuffle import prepare
from benchmarks.shuffle_meters import two_workers

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Client

VARIANTS = ("p2p", "tasks", "gpurt")
BYTES_PER_ROW = 70


def make(i: int, n: int, rows: int, side: str) -> pd.DataFrame:
    """One input partition: a key that has one partner on the other side on average, three numbers, a text."""
    r = np.random.default_rng([i, ord(side)])
    text = pd.Series(np.char.add("name-", r.integers(0, 1_000_000, n).astype("U7")), dtype="str")
    numbers = {f"{side}{name}": r.random(n) for name in "abc"}
    return pd.DataFrame({"k": r.integers(0, rows, n), **numbers, f"{side}s": text})


def frame(partitions: int, rows: int, side: str) -> Any:
    n = rows // partitions
    return dd.from_map(make, range(partitions), n=n, rows=rows, side=side, meta=make(0, 3, rows, side).iloc[:0])


def _shuffle(left: Any, right: Any) -> Any:
    return left.shuffle("k")


def _merge(left: Any, right: Any) -> Any:
    return left.merge(right, on="k")


def _set_index(left: Any, right: Any) -> Any:
    return left.set_index("k")


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {"shuffle": _shuffle, "merge": _merge, "set_index": _set_index}


def alone(operation: str, partitions: int, rows: int) -> float:
    """Seconds of the work around the shuffle on one of two workers, from a few partitions."""
    few, n = min(partitions, 8), rows // partitions
    seconds = 0.0
    for i in range(few):
        left, right = make(i, n, n, "l"), make(i, n, n, "r")
        start = time.perf_counter()
        if operation == "merge":
            left.merge(right, on="k")
        elif operation == "set_index":
            left.set_index("k").sort_index()
        seconds += time.perf_counter() - start
    return seconds * partitions / few / 2


def one(client: Client, variant: str, operation: str, inputs: tuple[Any, Any]) -> tuple[float, tuple[int, float]]:
    """Seconds, and what tells the result from others: rows and a sum."""
    method = "tasks" if variant == "tasks" else "p2p"
    with client.as_current(), dask.config.set({"dataframe.shuffle.method": method}):
        start = time.perf_counter()
        out = OPERATIONS[operation](*inputs).persist()
        wait(out)
        seconds = time.perf_counter() - start
        rows, total = dask.compute(out.la.size, out.la.sum())
    del out
    time.sleep(0.5)
    return seconds, (int(rows), round(float(total), 3))


def sweep(clients: dict[str, Client], operation: str, partitions: int, args: argparse.Namespace) -> dict[str, Any]:
    """All variants in turns."""
    rows = int(args.size * 1e9 / 2 / BYTES_PER_ROW)
    inputs = {}
    for variant, client in clients.items():
        with client.as_current():
            inputs[variant] = frame(partitions, rows, "l").persist(), frame(partitions, rows, "r").persist()
            wait(inputs[variant])
    runs: dict[str, list[float]] = {variant: [] for variant in clients}
    results = set()
    for round_, variant in compare.turns(list(clients), args.runs + 1):
        seconds, result = one(clients[variant], variant, operation, inputs[variant])
        results.add(result)
        if round_:
            runs[variant].append(seconds)
        print(f"{operation} {partitions} {variant} {seconds:.2f} s {result}", flush=True)
    if len(results) > 1:
        raise SystemExit(f"{operation} {partitions}: results differ: {results}")
    median = {variant: statistics.median(seconds) for variant, seconds in runs.items()}
    return {
        "rows_of_a_side": rows,
        "seconds": runs,
        "median": median,
        "alone_seconds": alone(operation, partitions, rows),
        "stock_over_gpurt": {variant: median[variant] / median["gpurt"] for variant in median if variant != "gpurt"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", nargs="+", default=list(OPERATIONS), choices=OPERATIONS)
    parser.add_argument("--partitions", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--runs", type=int, default=5, help="after the first")
    parser.add_argument("--size", type=float, default=0.6, help="GB of both inputs in memory, about")
    parser.add_argument("--out", default=os.path.join(data.RESULTS, "shuffle_merge.json"))
    args = parser.parse_args()
    prepare()
    report: dict[str, Any] = data.facts(
        f"{data.cores()} CPU cores, 2 worker processes with one thread, loopback, no GPU"
    )
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        makes = {variant: dask_gpurt.local_cluster if variant == "gpurt" else LocalCluster for variant in args.variants}
        clients = {variant: stack.enter_context(two_workers(make)) for variant, make in makes.items()}
        for operation in args.operations:
            for partitions in args.partitions:
                name = f"{operation} {partitions}"
                results[name] = sweep(clients, operation, partitions, args) | {"load_after": os.getloadavg()[0]}
                print(name, {k: v for k, v in results[name].items() if k != "seconds"}, flush=True)
                data.write_json(args.out, report | {"results": results})


if __name__ == "__main__":
    main()
