"""Replay against reality: runs are recorded on real clusters under several policies, and each trace is replayed.

For every workload and policy: recorded and predicted makespan, their difference, and how many predicted seconds a
second of simulating gives. And the ranking: the recorded runs of the policies, fastest first, against what the replay
of the *stock* trace predicts for them.

    python -m benchmarks.replay --runs 5 --out benchmarks/results/replay.json

Workloads: ``tree`` and ``stencil`` of tasks that sleep (4 workers), ``spill`` (arrays of three times the memory budget,
2 workers), and ``tpch`` (22 queries, scale 1, 2 workers). The clusters' processes share this machine's cores; what
sleeps does not mind, what computes does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
from distributed import Client, LocalCluster, wait

import dask_gpurt
from benchmarks.data import OUT, facts, write_json
from dask_gpurt.observe.trace.reader import Trace
from dask_gpurt.simulate.replay import replay

if TYPE_CHECKING:
    from collections.abc import Callable

#: of TPC-H
SCALE = 1.0
#: policy -> Dask's configuration; "gpurt" is the extension
POLICIES: dict[str, dict[str, Any]] = {
    "stock": {},
    "inf": {"distributed.scheduler.worker-saturation": "inf"},
    "gpurt": {},
}


def _make(seconds: float, nbytes: int, *inputs: Any) -> bytes:
    time.sleep(seconds)
    return bytes(nbytes)


def tree(client: Client) -> None:
    """128 leaves of 2 MB, joined by fours."""
    level = [dask.delayed(_make, pure=False)(0.04, 2_000_000, dask_key_name=("leaf", i)) for i in range(128)]
    depth = 0
    while len(level) > 1:
        depth += 1
        level = [
            dask.delayed(_make, pure=False)(0.04, 2_000_000, *level[i : i + 4], dask_key_name=(f"join{depth}", i // 4))
            for i in range(0, len(level), 4)
        ]
    client.compute(dask.delayed(len)(level[0])).result()


def stencil(client: Client) -> None:
    """10 steps on 24 cells of 2 MB, each from its two neighbours and itself."""
    row = [dask.delayed(_make, pure=False)(0.04, 2_000_000, dask_key_name=("step0", i)) for i in range(24)]
    for step in range(1, 10):
        row = [
            dask.delayed(_make, pure=False)(
                0.04, 2_000_000, *row[max(i - 1, 0) : i + 2], dask_key_name=(f"step{step}", i)
            )
            for i in range(24)
        ]
    client.compute(dask.delayed(lambda *r: sum(map(len, r)))(*row)).result()


def spill(client: Client) -> None:
    """Arrays of three times the memory that tasks may hold, read twice."""
    x = client.persist(da.random.default_rng(0).random((24, 5_000_000), chunks=(1, 2_500_000)))
    wait(x)
    (x + 1).sum().compute()
    (x * 2).mean().compute()


def tpch(client: Client) -> None:
    """The 22 queries."""
    from benchmarks.tpch.generate import ensure
    from benchmarks.tpch.queries import QUERIES
    from benchmarks.tpch.tables import open_tables

    tables = open_tables(ensure(os.path.join(OUT, "tpch", f"sf{SCALE:g}"), SCALE), SCALE)
    for query in QUERIES.values():
        client.compute(query(tables)).result()


#: workload -> (function, keyword arguments of the cluster)
WORKLOADS: dict[str, tuple[Callable[[Client], None], dict[str, Any]]] = {
    "tree": (tree, {"n_workers": 4, "threads_per_worker": 1}),
    "stencil": (stencil, {"n_workers": 4, "threads_per_worker": 1}),
    "spill": (spill, {"n_workers": 2, "threads_per_worker": 1, "memory_limit": "700 MB"}),
    "tpch": (tpch, {"n_workers": 2, "threads_per_worker": 1}),
}


def recorded(name: str, policy: str, path: str) -> None:
    """One run, recorded."""
    run, kwargs = WORKLOADS[name]
    make = dask_gpurt.local_cluster if policy == "gpurt" else LocalCluster
    with (
        dask.config.set(POLICIES[policy]),
        make(dashboard_address=":0", **kwargs) as cluster,
        Client(cluster) as client,
        dask_gpurt.record(client, path),
    ):
        run(client)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.workloads.split(","):
        traces: dict[str, list[Trace]] = {p: [] for p in POLICIES}
        with tempfile.TemporaryDirectory() as folder:
            for run in range(args.runs):
                for policy in POLICIES:  # alternating
                    path = os.path.join(folder, f"{policy}-{run}")
                    recorded(name, policy, path)
                    traces[policy].append(Trace.load(path))
        predicted_by_stock: dict[str, list[float]] = {p: [] for p in POLICIES}
        for policy, made in traces.items():
            same = []
            for trace in made:
                # A trace of stock Dask with another saturation does not know that it is one.
                one = replay(trace, policy)
                same.append((one.recorded_seconds, one.makespan_seconds, one.speed))
                if policy == "stock":
                    for other, values in predicted_by_stock.items():
                        values.append(replay(trace, other).makespan_seconds)
            errors = [p / r - 1 for r, p, _ in same]
            row = {
                "workload": name,
                "policy": policy,
                "recorded_seconds": statistics.median(r for r, _, _ in same),
                "predicted_seconds": statistics.median(p for _, p, _ in same),
                "median_error": statistics.median(errors),
                "worst_error": max(errors, key=abs),
                "times_real_time": statistics.median(s for _, _, s in same),
                "tasks": sum(t.runs > 0 for t in made[0].tasks.values()),
            }
            rows.append(row)
            print(
                f"{name:8} {policy:6} recorded {row['recorded_seconds']:.2f} s, predicted"
                f" {row['predicted_seconds']:.2f} s, error {row['median_error']:+.1%} (worst"
                f" {row['worst_error']:+.1%}), {row['times_real_time']:.0f} x real time"
            )
        real = sorted(POLICIES, key=lambda p: next(r["recorded_seconds"] for r in rows[-3:] if r["policy"] == p))
        told = sorted(POLICIES, key=lambda p: statistics.median(predicted_by_stock[p]))
        for row in rows[-len(POLICIES) :]:
            row["predicted_from_stock_seconds"] = statistics.median(predicted_by_stock[row["policy"]])
            row["ranking_recorded"], row["ranking_predicted"] = real, told
        print(f"{name:8} ranking: recorded {' < '.join(real)}; predicted from stock's trace {' < '.join(told)}")
    if args.out:
        write_json(
            args.out,
            {**facts("LocalCluster, processes, 2 CPU cores, loopback, no GPU"), "runs": args.runs, "rows": rows},
        )


if __name__ == "__main__":
    main()
