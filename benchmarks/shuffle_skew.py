"""A join on keys with Zipf's law (exponent 1.2), against stock: wall time, the longest task, peak memory.

    python -m benchmarks.shuffle_skew --runs 5

A fact table whose keys follow Zipf's law is joined (inner) with a table that has every key once; a fifth of all facts
has one key. Two workers with one thread, each variant in a cluster of its own, taking turns; both tables persisted
before the clock starts. The longest task is that of the output which holds the most frequent key: its partition cannot
be divided without changing what the user gets. Rows and a sum are checked. `told` is what our report says of the skew.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client, SchedulerPlugin, wait

from benchmarks import compare, data, shuffle, shuffle_meters

if TYPE_CHECKING:
    from collections.abc import Sequence

KEYS = 1_000_000
EXPONENT = 1.2


def facts(i: int, n: int) -> pd.DataFrame:
    """A partition of the fact table."""
    r = np.random.default_rng(i)
    return pd.DataFrame({"k": r.zipf(EXPONENT, n) % KEYS, **{name: r.random(n) for name in "abcd"}})


def keys(i: int, n: int) -> pd.DataFrame:
    """A partition of the table that has every key once."""
    first = i * (KEYS // n)
    k = np.arange(first, KEYS if i == n - 1 else first + KEYS // n)
    return pd.DataFrame({"k": k, "w": k * 0.5})


class Longest(SchedulerPlugin):
    """The longest computation of a task, seconds; since the last look."""

    name = "longest-task"

    def __init__(self) -> None:
        self.seconds = 0.0
        self.key = ""

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        for one in kwargs.get("startstops") or ():
            if one["action"] == "compute" and one["stop"] - one["start"] > self.seconds:
                self.seconds, self.key = one["stop"] - one["start"], str(key)


def longest(dask_scheduler: Any) -> tuple[float, str]:
    """On the scheduler."""
    plugin = dask_scheduler.plugins.get(Longest.name)
    if plugin is None:
        plugin = Longest()
        dask_scheduler.add_plugin(plugin, name=Longest.name)
    out = plugin.seconds, plugin.key
    plugin.seconds, plugin.key = 0.0, ""
    return out


def one(client: Client, left: Any, right: Any, variant: str, rows: int) -> dict[str, Any]:
    """Join once."""
    if variant == "gpurt":
        client.run_on_scheduler(shuffle_meters.take_over)
    client.run_on_scheduler(longest)
    client.run(shuffle_meters.begin)
    start = time.perf_counter()
    out = left.merge(right, on="k", how="inner", shuffle_method="p2p", broadcast=False).persist()
    wait(out)
    wall = time.perf_counter() - start
    after = client.run(shuffle_meters.end)
    seconds, _ = client.run_on_scheduler(longest)
    sizes = sorted(out.map_partitions(len).compute().tolist(), reverse=True)
    if sum(sizes) != rows or not bool((out.k * 0.5 == out.w).all().compute()):
        raise SystemExit(f"{variant}: {sum(sizes)} rows came out, must be {rows}, each with the w of its k")
    del out
    measured: dict[str, Any] = {
        "wall_seconds": wall,
        "longest_task_seconds": seconds,
        "peak_rss_bytes": max(peak for _, peak in after.values()),
        "largest_output_share": sizes[0] / rows,
    }
    if variant == "gpurt":
        stats = client.run_on_scheduler(shuffle_meters.give_back)
        if stats["runs"] != 2 or stats["fallbacks"] or stats["errors"]:
            raise SystemExit(f"our shuffle was not what ran, or failed: {stats}")
        measured["told"] = stats["skew"]["latest"]
    time.sleep(0.3)
    return measured


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=6_000_000, help="of the fact table")
    parser.add_argument("--partitions", type=int, default=16)
    parser.add_argument("--variants", nargs="+", default=["p2p", "gpurt"], choices=["p2p", "gpurt"])
    parser.add_argument("--out", default=os.path.join(data.RESULTS, "shuffle_skew.json"))
    args = parser.parse_args(argv)
    shuffle.prepare()
    report = data.facts(f"{data.cores()} CPU cores, 2 worker processes with one thread, loopback, no GPU")
    n = args.partitions
    runs: dict[str, list[dict[str, Any]]] = {v: [] for v in args.variants}
    with contextlib.ExitStack() as stack:
        clients = {variant: stack.enter_context(shuffle.cluster_for(variant)) for variant in args.variants}
        tables: dict[str, tuple[Any, Any]] = {}
        for variant, client in clients.items():
            with client.as_current():
                left = dd.from_map(facts, list(range(n)), n=args.rows // n, meta=facts(0, 1).iloc[:0]).persist()
                right = dd.from_map(keys, list(range(n)), n=n, meta=keys(0, n).iloc[:0]).persist()
                wait([left, right])
            tables[variant] = left, right
        rows = args.rows // n * n
        for r, variant in compare.turns(args.variants, args.runs + 1):
            with clients[variant].as_current():
                measured = one(clients[variant], *tables[variant], variant, rows)
            print(r, variant, measured, flush=True)
            if r:  # the first round imports and warms up
                runs[variant].append(measured)
        del tables, left, right
    figures = ("wall_seconds", "longest_task_seconds", "peak_rss_bytes", "largest_output_share")
    medians = {v: {k: statistics.median(run[k] for run in some) for k in figures} for v, some in runs.items()}
    report |= {"rows": rows, "partitions": n, "exponent": EXPONENT, "median": medians, "all_runs": runs}
    if "gpurt" in medians and "p2p" in medians:
        report["stock_over_gpurt"] = {k: medians["p2p"][k] / medians["gpurt"][k] for k in figures}
        print(report["stock_over_gpurt"])
    data.write_json(args.out, report)


if __name__ == "__main__":
    main()
