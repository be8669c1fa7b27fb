"""Do the causes sum to the time there was? The stall ledger over the 22 TPC-H queries.

For each query: ``|busy + causes - threads x wall| / (threads x wall)``, where the wall time is that between the two
snapshots by the scheduler's clock, not the ledger's own; and, as an independent account of ``busy``, the durations that
workers report with each task.

``python -m benchmarks.ledger --data DIR`` writes benchmarks/results/ledger.json.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from typing import Any

from benchmarks.data import OUT, RESULTS, cores, facts, write_json
from dask_gpurt import planning
from dask_gpurt.bench.tpch import generate, queries, runner, tables
from dask_gpurt.bench.tpch.clusters import ProcessCluster
from dask_gpurt.client.reports import snapshot
from dask_gpurt.observe.report.facts import from_snapshots

#: the goal, as a share
GOAL = 0.02


def measure(cluster: ProcessCluster, opened: tables.Tables, number: int, hold: bool) -> dict[str, Any]:
    before = snapshot(cluster.client)
    began = time.perf_counter()
    with planning.switched(hold), cluster.client.as_current():
        queries.QUERIES[number](opened).compute()
    seconds = time.perf_counter() - began
    run = from_snapshots(before, snapshot(cluster.client))
    threads = sum(w.threads for w in run.workers)
    there = threads * run.seconds
    told = run.busy_seconds + sum(run.causes.values())
    by_tasks = sum(task.seconds for task in run.tasks)
    return {
        "query": number,
        "seconds": seconds,
        "slot_seconds": there,
        "told_seconds": told,
        "error": abs(told - there) / there,
        "tasks": run.task_count,
        "busy_seconds": run.busy_seconds,
        "busy_by_tasks_seconds": by_tasks,
        "causes": {cause: round(s, 4) for cause, s in run.causes.items() if s >= 0.0001},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--data", help="directory of the data at this scale (default: out/tpch/sf<scale>)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--queries", type=int, nargs="*", default=sorted(queries.QUERIES))
    parser.add_argument("--runs", type=int, default=1, help="of all queries; the last one counts (default 1)")
    parser.add_argument("--planning", choices=("held", "stock"), default="held", help="what the client keeps of plans")
    parser.add_argument("--out", default=os.path.join(RESULTS, "ledger.json"))
    o = parser.parse_args()
    directory = o.data or os.path.join(OUT, "tpch", f"sf{o.scale:g}")
    generate.ensure(directory, o.scale, print)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        cluster = ProcessCluster(
            "gpurt",
            workers=o.workers,
            threads=o.threads,
            memory_limit_bytes=3 * 2**30,
            directory=os.path.join(scratch, "cluster"),
        )
        try:
            cluster.start()
            runner.warm_up(cluster, directory)
            opened = tables.open_tables(directory, o.scale)
            for _ in range(o.runs - 1):
                for number in o.queries:
                    measure(cluster, opened, number, o.planning == "held")
            for number in o.queries:
                row = measure(cluster, opened, number, o.planning == "held")
                rows.append(row)
                print(
                    f"q{number:02d} {row['seconds']:6.2f} s  slots x wall {row['slot_seconds']:7.3f}  "
                    f"told {row['told_seconds']:7.3f}  error {row['error']:.3%}  "
                    f"busy {row['busy_seconds']:.3f} (tasks: {row['busy_by_tasks_seconds']:.3f})",
                    flush=True,
                )
        finally:
            cluster.close()
    there = sum(row["slot_seconds"] for row in rows)
    total = abs(sum(row["told_seconds"] for row in rows) - there) / there
    worst = max(row["error"] for row in rows)
    by_cause: dict[str, float] = {"busy": sum(row["busy_seconds"] for row in rows)}
    for row in rows:
        for cause, seconds in row["causes"].items():
            by_cause[cause] = by_cause.get(cause, 0.0) + seconds
    for cause, seconds in sorted(by_cause.items(), key=lambda item: -item[1]):
        print(f"{cause:>24} {seconds:7.2f} s {seconds / there:6.1%}")
    print(f"queries: {sum(row['seconds'] for row in rows):.2f} s")
    print(f"all: {total:.3%}; worst query: {worst:.3%}; goal: {GOAL:.0%}")
    result = facts(f"{cores()} CPU cores, {o.workers} worker processes x {o.threads} threads, loopback; no GPU")
    write_json(
        o.out,
        {
            **result,
            "scale": o.scale,
            "runs": o.runs,
            "planning": o.planning,
            "goal": GOAL,
            "error_all": total,
            "error_worst": worst,
            "queries": rows,
        },
    )
    return 0 if worst <= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
