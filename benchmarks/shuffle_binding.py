"""A join two of whose large outputs belong to one worker: with and without late binding, and with stock's shuffle.

    python -m benchmarks.shuffle_binding --runs 5

Two fifths of the facts have one of two keys; Dask's hash puts both into outputs of the first of two workers (one thread
each). The facts are joined (inner) with a table that has every key `--copies` times; more make the join the larger
part. Ours stays installed from run to run, and learns in the first, which is not counted. Measured besides wall time:
the seconds that the busier worker spends on the tasks behind the barrier, and its share of the bytes of the result.
Variants take turns, each in a cluster of its own, both tables persisted before the clock starts. Rows and a sum are
checked.
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
from dask.dataframe.shuffle import partitioning_index
from distributed import Client, SchedulerPlugin, wait

from benchmarks import compare, data, shuffle, shuffle_meters
from benchmarks.shuffle_skew import keys

if TYPE_CHECKING:
    from collections.abc import Sequence

KEYS = 1_000_000
SHARE = 0.4
VARIANTS = ("p2p", "gpurt", "late")


def hot_keys(outputs: int) -> list[int]:
    """Two keys of different outputs of the first worker: outputs are given out in ranges."""
    every = pd.DataFrame({"k": np.arange(10_000)})
    parts = partitioning_index(every.astype("f8"), outputs)
    return [int(every.k[parts == part].iloc[0]) for part in (0, outputs // 4)]


def facts(i: int, n: int, outputs: int) -> pd.DataFrame:
    """A partition of the fact table."""
    r = np.random.default_rng(i)
    k = np.where(r.random(n) < SHARE, r.choice(hot_keys(outputs), n), r.integers(0, KEYS, n))
    return pd.DataFrame({"k": k, **{name: r.random(n) for name in "abcd"}})


class Behind(SchedulerPlugin):
    """Seconds of tasks behind barriers, and bytes of their results, by worker."""

    name = "behind-the-barrier"

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.clear()

    def clear(self) -> None:
        self.seconds: dict[str, float] = {}
        self.nbytes: dict[str, int] = {}

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if start != "processing" or finish != "memory":
            return
        if not any(str(other.key).startswith("shuffle-barrier-") for other in self.scheduler.tasks[key].dependencies):
            return
        worker = kwargs["worker"]
        self.nbytes[worker] = self.nbytes.get(worker, 0) + int(kwargs.get("nbytes") or 0)
        for one in kwargs.get("startstops") or ():
            if one["action"] == "compute":
                self.seconds[worker] = self.seconds.get(worker, 0.0) + one["stop"] - one["start"]


def behind(dask_scheduler: Any) -> tuple[dict[str, float], dict[str, int]]:
    """On the scheduler; since the last call."""
    plugin = dask_scheduler.plugins.get(Behind.name)
    if plugin is None:
        plugin = Behind(dask_scheduler)
        dask_scheduler.add_plugin(plugin, name=Behind.name)
    out = plugin.seconds, plugin.nbytes
    plugin.clear()
    return out


async def told(dask_scheduler: Any) -> dict[str, Any]:
    """On the scheduler."""
    stats: dict[str, Any] = dask_scheduler.plugins["shuffle"].takeover.statistics()
    return stats


def repeated(i: int, n: int, copies: int) -> pd.DataFrame:
    """A partition of the table that has every key so many times."""
    return pd.concat([keys(i, n)] * copies, ignore_index=True)


def one(client: Client, left: Any, right: Any, variant: str, rows: int, first: bool) -> dict[str, Any]:
    """Join once."""
    if variant != "p2p" and first:
        client.run_on_scheduler(shuffle_meters.take_over, late_binding=variant == "late")
    client.run_on_scheduler(behind)
    client.run(shuffle_meters.begin)
    start = time.perf_counter()
    out = left.merge(right, on="k", how="inner", shuffle_method="p2p", broadcast=False).persist()
    wait(out)
    wall = time.perf_counter() - start
    after = client.run(shuffle_meters.end)
    seconds, nbytes = client.run_on_scheduler(behind)
    total = out.map_partitions(len).compute().sum()
    if total != rows or not bool((out.k * 0.5 == out.w).all().compute()):
        raise SystemExit(f"{variant}: {total} rows came out, must be {rows}, each with the w of its k")
    del out
    measured: dict[str, Any] = {
        "wall_seconds": wall,
        "busier_worker_seconds": max(seconds.values()),
        "busier_worker_share": max(nbytes.values()) / sum(nbytes.values()),
        "peak_rss_bytes": max(peak for _, peak in after.values()),
    }
    if variant != "p2p":
        stats = client.run_on_scheduler(told)
        if stats["runs"] % 2 or stats["fallbacks"] or stats["errors"] or stats["recovery"]["restarted"]:
            raise SystemExit(f"our shuffle was not what ran, or failed: {stats}")
        measured["moved_so_far"] = stats["late_binding"]
    time.sleep(0.3)
    return measured


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=6_000_000, help="of the fact table")
    parser.add_argument("--partitions", type=int, default=16)
    parser.add_argument("--copies", type=int, default=1, help="of every key")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--out", default=os.path.join(data.RESULTS, "shuffle_binding.json"))
    args = parser.parse_args(argv)
    shuffle.prepare()
    report = data.facts(f"{data.cores()} CPU cores, 2 worker processes with one thread, loopback, no GPU")
    n = args.partitions
    rows = args.rows // n * n
    runs: dict[str, list[dict[str, Any]]] = {v: [] for v in args.variants}
    with contextlib.ExitStack() as stack:
        clients = {v: stack.enter_context(shuffle.cluster_for("p2p" if v == "p2p" else "gpurt")) for v in args.variants}
        tables: dict[str, tuple[Any, Any]] = {}
        for variant, client in clients.items():
            with client.as_current():
                meta = facts(0, 1, n).iloc[:0]
                left = dd.from_map(facts, list(range(n)), n=args.rows // n, outputs=n, meta=meta).persist()
                meta = keys(0, n).iloc[:0]
                right = dd.from_map(repeated, list(range(n)), n=n, copies=args.copies, meta=meta).persist()
                wait([left, right])
            tables[variant] = left, right
        for r, variant in compare.turns(args.variants, args.runs + 1):
            with clients[variant].as_current():
                measured = one(clients[variant], *tables[variant], variant, rows * args.copies, not r)
            print(r, variant, measured, flush=True)
            if r:  # the first round imports and warms up
                runs[variant].append(measured)
        del tables, left, right
    figures = ("wall_seconds", "busier_worker_seconds", "busier_worker_share", "peak_rss_bytes")
    medians = {v: {k: statistics.median(run[k] for run in some) for k in figures} for v, some in runs.items()}
    print(medians)
    data.write_json(
        args.out, report | {"rows": rows, "copies": args.copies, "partitions": n, "median": medians, "all_runs": runs}
    )


if __name__ == "__main__":
    main()
